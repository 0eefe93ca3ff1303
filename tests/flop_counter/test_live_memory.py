"""Test live memory: peaks by hand, peaks of the CPU allocator, and the parts of a peak."""

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
BATCH = 8
IN = 100
OUT = 50


def memory(counted: lflops.Profile) -> Memory:
    """Return the memory of a profile, after checking that its parts add up to its peak."""
    assert counted.memory is not None
    whole = counted.memory
    assert whole.peak_bytes == sum(whole.by_category.values()) == sum(whole.by_module.values())
    assert whole.peak_bytes == counted.modules[""].peak_bytes
    return whole


def parts(counted: lflops.Profile) -> dict[str, int]:
    """Return the categories that are not empty at the peak."""
    return {category: nbytes for category, nbytes in memory(counted).by_category.items() if nbytes}


def test_a_layer_holds_its_weights_its_input_and_its_output() -> None:
    """Without gradients, the peak is the weights, the input and the output of the layer."""
    with torch.no_grad():
        counted = lflops.count(nn.Linear(IN, OUT), fixed(BATCH, IN))
    assert {
        "parameters": (IN + 1) * OUT * FLOAT,
        "other": BATCH * IN * FLOAT,
        "activations": BATCH * OUT * FLOAT,
    } == parts(counted)


@pytest.mark.parametrize(("device", "source"), [("cpu", "counted"), ("meta", "fake")])
def test_memory_that_was_never_there_is_said_to_be_fake(device: str, source: str) -> None:
    """On the meta device the numbers are the same, but the source is "fake"."""
    with torch.device(device), torch.no_grad():
        counted = lflops.count(nn.Linear(IN, OUT), torch.zeros(BATCH, IN))
    assert source == memory(counted).source
    assert ((IN + 1) * OUT + BATCH * (IN + OUT)) * FLOAT == memory(counted).peak_bytes


def test_without_a_graph_a_chain_holds_two_links() -> None:
    """Without gradients, each result is freed when the next one exists.

    The caller holds the input.
    """
    with torch.no_grad():
        counted = count(lambda x: x.exp().exp().exp().exp(), fixed(100))
    assert {"other": 100 * FLOAT, "activations": 2 * 100 * FLOAT} == parts(counted)


def test_with_a_graph_a_chain_holds_all_links() -> None:
    """With gradients, each exponential is kept for backward."""
    assert {"other": 100 * FLOAT, "activations": 4 * 100 * FLOAT} == parts(
        count(lambda x: x.exp().exp().exp().exp(), of(100))
    )


def test_going_back_makes_gradients_while_activations_last() -> None:
    """The peak of backward has both activations and two gradients.

    The two gradients are the one that backward starts from and the one computed from it.
    """
    counted = count(lambda x: x.exp().exp(), of(100), backward=True)
    assert {
        "other": 100 * FLOAT,
        "activations": 2 * 100 * FLOAT,
        "temporary": 2 * 100 * FLOAT,
    } == parts(counted)


def test_a_layers_gradients_are_known_once_they_are_there() -> None:
    """At the end of backward, a gradient of the size of each parameter is in its own category.

    The input and the output with which backward began are still alive.
    """
    counted = lflops.count(nn.Linear(IN, OUT), fixed(BATCH, IN), backward=True)
    weights = (IN + 1) * OUT * FLOAT
    assert {"parameters": weights, "gradients": weights, "other": BATCH * IN * FLOAT} == {
        category: nbytes for category, nbytes in parts(counted).items() if category != "activations"
    }


def test_what_is_seen_through_several_views_is_there_once() -> None:
    """Views share one storage, which counts once.

    The results of operators on three views are three new tensors.
    """
    with torch.no_grad():
        counted = count(
            lambda x: (x.view(10, 10), x.t(), x[0], x.expand(3, -1, -1).detach().exp()),
            fixed(10, 10),
        )
    assert {"other": 100 * FLOAT, "activations": 3 * 100 * FLOAT} == parts(counted)


def test_memory_that_comes_in_from_outside_is_there_too() -> None:
    """Memory that `torch.tensor` allocates without an operator is counted."""
    assert {"other": 100 * FLOAT, "activations": 100 * FLOAT} == parts(
        count(lambda x: torch.tensor([1.0] * 100), fixed(100))
    )


def test_the_timeline_says_what_was_alive_before_each_operator() -> None:
    """The timeline has the live bytes before each operator, in order of execution.

    The peak's index is the operator in which the peak is reached.
    """
    with torch.no_grad():
        whole = memory(count(lambda x: torch.cat([x.exp(), x]).sum(), fixed(100)))
    before = [("exp", 100 * FLOAT), ("cat", 200 * FLOAT), ("sum", 300 * FLOAT)]
    assert before == [(moment.operator, moment.live_bytes) for moment in whole.timeline]
    assert "cat" == whole.timeline[whole.peak_index].operator
    assert 400 * FLOAT == whole.peak_bytes


def test_the_timeline_says_what_each_part_turned_out_to_be() -> None:
    """Each moment of the timeline has live bytes by category.

    A tensor is a gradient from the moment when backward makes it. Momentum is optimizer state from
    its first copy on, and in later steps from the beginning.
    """
    model = nn.Linear(IN, OUT, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False)
    weights = IN * OUT * FLOAT
    product = BATCH * OUT * FLOAT
    x = torch.ones(BATCH, IN)
    first: list[Any] = []
    later: list[Any] = []
    for moments in (first, later):
        with lflops.counting(model) as counted:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = memory(counted.profile)
        for moment in whole.timeline:
            assert moment.by_category
            assert moment.live_bytes == sum(moment.by_category)
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
    """`fits` is exact to the byte: the peak is two tensors of a hundred floats.

    By default a tenth of the memory is reserved for memory that no tensor uses.
    """
    with torch.no_grad():
        whole = memory(count(torch.exp, fixed(100)))
    assert whole.fits(200 * FLOAT, margin=0)
    assert not whole.fits(200 * FLOAT - 1, margin=0)
    assert whole.fits(1000)
    # Nine tenths of 888 are 799.2, less than the 800 bytes of the peak.
    assert not whole.fits(888)
    with pytest.raises(ValueError, match=r"margin=1: pass a share"):
        whole.fits(1000, margin=1)


def test_each_category_has_its_most_at_its_own_time() -> None:
    """The activations have their maximum at the end of forward: ten exponentials.

    The highest moment of the timeline is the peak.
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
    """A module that briefly needs much memory, next to one that needs little."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = Function(lambda x: x.repeat(100).sum())
        self.narrow = Function(lambda x: x * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(x) + self.wide(x)


def test_each_row_has_the_peak_of_the_time_it_ran() -> None:
    """The peak of a module is the highest live memory while it runs.

    The narrow module sees its input and its product. The wide module sees them too, and a hundred
    repetitions and their sum.
    """
    with torch.no_grad():
        counted = lflops.count(Uneven(), fixed(10))
    ten = 10 * FLOAT
    peaks = {row: module.peak_bytes for row, module in counted.modules.items()}
    assert {"": 102 * ten + FLOAT, "wide": 102 * ten + FLOAT, "narrow": 2 * ten} == peaks
    assert {"": ten, "narrow": ten, "wide": 100 * ten + FLOAT} == memory(counted).by_module


def test_a_row_that_ran_nothing_has_no_peak() -> None:
    """A module without operators has the peak `None`, not 0."""
    profile = lflops.count(nn.Sequential(nn.Linear(3, 3), nn.Identity()), fixed(2, 3))
    assert profile.modules["1"].peak_bytes is None


def test_the_largest_at_the_peak_are_named() -> None:
    """The largest tensors at the peak are listed first, with operator, module and phase."""
    with torch.no_grad():
        largest = memory(lflops.count(Uneven(), fixed(10))).alive
    first = largest[0]
    assert "activations" == first.category
    assert "repeat" == first.operator
    assert "wide" == first.module
    assert "forward" == first.phase
    assert 1000 * FLOAT == first.bytes
    assert sorted((each.bytes for each in largest), reverse=True) == [
        each.bytes for each in largest
    ]


def test_a_long_timeline_is_shortened_and_keeps_its_peak() -> None:
    """A timeline of more than 20,000 operators is shortened, but keeps the peak.

    Here the peak is an operator in the middle that briefly needs much memory.
    """
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
    assert half + 1 == whole.peak_index
    assert 1001 * 10 * FLOAT + FLOAT == whole.peak_bytes
    assert [("sum", 1001 * 10 * FLOAT)] == [
        (each.operator, each.live_bytes) for each in whole.timeline if each.operator == "sum"
    ]
    assert 10 * FLOAT == whole.timeline[0].live_bytes
    assert 10 * FLOAT == whole.timeline[-1].live_bytes
    assert 0 == whole.timeline[0].index
    assert 2 * half + 1 == whole.timeline[-1].index
    for moment in whole.timeline:
        assert moment.by_category
        assert moment.live_bytes == sum(moment.by_category)


def test_a_timeline_of_20_000_is_whole() -> None:
    """A timeline of 20,000 operators is not shortened."""
    with torch.no_grad():
        whole = memory(count(lambda x: [x.neg_() for _ in range(LONGEST_TIMELINE)], fixed(2)))
    assert LONGEST_TIMELINE == len(whole.timeline)


class Transformer(nn.Module):
    """A small transformer with the layers that a large one has."""

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
    """Return a model, and a function that runs a training step."""
    torch.manual_seed(0)
    model = Transformer()
    tokens = torch.randint(200, (4, 16))
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
    """The peaks of two steps are those of the CPU allocator, to the byte.

    The second step begins with the optimizer's state. The batch existed before the steps, so its
    bytes are added.
    """
    model, step = training(how)
    peaks = []
    for _ in range(2):
        with lflops.counting(model) as counted:
            step()
        peaks.append(memory(counted.profile).peak_bytes + 4 * 16 * 8)
    assert peaks == allocated(lambda: training(how)[1], tmp_path)


class Chain(nn.Module):
    """A chain of matmuls with one square weight.

    If `keeps` is a list, the gradient of the weight in the last matmul is added to it.
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
    """Return the same tensor, and keep its gradient if there is a list for it."""

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
    """Gradients of a shared weight are summed in place, unless something else holds one of them.

    The peak is 3 squares: the weight, its gradient and one term. If a term is kept, it is 4
    squares. The matmuls have one row of 256 floats, of which at most four are alive at the same
    time.
    """
    square = 256 * 256 * FLOAT
    row = 256 * FLOAT
    x = torch.ones(1, 256)

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
    """Gradients that a step frees are not part of the next step."""
    model, step = training({"foreach": False})
    with lflops.counting(model) as together:
        step()
        step()
    with lflops.counting(model) as alone:
        step()
    assert memory(alone.profile).peak_bytes == memory(together.profile).peak_bytes


def test_an_optimizers_state_is_known_also_where_an_earlier_step_made_it() -> None:
    """The optimizer's state is recognized in the step that makes it, and in the next one.

    It is two averages of each parameter, and a step counter. Gradients are recognized although they
    are freed at the end.
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
        assert weights == found["parameters"]
        assert weights == found["gradients"]
        assert 2 * weights + FLOAT == found["optimizer_state"]


def test_a_profile_keeps_nothing_alive() -> None:
    """A profile holds neither the model nor its input nor its activations."""
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
    """A tensor is freed during a count as soon as it would be freed without it."""
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
    """State that the first step allocates belongs to the modules that own the parameters.

    Adam makes two averages of each parameter.
    """
    wide = 64
    narrow = 4
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
