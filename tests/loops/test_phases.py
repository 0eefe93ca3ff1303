"""Which phases a loop of one's own is seen to have, by torch's hooks and by name."""

import contextlib
import copy
import copyreg
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lflops.boundary import Boundary, Undo, unguarded
from lflops.collect.torch_private.autograd import after_backward
from lflops.loops.phases import LoopPhases
from tests.support.compilers import Backend


class Events:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._running: list[str] = []

    @property
    def innermost(self) -> str:
        return self._running[-1] if self._running else "other"

    def enter(self, phase: str, given: tuple[Any, ...] = ()) -> None:
        self._running.append(phase)
        self.heard.append(f"+{phase}")

    def leave(self) -> None:
        self.heard.append(f"-{self._running.pop()}")

    def drop(self) -> None:
        self.heard.append(f"!{self._running.pop()}")


def raising(error: BaseException) -> None:
    """Where a test is to see our own errors."""
    raise error


class Loop:
    """A model, its optimizer and what was heard of them."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.events = Events()
        self.watch()

    def watch(self) -> None:
        """Install the hooks, and listen."""
        self.phases, self.undo = LoopPhases(), Undo()
        self.phases.install([self.model], [self.optimizer], Boundary(raising), self.undo)
        self.undo.add(self.phases.listen("train", self.events, unguarded))

    def loss(self) -> Tensor:
        return F.mse_loss(self.model(torch.ones(2, 4)), torch.zeros(2, 1))

    @property
    def heard(self) -> str:
        return " ".join(self.events.heard)

    @property
    def hooks(self) -> int:
        model, optimizer = self.model, self.optimizer
        return sum(
            map(
                len,
                (
                    model._forward_hooks,
                    model._forward_pre_hooks,
                    optimizer._optimizer_step_pre_hooks,
                    optimizer._optimizer_step_post_hooks,
                ),
            )
        )


@pytest.fixture
def loop() -> Iterator[Loop]:
    """Listened to, and left without a hook."""
    loop = Loop()
    yield loop
    loop.undo.close()
    assert 0 == loop.hooks


def test_a_step_is_forward_backward_and_optimizer(loop: Loop) -> None:
    """Without a word from the loop."""
    loop.phases.begin_step()
    loop.loss().backward()
    loop.optimizer.step()
    loop.phases.end_step()
    assert "+forward -forward +backward -backward +optimizer -optimizer" == loop.heard


def test_what_runs_outside_of_steps_has_no_phase(loop: Loop) -> None:
    """Nothing is heard of it."""
    loop.loss().backward()
    loop.optimizer.step()
    assert not loop.heard


def test_two_backward_passes_and_two_forward_passes_are_four_phases(loop: Loop) -> None:
    """As where a generator and a critic are trained."""
    loop.phases.begin_step()
    for _ in range(2):
        loop.loss().backward()
    loop.phases.end_step()
    assert "+forward -forward +backward -backward " * 2 == f"{loop.heard} "


def test_what_is_registered_late_in_backward_is_part_of_it(loop: Loop) -> None:
    """As DDP's wait for the other ranks, which it registers when the last gradient is there."""
    first = next(loop.model.parameters())
    first.register_hook(lambda _: after_backward(lambda: loop.events.heard.append("waits")))
    loop.phases.begin_step()
    loop.loss().backward()
    assert "+forward -forward +backward waits -backward" == loop.heard


class Waiting(Events):
    """One that also hears where backward begins to wait for other ranks."""

    def wait(self) -> None:
        self.heard.append("wait")


def test_the_wait_for_other_ranks_is_heard_where_there_are_others() -> None:
    """Behind the last node and before what DDP registers, in a backward of the loop's own and in a named one."""
    loop = Loop()
    loop.undo.close()
    loop.events = Waiting()
    loop.watch()
    next(loop.model.parameters()).register_hook(lambda _: after_backward(lambda: loop.events.heard.append("waits")))
    for others, heard in ((False, "+backward waits -backward"), (True, "+backward wait waits -backward")):
        loop.phases.awaits_others = others
        for is_named in (False, True):
            loop.events.heard.clear()
            loop.phases.begin_step()
            loss = loop.loss()
            with loop.phases.named("backward", loss) if is_named else contextlib.nullcontext():
                loss.backward()
            loop.phases.end_step()
            assert f"+forward -forward {heard}" == loop.heard
    loop.undo.close()


def test_a_step_without_backward_is_forward_to_its_end(loop: Loop) -> None:
    """A validation has no other phase."""
    loop.phases.begin_step()
    with torch.no_grad():
        loop.loss()
    loop.phases.end_step()
    assert "+forward -forward" == loop.heard


def test_a_closure_runs_within_its_optimizer() -> None:
    """L-BFGS calls the model again and again within one step."""
    loop = Loop()
    loop.optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=2, line_search_fn=None)  # type: ignore[assignment]
    loop.undo.close()
    loop.watch()

    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        return loss

    loop.phases.begin_step()
    loop.optimizer.step(closure)  # type: ignore[arg-type]
    loop.phases.end_step()
    loop.undo.close()
    inner = "+forward -forward +backward -backward"
    assert f"+optimizer {inner} {inner} -optimizer" == loop.heard


def test_named_phases_are_exact(loop: Loop) -> None:
    """The loss's own gradient is within backward then; what is named twice is entered once."""
    loop.phases.begin_step()
    loss = loop.loss()
    with loop.phases.named("backward", loss):
        loss.backward()
    with loop.phases.named("clip"):
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1)
    loop.phases.end_step()
    assert "+forward -forward +backward -backward +clip -clip" == loop.heard


def test_an_exception_leaves_no_phase_open(loop: Loop) -> None:
    """It is dropped, not ended."""
    loop.phases.begin_step()
    loop.loss()
    with pytest.raises(ZeroDivisionError), loop.phases.named("clip"):
        raise ZeroDivisionError
    loop.phases.end_step(failed=True)
    assert ("+forward -forward +clip !clip", "other") == (loop.heard, loop.events.innermost)


def test_another_stage_is_no_part_of_a_training_step(loop: Loop) -> None:
    """Who listens to training hears nothing of it."""
    other = Events()
    undo = loop.phases.listen("validate", other, unguarded)
    with loop.phases.stage("validate"):
        loop.phases.begin_step()
        loop.loss()
        loop.phases.end_step()
    undo()
    assert ("", ["+forward", "-forward"]) == (loop.heard, other.heard)


def test_where_nobody_listens_the_hooks_do_nothing() -> None:
    """They stand until the run is over, and no tensor gets one."""
    loop = Loop()
    loop.phases.forget()
    loop.phases.begin_step()
    output = loop.model(torch.ones(2, 4))
    assert (4, None) == (loop.hooks, output._backward_hooks)
    loop.undo.close()
    assert 0 == loop.hooks


def test_a_copy_of_the_model_has_no_hook_of_ours(loop: Loop) -> None:
    """As that of an average of the weights; nor has a file that the model is saved to, which is read without lflops."""
    average = copy.deepcopy(loop.model)
    saved = pickle.dumps(loop.model)
    loop.phases.begin_step()
    average(torch.ones(2, 4))
    assert ("", False) == (loop.heard, b"lflops" in saved)
    loop.model(torch.ones(2, 4))
    assert "+forward" == loop.heard


def test_a_saved_model_is_as_without(loop: Loop) -> None:
    """To the byte, so that it loads with `weights_only`, which takes no function. Afterwards no class is pickled otherwise than before."""
    saved = pickle.dumps(loop.model)
    file = io.BytesIO()
    torch.save(loop.model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh]):
        assert 0 == len(torch.load(file, weights_only=True)._forward_hooks)
    loop.undo.close()
    assert saved == pickle.dumps(loop.model)
    assert nn.Sequential not in copyreg.dispatch_table


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # where another test's library has left a global hook
@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_compiled_once(in_place: bool) -> None:
    """Hooks on a model that was compiled in place would be compiled with it."""
    backend = Backend()
    model: Any = nn.Linear(4, 1)
    if in_place:
        model.compile(backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    model(torch.ones(2, 4)).sum().backward()
    before = backend.compilations
    events = Events()
    phases, undo = LoopPhases(), Undo()
    phases.install([model], [], Boundary(raising), undo)
    undo.add(phases.listen("train", events, unguarded))
    phases.begin_step()
    model(torch.ones(2, 4)).sum().backward()
    phases.end_step()
    undo.close()
    model(torch.ones(2, 4)).sum().backward()
    assert before == backend.compilations
    assert ([] if in_place else ["+forward", "-forward", "+backward", "-backward"]) == events.heard
