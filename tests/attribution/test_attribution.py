"""Test that work is attributed to the module that does it, in forward and in backward.

The modules have unusual inputs, outputs, frozen parameters and exceptions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lflops
from tests.support.profile_checks import calls, consistent, flops, macs
from tests.support.small_models import (
    Block,
    Projections,
    Towers,
    batch,
    down,
    hidden,
    length,
    sequence,
    square,
    tokens,
    up,
)


def test_three_projections_of_one_input_cost_the_same_backward() -> None:
    """Each of q, k and v has two matmuls in backward: the gradients of its weight and of its input.

    The stem has only the first of them, because its input needs no gradient.
    """
    profile = lflops.count(Projections(), sequence(), backward=True)
    assert dict.fromkeys(("stem", "q", "k", "v"), square) == macs(profile, "forward")
    assert {"stem": square, **dict.fromkeys(("q", "k", "v"), 2 * square)} == macs(
        profile, "backward"
    )
    assert {} == macs(profile, "recompute")


def test_every_operation_backward_is_its_own_modules() -> None:
    """Operators of backward without matmuls are attributed to modules, too.

    The gradient of a bias is a sum over the tokens. The three gradients of the shared input are
    added where they arise, with two additions: v runs backward first, so k and q have the
    additions.
    """
    profile = lflops.count(Projections(), sequence(), backward=True)
    elements = tokens * hidden
    assert {
        "": 2 * elements,
        **dict.fromkeys(("stem", "q", "k", "v"), 2 * square + elements),
    } == flops(profile, "forward")
    assert {
        "stem": 2 * square + elements,
        "v": 4 * square + elements,
        "k": 4 * square + 2 * elements,
        "q": 4 * square + 2 * elements,
    } == flops(profile, "backward")


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(hidden, hidden)
        self.activation = nn.ReLU(inplace=True)
        self.second = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.first(x))
        y = self.second(y)
        y += x
        return y.mul_(2)


def test_in_place_operators_are_the_modules_that_call_them() -> None:
    """In-place operators belong to the module that calls them.

    Each is one operation per element in forward and in backward, except the addition: its backward
    only passes the gradient on.
    """
    profile = lflops.count(InPlace(), sequence(), backward=True)
    elements = tokens * hidden
    assert {
        "": 2 * elements,
        "first": 2 * square + elements,
        "activation": elements,
        "second": 2 * square + elements,
    } == flops(profile, "forward")
    assert {
        "": elements,
        "first": 2 * square + elements,
        "activation": elements,
        "second": 4 * square + elements,
    } == flops(profile, "backward")


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True)])
def test_an_input_without_gradient_saves_the_first_layer_one_product(
    wanted: tuple[bool, bool],
) -> None:
    """A tower's first layer computes the gradient of its input only if it is required."""
    a = sequence(requires_grad=wanted[0])
    b = sequence(requires_grad=wanted[1])
    profile = lflops.count(Towers(), (a, b), backward=True)
    assert {"a.up": up, "a.down": down, "b.up": up, "b.down": down, "head": square} == macs(
        profile, "forward"
    )
    assert {
        "a.up": (1 + wanted[0]) * up,
        "a.down": 2 * down,
        "b.up": (1 + wanted[1]) * up,
        "b.down": 2 * down,
        "head": 2 * square,
    } == macs(profile, "backward")


def test_a_frozen_layer_only_passes_gradients_on() -> None:
    """A frozen layer computes no gradient of its weight.

    At the bottom of the model, a frozen layer has no backward at all. In the middle, it has one
    matmul, which passes the gradient on to the layers before it.
    """
    bottom = Projections()
    middle = Projections()
    bottom.stem.requires_grad_(False)
    middle.k.requires_grad_(False)
    of_bottom = lflops.count(bottom, sequence(), backward=True)
    assert dict.fromkeys(("q", "k", "v"), square) == macs(of_bottom, "backward")
    of_middle = lflops.count(middle, sequence(), backward=True)
    assert {"stem": square, "q": 2 * square, "k": square, "v": 2 * square} == macs(
        of_middle, "backward"
    )
    weights = hidden * hidden + hidden
    assert [4 * weights, 3 * weights] == [
        of_middle.modules[""].parameters,
        of_middle.modules[""].trainable_parameters,
    ]


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(hidden, rank, bias=False)
        self.up = nn.Linear(rank, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_a_low_rank_adapter_trains_without_the_base_weights_gradient() -> None:
    """A frozen base layer has at most one matmul in backward, the gradient of its input.

    The base of the second layer passes the gradient on. The base of the first layer has no
    backward, because no trained layer precedes it.
    """
    rank = 2
    adapter = tokens * hidden * rank
    profile = lflops.count(
        nn.Sequential(LoRA(nn.Linear(hidden, hidden), rank), LoRA(nn.Linear(hidden, hidden), rank)),
        sequence(),
        backward=True,
    )
    forward = {
        "0.base": square,
        "0.down": adapter,
        "0.up": adapter,
        "1.base": square,
        "1.down": adapter,
        "1.up": adapter,
    }
    assert forward == macs(profile, "forward")
    assert {
        "0.down": adapter,
        "0.up": 2 * adapter,
        "1.base": square,
        "1.down": 2 * adapter,
        "1.up": 2 * adapter,
    } == macs(profile, "backward")


@dataclass
class Output:
    logits: Tensor
    extra: dict[str, Any]


class Opaque:
    """An output that returns its tensor only from a function."""

    __slots__ = ("ask",)

    def __init__(self, tensor: Tensor) -> None:
        self.ask: Callable[[], Tensor] = lambda: tensor


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda y: {"y": [y]}, lambda out: out["y"][0]),
    "dataclass": (lambda y: Output(y, {"same": y}), lambda out: out.extra["same"]),
    "opaque": (Opaque, lambda out: out.ask()),
}
"""For each kind of output, a function that wraps a tensor, and one that unwraps it."""


class Wrapped(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.block = Block()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.block(x))


@pytest.mark.parametrize("kind", OUTPUTS)
def test_what_a_module_returns_does_not_matter(kind: str) -> None:
    """Backward is attributed correctly for any output of a module.

    Attribution uses the autograd graph, not the tensors in the output.
    """
    wrap, unwrap = OUTPUTS[kind]
    model = nn.ModuleDict({"body": Wrapped(wrap), "head": nn.Linear(hidden, hidden)})
    with lflops.counting(model) as counted:
        model["head"](unwrap(model["body"](sequence()))).sum().backward()
    assert {"body.block.up": up, "body.block.down": down, "head": square} == macs(
        counted.profile, "forward"
    )
    assert {"body.block.up": up, "body.block.down": 2 * down, "head": 2 * square} == macs(
        counted.profile, "backward"
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_costs_what_one_with_them_does(mode: Callable[[], Any]) -> None:
    """Each module has the same MACs and FLOPs in forward with and without gradients.

    In inference mode, composite operators arrive whole, and lflops decomposes them.
    """
    model = nn.Sequential(
        Projections(), Block(), nn.LayerNorm(hidden), nn.Conv1d(length, length, 1)
    )
    x = sequence()
    expected = lflops.count(model, x)
    with mode():
        actual = lflops.count(model, x)
    assert macs(expected, "forward") == macs(actual, "forward")
    assert flops(expected, "forward") == flops(actual, "forward")
    assert calls(expected) == calls(actual)


def test_under_autocast_contractions_are_in_its_dtype() -> None:
    """Under autocast, matmuls are counted as bfloat16, and the layer norm before them as float32.

    The MACs are the same as without autocast.
    """
    model = nn.Sequential(
        nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        profile = consistent(lflops.count(model, sequence(), backward=True))
    assert {"bfloat16"} == {cell.dtype for cell in profile.op_counts if cell.macs}
    assert {"float32"} == {
        cell.dtype for cell in profile.op_counts if "layer_norm" in cell.operator
    }
    assert {"1": square, "2": square} == macs(profile, "forward")
    assert {"1": 2 * square, "2": 2 * square} == macs(profile, "backward")
    assert ("bfloat16", "autocast bfloat16") == (profile.run.dtype, profile.run.precision)


def test_the_fast_path_of_a_transformer_layer_stays_on() -> None:
    """Counting installs no hooks on the modules, so torch still uses its fast path in evaluation.

    The fast path runs the whole layer as one operator, so only the layer itself has work.
    """
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    with torch.no_grad():
        profile = consistent(lflops.count(layer, torch.randn(batch, length, 4)))
    assert {"": 1} == calls(profile)
    assert {("", "_transformer_encoder_layer_fwd")} == {
        (each.module, each.operator) for each in (*profile.op_counts, *profile.unsupported)
    }


class Failing(nn.Module):
    """A module that calls a layer, and then raises an error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, hidden)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise self.error


class Fallback(nn.Module):
    def __init__(self, fast: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, hidden))
        self.fast = fast
        self.safe = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        try:
            self.fast(x)
        except BaseException:  # noqa: BLE001 - the test also raises interrupts
            x = x @ self.weight
        return self.safe(x) @ self.weight


ERRORS = [ValueError("no"), StopIteration(), KeyboardInterrupt(), SystemExit(1)]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_part_that_raises_and_is_caught_leaves_its_callers_rows_right(
    error: BaseException,
) -> None:
    """If a module raises and its caller catches the error, work is still attributed correctly.

    Work before the error belongs to the module. Work after the error belongs to the caller, in
    forward and in backward.
    """
    model = nn.Sequential(nn.Linear(hidden, hidden), Fallback(Failing(error)))
    profile = lflops.count(model, sequence(), backward=True)
    assert {"0": square, "1.fast.inner": square, "1": 2 * square, "1.safe": square} == macs(
        profile, "forward"
    )
    assert {"0": square, "1": 4 * square, "1.safe": 2 * square} == macs(profile, "backward")
    assert {"": 1, "0": 1, "1": 1, "1.fast": 1, "1.fast.inner": 1, "1.safe": 1} == calls(profile)


def test_a_users_hook_that_raises_leaves_its_callers_rows_right() -> None:
    """If a user's forward pre-hook raises, the module has no work, and the caller has its own."""

    def refuse(_module: nn.Module, _args: Any) -> None:
        raise ValueError

    fast = nn.Linear(hidden, hidden)
    fast.register_forward_pre_hook(refuse)
    profile = lflops.count(Fallback(fast), sequence(requires_grad=True), backward=True)
    assert {"": 2 * square, "safe": square} == macs(profile, "forward")
    assert {"": 4 * square, "safe": 2 * square} == macs(profile, "backward")


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_that_leaves_the_count_leaves_a_partial_profile(error: BaseException) -> None:
    """If an error ends the count, the work so far is counted, and the next count is complete."""
    model = nn.Sequential(nn.Linear(hidden, hidden), Failing(error))
    counted = lflops.counting(model)
    with pytest.raises((type(error), RuntimeError)), counted:
        model(sequence())
    assert counted.profile.run.partial
    assert {"0": square, "1.inner": square} == macs(counted.profile, "forward")
    assert {"0": square} == macs(lflops.count(model[:1], sequence()), "forward")
