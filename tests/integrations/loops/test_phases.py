"""Which phases a loop of one's own is seen to have, by torch's hooks and by name."""

import contextlib
import copy
import copyreg
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import ConvertFrame
from torch.autograd import Variable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lflops.error_guard import CleanupStack, ErrorGuard, unguarded
from lflops.integrations.loops.phases import LoopPhases
from lflops.torch_private.autograd import after_backward
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

    def watch(self, *, awaits_others: bool = False) -> None:
        """Install the hooks, and listen."""
        self.phases, self.undo = LoopPhases(), CleanupStack()
        self.phases.awaits_others = awaits_others
        self.phases.install([self.model], [self.optimizer], ErrorGuard(raising), self.undo)
        self.undo.add(self.phases.listen("train", self.events, unguarded))

    def watch_waits(self, *, awaits_others: bool) -> None:
        """Watch anew, and listen to waits for other ranks as well."""
        self.undo.close()
        self.events = Waiting()
        self.watch(awaits_others=awaits_others)

    def loss(self, *, by_methods: bool = False) -> Tensor:
        call = self.model.forward if by_methods else self.model
        return F.mse_loss(call(torch.ones(2, 4)), torch.zeros(2, 1))

    def goes_backward(self, *, by_methods: bool) -> None:
        self.loss(by_methods=by_methods).backward()
        self.optimizer.step()

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


def test_the_users_hooks_on_the_model_are_part_of_forward(loop: Loop) -> None:
    """Also those that were registered first, which torch would run before ours."""
    loop.undo.close()
    hook = loop.model.register_forward_pre_hook(lambda *_: loop.events.heard.append("hook"))
    loop.watch()
    loop.phases.begin_step()
    loop.loss().backward()
    loop.phases.end_step()
    hook.remove()
    assert "+forward hook -forward +backward -backward" == loop.heard


def _transfers(loop: Loop) -> None:
    with loop.phases.named("transfer"):
        pass
    loop.goes_backward(by_methods=True)


def _names_forward(loop: Loop) -> None:
    with loop.phases.named("transfer"):
        pass
    with loop.phases.named("forward"):
        loss = loop.loss(by_methods=True)
    loss.backward()
    loop.optimizer.step()


def _goes_backward_twice(loop: Loop) -> None:
    loop.goes_backward(by_methods=True)
    loop.goes_backward(by_methods=True)


def _validates_first(loop: Loop) -> None:
    with loop.phases.stage("validate"), torch.no_grad():
        loop.phases.begin_step()
        loop.loss()
        loop.phases.end_step()
    loop.goes_backward(by_methods=True)


LEARNS = "+backward -backward +optimizer -optimizer"


@pytest.mark.parametrize(
    ("step", "heard"),
    [
        (lambda loop: loop.goes_backward(by_methods=True), f"+forward -forward {LEARNS}"),
        (lambda loop: loop.goes_backward(by_methods=False), f"+forward -forward {LEARNS}"),
        (_transfers, f"+forward -forward +transfer -transfer +forward -forward {LEARNS}"),
        (_names_forward, f"+transfer -transfer +forward -forward {LEARNS}"),
        (
            _goes_backward_twice,
            "+forward -forward +backward -backward +forward -forward +optimizer -optimizer +forward -forward "
            + LEARNS,
        ),
        (_validates_first, f"+forward -forward +forward -forward {LEARNS}"),
    ],
    ids=["methods", "calls", "with a phase before", "named", "twice", "after a validation"],
)
def test_where_only_methods_of_models_are_called_forward_is_what_is_before_backward(
    loop: Loop, step: Callable[[Loop], None], heard: str
) -> None:
    """From the second step on: the first one tells."""
    for _ in range(3):
        loop.events.heard.clear()
        loop.phases.begin_step()
        step(loop)
        loop.phases.end_step()
    assert heard == loop.heard


def test_the_step_after_one_by_methods_may_call_the_model(loop: Loop) -> None:
    """The step after that begins with no phase again."""
    heard = []
    for by_methods in (True, False, False):
        loop.events.heard.clear()
        loop.phases.begin_step()
        heard.append(loop.heard)
        loop.goes_backward(by_methods=by_methods)
        loop.phases.end_step()
    assert ["", "+forward", ""] == heard


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


class Told(torch.autograd.Function):
    """A loss whose gradient says in which phase it is computed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loop: Loop) -> Tensor:
        ctx.loop = loop
        return value.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.loop.events.heard.append(f"loss in {ctx.loop.events.innermost}")
        return gradients[0].expand(2, 1), None


def test_the_gradient_of_a_loss_outside_of_the_model_is_part_of_backward(loop: Loop) -> None:
    """It runs before the gradient of the model's output is there."""
    loop.phases.begin_step()
    Told.apply(loop.model(torch.ones(2, 4)), loop).backward()
    assert "+forward -forward +backward loss in backward -backward" == loop.heard


def test_gradients_that_are_asked_for_are_no_backward_pass(loop: Loop) -> None:
    """A penalty on gradients is part of the forward pass that needs it."""
    loop.phases.begin_step()
    loss = loop.loss()
    (gradient,) = torch.autograd.grad(loss, [next(loop.model.parameters())], create_graph=True)
    (loss + gradient.square().sum()).backward()
    assert "+forward -forward +backward -backward" == loop.heard


def test_a_backward_pass_within_another_is_part_of_it() -> None:
    """As a reentrant checkpoint makes one.

    The wait for other ranks is at the end of the outer one.
    """
    loop = Loop()
    loop.watch_waits(awaits_others=True)
    loop.phases.begin_step()
    checkpoint(
        loop.model, torch.ones(2, 4, requires_grad=True), use_reentrant=True
    ).sum().backward()
    loop.undo.close()
    assert "+forward -forward +backward wait -backward" == loop.heard


def test_the_wait_is_heard_once_in_each_pass_of_a_graph_that_is_kept() -> None:
    """The hook on the loss's node goes when it has run, or a loss that goes backward a thousand times would have a thousand."""
    loop = Loop()
    loop.watch_waits(awaits_others=True)
    loop.phases.begin_step()
    loss = loop.loss()
    for _ in range(3):
        loss.backward(retain_graph=True)
    loop.undo.close()
    assert "+forward -forward" + 3 * " +backward wait -backward" == loop.heard


def test_a_loop_on_another_thread_than_its_monitor_is_heard(loop: Loop) -> None:
    """The thread is that of the step."""

    def step() -> None:
        loop.phases.begin_step()
        loop.loss().backward()

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert "+forward -forward +backward -backward" == loop.heard


def test_the_engine_may_be_called_with_names_alone(loop: Loop) -> None:
    """As pipelines do, which call it themselves; they are not heard."""
    loss = loop.loss()
    Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        tensors=(loss,),
        grad_tensors=(torch.ones(()),),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )
    assert next(loop.model.parameters()).grad is not None


def test_a_compiled_function_that_goes_backward_compiles_nothing_of_ours(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph breaks there, and dynamo goes on to what hears of it."""
    looked_at: list[str] = []
    convert = ConvertFrame.__call__

    def noting(self: ConvertFrame, frame: Any, *args: Any, **kwargs: Any) -> Any:
        looked_at.append(frame.f_code.co_filename)
        return convert(self, frame, *args, **kwargs)

    torch.compiler.reset()
    monkeypatch.setattr(ConvertFrame, "__call__", noting)
    step = torch.compile(lambda x: loop.model(x).sum().backward(), backend="eager")
    loop.phases.begin_step()
    step(torch.ones(2, 4))
    torch.compiler.reset()
    assert "+backward -backward" in loop.heard
    assert __file__ in looked_at
    assert not [
        name
        for name in looked_at
        if name.endswith(
            ("torch_private/autograd.py", "boundary.py", "integrations/loops/phases.py")
        )
    ]


def test_a_backward_pass_of_another_thread_is_not_the_loops(loop: Loop) -> None:
    """Something else is trained there."""
    loop.phases.begin_step()
    other = threading.Thread(target=lambda: torch.ones(1, requires_grad=True).sum().backward())
    other.start()
    other.join()
    assert not loop.heard


@pytest.mark.parametrize("first", [0, 1])
def test_torchs_own_function_is_back_when_all_loops_are_over(first: int) -> None:
    """In whichever order they end."""
    torchs = torch.autograd._engine_run_backward
    loops = [Loop(), Loop()]
    loops[first].undo.close()
    loops[1 - first].phases.begin_step()
    loops[1 - first].loss().backward()
    assert "+backward -backward" in loops[1 - first].heard
    loops[1 - first].undo.close()
    assert torchs is torch.autograd._engine_run_backward


class Waiting(Events):
    """One that also hears where backward begins to wait for other ranks."""

    def wait(self) -> None:
        self.heard.append("wait")


def test_the_wait_for_other_ranks_is_heard_where_there_are_others() -> None:
    """Behind the last node and before what DDP registers, in a backward of the loop's own and in a named one."""
    loop = Loop()
    next(loop.model.parameters()).register_hook(
        lambda _: after_backward(lambda: loop.events.heard.append("waits"))
    )
    for others, heard in (
        (False, "+backward waits -backward"),
        (True, "+backward wait waits -backward"),
    ):
        loop.watch_waits(awaits_others=others)
        for is_named in (False, True):
            loop.events.heard.clear()
            loop.phases.begin_step()
            loss = loop.loss()
            with loop.phases.named("backward") if is_named else contextlib.nullcontext():
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
    """What is named and found is entered once."""
    loop.phases.begin_step()
    loss = loop.loss()
    with loop.phases.named("backward"):
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
    loop.phases.clear()
    loop.phases.begin_step()
    output = loop.model(torch.ones(2, 4))
    assert (3, None) == (loop.hooks, output._backward_hooks)
    loop.undo.close()
    assert 0 == loop.hooks


def test_a_copy_of_the_model_has_no_hook_of_ours(loop: Loop) -> None:
    """As that of an average of the weights.

    Nor has a file that the model is saved to, which is read without lflops.
    """
    average = copy.deepcopy(loop.model)
    saved = pickle.dumps(loop.model)
    loop.phases.begin_step()
    average(torch.ones(2, 4))
    assert ("", False) == (loop.heard, b"lflops" in saved)
    loop.model(torch.ones(2, 4))
    assert "+forward" == loop.heard


class Saved(nn.Sequential):
    """A class that no other test hooks."""


def test_a_saved_model_is_as_without() -> None:
    """To the byte, so that it loads with `weights_only`, which takes no function.

    Afterwards the class is pickled as before.
    """
    model, phases, undo = Saved(nn.Linear(4, 4)), LoopPhases(), CleanupStack()
    phases.install([model], [], ErrorGuard(raising), undo)
    saved, file = pickle.dumps(model), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([Saved, nn.Linear]):
        assert 0 == len(torch.load(file, weights_only=True)._forward_hooks)
    assert (0, 1) == (len(model._forward_hooks), len(model._forward_pre_hooks))
    undo.close()
    assert saved == pickle.dumps(model)
    assert Saved not in copyreg.dispatch_table


@pytest.mark.filterwarnings(
    "ignore:Using `torch.compile"
)  # where another test's library has left a global hook
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
    phases, undo = LoopPhases(), CleanupStack()
    phases.install([model], [], ErrorGuard(raising), undo)
    undo.add(phases.listen("train", events, unguarded))
    phases.begin_step()
    model(torch.ones(2, 4)).sum().backward()
    phases.end_step()
    undo.close()
    model(torch.ones(2, 4)).sum().backward()
    assert before == backend.compilations
    assert ([] if in_place else ["+forward", "-forward"]) + [
        "+backward",
        "-backward",
    ] == events.heard
