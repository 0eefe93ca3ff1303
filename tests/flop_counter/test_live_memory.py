"""Bytes alive: hand-worked peaks, the allocator's own figure, and what a peak is made of."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lflops
from lflops.flop_counter.memory_record import LONGEST_TIMELINE
from lflops.profile.profile import Memory
from tests.support.count_function import Function, count, fixed, of
from tests.support.cpu_allocator import allocated

FLOAT = 4
BATCH, IN, OUT = 8, 100, 50


def memory(counted: lflops.Profile) -> Memory:
    """That of a profile, whose parts are seen to be its whole."""
    assert counted.memory is not None
    whole = counted.memory
    assert whole.peak_bytes == sum(whole.by_category.values()) == sum(whole.by_module.values())
    assert whole.peak_bytes == counted.modules[""].peak_bytes
    return whole


def parts(counted: lflops.Profile) -> dict[str, int]:
    """The categories that have something in them at the peak."""
    return {category: nbytes for category, nbytes in memory(counted).by_category.items() if nbytes}


def test_a_layer_holds_its_weights_its_input_and_its_output() -> None:
    """Nothing else, where no gradient is wanted."""
    with torch.no_grad():
        counted = lflops.count(nn.Linear(IN, OUT), fixed(BATCH, IN))
    assert {
        "parameters": (IN + 1) * OUT * FLOAT,
        "other": BATCH * IN * FLOAT,
        "activations": BATCH * OUT * FLOAT,
    } == parts(counted)


@pytest.mark.parametrize(("device", "source"), [("cpu", "counted"), ("meta", "fake")])
def test_memory_that_was_never_there_is_said_to_be_fake(device: str, source: str) -> None:
    """The figures are the same."""
    with torch.device(device), torch.no_grad():
        counted = lflops.count(nn.Linear(IN, OUT), torch.zeros(BATCH, IN))
    assert (source, ((IN + 1) * OUT + BATCH * (IN + OUT)) * FLOAT) == (
        memory(counted).source,
        memory(counted).peak_bytes,
    )


def test_without_a_graph_a_chain_holds_two_links() -> None:
    """Each result is let go when the next is there; the input is the caller's."""
    with torch.no_grad():
        counted = count(lambda x: x.exp().exp().exp().exp(), fixed(100))
    assert {"other": 100 * FLOAT, "activations": 2 * 100 * FLOAT} == parts(counted)


def test_with_a_graph_a_chain_holds_all_links() -> None:
    """Each exponential is kept for its own gradient."""
    assert {"other": 100 * FLOAT, "activations": 4 * 100 * FLOAT} == parts(
        count(lambda x: x.exp().exp().exp().exp(), of(100))
    )


def test_going_back_makes_gradients_while_activations_last() -> None:
    """A chain's way back: 2 links and 2 gradients are the most at once.

    The first, and the one made of it.
    """
    counted = count(lambda x: x.exp().exp(), of(100), backward=True)
    assert {
        "other": 100 * FLOAT,
        "activations": 2 * 100 * FLOAT,
        "temporary": 2 * 100 * FLOAT,
    } == parts(counted)


def test_a_layers_gradients_are_known_once_they_are_there() -> None:
    """At the end of a backward.

    The input, the output that it began from, and a gradient of the size of each parameter.
    """
    counted = lflops.count(nn.Linear(IN, OUT), fixed(BATCH, IN), backward=True)
    weights = (IN + 1) * OUT * FLOAT
    assert {"parameters": weights, "gradients": weights, "other": BATCH * IN * FLOAT} == {
        category: nbytes for category, nbytes in parts(counted).items() if category != "activations"
    }


def test_what_is_seen_through_several_views_is_there_once() -> None:
    """A storage, whoever looks at it; what is made of three views of it is three."""
    with torch.no_grad():
        counted = count(
            lambda x: (x.view(10, 10), x.t(), x[0], x.expand(3, -1, -1).detach().exp()),
            fixed(10, 10),
        )
    assert {"other": 100 * FLOAT, "activations": 3 * 100 * FLOAT} == parts(counted)


def test_memory_that_comes_in_from_outside_is_there_too() -> None:
    """`torch.tensor` makes it without an operator."""
    assert {"other": 100 * FLOAT, "activations": 100 * FLOAT} == parts(
        count(lambda x: torch.tensor([1.0] * 100), fixed(100))
    )


def test_the_timeline_says_what_was_alive_before_each_operator() -> None:
    """In the order of execution, allocations among them.

    And the peak's place is where it was reached.
    """
    with torch.no_grad():
        whole = memory(count(lambda x: torch.cat([x.exp(), x]).sum(), fixed(100)))
    before = [("exp", 100 * FLOAT), ("cat", 200 * FLOAT), ("sum", 300 * FLOAT)]
    assert before == [(moment.operator, moment.live_bytes) for moment in whole.timeline]
    assert ("cat", 400 * FLOAT) == (whole.timeline[whole.peak_index].operator, whole.peak_bytes)


def test_the_timeline_says_what_each_part_turned_out_to_be() -> None:
    """A gradient is one from when backward made it.

    Momentum is state from its first copy, and in a later step from the beginning.
    """
    model = nn.Linear(IN, OUT, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)
    weights, product = IN * OUT * FLOAT, BATCH * OUT * FLOAT
    x, first, later = torch.ones(BATCH, IN), [], []
    for moments in (first, later):
        with lflops.counting(model) as counted:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = memory(counted.profile)
        assert all(
            moment.by_category and moment.live_bytes == sum(moment.by_category)
            for moment in whole.timeline
        )
        assert list(range(len(whole.timeline))) == [moment.index for moment in whole.timeline]
        moments += [
            (moment.operator, moment.phase, moment.by_category) for moment in whole.timeline
        ]
    assert ("mm", "forward", (weights, 0, 0, 0, 0, 0)) == first[0]
    assert ("sum", "forward", (weights, 0, 0, product, 0, 0)) == first[1]
    assert ("clone", "optimizer", (weights, weights, 0, 0, 0, 0)) == first[4]
    assert ("add_", "optimizer", (weights, weights, weights, 0, 0, 0)) == first[5]
    assert ("mm", "forward", (weights, 0, weights, 0, 0, 0)) == later[0]
    assert ("sum", "forward", (weights, 0, weights, product, 0, 0)) == later[1]


def test_a_peak_fits_where_there_is_room_for_it() -> None:
    """To the byte: two tensors of a hundred.

    Without a margin of one's own a tenth is left for what no tensor holds.
    """
    with torch.no_grad():
        whole = memory(count(torch.exp, fixed(100)))
    assert (True, False) == (
        whole.fits(200 * FLOAT, margin=0),
        whole.fits(200 * FLOAT - 1, margin=0),
    )
    assert (True, False) == (whole.fits(1000), whole.fits(888)), "nine tenths of 888 are 799.2"
    with pytest.raises(ValueError, match=r"margin=1: pass a share"):
        whole.fits(1000, margin=1)


def test_each_category_has_its_most_at_its_own_time() -> None:
    """Activations at the end of forward: by hand, ten exponentials.

    And the highest that the timeline reaches is the peak.
    """

    def ten(x: Tensor) -> Tensor:
        for _ in range(10):
            x = x.exp()
        return x

    counted = memory(
        lflops.count(
            Function(ten), fixed(100).requires_grad_(), backward=True, loss=lambda out: out[0]
        )
    )
    assert 10 * 100 * FLOAT == counted.most_by_category["activations"]
    assert counted.peak_bytes == max(moment.highest_bytes or 0 for moment in counted.timeline)


class Uneven(nn.Module):
    """A part that needs much for a moment, and one that needs little."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = Function(lambda x: x.repeat(100).sum())
        self.narrow = Function(lambda x: x * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(x) + self.wide(x)


def test_each_row_has_the_peak_of_the_time_it_ran() -> None:
    """The narrow part: input and product.

    The wide one: those, a hundred repetitions, and their sum.
    """
    with torch.no_grad():
        counted = lflops.count(Uneven(), fixed(10))
    ten = 10 * FLOAT
    peaks = {row: module.peak_bytes for row, module in counted.modules.items()}
    assert {"": 102 * ten + FLOAT, "wide": 102 * ten + FLOAT, "narrow": 2 * ten} == peaks
    assert {"": ten, "narrow": ten, "wide": 100 * ten + FLOAT} == memory(counted).by_module


def test_a_row_that_ran_nothing_has_no_peak() -> None:
    """None, which is not 0."""
    assert (
        lflops.count(nn.Sequential(nn.Linear(3, 3), nn.Identity()), fixed(2, 3))
        .modules["1"]
        .peak_bytes
        is None
    )


def test_the_largest_at_the_peak_are_named() -> None:
    """What made them, where and when, the most bytes first."""
    with torch.no_grad():
        largest = memory(lflops.count(Uneven(), fixed(10))).alive
    assert [("activations", "repeat", "wide", "forward", 1000 * FLOAT)] == [
        (each.category, each.operator, each.module, each.phase, each.bytes) for each in largest[:1]
    ]
    assert sorted((each.bytes for each in largest), reverse=True) == [
        each.bytes for each in largest
    ]


def test_a_long_timeline_is_shortened_and_keeps_its_peak() -> None:
    """More than 20,000 operators, and one in the middle of them that needs much for a moment."""
    half = LONGEST_TIMELINE // 2 + 100

    def long(x: Tensor) -> Tensor:
        for _ in range(half):
            x.neg_()
        x.repeat(1000).sum()
        for _ in range(half):
            x.neg_()
        return x

    with torch.no_grad():
        counted = lflops.count(Function(long), fixed(10))
    whole = memory(counted)
    assert (
        2 * half + 2 == counted.modules[""].forward.calls > LONGEST_TIMELINE >= len(whole.timeline)
    )
    assert (half + 1, 1001 * 10 * FLOAT + FLOAT) == (whole.peak_index, whole.peak_bytes)
    assert [("sum", 1001 * 10 * FLOAT)] == [
        (each.operator, each.live_bytes) for each in whole.timeline if each.operator == "sum"
    ]
    assert (10 * FLOAT, 10 * FLOAT) == (whole.timeline[0].live_bytes, whole.timeline[-1].live_bytes)
    assert (0, 2 * half + 1) == (whole.timeline[0].index, whole.timeline[-1].index)
    assert all(
        moment.by_category and moment.live_bytes == sum(moment.by_category)
        for moment in whole.timeline
    )


def test_a_timeline_of_20_000_is_whole() -> None:
    """Up to there nothing is left out."""
    with torch.no_grad():
        whole = memory(count(lambda x: [x.neg_() for _ in range(LONGEST_TIMELINE)], fixed(2)))
    assert LONGEST_TIMELINE == len(whole.timeline)


class Transformer(nn.Module):
    """Small, but with every kind of thing that a large one has."""

    def __init__(self, words: int = 200, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


Training = Callable[[], None]


def training(how: dict[str, Any]) -> tuple[nn.Module, Training]:
    """A model, and what makes one step of its training."""
    torch.manual_seed(0)
    model, tokens = Transformer(), torch.randint(200, (4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), **how)

    def step() -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@pytest.mark.parametrize(
    "how",
    [{"foreach": False}, {"foreach": True}, {"fused": True}],
    ids=["in a loop", "in lists", "fused"],
)
def test_the_peak_is_the_allocators_own(how: dict[str, Any], tmp_path: Path) -> None:
    """To the byte: of the first step, and of the second, which begins with the optimizer's state.

    The batch was there before.
    """
    model, step = training(how)
    peaks = []
    for _ in range(2):
        with lflops.counting(model) as counted:
            step()
        peaks.append(memory(counted.profile).peak_bytes + 4 * 16 * 8)
    assert peaks == allocated(lambda: training(how)[1], tmp_path)


class Chain(nn.Module):
    """One square weight, used in every product of a chain.

    Perhaps something keeps the last product's gradient of it.
    """

    def __init__(self, keeps: list[Tensor] | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256, 256))
        self.keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x @ self.weight
        return x @ Kept.apply(self.weight, self.keeps)


class Kept(torch.autograd.Function):
    """The same tensor, whose gradient something keeps."""

    @staticmethod
    def forward(_: Any, x: Tensor, keeps: list[Tensor] | None) -> Tensor:
        Kept.keeps = keeps
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if Kept.keeps is not None:
            Kept.keeps.append(gradient)
        return gradient, None

    keeps: list[Tensor] | None = None


@pytest.mark.parametrize(
    ("keeps", "squares"), [(None, 3), ([], 4)], ids=["in place", "its term is kept"]
)
def test_gradients_of_a_shared_weight_are_summed_in_place(
    keeps: list[Tensor] | None, squares: int, tmp_path: Path
) -> None:
    """Its gradients, and one more while it is made: 3 squares with the weight.

    What keeps a term has it beside the sum: 4.

    The products are of one row each: 256 floats, of which at most four are alive with all squares.
    """
    square, row, x = 256 * 256 * FLOAT, 256 * FLOAT, torch.ones(1, 256)

    def begin() -> Callable[[], None]:
        model = Chain(keeps)

        def step() -> None:
            model(x).sum().backward()
            model.weight.grad = None
            if keeps is not None:
                keeps.clear()

        return step

    real = max(allocated(begin, tmp_path))
    model = Chain(keeps)
    with lflops.counting(model) as counted:
        model(x).sum().backward()
    if keeps is not None:
        keeps.clear()
    estimated = lflops.estimate(lambda: Chain(keeps), x, backward=True, loss=lambda out: out.sum())
    for found in (real, memory(counted.profile).peak_bytes, memory(estimated).peak_bytes):
        assert squares * square <= found <= squares * square + 5 * row


def test_the_peak_of_several_steps_is_that_of_the_largest() -> None:
    """Gradients that were let go after a step are not there in the next."""
    model, step = training({"foreach": False})
    with lflops.counting(model) as together:
        step()
        step()
    with lflops.counting(model) as alone:
        step()
    assert memory(alone.profile).peak_bytes == memory(together.profile).peak_bytes


def test_an_optimizers_state_is_known_also_where_an_earlier_step_made_it() -> None:
    """Two averages of each parameter, and a number of steps.

    And the gradients are known though they are let go in the end.
    """
    model = nn.Linear(IN, OUT, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    weights = IN * OUT * FLOAT
    for _ in range(2):
        with lflops.counting(model) as counted:
            model(torch.ones(1, IN)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = parts(counted.profile)
        assert (weights, weights, 2 * weights + FLOAT) == (
            found["parameters"],
            found["gradients"],
            found["optimizer_state"],
        )


def test_a_profile_keeps_nothing_alive() -> None:
    """Neither the model nor its input, nor what was between them."""
    model, x = nn.Linear(IN, OUT), fixed(BATCH, IN)
    between: list[weakref.ref[Tensor]] = []
    hook = model.register_forward_hook(
        lambda _module, _args, output: between.append(weakref.ref(output))
    )
    counted = lflops.count(model, x, backward=True)
    hook.remove()
    kept = [weakref.ref(model), weakref.ref(x), *between]
    del model, x, hook
    gc.collect()
    assert [None] * 3 == [reference() for reference in kept]
    assert memory(counted).peak_bytes > 0


def test_activations_die_while_they_are_counted_as_they_do_without() -> None:
    """What was counted is watched, not held."""
    died: list[bool] = []

    def let_go(x: Tensor) -> Tensor:
        between = x.exp()
        reference = weakref.ref(between)
        total = between.sum()
        del between
        died.append(reference() is None)
        return total

    with torch.no_grad():
        count(let_go, fixed(100))
    assert [True] == died


def test_the_state_of_the_first_step_is_its_parameters_owners() -> None:
    """Two averages of each parameter, made in the step.

    At the rows that hold the parameters, as in every later step.
    """
    wide, narrow = 64, 4
    model = nn.Sequential(nn.Linear(narrow, wide, bias=False), nn.Linear(wide, narrow, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(torch.ones(1, narrow)).sum().backward()
    with lflops.counting(model) as counted:
        optimizer.step()
    averages = [each for each in memory(counted.profile).alive if each.operator == "zeros_like"]
    one = FLOAT * wide * narrow
    assert [("optimizer_state", "0", one)] * 2 + [("optimizer_state", "1", one)] * 2 == sorted(
        (each.category, each.module, each.bytes) for each in averages
    )
