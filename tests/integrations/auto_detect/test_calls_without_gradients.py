"""Test the phases of calls without gradients in training mode, in an auto-detected loop.

The expected texts have one word for each event: `+phase` when it begins and `-phase` when it ends.
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lflops.error_guard import CleanupStack, ErrorGuard
from lflops.integrations.auto_detect.detected_phases import AutoDetectedPhases
from lflops.phase_log import ENTER, STEP_END, events_in


def raising(error: BaseException) -> None:
    """Raise an error of lflops, so that the test fails."""
    raise error


class Student(nn.Module):
    """A model whose forward also calls its teacher, which lflops watches as well."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        # not a submodule
        self.teachers = [teacher]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teachers[0](x)
        return self.layer(x) - target


class Loop:
    """Two watched models, one that is not watched, and the events of their phases."""

    def __init__(self) -> None:
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.student = Student(self.second)
        self.other = nn.Linear(4, 4)
        self.x = torch.ones(2, 4, requires_grad=True)
        self.undo = CleanupStack()
        self.phases = AutoDetectedPhases(lambda **_: None, lambda: None)
        models = [self.first, self.second, self.student]
        self.phases.install(models, [], ErrorGuard(raising), self.undo)
        self._running: list[str] = []
        self.heard: list[str] = []
        self.phases.log.connect(self)

    def take(self, events: list[object]) -> None:
        """Record events of the log."""
        for _, event, phase, _ in events_in(events):
            if event == STEP_END:
                continue
            if event == ENTER:
                self._running.append(phase)
                self.heard.append(f"+{phase}")
            else:
                self.heard.append(f"-{self._running.pop()}")

    def steps(self, step: Callable[["Loop"], None], *, deferred: bool) -> list[str]:
        """Run a step twice, and return the phases of each step."""
        texts = []
        for _ in range(2):
            self.phases.begin_step()
            if deferred:
                self.phases.deferred.start()
            step(self)
            self.phases.deferred.stop()
            self.phases.end_step()
            self.phases.log.deliver()
            texts.append(" ".join(self.heard))
            self.heard.clear()
        return texts


@pytest.fixture
def loop() -> Iterator[Loop]:
    """Return a loop with hooks."""
    loop = Loop()
    yield loop
    loop.undo.close()
    assert not loop.first._forward_hooks
    assert not loop.first._forward_pre_hooks


def _acts(loop: Loop) -> None:
    with torch.no_grad():
        loop.first(loop.x)


def _learns(loop: Loop) -> None:
    loop.first(loop.x).sum().backward()


def rolls_out(loop: Loop) -> None:
    """Act twice, for example in an environment, and learn from it."""
    _acts(loop)
    _acts(loop)
    _learns(loop)


def rolls_out_with_gradients_off(loop: Loop) -> None:
    """Act once, as each step of an actor-critic may do, in inference mode."""
    with torch.inference_mode():
        loop.first(torch.ones(2, 4))
    _learns(loop)


def learns_by_a_method(loop: Loop) -> None:
    """Act twice, and learn with a method of the model, which lflops does not see."""
    _acts(loop)
    _acts(loop)
    loop.first.forward(loop.x).sum().backward()


def computes_targets_after(loop: Loop) -> None:
    """Call the model with gradients, and then without gradients for the targets of the loss."""
    values = loop.first(loop.x)
    with torch.no_grad():
        targets = loop.second(loop.x)
    (values - targets).sum().backward()


def has_a_teacher(loop: Loop) -> None:
    """Call a model whose forward calls another watched model without gradients."""
    loop.student(loop.x).sum().backward()


def trains_a_critic(loop: Loop) -> None:
    """Train a model that lflops does not watch, on what a watched generator returns."""
    with torch.no_grad():
        generated = loop.first(loop.x)
    loop.other(generated).sum().backward()


def checkpoints(loop: Loop) -> None:
    """Checkpoint the whole model with a first forward without gradients."""
    checkpoint(loop.first, loop.x, use_reentrant=True).sum().backward()


def checkpoints_one_of_two(loop: Loop) -> None:
    """Checkpoint the first of two models of one forward."""
    loop.second(checkpoint(loop.first, loop.x, use_reentrant=True)).sum().backward()


def fails_to_act(loop: Loop) -> None:
    """Act with a wrong input, and learn all the same."""
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        loop.first(torch.ones(1, 1))
    _learns(loop)


INFERS = "+inference -inference"
LEARNS = "+forward -forward +backward -backward"


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    ("step", "first", "second"),
    [
        (rolls_out, f"{INFERS} {INFERS} {LEARNS}", f"{INFERS} {INFERS} {LEARNS}"),
        (rolls_out_with_gradients_off, f"{INFERS} {LEARNS}", f"{INFERS} {LEARNS}"),
        (learns_by_a_method, f"{INFERS} {INFERS} +backward -backward", LEARNS),
        (computes_targets_after, LEARNS, LEARNS),
        (has_a_teacher, LEARNS, LEARNS),
        (trains_a_critic, f"{INFERS} +backward -backward", LEARNS),
        (checkpoints, f"{INFERS} +backward -backward", LEARNS),
        (checkpoints_one_of_two, f"{INFERS} {LEARNS}", LEARNS),
        (fails_to_act, f"{INFERS} {LEARNS}", f"{INFERS} {LEARNS}"),
    ],
)
def test_calls_without_gradients_are_inference_unless_they_begin_forward(
    step: Callable[[Loop], None], first: str, second: str, deferred: bool, loop: Loop
) -> None:
    """Each call is a separate phase, and the time after it belongs to no phase.

    In the second step, lflops knows from the first step which of these calls begin forward.
    """
    assert [first, second] == loop.steps(step, deferred=deferred)
