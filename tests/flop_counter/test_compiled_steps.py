"""Test that counting a step does not change a training run with compiled code or control flow.

The counting step is counted by module.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as mapped
from torch.nn import functional as F

import lflops
from lflops.profile.profile import Profile

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using `torch.compile"),
    # torch warns about this when it compiles control flow.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

ROWS = 4
SIZE = 8
HIDDEN = 16
UP = ROWS * SIZE * HIDDEN
SQUARE = ROWS * SIZE * SIZE


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """Two layers with dropout in the second one's input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(SIZE, HIDDEN)
        self.down = nn.Linear(HIDDEN, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.1))


class Flow(nn.Module):
    """A layer, and a layer that control flow calls."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.before = nn.Linear(SIZE, SIZE)
        self.inner = nn.Linear(SIZE, SIZE)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.inner, self.before(x))


def train(make: Callable[[], nn.Module], counted: int | None) -> tuple[list[Any], Profile | None]:
    """Train four steps, one of them counted; return the end state and the profile.

    The end state is the losses, the kinds of autograd nodes, the weights and the state of the
    random number generator.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    model = make()
    kinds: list[str] = []
    losses: list[float] = []
    count = None if counted is None else lflops.counting(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        out = model(x)
        kinds.append(type(out.grad_fn).__name__)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    for number in range(4):
        x = torch.randn(ROWS, SIZE)
        if count is not None and number == counted:
            with count:
                step(x)
        else:
            step(x)
    end = [
        losses,
        kinds,
        [each.tolist() for each in model.parameters()],
        torch.get_rng_state().tolist(),
    ]
    return end, None if count is None else count.profile


def self_macs(profile: Profile, phase: str) -> dict[str, int]:
    """Return the MACs of each module itself, without modules that have none."""
    own = {row: module.work(phase).self_macs for row, module in profile.modules.items()}
    return {row: macs for row, macs in own.items() if macs}


@pytest.mark.parametrize("counted", [0, 2])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_trains_to_the_bit_as_without_a_count(backend: str, counted: int) -> None:
    """A compiled model ends with the same bits, also if it is first compiled in the counting step.

    The input needs no gradient, so `up` has one matmul in backward.
    """

    def make() -> nn.Module:
        return torch.compile(Block(), backend=backend)  # type: ignore[no-any-return,unused-ignore]

    plain, _ = train(make, None)
    end, profile = train(make, counted)
    assert profile is not None
    assert plain == end
    assert {"CompiledFunctionBackward"} == set(end[1])
    assert {"up": UP, "down": UP} == self_macs(profile, "forward")
    assert {"up": UP, "down": 2 * UP} == self_macs(profile, "backward")


CONTROL_FLOW: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], int]] = {
    "cond": (
        lambda inner, x: torch.cond(
            x.sum() > -1e9, lambda x: inner(inner(x)), lambda x: x.sin(), (x,)
        ),
        2 * SQUARE,
    ),
    "map": (lambda inner, x: mapped(lambda row: inner(row), x), SQUARE),  # noqa: PLW0108 - a closure over the layer
    "scan": (
        lambda inner, x: scan(
            lambda c, row: (torch.tanh(inner(c + row)), c * 2), torch.zeros(SIZE), x, dim=0
        )[1],
        SQUARE,
    ),
    "while_loop": (
        lambda inner, x: while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, inner(x)), (torch.tensor(0), x)
        )[1],
        3 * SQUARE,
    ),
}
"""Control flow that calls the inner layer, and the layer's MACs in forward.

`cond` runs a branch that calls the layer twice, `map` and `scan` call it for each row, and the loop
has three iterations.
"""


@pytest.mark.parametrize(("run", "macs"), CONTROL_FLOW.values(), ids=CONTROL_FLOW)
def test_control_flow_has_its_gradients_and_is_counted(
    run: Callable[[nn.Module, Tensor], Tensor], macs: int
) -> None:
    """Parameters used inside control flow get the same gradients in the counting step.

    Backward costs twice the forward pass.
    """
    plain, _ = train(lambda: Flow(run), None)
    end, profile = train(lambda: Flow(run), 2)
    assert profile is not None
    assert plain == end
    assert {"before": SQUARE, "inner": macs} == self_macs(profile, "forward")
    assert {"before": SQUARE, "inner": 2 * macs} == self_macs(profile, "backward")


def test_code_that_was_compiled_before_is_counted_as_far_as_it_is_seen_and_listed() -> None:
    """For code compiled before the count, only forward is counted, and a note says so.

    The count begins too late to receive the graph.
    """
    model = torch.compile(Block(), backend="aot_eager")
    x = torch.ones(ROWS, SIZE)
    model(x).sum().backward()
    with lflops.counting(model) as count:
        model(x).sum().backward()
    assert {"torch.compile"} == {each.operator for each in count.profile.unsupported}
    assert {"": 2 * UP} == self_macs(count.profile, "forward")
    assert ["compiled_unsupported"] == [note.code for note in count.profile.notes]
    assert count.profile.memory is None
