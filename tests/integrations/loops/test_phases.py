"""Test that `LoopPhases` detects the phases of a custom loop, through torch's hooks and by name.

The expected texts have one word for each event: `+phase` when it begins, `-phase` when it ends and
`!phase` when it is dropped. `wait` is the moment at which backward begins to wait for other ranks.
"""

import contextlib
import copy
import copyreg
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
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
from lflops.phase_log import ENTER, LEAVE, RUN, events_in
from lflops.torch_private.autograd import after_backward
from tests.support.compilers import Backend


class Events:
    """A listener that records the events of phases in `heard`."""

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
    """Raise an error of lflops, so that the test fails."""
    raise error


class Loop:
    """A model and its optimizer with hooks, and a listener that records their phases."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.events = Events()
        self.watch()

    def watch(self, *, awaits_others: bool = False) -> None:
        """Install the hooks and the listener."""
        self.phases = LoopPhases()
        self.undo = CleanupStack()
        self.phases.awaits_others = awaits_others
        self.phases.install([self.model], [self.optimizer], ErrorGuard(raising), self.undo)
        self.undo.add(self.phases.listen("train", self.events, unguarded))

    def watch_waits(self, *, awaits_others: bool) -> None:
        """Install new hooks and a listener that also records waits for other ranks."""
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
        return (
            len(self.model._forward_hooks)
            + len(self.model._forward_pre_hooks)
            + len(self.optimizer._optimizer_step_pre_hooks)
            + len(self.optimizer._optimizer_step_post_hooks)
        )


@pytest.fixture
def loop() -> Iterator[Loop]:
    """Return a loop with hooks and a listener. After the test, no hook may remain."""
    loop = Loop()
    yield loop
    loop.undo.close()
    assert 0 == loop.hooks


def test_a_step_is_forward_backward_and_optimizer(loop: Loop) -> None:
    """The hooks detect the three phases, although the loop names none."""
    loop.phases.begin_step()
    loop.loss().backward()
    loop.optimizer.step()
    loop.phases.end_step()
    assert "+forward -forward +backward -backward +optimizer -optimizer" == loop.heard


def test_the_users_hooks_on_the_model_are_part_of_forward(loop: Loop) -> None:
    """This includes hooks registered before lflops' hooks, which torch would run first."""
    loop.undo.close()
    hook = loop.model.register_forward_pre_hook(lambda *_: loop.events.heard.append("hook"))
    loop.watch()
    loop.phases.begin_step()
    loop.loss().backward()
    loop.phases.end_step()
    hook.remove()
    assert "+forward hook -forward +backward -backward" == loop.heard


def test_saving_a_file_is_no_part_of_the_step(loop: Loop) -> None:
    """`torch.save` begins a category of the ledger, unless the user has named this part.

    A file that cannot be opened ends the category, too. Afterwards torch's function is restored.
    """
    loop.undo.close()
    original = torch.serialization._open_zipfile_writer
    loop.watch()
    log = loop.phases.log
    marked: list[str] = []
    loop.phases.checkpoint_begins = partial(marked.append, "checkpoint")

    log.connect(list)

    def saves(file: Any) -> list[Any]:
        before = len(log.events)
        torch.save(loop.model.state_dict(), file)
        return list(events_in([*log.events][before:]))

    loop.phases.begin_step()
    began, ended = saves(io.BytesIO())
    assert (ENTER, "checkpoint_save", RUN) == began[1:]
    assert LEAVE == ended[1]
    assert ["checkpoint"] == marked
    with loop.phases.named("mine"):
        assert [] == saves(io.BytesIO())
    with loop.phases.within("checkpoint_save"):
        assert [] == saves(io.BytesIO())
        # The block of the user lasts until its end.
        assert "checkpoint_save" == loop.phases.innermost
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.save(1, "no/such/folder/file.pt")
    assert 0 == loop.phases.depth
    loop.undo.close()
    assert original is torch.serialization._open_zipfile_writer


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


UPDATES = "+optimizer -optimizer"
LEARNS = f"+backward -backward {UPDATES}"


@pytest.mark.parametrize(
    ("step", "heard"),
    [
        (lambda loop: loop.goes_backward(by_methods=True), f"+forward -forward {LEARNS}"),
        (lambda loop: loop.goes_backward(by_methods=False), f"+forward -forward {LEARNS}"),
        (_transfers, f"+forward -forward +transfer -transfer +forward -forward {LEARNS}"),
        (_names_forward, f"+transfer -transfer +forward -forward {LEARNS}"),
        (
            _goes_backward_twice,
            f"+forward -forward +backward -backward +forward -forward {UPDATES} +forward -forward "
            + LEARNS,
        ),
        (_validates_first, f"+forward -forward +forward -forward {LEARNS}"),
    ],
    ids=["methods", "calls", "with a phase before", "named", "twice", "after a validation"],
)
def test_where_only_methods_of_models_are_called_forward_is_what_is_before_backward(
    loop: Loop, step: Callable[[Loop], None], heard: str
) -> None:
    """If a step calls only methods of the model, forward fills the next step until backward.

    Steps 2 and 3 behave like this, because step 1 shows that hooks do not see the forward pass. The
    recorded events are those of step 3.
    """
    for _ in range(3):
        loop.events.heard.clear()
        loop.phases.begin_step()
        step(loop)
        loop.phases.end_step()
    assert heard == loop.heard


def test_the_step_after_one_by_methods_may_call_the_model(loop: Loop) -> None:
    """After a step that calls the model itself, the next step begins without a phase again."""
    heard = []
    for by_methods in (True, False, False):
        loop.events.heard.clear()
        loop.phases.begin_step()
        heard.append(loop.heard)
        loop.goes_backward(by_methods=by_methods)
        loop.phases.end_step()
    assert ["", "+forward", ""] == heard


def test_what_runs_outside_of_steps_has_no_phase(loop: Loop) -> None:
    """Forward, backward and optimizer outside of `begin_step` and `end_step` record nothing."""
    loop.loss().backward()
    loop.optimizer.step()
    assert not loop.heard


def test_two_backward_passes_and_two_forward_passes_are_four_phases(loop: Loop) -> None:
    """Each pass is a separate phase, for example when one step trains a generator and a critic."""
    loop.phases.begin_step()
    for _ in range(2):
        loop.loss().backward()
    loop.phases.end_step()
    assert "+forward -forward +backward -backward " * 2 == f"{loop.heard} "


def test_what_is_registered_late_in_backward_is_part_of_it(loop: Loop) -> None:
    """A callback that is registered during backward runs inside the backward phase.

    DDP registers such a callback with its last gradient, to wait for the other ranks.
    """
    first = next(loop.model.parameters())
    first.register_hook(lambda _: after_backward(lambda: loop.events.heard.append("waits")))
    loop.phases.begin_step()
    loop.loss().backward()
    assert "+forward -forward +backward waits -backward" == loop.heard


class Told(torch.autograd.Function):
    """A loss that records the phase in which its gradient is computed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loop: Loop) -> Tensor:
        ctx.loop = loop
        return value.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.loop.events.heard.append(f"loss in {ctx.loop.events.innermost}")
        return gradients[0].expand(2, 1), None


def test_the_gradient_of_a_loss_outside_of_the_model_is_part_of_backward(loop: Loop) -> None:
    """Backward begins with the gradient of the loss, not with that of the model's output."""
    loop.phases.begin_step()
    Told.apply(loop.model(torch.ones(2, 4)), loop).backward()
    assert "+forward -forward +backward loss in backward -backward" == loop.heard


def test_gradients_that_are_asked_for_are_no_backward_pass(loop: Loop) -> None:
    """A call of `torch.autograd.grad`, here for a gradient penalty, records no backward phase."""
    loop.phases.begin_step()
    loss = loop.loss()
    (gradient,) = torch.autograd.grad(loss, [next(loop.model.parameters())], create_graph=True)
    (loss + gradient.square().sum()).backward()
    assert "+forward -forward +backward -backward" == loop.heard


def test_a_backward_pass_within_another_is_part_of_it() -> None:
    """Backward is one phase, although a reentrant checkpoint runs a second backward inside it.

    The wait for other ranks is recorded once, at the end of the outer backward.
    """
    loop = Loop()
    loop.watch_waits(awaits_others=True)
    loop.phases.begin_step()
    checkpoint(
        loop.model, torch.ones(2, 4, requires_grad=True), use_reentrant=True
    ).sum().backward()
    loop.undo.close()
    assert "+forward -forward +backward wait -backward" == loop.heard


class LayerLosses(nn.Module):
    """A model whose forward runs backward on the loss of each of two layers before its last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.detach())
            x.sum().backward()
        return self.last(x.detach())


def test_forward_goes_on_after_a_backward_pass_within_it(loop: Loop) -> None:
    """If a model's forward runs backward, the rest of its call is still forward.

    After the call, the next backward pass ends forward as usual.
    """
    loop.undo.close()
    loop.model = LayerLosses()  # type: ignore[assignment]
    loop.watch()
    loop.phases.begin_step()
    loop.model(torch.ones(2, 4)).sum().backward()
    loop.optimizer.step()
    loop.phases.end_step()
    assert "+forward -forward +backward -backward " * 3 + UPDATES == loop.heard


def test_a_call_that_backward_stops_early_is_over_after_it(loop: Loop) -> None:
    """Recomputation ends with an exception of torch as soon as all tensors are known again.

    Forward does not go on after such a backward pass, although the call has not returned.
    """
    loop.phases.begin_step()
    for _ in range(2):
        checkpoint(loop.model, torch.ones(2, 4), use_reentrant=False).sum().backward()
    loop.phases.end_step()
    assert "+forward -forward +backward -backward " * 2 == f"{loop.heard} "


def test_the_wait_is_heard_once_in_each_pass_of_a_graph_that_is_kept() -> None:
    """With `retain_graph=True`, each of three backward passes records one wait.

    The hook on the node of the loss is removed after it has run. Otherwise they would accumulate.
    """
    loop = Loop()
    loop.watch_waits(awaits_others=True)
    loop.phases.begin_step()
    loss = loop.loss()
    for _ in range(3):
        loss.backward(retain_graph=True)
    loop.undo.close()
    assert "+forward -forward" + 3 * " +backward wait -backward" == loop.heard


def test_a_loop_on_another_thread_than_its_monitor_is_heard(loop: Loop) -> None:
    """The phases of a step are detected in the thread that began the step."""

    def step() -> None:
        loop.phases.begin_step()
        loop.loss().backward()

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert "+forward -forward +backward -backward" == loop.heard


def test_the_engine_may_be_called_with_names_alone(loop: Loop) -> None:
    """With the hooks installed, the autograd engine accepts a call with keyword arguments only.

    Pipelines call the engine like this. lflops does not detect such a backward pass.
    """
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
    """Dynamo compiles no function of lflops when a compiled function calls `backward`.

    Its graph breaks at `backward`, and dynamo continues with the functions called from there, which
    include the hooks of lflops.
    """
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
            ("torch_private/autograd.py", "error_guard.py", "integrations/loops/phases.py")
        )
    ]


def test_a_backward_pass_of_another_thread_is_not_the_loops(loop: Loop) -> None:
    """A backward pass in a thread without a step records nothing: it may train another model."""
    loop.phases.begin_step()
    other = threading.Thread(target=lambda: torch.ones(1, requires_grad=True).sum().backward())
    other.start()
    other.join()
    assert not loop.heard


@pytest.mark.parametrize("first", [0, 1])
def test_torchs_own_function_is_back_when_all_loops_are_over(first: int) -> None:
    """The function that torch calls for backward is restored, whichever of two loops ends first."""
    torchs = torch.autograd._engine_run_backward
    loops = [Loop(), Loop()]
    ends_first = loops[first]
    ends_last = loops[1 - first]
    ends_first.undo.close()
    ends_last.phases.begin_step()
    ends_last.loss().backward()
    assert "+backward -backward" in ends_last.heard
    ends_last.undo.close()
    assert torchs is torch.autograd._engine_run_backward


class Waiting(Events):
    """A listener that also records when backward begins to wait for other ranks."""

    def wait(self) -> None:
        self.heard.append("wait")


def test_the_wait_for_other_ranks_is_heard_where_there_are_others() -> None:
    """If there are other ranks, the wait begins after the last node of backward.

    It begins before the callback that stands for the one that DDP registers (`waits`). This holds
    for a detected backward and for one inside a named phase.
    """
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
    """In a step without backward, such as a validation step, forward ends with the step."""
    loop.phases.begin_step()
    with torch.no_grad():
        loop.loss()
    loop.phases.end_step()
    assert "+forward -forward" == loop.heard


def test_a_closure_runs_within_its_optimizer() -> None:
    """The forwards and backwards of an optimizer's closure are nested in the optimizer phase.

    L-BFGS calls its closure several times in one step.
    """
    loop = Loop()
    parameters = loop.model.parameters()
    lbfgs: Any = torch.optim.LBFGS(parameters, max_iter=2, line_search_fn=None)
    loop.optimizer = lbfgs
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
    """A named backward is not entered a second time by the hook that detects it."""
    loop.phases.begin_step()
    loss = loop.loss()
    with loop.phases.named("backward"):
        loss.backward()
    with loop.phases.named("clip"):
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1)
    loop.phases.end_step()
    assert "+forward -forward +backward -backward +clip -clip" == loop.heard


def test_an_exception_leaves_no_phase_open(loop: Loop) -> None:
    """If an exception ends a named phase, the phase is dropped, not ended."""
    loop.phases.begin_step()
    loop.loss()
    with pytest.raises(ZeroDivisionError), loop.phases.named("clip"):
        raise ZeroDivisionError
    loop.phases.end_step(failed=True)
    assert ("+forward -forward +clip !clip", "other") == (loop.heard, loop.events.innermost)


def test_another_stage_is_no_part_of_a_training_step(loop: Loop) -> None:
    """A step of validation reaches only the listener of that stage."""
    other = Events()
    undo = loop.phases.listen("validate", other, unguarded)
    with loop.phases.stage("validate"):
        loop.phases.begin_step()
        loop.loss()
        loop.phases.end_step()
    undo()
    assert ("", ["+forward", "-forward"]) == (loop.heard, other.heard)


def test_where_nobody_listens_the_hooks_do_nothing() -> None:
    """Without a listener, the hooks stay until the run ends, but put no hook on any tensor."""
    loop = Loop()
    loop.phases.clear()
    loop.phases.begin_step()
    output = loop.model(torch.ones(2, 4))
    assert (4, None) == (loop.hooks, output._backward_hooks)
    loop.undo.close()
    assert 0 == loop.hooks


def test_a_copy_of_the_model_has_no_hook_of_ours(loop: Loop) -> None:
    """Neither a copy nor a pickle of a hooked model contains hooks of lflops.

    A copy is made, for example, to average the weights. A pickle must load without lflops.
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
    """The pickle of a hooked model is the same to the byte as without hooks.

    So the file loads with `weights_only`, which accepts no functions. After the run, no reducer for
    the class remains in `copyreg`.
    """
    model = Saved(nn.Linear(4, 4))
    phases = LoopPhases()
    undo = CleanupStack()
    phases.install([model], [], ErrorGuard(raising), undo)
    saved = pickle.dumps(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([Saved, nn.Linear]):
        assert 0 == len(torch.load(file, weights_only=True)._forward_hooks)
    assert (1, 1) == (len(model._forward_hooks), len(model._forward_pre_hooks))
    undo.close()
    assert saved == pickle.dumps(model)
    assert Saved not in copyreg.dispatch_table


# torch warns if a library that another test imported has left a global module hook
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_compiled_once(in_place: bool) -> None:
    """Installing and removing the hooks causes no recompilation.

    A model that was compiled in place gets no hooks, because they would be compiled with it. So its
    forward is not detected.
    """
    backend = Backend()
    model: Any = nn.Linear(4, 1)
    if in_place:
        model.compile(backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    model(torch.ones(2, 4)).sum().backward()
    before = backend.compilations
    events = Events()
    phases = LoopPhases()
    undo = CleanupStack()
    phases.install([model], [], ErrorGuard(raising), undo)
    undo.add(phases.listen("train", events, unguarded))
    phases.begin_step()
    model(torch.ones(2, 4)).sum().backward()
    phases.end_step()
    undo.close()
    model(torch.ones(2, 4)).sum().backward()
    assert before == backend.compilations
    forward = [] if in_place else ["+forward", "-forward"]
    assert [*forward, "+backward", "-backward"] == events.heard
