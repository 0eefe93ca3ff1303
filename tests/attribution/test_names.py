"""Test the name in the profile to which work is attributed.

The tests cover shared, aliased, tied, recursive and never called modules, scopes, and several
models at once.
"""

import pytest
import torch
from torch import Tensor, nn

import lflops
from tests.support.profile_checks import calls, flops, macs
from tests.support.small_models import (
    Block,
    Projections,
    batch,
    down,
    hidden,
    length,
    sequence,
    square,
    tokens,
    up,
    wide,
)


class Caller(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(hidden, hidden)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.own(x))


def test_a_module_of_two_callers_is_a_row_under_each() -> None:
    """A module with two callers has a row below each caller, with the work of that caller's calls.

    Its parameters are counted only in the first row.
    """
    shared = nn.Linear(hidden, hidden)
    profile = lflops.count(nn.Sequential(Caller(shared), Caller(shared)), sequence(), backward=True)
    rows = ("0.own", "0.shared", "1.own", "1.shared")
    assert dict.fromkeys(rows, square) == macs(profile, "forward")
    assert {**dict.fromkeys(rows, 2 * square), "0.own": square} == macs(profile, "backward")
    weights = hidden * hidden + hidden
    assert [3 * weights, weights, 0] == [
        profile.modules[row].parameters for row in ("", "0.shared", "1.shared")
    ]
    assert [None, "0.shared"] == [profile.modules[row].owner for row in ("0.shared", "1.shared")]
    assert {"": 1, "0": 1, "1": 1, **dict.fromkeys(rows, 1)} == calls(profile)


class Aliases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(hidden, hidden)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_module_with_two_names_on_one_parent_is_one_row() -> None:
    """A module with two names in one parent has one row, under its first name, with both calls.

    In backward, the first call has one matmul, because its input needs no gradient, and the second
    call has two.
    """
    profile = lflops.count(Aliases(), sequence(), backward=True)
    assert ["", "first"] == list(profile.modules)
    assert {"first": 2 * square} == macs(profile, "forward")
    assert {"first": square + 2 * square} == macs(profile, "backward")
    assert {"": 1, "first": 2} == calls(profile)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(wide, hidden)
        self.block = Block()
        self.lm_head = nn.Linear(hidden, wide, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.lm_head(self.block(self.embedding(words)))


def test_a_tied_weight_is_counted_once_and_works_where_it_is_used() -> None:
    """The matmul with a tied weight belongs to the head, which uses the weight.

    The weight is counted once, as a parameter of the embedding.
    """
    profile = lflops.count(
        LanguageModel(), torch.zeros(batch, length, dtype=torch.int64), backward=True
    )
    assert {"block.up": up, "block.down": down, "lm_head": up} == macs(profile, "forward")
    assert {"block.up": 2 * up, "block.down": 2 * down, "lm_head": 2 * up} == macs(
        profile, "backward"
    )
    embedding = profile.modules["embedding"]
    head = profile.modules["lm_head"]
    assert (wide * hidden, 0, "embedding") == (embedding.parameters, head.parameters, head.owner)
    assert wide * hidden + profile.modules["block"].parameters == profile.modules[""].parameters


class Unrolled(nn.Module):
    """A module that calls itself once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, steps: int) -> Tensor:
        if not steps:
            return x
        return self(self.cell(x), steps - 1)


def test_a_module_that_calls_itself_is_one_row() -> None:
    """A module that calls itself has one row for all calls.

    Three steps are four calls, because the last call only returns. The input of the first step
    needs no gradient.
    """
    steps = 3
    profile = lflops.count(Unrolled(), (sequence(), steps), backward=True)
    assert {"cell": steps * square} == macs(profile, "forward")
    assert {"cell": (2 * steps - 1) * square} == macs(profile, "backward")
    assert {"": steps + 1, "cell": steps} == calls(profile)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.down = nn.ModuleList([Block(), shared])
        self.up = nn.ModuleList([shared, Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.down, *self.up):
            x = block(x)
        return x


def test_a_module_list_that_is_never_called_has_what_is_in_it() -> None:
    """A `ModuleList` is never called and does no work; its row is the sum of its blocks.

    A block in two lists belongs to the first list.
    """
    profile = lflops.count(Lists(), sequence(requires_grad=True), backward=True)
    forward = {
        "down.0.up": up,
        "down.0.down": down,
        "down.1.up": 2 * up,
        "down.1.down": 2 * down,
        "up.1.up": up,
        "up.1.down": down,
    }
    assert forward == macs(profile, "forward")
    assert {row: 2 * cost for row, cost in forward.items()} == macs(profile, "backward")
    down_list = profile.modules["down"]
    up_list = profile.modules["up"]
    assert [0, 0] == [down_list.calls, up_list.calls]
    assert [3 * (up + down), up + down] == [down_list.forward.macs, up_list.forward.macs]
    assert [6 * (up + down), 2 * (up + down)] == [down_list.backward.macs, up_list.backward.macs]


class Trainable(nn.Module):
    """A module like a LightningModule: `training_step` calls its layers, not `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Block()
        self.decoder = nn.Linear(hidden, wide)

    def training_step(self, x: Tensor) -> Tensor:
        predicted = self.decoder(self.encoder(x))
        with lflops.scope("loss"):
            return (predicted * predicted).sum()


def test_parts_called_from_another_method_have_the_names_of_the_model() -> None:
    """Layers that `training_step` calls have their names in the model.

    The model itself is never called.
    """
    model = Trainable()
    with lflops.counting(model) as counted:
        model.training_step(sequence()).backward()
    assert {"encoder.up": up, "encoder.down": down, "decoder": up} == macs(
        counted.profile, "forward"
    )
    assert {"encoder.up": up, "encoder.down": 2 * down, "decoder": 2 * up} == macs(
        counted.profile, "backward"
    )
    assert {"encoder": 1, "encoder.up": 1, "encoder.down": 1, "decoder": 1, "loss": 1} == calls(
        counted.profile
    )


def test_a_scope_is_a_row_with_its_own_forward_and_backward() -> None:
    """A scope has a row with its own work in forward and in backward.

    Forward has a multiplication and a sum per output. Backward has two multiplications per output,
    and an addition of their results.
    """
    model = Trainable()
    with lflops.counting(model) as counted:
        model.training_step(sequence()).backward()
    outputs = tokens * wide
    assert 2 * outputs == flops(counted.profile, "forward")["loss"]
    assert 3 * outputs == flops(counted.profile, "backward")["loss"]
    assert ("scope", 1, 0) == (
        counted.profile.modules["loss"].class_name,
        counted.profile.modules["loss"].depth,
        counted.profile.modules["loss"].parameters,
    )


class Prepared(nn.Module):
    """A module that multiplies by its own parameter before it calls a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, hidden))
        self.layer = nn.Linear(hidden, hidden)

    def training_step(self, x: Tensor) -> Tensor:
        return self.layer(x @ self.weight).sum()


def test_what_comes_before_the_first_module_is_forward_too() -> None:
    """Work before the first call of a layer belongs to forward, in the first and in later steps.

    Work that needs no gradient, such as preparing a batch, belongs to the phase other.
    """
    model = Prepared()
    with lflops.counting(model) as counted:
        for _ in range(2):
            model.training_step(sequence() * 2).backward()
    assert {"": 2 * square, "layer": 2 * square} == macs(counted.profile, "forward")
    assert {"": 2 * square, "layer": 4 * square} == macs(counted.profile, "backward")
    assert {"": 2 * tokens * hidden} == flops(counted.profile, "other")


class Borrower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, borrowed: nn.Module) -> Tensor:
        return borrowed(self.own(x))


class Lender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.borrower = Borrower()
        self.lent = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.lent(self.borrower(x, self.lent))


def test_a_module_that_its_caller_does_not_hold_keeps_its_own_name() -> None:
    """A module that is passed to another module's forward keeps its own name.

    It runs twice, once inside the other module, and has one row, as do its submodules.
    """
    profile = lflops.count(Lender(), sequence(), backward=True)
    assert {"borrower.own": square, "lent.up": 2 * up, "lent.down": 2 * down} == macs(
        profile, "forward"
    )
    assert {"borrower.own": square, "lent.up": 4 * up, "lent.down": 4 * down} == macs(
        profile, "backward"
    )
    assert {
        "": 1,
        "borrower": 1,
        "borrower.own": 1,
        "lent": 2,
        "lent.up": 2,
        "lent.down": 2,
    } == calls(profile)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_is_counted_in_the_pass_that_makes_its_parameters() -> None:
    """A lazy module is counted in its first call, with the parameters that this call creates."""
    model = nn.Sequential(nn.LazyLinear(hidden), nn.LazyBatchNorm1d(), nn.Linear(hidden, hidden))
    profile = lflops.count(model, sequence(), backward=True)
    assert {"0": square, "2": square} == macs(profile, "forward")
    assert {"0": square, "2": 2 * square} == macs(profile, "backward")
    weights = hidden * hidden + hidden
    assert [weights, 2 * length, weights] == [
        profile.modules[row].parameters for row in ("0", "1", "2")
    ]


class Scoped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden, hidden)
        self.weight = nn.Parameter(torch.randn(hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        with lflops.scope("mixing"):
            x = x @ self.weight
            with lflops.scope("inner"):
                x = self.proj(x) @ self.weight
        return x @ self.weight


def test_scopes_nest_and_modules_keep_their_names_within() -> None:
    """Each matmul outside a layer belongs to the innermost scope.

    A layer that is called inside a scope is still named after the module that calls it.
    """
    profile = lflops.count(nn.Sequential(Scoped()), sequence(requires_grad=True), backward=True)
    assert dict.fromkeys(("0", "0.mixing", "0.mixing.inner", "0.proj"), square) == macs(
        profile, "forward"
    )
    assert dict.fromkeys(("0", "0.mixing", "0.mixing.inner", "0.proj"), 2 * square) == macs(
        profile, "backward"
    )


def test_a_scope_outside_of_a_count_does_nothing() -> None:
    """Outside a count, a scope has no effect. A name with a dot is refused."""
    with lflops.scope("loss"):
        pass
    with pytest.raises(ValueError, match="has no dots"), lflops.scope("a.b"):
        pass


def test_several_models_are_rows_below_one_root() -> None:
    """Several models are rows below one root. A row has the name of the model's class.

    A second model of the same class has a number. Work between the models belongs to the root.
    """
    first = Block()
    second = Block()
    other = nn.Linear(hidden, hidden)
    weight = torch.randn(hidden, hidden, requires_grad=True)
    with lflops.counting(first, second, other) as counted:
        (other(second(first(sequence()))) @ weight).sum().backward()
    blocks = {"Block.up": up, "Block.down": down, "Block-2.up": up, "Block-2.down": down}
    forward = {**blocks, "Linear": square, "": square}
    assert forward == macs(counted.profile, "forward")
    backward = {row: 2 * cost for row, cost in forward.items()}
    # The input of the first layer needs no gradient.
    backward["Block.up"] = up
    assert backward == macs(counted.profile, "backward")


def test_a_count_within_a_count_changes_neither() -> None:
    """Each of two nested counts contains the work during its block, by its model's names."""
    outer_model = Projections()
    inner_model = Block()
    with lflops.counting(outer_model) as outer:
        x = outer_model(sequence())
        with lflops.counting(inner_model) as inner:
            loss = inner_model(x).sum()
            loss.backward(inputs=list(inner_model.parameters()))
        outer_model(sequence())
    projections = dict.fromkeys(("stem", "q", "k", "v"), 2 * square)
    assert {"up": up, "down": down} == macs(inner.profile, "forward")
    assert {"up": up, "down": 2 * down} == macs(inner.profile, "backward")
    assert {**projections, "": up + down} == macs(outer.profile, "forward")
    assert {"": up + 2 * down} == macs(outer.profile, "backward")


def test_two_counts_of_one_model_may_end_in_any_order() -> None:
    """Two overlapping counts each contain the work during their own block.

    The first count begins and ends first, so only the second count contains the work after that.
    """
    model = Block()
    first = lflops.counting(model)
    second = lflops.counting(model)
    first.__enter__()
    second.__enter__()
    model(sequence())
    first.__exit__(None, None, None)
    model(sequence()).sum().backward()
    second.__exit__(None, None, None)
    assert {"up": up, "down": down} == macs(first.profile, "forward")
    assert {"up": 2 * up, "down": 2 * down} == macs(second.profile, "forward")
    assert {"up": up, "down": 2 * down} == macs(second.profile, "backward")


def test_what_an_attention_only_keeps_its_weights_in_is_not_told_of() -> None:
    """The list of uncalled modules omits `out_proj`, but contains a layer that is really unused.

    `MultiheadAttention` uses the weight of `out_proj` without calling the module. The matmul
    belongs to the attention itself.
    """
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model.spare = nn.Linear(8, 8)
    profile = lflops.count(model, (torch.randn(1, 4, 8),))
    assert 4 * 8 * 8 * 4 + 2 * 4 * 4 * 8 == profile.modules["self_attn"].forward.self_macs
    assert ("spare",) == profile.uncalled
