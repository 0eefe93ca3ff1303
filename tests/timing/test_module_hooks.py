"""Test `ModuleTimer` with models whose durations the test chooses.

Each expected time is a sum of these durations.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lflops
from lflops.model.module_tree import ModuleTree
from lflops.timing.module_hooks import (
    MOST_NODES,
    ModuleTimer,
    _SegmentsByNumber,
    median_overhead,
)
from lflops.timing.module_times import NO_OVERHEAD, HookOverhead, PassTimes, inclusive
from tests.support.fake_clock import StillClock
from tests.support.installed import installed
from tests.support.timed_modules import Itself, Part, Square, Takes

Model = Callable[[StillClock], nn.Module]
Times = Mapping[str, Mapping[str, float]]


def pass_of(
    model: nn.Module,
    clock: StillClock,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    **kwargs: Any,
) -> dict[str, PassTimes]:
    """Run a pass with hooks, and return the times of each part. With a loss, backward runs, too."""
    spans = ModuleTimer(ModuleTree({"": model}), clock)
    with installed(spans):
        spans.begin()
        output = model(*args, **kwargs)
        if loss is not None:
            result = loss(output)
            spans.set_aside()
            spans.begin_backward([result])
            result.backward()
        parts = spans.end()
    return spans.pass_times(parts)


def own(laps: Mapping[str, PassTimes]) -> Times:
    """Return the self seconds of the modules in each phase, without modules that took no time."""
    times: dict[str, dict[str, float]] = {}
    for lap in laps.values():
        for (row, phase), seconds in lap.self_seconds.items():
            if seconds:
                of_phase = times.setdefault(phase, {})
                of_phase[row] = of_phase.get(row, 0) + seconds
    return times


def ones(*, requires_grad: bool = False) -> Tensor:
    """Return a batch."""
    return torch.ones(2, requires_grad=requires_grad)


class Nested(Itself):
    def forward(self, x: Tensor) -> Tensor:
        return self.take(self.outer(self.take(x, 1, 2)), 4, 8)


class Outer(Itself):
    def forward(self, x: Tensor) -> Tensor:
        return self.take(self.inner(self.take(x, 16, 32)), 64, 128)


def nested(clock: StillClock) -> nn.Module:
    """Return a model with three levels; each has work before and after the level below."""
    return Nested(clock, outer=Outer(clock, inner=Part(clock, 256, 512)))


def test_a_pass_may_begin_within_a_module() -> None:
    """A pass may begin within a module, so that the root has no time.

    In a loop that calls several models, forward begins when the first model is called. Here, the
    first hook of `a` begins the pass, and its second hook takes 7 s, so `a` has 8 s.
    """
    clock = StillClock()
    models = nn.ModuleDict({"a": Part(clock, 1, 2), "b": Part(clock, 4, 8)})
    spans = ModuleTimer(ModuleTree({"": models}), clock)
    passes = []
    with installed(spans):
        for _ in range(2):
            begins = models["a"].register_forward_pre_hook(lambda *_: spans.begin())
            waits = models["a"].register_forward_pre_hook(lambda *_: clock.advance(7))
            models["b"](models["a"](ones()))
            begins.remove()
            waits.remove()
            spans.set_aside()
            models["b"](ones())
            passes.append(own(spans.pass_times(spans.end())))
    assert [{"forward": {"a": 8, "b": 4}}] * 2 == passes


class Projections(Itself):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.q(x) + self.k(x) + self.v(x)


def projections(clock: StillClock) -> nn.Module:
    """Return a model in which three modules have the same input.

    The gradients of the modules' inputs cannot show which module runs in backward.
    """
    return Projections(
        clock,
        stem=Part(clock, 1, 2),
        q=Part(clock, 4, 8),
        k=Part(clock, 16, 32),
        v=Part(clock, 64, 128),
    )


class Twice(Itself):
    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.take(self.part(x), 1, 2))


class Callers(Itself):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Caller(Itself):
    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.take(x, *self.seconds))

    def __init__(self, clock: StillClock, seconds: tuple[float, float], shared: nn.Module) -> None:
        super().__init__(clock, shared=shared)
        self.seconds = seconds


def shared(clock: StillClock) -> nn.Module:
    """Return a model with one module under two callers, so that it has two names."""
    both = Part(clock, 1, 2)
    return Callers(clock, a=Caller(clock, (4, 8), both), b=Caller(clock, (16, 32), both))


def containers(clock: StillClock) -> nn.Module:
    """Return a model with modules that do no work of their own."""
    return nn.Sequential(
        nn.Sequential(Part(clock, 1, 2), Part(clock, 4, 8)), nn.Identity(), Part(clock, 16, 32)
    )


def frozen(clock: StillClock) -> nn.Module:
    """Return a model with a frozen part, which takes time for its input's gradient in backward."""
    still = Part(clock, 16, 32).requires_grad_(requires_grad=False)
    return nn.Sequential(Part(clock, 1, 2), Part(clock, 4, 8), still, Part(clock, 64, 128))


class SwiGLU(Itself):
    """A gate whose activation is no module: its result is computed early, and used late."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.take(self.gate(x), 1, 2)
        return self.down(self.take(gate * self.up(x), 4, 8))


def gate(clock: StillClock) -> nn.Module:
    """Return a model with a gate between two other parts."""
    block = SwiGLU(
        clock, gate=Part(clock, 16, 32), up=Part(clock, 64, 128), down=Part(clock, 256, 512)
    )
    return nn.Sequential(Part(clock, 1024, 2048), block, Part(clock, 4096, 8192))


class TakesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: StillClock, seconds: tuple[float, float]) -> Tensor:
        ctx.clock = clock
        ctx.seconds = seconds[1]
        clock.advance(seconds[0])
        ctx.mark_dirty(x.add_(1))
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.clock.advance(ctx.seconds)
        return gradients[0], None, None


class InPlace(Part):
    def forward(self, x: Tensor) -> Tensor:
        return TakesInPlace.apply(x, self.clock, self.seconds)


def in_place(clock: StillClock) -> nn.Module:
    """Return a model in which two parts and torch's ReLU change their input in place."""
    return nn.Sequential(
        Part(clock, 1, 2),
        InPlace(clock, 4, 8),
        InPlace(clock, 16, 32),
        nn.ReLU(inplace=True),
        Part(clock, 64, 128),
    )


class Keywords(Itself):
    def forward(self, *, x: Tensor) -> Tensor:
        return self.last(x=self.take(self.first(x=self.take(x, 1, 2)), 4, 8))


class KeywordPart(Part):
    def forward(self, *, x: Tensor) -> Tensor:
        return super().forward(x)


@dataclass
class Output:
    hidden: Tensor
    others: list[dict[str, Tensor]]


class Packs(Part):
    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        return Output(hidden, [{"auxiliary": Takes.apply(hidden, None, self.clock, (1024, 2048))}])


class Unpacks(Itself):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        packed = self.packs(x)
        return {"sum": self.part(packed.hidden) + packed.others[0]["auxiliary"]}


def outputs(clock: StillClock) -> nn.Module:
    """Return a model with two kinds of outputs: a dataclass with a list of dicts, and a dict."""
    return Unpacks(clock, packs=Packs(clock, 1, 2), part=Part(clock, 4, 8))


class Recurrent(Part):
    """A module that returns its state and outputs that are computed from the state."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state = super().forward(x)
        return Takes.apply(state, None, self.clock, (1024, 2048)), state


class UsesState(Itself):
    """A model that ignores the outputs, which have the newest node of the module."""

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.recurrent(x)
        return self.last(state)


class ReturnsView(Part):
    """A module whose output is a view, like the output of attention."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1)


class ChangesView(Itself):
    """A model that changes a module's output in place: autograd then forgets the view's node."""

    def forward(self, x: Tensor) -> Tensor:
        view = self.view(x)
        view += 1
        return self.last(view)


class KeepsAuxiliary(Part):
    """A module that computes an auxiliary loss after its output, and keeps it as an attribute."""

    auxiliary: Tensor

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.auxiliary = Takes.apply(output, None, self.clock, (1024, 2048))
        return output


class UsesAuxiliary(Itself):
    def forward(self, x: Tensor) -> Tensor:
        output = self.last(self.experts(x))
        return output + self.experts.auxiliary


class FillsDict(Part):
    """A module that returns nothing and writes its result into its input."""

    def forward(self, batch: dict[str, Any]) -> None:
        batch["x"] = super().forward(batch["x"])


class SharesDict(Itself):
    def forward(self, x: Tensor) -> Tensor:
        batch = {"x": x}
        self.first(batch)
        self.second(batch)
        return batch["x"]


class ReturnsDeque(Part):
    def forward(self, x: Tensor) -> Any:
        return deque([super().forward(x)])


class ReadsDeque(Itself):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.queue(x)[0])


class LateGate(Itself):
    """A gate that is computed early and used after more nodes than a search visits."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.take(self.gate(x), 1, 2)
        for _ in range(MOST_NODES):
            x = x + 1
        return self.last(x + gate)


class IgnoresMask(Part):
    """A module that does not use its second argument."""

    def forward(self, x: Tensor, _mask: Tensor) -> Tensor:
        return super().forward(x)


class PassesMask(Itself):
    """A model whose newest node before the call of a module leads only to an unused argument."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.take(x, 1, 2)
        return self.last(x, self.take(x, 4, 8))


class Residual(Itself):
    def forward(self, x: Tensor) -> Tensor:
        for part in (self.first, self.second):
            x = self.take(x + part(x), 1, 2)
        return x


class Recursive(Part):
    """A module that calls itself several times."""

    def forward(self, x: Tensor, times: int = 3) -> Tensor:
        x = super().forward(x)
        return self(x, times - 1) if times > 1 else x


class Careful(Itself):
    """A module that catches the error of a submodule and continues in another way."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.fails(x)
        except ValueError:
            x = self.take(x, 1, 2)
        return self.part(x)


class Fails(Itself):
    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        self.clock.advance(16)
        raise ValueError("planted")


class Scoped(Itself):
    def forward(self, x: Tensor) -> Tensor:
        with lflops.scope("head"):
            x = self.part(self.take(x, 1, 2))
        return self.take(x, 4, 8)


CASES: dict[str, tuple[Model, Times]] = {
    "nested": (
        nested,
        {
            "forward": {"": 1 + 4, "outer": 16 + 64, "outer.inner": 256},
            "backward": {"": 2 + 8, "outer": 32 + 128, "outer.inner": 512},
        },
    ),
    "one input": (
        projections,
        {
            "forward": {"stem": 1, "q": 4, "k": 16, "v": 64},
            "backward": {"stem": 2, "q": 8, "k": 32, "v": 128},
        },
    ),
    "called twice": (
        lambda clock: Twice(clock, part=Part(clock, 4, 8)),
        {"forward": {"": 1, "part": 4 + 4}, "backward": {"": 2, "part": 8 + 8}},
    ),
    "shared": (
        shared,
        {
            "forward": {"a": 4, "a.shared": 1, "b": 16, "b.shared": 1},
            "backward": {"a": 8, "a.shared": 2, "b": 32, "b.shared": 2},
        },
    ),
    "containers": (
        containers,
        {"forward": {"0.0": 1, "0.1": 4, "2": 16}, "backward": {"0.0": 2, "0.1": 8, "2": 32}},
    ),
    "frozen": (
        frozen,
        {
            "forward": {"0": 1, "1": 4, "2": 16, "3": 64},
            "backward": {"0": 2, "1": 8, "2": 32, "3": 128},
        },
    ),
    "gate": (
        gate,
        {
            "forward": {"0": 1024, "1": 1 + 4, "1.gate": 16, "1.up": 64, "1.down": 256, "2": 4096},
            "backward": {
                "0": 2048,
                "1": 2 + 8,
                "1.gate": 32,
                "1.up": 128,
                "1.down": 512,
                "2": 8192,
            },
        },
    ),
    "in place": (
        in_place,
        {
            "forward": {"0": 1, "1": 4, "2": 16, "4": 64},
            "backward": {"0": 2, "1": 8, "2": 32, "4": 128},
        },
    ),
    "residual": (
        lambda clock: Residual(clock, first=Part(clock, 4, 8), second=Part(clock, 16, 32)),
        {
            "forward": {"": 2, "first": 4, "second": 16},
            "backward": {"": 4, "first": 8, "second": 32},
        },
    ),
    "outputs": (
        outputs,
        {"forward": {"packs": 1 + 1024, "part": 4}, "backward": {"packs": 2 + 2048, "part": 8}},
    ),
    "unused output": (
        lambda clock: UsesState(clock, recurrent=Recurrent(clock, 1, 2), last=Part(clock, 4, 8)),
        {
            "forward": {"recurrent": 1 + 1024, "last": 4},
            "backward": {"recurrent": 2, "last": 8},
        },
    ),
    "view changed in place": (
        lambda clock: ChangesView(clock, view=ReturnsView(clock, 1, 2), last=Part(clock, 4, 8)),
        {"forward": {"view": 1, "last": 4}, "backward": {"view": 2, "last": 8}},
    ),
    "auxiliary attribute": (
        lambda clock: UsesAuxiliary(
            clock, experts=KeepsAuxiliary(clock, 1, 2), last=Part(clock, 4, 8)
        ),
        {
            "forward": {"experts": 1 + 1024, "last": 4},
            "backward": {"experts": 2 + 2048, "last": 8},
        },
    ),
    "modules that return nothing": (
        lambda clock: SharesDict(
            clock, first=FillsDict(clock, 1, 2), second=FillsDict(clock, 4, 8)
        ),
        {"forward": {"first": 1, "second": 4}, "backward": {"first": 2, "second": 8}},
    ),
    "deque": (
        lambda clock: ReadsDeque(clock, queue=ReturnsDeque(clock, 1, 2), last=Part(clock, 4, 8)),
        {"forward": {"queue": 1, "last": 4}, "backward": {"queue": 2, "last": 8}},
    ),
    "late gate": (
        lambda clock: LateGate(clock, gate=Part(clock, 4, 8), last=Part(clock, 16, 32)),
        {
            "forward": {"": 1, "gate": 4, "last": 16},
            "backward": {"": 2, "gate": 8, "last": 32},
        },
    ),
    "unused argument": (
        lambda clock: PassesMask(
            clock, first=Part(clock, 16, 32), last=IgnoresMask(clock, 64, 128)
        ),
        {
            "forward": {"": 1 + 4, "first": 16, "last": 64},
            "backward": {"": 2, "first": 32, "last": 128},
        },
    ),
    "recursive": (
        lambda clock: nn.Sequential(Recursive(clock, 1, 2)),
        {"forward": {"0": 3}, "backward": {"0": 6}},
    ),
    "an error that is caught": (
        lambda clock: Careful(
            clock, fails=Fails(clock, inner=Part(clock, 4, 8)), part=Part(clock, 32, 64)
        ),
        {
            "forward": {"": 1, "fails": 16, "fails.inner": 4, "part": 32},
            "backward": {"": 2, "part": 64},
        },
    ),
    "scope": (
        lambda clock: Scoped(clock, part=Part(clock, 16, 32)),
        {"forward": {"": 4, "head": 1, "part": 16}, "backward": {"": 8, "head": 2, "part": 32}},
    ),
}


def summed(output: Any) -> Tensor:
    """Return a loss that takes no time: the sum of the output, or of the first value of a dict."""
    if isinstance(output, dict):
        output = next(iter(output.values()))
    return output.sum()


@pytest.mark.parametrize(
    "requires_grad", [True, False], ids=["input with a gradient", "input without"]
)
@pytest.mark.parametrize(("make", "expected"), CASES.values(), ids=CASES)
def test_every_second_is_in_the_row_and_the_phase_that_it_was_spent_in(
    make: Model, expected: Times, requires_grad: bool
) -> None:
    """Every second belongs to the module and the phase in which it was spent.

    In forward, this is the module that was called; in backward, the module that built the autograd
    node. This holds whether the input of the model requires a gradient or not.
    """
    clock = StillClock()
    laps = pass_of(make(clock), clock, ones(requires_grad=requires_grad).clone(), loss=summed)
    assert expected == own(laps)
    assert clock.now == sum(sum(rows.values()) for rows in expected.values())


@pytest.mark.parametrize(("make", "expected"), CASES.values(), ids=CASES)
def test_a_forward_that_builds_no_graph_has_the_same_times(make: Model, expected: Times) -> None:
    """Under `no_grad`, the times of forward are the same, although there are no autograd nodes."""
    clock = StillClock()
    with torch.no_grad():
        assert {"forward": expected["forward"]} == own(pass_of(make(clock), clock, ones()))


def test_a_module_has_the_time_of_what_it_calls_as_well() -> None:
    """The inclusive time of each of the three levels of `nested` includes the levels below."""
    clock = StillClock()
    laps = pass_of(nested(clock), clock, ones(), loss=summed)
    forward = inclusive(laps["forward"].self_seconds)
    backward = inclusive(laps["backward"].self_seconds)
    assert {"": 5 + 80 + 256, "outer": 80 + 256, "outer.inner": 256} == {
        place.fqn: seconds for place, seconds in forward.items()
    }
    assert {"": 10 + 160 + 512, "outer": 160 + 512, "outer.inner": 512} == {
        place.fqn: seconds for place, seconds in backward.items()
    }


def test_what_needs_no_gradient_has_no_time_in_backward() -> None:
    """Modules that need no gradient have no time in backward.

    The first two parts are frozen and the input requires no gradient, so backward ends after the
    third part.
    """
    clock = StillClock()
    below = [Part(clock, 1, 2).requires_grad_(requires_grad=False) for _ in range(2)]
    laps = pass_of(nn.Sequential(*below, Part(clock, 4, 8)), clock, ones(), loss=summed)
    assert {"forward": {"0": 1, "1": 1, "2": 4}, "backward": {"2": 8}} == own(laps)


def test_keyword_arguments_lead_to_no_node_and_are_found_by_the_output() -> None:
    """With keyword arguments, backward is divided by the outputs of the modules.

    Torch does not pass keyword arguments to global hooks that run before forward. The root has work
    before and between its parts.
    """
    clock = StillClock()
    model = Keywords(clock, first=KeywordPart(clock, 16, 32), last=KeywordPart(clock, 64, 128))
    laps = pass_of(model, clock, x=ones(), loss=summed)
    assert {
        "forward": {"": 5, "first": 16, "last": 64},
        "backward": {"": 10, "first": 32, "last": 128},
    } == own(laps)


def test_what_the_loss_does_is_the_roots() -> None:
    """The time of a loss that is no module belongs to the root: 1 s forward and 2 s backward."""
    clock = StillClock()
    weight = torch.ones((), requires_grad=True)
    laps = pass_of(
        Part(clock, 4, 8),
        clock,
        ones(),
        loss=lambda out: Takes.apply(out, weight, clock, (1, 2)).sum(),
    )
    assert {"forward": {"": 5}, "backward": {"": 10}} == own(laps)
    laps = pass_of(
        nn.Sequential(Part(clock, 4, 8)),
        clock,
        ones(),
        loss=lambda out: Takes.apply(out, weight, clock, (1, 2)).sum(),
    )
    assert {"forward": {"": 1, "0": 4}, "backward": {"": 2, "0": 8}} == own(laps)


class Headless(Itself):
    """A model that leaves the call of its head to the loss."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_a_loss_may_call_modules_of_the_models() -> None:
    """If the loss calls a module of the model, the module has its time.

    The loss also has work of its own, whose result is computed early and used late.
    """
    clock = StillClock()
    weight = torch.ones((), requires_grad=True)
    model = Headless(clock, body=Part(clock, 4, 8), head=Part(clock, 16, 32))

    def loss(out: Tensor) -> Tensor:
        early = Takes.apply(out, weight, clock, (1, 2))
        return (model.head(out) + early).sum()

    laps = pass_of(model, clock, ones(), loss=loss)
    assert {
        "forward": {"": 1, "body": 4, "head": 16},
        "backward": {"": 2, "body": 8, "head": 32},
    } == own(laps)


def test_a_graph_that_is_kept_is_timed_each_time_that_it_goes_backward() -> None:
    """If backward runs twice through the same graph, both passes are timed."""
    clock = StillClock()
    model = projections(clock)
    spans = ModuleTimer(ModuleTree({"": model}), clock)
    with installed(spans):
        spans.begin()
        result = model(ones()).sum()
        spans.set_aside()
        spans.begin_backward([result])
        for _ in range(2):
            torch.autograd.backward(result, retain_graph=True)
        parts = spans.end()
    assert {"stem": 4, "q": 16, "k": 64, "v": 256} == own(spans.pass_times(parts))["backward"]


class Energy(Itself):
    """A model whose output is the gradient of its energy, like a force field."""

    def forward(self, x: Tensor) -> Tensor:
        energy = self.head(self.body(x)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


def test_a_gradient_that_forward_takes_is_backward_within_forward() -> None:
    """A gradient that is computed in forward is in the part `forward` and the phase `backward`."""
    clock = StillClock()
    laps = pass_of(
        Energy(clock, body=Part(clock, 1, 2), head=Part(clock, 4, 8)),
        clock,
        ones(requires_grad=True),
    )
    assert {"forward"} == laps.keys()
    assert {"forward": {"body": 1, "head": 4}, "backward": {"body": 2, "head": 8}} == own(laps)


class Forces(Itself):
    """A model that computes the gradient of its energy, and then something else."""

    def forward(self, x: Tensor) -> Tensor:
        energy = self.head(self.body(x)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.last(self.take(force, 1024, 2048))


def test_a_second_derivative_belongs_to_the_module_that_it_is_of() -> None:
    """Nodes that `autograd.grad` builds belong to the modules whose nodes it runs.

    Forward computes the first derivatives of both squares. Backward computes their second
    derivatives, and again the first derivative of the body, whose output the head's derivative
    depends on. The time of forward after the first derivatives is forward.
    """
    clock = StillClock()
    model = Forces(
        clock, body=Square(clock, 1, 2, 4), head=Square(clock, 8, 16, 32), last=Part(clock, 64, 128)
    )
    laps = pass_of(model, clock, ones(requires_grad=True), loss=summed)
    assert {
        "forward": {"body": 1, "head": 8, "": 1024, "last": 64},
        "backward": {"body": 2 + 4 + 2, "head": 16 + 32, "": 2048, "last": 128},
    } == own(laps)
    in_forward = laps["forward"].self_seconds
    assert (2, 16) == (in_forward["body", "backward"], in_forward["head", "backward"])


class Curvature(Itself):
    """A model that computes the second derivative of its energy, like a physics-informed loss."""

    def forward(self, x: Tensor) -> Tensor:
        energy = self.head(self.body(x)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        (curvature,) = torch.autograd.grad(self.take(force, 1024, 2048).sum(), x)
        return curvature


def test_a_second_derivative_in_forward_belongs_to_the_module_that_it_is_of() -> None:
    """A gradient of a gradient in forward is the time of the modules after the first one.

    The second derivative of the head runs after the second derivative of the body, so that the
    timer knows where it begins. It does not know where the pass itself begins: the 2048 s of the
    model and the 4 s of the body count as forward of the model.
    """
    clock = StillClock()
    model = Curvature(clock, body=Square(clock, 1, 2, 4), head=Square(clock, 8, 16, 32))
    assert {
        "forward": {"body": 1, "head": 8, "": 1024 + 2048 + 4},
        "backward": {"body": 2 + 2, "head": 16 + 32},
    } == own(pass_of(model, clock, ones(requires_grad=True)))


def test_a_graph_of_an_earlier_pass_is_timed() -> None:
    """A generator's graph is used after the discriminator was trained with its own backward."""
    clock = StillClock()
    model = nn.ModuleDict({"generator": Part(clock, 1, 2), "discriminator": Part(clock, 4, 8)})
    spans = ModuleTimer(ModuleTree({"": model}), clock)
    passes = []
    with installed(spans):
        spans.begin()
        fake = model["generator"](ones())
        passes.append(spans.end())
        for shown in (fake.detach(), fake):
            spans.begin()
            result = model["discriminator"](shown).sum()
            spans.set_aside()
            spans.begin_backward([result])
            result.backward()
            passes.append(spans.end())
    times = [own(spans.pass_times(parts)) for parts in passes]
    assert {"forward": {"generator": 1}} == times[0]
    assert {"forward": {"discriminator": 4}, "backward": {"discriminator": 8}} == times[1]
    assert {
        "forward": {"discriminator": 4},
        "backward": {"discriminator": 8, "generator": 2},
    } == times[2]


@pytest.mark.parametrize(
    ("number", "name"),
    [(0, None), (1, "a"), (3, "inner"), (5, "a"), (9, "a"), (10, None), (12, "b"), (14, None)],
)
def test_a_node_belongs_to_the_innermost_segment(number: int, name: str | None) -> None:
    """Segments may contain each other, and may have gaps between them."""
    found = _SegmentsByNumber([(3, 5, "inner"), (1, 10, "a"), (12, 14, "b")]).of(number)
    assert name == (None if found is None else found[2])


class Checkpointed(Itself):
    def __init__(self, clock: StillClock, *, reentrant: bool, **parts: nn.Module) -> None:
        super().__init__(clock, **parts)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, self.take(x, 1, 2), use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_is_told_apart(reentrant: bool) -> None:
    """The second run of a checkpointed block within backward has the phase `recompute`.

    The last operator of the block saves a tensor, so that a checkpoint that stops the recomputation
    early also runs the whole block.
    """
    clock = StillClock()
    block = Saves(clock, first=Part(clock, 4, 8), second=Part(clock, 16, 32))
    model = Checkpointed(clock, reentrant=reentrant, block=block, last=Part(clock, 64, 128))
    laps = pass_of(model, clock, ones(requires_grad=True), loss=summed)
    assert {
        "forward": {"": 1, "block": 256, "block.first": 4, "block.second": 16, "last": 64},
        "recompute": {"block": 256, "block.first": 4, "block.second": 16},
        "backward": {"": 2, "block": 512, "block.first": 8, "block.second": 32, "last": 128},
    } == own(laps)
    assert {"block": 1, "block.first": 1, "block.second": 1} == {
        place.fqn: calls for place, calls in (+laps["backward"].called).items()
    }


class Saves(Itself):
    def forward(self, x: Tensor) -> Tensor:
        return self.take(self.second(self.first(x)), 256, 512).exp()


class Ticking(TorchDispatchMode):
    """A mode in which every matmul takes 1 s, also in a script, which does not run Python code."""

    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.clock = clock

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.clock.advance(function.overloadpacket in {torch.ops.aten.mm, torch.ops.aten.addmm})
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_script_is_one_row() -> None:
    """The time of a script belongs to the script as a whole, because its submodules call no hooks.

    It has two matmuls in forward. In backward, it has three, because its input needs no gradient.
    """
    clock = StillClock()
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2))
    with Ticking(clock):
        laps = pass_of(
            nn.Sequential(scripted, nn.Linear(2, 2)), clock, torch.ones(1, 2), loss=summed
        )
    assert {"forward": {"0": 2, "1": 1}, "backward": {"0": 1 + 2, "1": 2}} == own(laps)


class Threaded(Itself):
    """A module that runs a part on another thread, and waits for it."""

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(self.there(x)))
        thread.start()
        thread.join()
        return self.here(found[0])


def test_what_runs_on_another_thread_is_left_alone() -> None:
    """Modules on another thread are not timed, because two threads would end each other's times.

    The wait for the other thread is self time of the caller.
    """
    clock = StillClock()
    with torch.no_grad():
        laps = pass_of(Threaded(clock, there=Part(clock, 1), here=Part(clock, 2)), clock, ones())
    assert {"forward": {"": 1, "here": 2}} == own(laps)


def test_modules_of_others_are_the_time_of_who_calls_them() -> None:
    """The time of a module that is not a submodule of the model belongs to its caller."""
    clock = StillClock()
    foreign = Part(clock, 1, 2)

    class Calls(Part):
        def forward(self, x: Tensor) -> Tensor:
            return foreign(super().forward(x))

    laps = pass_of(nn.Sequential(Calls(clock, 4, 8)), clock, ones(), loss=summed)
    assert {"forward": {"0": 5}, "backward": {"0": 10}} == own(laps)


class Slow(StillClock):
    """A clock whose reading takes 1 s."""

    def mark(self) -> float:
        self.advance(1)
        return self.now


def test_what_hooks_take_is_left_out_where_it_happened() -> None:
    """The time of hooks is left out where it was spent.

    Each hook reads the clock twice, which takes 1 s each time. The first reading belongs to the
    code that ran before, and the second to the hook.
    """
    clock = Slow()
    laps = pass_of(nn.Sequential(Part(clock, 16), Part(clock, 32)), clock, ones())
    lap = laps["forward"]
    assert {"": 3 + 2, "0": 16 + 1, "1": 32 + 1} == own(laps)["forward"]
    assert lap.observer == 6
    assert {"": 1, "0": 1, "1": 1} == {place.fqn: calls for place, calls in (+lap.called).items()}


def test_hooks_and_graphs_are_as_they_were_when_the_spans_are_left() -> None:
    """After the timer is removed, even by an error, neither forward nor backward makes stamps."""
    clock = StillClock()
    model = nn.Sequential(Part(clock, 1, 2))
    x = ones()
    spans = ModuleTimer(ModuleTree({"": model}), clock)

    def fail() -> None:
        with installed(spans):
            spans.begin()
            outputs.append(model(x))
            raise ValueError("planted")

    outputs: list[Tensor] = []
    with pytest.raises(ValueError, match="planted"):
        fail()
    before = list(spans._stamps)
    model(x)
    outputs[0].sum().backward()
    assert before == spans._stamps


class ReducesAtTheEnd(torch.autograd.Function):
    """An operator like DDP: the autograd engine finishes its work after all nodes have run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: StillClock, seconds: float) -> Tensor:
        ctx.clock = clock
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: ctx.clock.advance(ctx.seconds)
        )  # type: ignore[attr-defined]
        return gradients[0], None, None


class Reduced(Itself):
    def forward(self, x: Tensor) -> Tensor:
        return ReducesAtTheEnd.apply(self.last(self.first(x)), self.clock, 32)


def test_what_the_engine_calls_at_the_end_of_backward_is_the_roots_own() -> None:
    """The time of a callback at the end of backward belongs to the root.

    Such a callback is, for example, the wait for the gradients of all ranks; here, it takes 32 s.
    They do not belong to `first`, the module whose backward runs last.
    """
    clock = StillClock()
    model = Reduced(clock, first=Part(clock, 1, 2), last=Part(clock, 4, 8))
    assert {"first": 2, "last": 8, "": 32} == own(pass_of(model, clock, ones(), loss=Tensor.sum))[
        "backward"
    ]


@pytest.mark.parametrize(("seconds", "trials"), [(1e-3, 15), (0.06, 3), (0.0101, 10)])
def test_a_busy_machine_has_fewer_trials_of_the_overhead(seconds: float, trials: int) -> None:
    """The trials of the hook overhead stop after about 0.1 s, but at least 3 of them run.

    In this time, all 15 trials of 1 ms can run, or 10 trials of 10.1 ms. Of the trials of 60 ms, 3
    run.
    """
    clock = StillClock()
    tried = []

    def trial() -> HookOverhead:
        clock.advance(seconds)
        tried.append(seconds)
        return NO_OVERHEAD

    assert NO_OVERHEAD == median_overhead(trial, trials=15, now=clock.mark)
    assert trials == len(tried)
