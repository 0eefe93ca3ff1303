"""Test `CountAndTime`, which counts and times the same pass.

The counts must equal those of `lflops.counting`, and the times must not include the time that
counting takes.
"""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lflops
from lflops.flop_counter import operator_costs
from lflops.profile.module_names import ancestry
from lflops.profile.profile import Profile
from lflops.profile.records import PHASES
from lflops.timing import measure as watching_module, module_hooks
from lflops.timing.measure import CountAndTime
from lflops.timing.module_times import NO_OVERHEAD, HookOverhead
from tests.support.canary_model import Patient, Raises
from tests.support.fake_clock import StillClock
from tests.support.process_state import differences, everything, random_numbers
from tests.support.timed_modules import Itself, Part

CLOCKS: list[StillClock] = []
"""The clocks of the running tests. The operator `wait` advances the last one."""


@torch.library.custom_op("timed_tests::wait", mutates_args=())
def wait(x: Tensor, seconds: float, backward: float) -> Tensor:
    """Run an operator that takes `seconds`, and whose backward takes `backward` seconds."""
    CLOCKS[-1].advance(seconds)
    return x.clone()


def remember(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
    """Save the duration of backward."""
    ctx.seconds = inputs[2]


wait.register_autograd(
    lambda ctx, gradient: (torch.ops.timed_tests.wait(gradient, ctx.seconds, 0.0), None, None),
    setup_context=remember,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[StillClock]:
    """Return a clock on which it takes 1,000 s to count a call of `wait`.

    The formula counts 7 MACs for each call.
    """
    still = StillClock()

    def formula(*_: Any, out: Any) -> int:
        still.advance(1000)
        return 7

    monkeypatch.setattr(operator_costs, "_USERS", {})
    lflops.register_formula(torch.ops.timed_tests.wait, formula)
    CLOCKS.append(still)
    yield still
    CLOCKS.remove(still)


class Waits(nn.Module):
    """A module that calls the operator `wait`."""

    def __init__(self, forward: float, backward: float = 0.0) -> None:
        super().__init__()
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.timed_tests.wait(x, *self.seconds)


def watch(
    model: nn.Module,
    clock: StillClock | None,
    action: Callable[[], object],
    *,
    overhead: HookOverhead = NO_OVERHEAD,
    **options: Any,
) -> Profile:
    """Count and time the work that runs in `action`."""
    watching = CountAndTime(model, clock=clock, overhead=overhead, **options)
    with watching:
        action()
    return watching.profile


def seconds(profile: Profile, phase: str) -> dict[str, float]:
    """Return the self seconds of each module, without modules whose time is unknown."""
    works = {name: module.work(phase) for name, module in profile.modules.items()}
    return {
        name: work.self_seconds.median
        for name, work in works.items()
        if work.self_seconds is not None
    }


def differentiated(model: nn.Module, x: Tensor) -> None:
    """Run forward and backward, without a loss."""
    out = model(x)
    out.backward(torch.ones_like(out))


def penalised(model: nn.Module, x: Tensor) -> None:
    """Run backward through a gradient, as for a gradient penalty."""
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    gradient.backward(torch.ones_like(gradient))


def recomputed(reentrant: bool) -> Callable[[nn.Module, Tensor], None]:
    """Return a function that runs forward and backward with a checkpoint around the model."""

    def step(model: nn.Module, x: Tensor) -> None:
        out = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
        out.backward(torch.ones_like(out))

    return step


def stepped(model: nn.Module, x: Tensor) -> None:
    """Run forward, backward and an optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters())
    differentiated(model, x)
    optimizer.step()


def small() -> nn.Module:
    """Return three layers that can be differentiated twice."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def encoder() -> nn.Module:
    """Return a layer that evaluates in one fused operator."""
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[None])[0]


STEPS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], object]]] = {
    "forward": (Patient, lambda model, x: model(x)),
    "forward without a graph": (encoder, lambda model, x: torch.no_grad()(model)(x[None])),
    "backward": (Patient, differentiated),
    "penalised": (small, penalised),
    "checkpointed": (small, recomputed(reentrant=False)),
    "checkpointed, reentrant": (small, recomputed(reentrant=True)),
    "step": (small, stepped),
    "recurrent": (Recurrent, differentiated),
}


def all_but_outside(profile: Profile) -> list[Any]:
    """Return the op counts without those of code outside the model, such as another model.

    Op counts of backward and the optimizer are included.
    """
    outside = {"forward", "other"}
    return [cell for cell in profile.op_counts if cell.module or cell.phase not in outside]


def counted(model: nn.Module, action: Callable[[], object]) -> Profile:
    """Count the work that runs in `action`, without timing it."""
    with lflops.counting(model) as counting:
        action()
    return counting.profile


def watched(model: nn.Module, action: Callable[[], object]) -> Profile:
    """Count and time the work that runs in `action`, with the clock of the machine."""
    return watch(model, None, action)


@pytest.mark.parametrize(("make", "step"), STEPS.values(), ids=STEPS)
def test_counts_are_those_of_a_count(
    make: Callable[[], nn.Module], step: Callable[[nn.Module, Tensor], object]
) -> None:
    """The op counts, the unsupported operators and the calls equal those of `lflops.counting`."""
    profiles = []
    for way in (counted, watched):
        torch.manual_seed(0)
        model = make()
        x = torch.ones(3, 4)
        profiles.append(way(model, lambda model=model, x=x: step(model, x)))
    expected, found = profiles
    assert all_but_outside(expected) == all_but_outside(found)
    assert expected.unsupported == found.unsupported
    assert {name: module.calls for name, module in expected.modules.items()} == {
        name: module.calls for name, module in found.modules.items()
    }


class Waiting(Itself):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.take(x, 1))
        with lflops.scope("part"):
            self.clock.advance(2)
            x = torch.ops.timed_tests.wait(x, 4.0, 8.0)
            self.clock.advance(64)
        return self.second(x)


def waiting(clock: StillClock) -> nn.Module:
    """Return a model that takes 119 s forward and 56 s backward, in Python and in operators."""
    return Waiting(clock, first=Waits(16, 32), second=nn.Sequential(Part(clock, 32), Waits(0, 16)))


x = torch.ones(3, 4)


def test_times_are_the_modules_own_and_not_those_of_counting_them(clock: StillClock) -> None:
    """The times of the modules do not include the time for counting.

    Counting takes 6 times 1,000 s here: three calls of `wait` in forward and three in backward.
    """
    model = waiting(clock)
    profile = watch(model, clock, lambda: differentiated(model, x))
    assert {
        "": 1,
        "part": 2 + 4 + 64,
        "first": 16,
        "second": 0,
        "second.0": 32,
        "second.1": 0,
    } == seconds(profile, "forward")
    assert {"part": 8, "first": 32, "second.1": 16} == {
        row: s for row, s in seconds(profile, "backward").items() if row
    }
    (step,) = profile.steps
    assert "counting" == step.kind
    assert {"forward": 119, "backward": 56} == step.phases
    assert 175 == step.seconds
    assert ("measure", (175 + 6000) / 175) == (profile.run.kind, profile.run.observer_ratio)
    assert 7 == profile.modules["first"].forward.macs == profile.modules["first"].backward.macs


def test_own_seconds_add_up_to_those_of_the_rows_above(clock: StillClock) -> None:
    """In each phase, the inclusive time of a module is the sum of the self times below it.

    A module whose phase did not run has no time.
    """
    model = waiting(clock)
    profile = watch(model, clock, lambda: checkpointed(model))
    assert 119 == profile.modules[""].recompute.seconds.median
    for phase in PHASES:
        rows = seconds(profile, phase)
        for name, module in profile.modules.items():
            spread = module.work(phase).seconds
            below = [mine for row, mine in rows.items() if name in ancestry(row)]
            assert (spread is None) == (not below)
            if spread is not None:
                assert sum(below) == spread.median


def checkpointed(model: nn.Module) -> None:
    """Run forward and backward with a checkpoint around the model.

    The last operator saves a tensor, so that the whole model is recomputed.
    """
    out = checkpoint(lambda x: model(x).exp(), x.clone().requires_grad_(), use_reentrant=False)
    out.backward(torch.ones_like(out))


def test_the_overhead_is_taken_off_once_for_each_call_and_operator(clock: StillClock) -> None:
    """The overhead is subtracted once for each call and for each counted operator.

    The root is called and calls its part, which runs an operator of 16 s.
    """
    model = nn.Sequential(Waits(16))
    overhead = HookOverhead(inside=1, outside=2, operator=4)
    profile = watch(model, clock, lambda: model(x), overhead=overhead)
    assert {"": 0, "0": 16 - 1 - 4} == seconds(profile, "forward")
    assert profile.run.observer_ratio == (11 + 1000 + 1 + 2 + 1 + 4 + 2) / 11


def test_an_overhead_that_would_leave_nothing_is_not_taken_off(clock: StillClock) -> None:
    """An overhead that is longer than the time of its module is not subtracted.

    The trial on a busy machine may measure such an overhead: here 17 s in a module whose operator
    takes 16 s.
    """
    model = nn.Sequential(Waits(16))
    overhead = HookOverhead(inside=17, outside=0, operator=0)
    profile = watch(model, clock, lambda: model(x), overhead=overhead)
    assert {"": 0, "0": 16} == seconds(profile, "forward")


def test_what_runs_between_passes_is_in_no_time(clock: StillClock) -> None:
    """Code before, between and after two passes is in no time.

    It is the wait for data, a loss in Python, and another model, of 100 s each.
    """
    model = nn.Sequential(Waits(1, 2))

    def loop() -> None:
        for _ in range(2):
            clock.advance(100)
            out = model(x.clone().requires_grad_())
            clock.advance(100)
            out.backward(torch.ones_like(out))
        clock.advance(100)
        Waits(100)(x)

    profile = watch(model, clock, loop)
    assert {"forward": 2, "backward": 4} == profile.steps[0].phases
    assert {"": 0, "0": 2} == seconds(profile, "forward")
    assert profile.run.observer_ratio == (6 + 4 * 1000) / 6
    assert 2 * 7 == profile.total()


def test_what_follows_a_backward_is_in_no_time(clock: StillClock) -> None:
    """The time after a backward pass belongs to no phase.

    No event shows when the code after backward ends. Here, 100 s follow each of three passes.
    """
    model = nn.Sequential(Waits(1, 2))

    def loop() -> None:
        leaf = x.clone().requires_grad_()
        losses = [model(leaf).sum() for _ in range(3)]
        for loss in losses:
            loss.backward()
            clock.advance(100)

    assert {"forward": 3, "backward": 6} == watch(model, clock, loop).steps[0].phases


class Force(nn.Module):
    """A model that computes a gradient in forward, and then runs for 64 s."""

    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.clock = clock
        self.body = Waits(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        (force,) = torch.autograd.grad(out, x, torch.ones_like(out))
        self.clock.advance(64)
        return force.exp()


def test_what_follows_a_gradient_within_a_module_is_the_modules(clock: StillClock) -> None:
    """The 64 s after a gradient within a module are self time of the module.

    The gradient runs 2 s of backward in its body.
    """
    model = Force(clock)
    profile = watch(model, clock, lambda: model(x.clone().requires_grad_()))
    assert {"": 64, "body": 1} == seconds(profile, "forward")
    assert {"body": 2} == {row: mine for row, mine in seconds(profile, "backward").items() if row}


def test_what_is_ignored_takes_its_time_with_it(clock: StillClock) -> None:
    """The time of an ignored module, 16 s forward and 32 s backward, is only in a note."""
    model = waiting(clock)
    profile = watch(model, clock, lambda: differentiated(model, x), ignore=["first"])
    assert {"forward": 119 - 16, "backward": 56 - 32} == profile.steps[0].phases
    (note,) = profile.notes
    assert ("ignored", "first", 48) == (note.code, note.subject, note.values["seconds"])


def test_an_error_leaves_what_was_found_until_then(clock: StillClock) -> None:
    """After an error in the model, the profile has the work and the time until then.

    The error is raised, and the profile is marked as partial.
    """

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            clock.advance(2)
            raise ValueError("planted")

    model = nn.Sequential(Waits(16), Fails(), Waits(32))
    watching = CountAndTime(model, clock=clock, overhead=NO_OVERHEAD)
    with pytest.raises(ValueError, match="planted"), watching:
        model(x)
    profile = watching.profile
    assert profile.run.partial
    assert {"": 0, "0": 16, "1": 2} == seconds(profile, "forward")
    assert profile.total() == 7


def test_an_error_that_the_loop_catches_is_no_error(clock: StillClock) -> None:
    """An error that the user's loop catches does not make the profile partial.

    Backward of the first pass fails, and backward of the second does not. Both passes are timed.
    """
    model = nn.Sequential(Waits(16, 3), Waits(1, 2))

    def loop() -> None:
        leaf = x.clone().requires_grad_()
        with pytest.raises(ValueError, match="planted"):
            model[1](Raises.apply(model[0](leaf), ValueError("planted"))).sum().backward()
        differentiated(model, leaf)

    profile = watch(model, clock, loop)
    assert not profile.run.partial
    assert {"": 0, "0": 32, "1": 2} == seconds(profile, "forward")
    assert {"0": 3, "1": 2 + 2} == {
        row: mine for row, mine in seconds(profile, "backward").items() if row
    }


def test_within_a_count_both_count(clock: StillClock) -> None:
    """A count around `CountAndTime` has the same work, and so has a count within it."""
    model = nn.Sequential(Waits(16))
    with lflops.counting(model) as outer:
        profile = watch(model, clock, lambda: model(x))
    assert 7 == profile.total() == outer.profile.total()
    inner = lflops.counting(model)

    def within() -> None:
        with inner:
            model(x)

    assert 7 == watch(model, clock, within).total() == inner.profile.total()


def test_a_trial_is_no_work_of_who_counts_around_it() -> None:
    """Only the operators of the model are counted, not those of the trial of the overhead.

    The trial runs its own matmuls.
    """
    watching_module._overhead.cache_clear()
    model = small()
    with lflops.counting(model) as outer, CountAndTime(model):
        model(x)
    assert {"addmm", "tanh"} == {cell.operator for cell in outer.profile.op_counts}


def test_a_watch_that_is_entered_again_says_so_and_goes_on(clock: StillClock) -> None:
    """Entering a `CountAndTime` for the second time is an error, but the first block continues."""
    model = nn.Sequential(Waits(16))
    watching = CountAndTime(model, clock=clock, overhead=NO_OVERHEAD)
    with watching:
        with pytest.raises(lflops.CountError, match="was already used in a `with` block"), watching:
            pass
        model(x)
    assert 7 == watching.profile.total()
    assert {"": 0, "0": 16} == seconds(watching.profile, "forward")


def test_there_is_no_profile_before_the_end(clock: StillClock) -> None:
    """Before the end of the block, reading the profile is an error.

    As no model ran in the block, all times are unknown.
    """
    watching = CountAndTime(nn.Sequential(Waits(16)), clock=clock, overhead=NO_OVERHEAD)
    with watching, pytest.raises(lflops.CountError, match="until the `with` block has ended"):
        _ = watching.profile
    profile = watching.profile
    assert (None, None) == (profile.modules[""].forward.seconds, profile.run.observer_ratio)


def test_other_threads_are_counted_and_not_timed(clock: StillClock) -> None:
    """Modules on another thread are counted but not timed.

    Two threads at once would end each other's times.
    """
    model = nn.Sequential(Waits(16), Part(clock, 1, 2))
    with ThreadPoolExecutor(1) as pool:
        profile = watch(model, clock, lambda: pool.submit(model, x).result(60))
    assert profile.total() == 7
    assert {} == seconds(profile, "forward")


def with_a_trial(model: nn.Module, x: Tensor) -> None:
    """Count and time a pass as a user does, with the trial of the overhead before it."""
    watching_module._overhead.cache_clear()
    watching = CountAndTime(model)
    with watching:
        model(x)
    assert watching.profile.run.observer_ratio > 1


def until_an_error(model: nn.Module, x: Tensor) -> None:
    """Leave the block by an error in backward."""
    with pytest.raises(ValueError, match="planted"), CountAndTime(model, overhead=NO_OVERHEAD):
        torch.autograd.grad(Raises.apply(model(x), ValueError("planted")).sum(), x)


WAYS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "forward": lambda model, x: watch(model, None, lambda: model(x)),
    "backward": lambda model, x: watch(model, None, lambda: torch.autograd.grad(model(x).sum(), x)),
    "with a trial": with_a_trial,
    "error": until_an_error,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_to_be_watched_leaves_no_trace(way: Callable[[nn.Module, Tensor], object]) -> None:
    """`CountAndTime` leaves hooks, modes, attributes, gradients and random numbers unchanged.

    The model is in eval mode, so that the pass itself changes nothing.
    """
    model = Patient().eval()
    x = torch.randn(3, 4, requires_grad=True)
    # The first run loads everything that torch loads on first use.
    way(Patient().eval(), torch.randn(3, 4, requires_grad=True))
    # Free objects of earlier tests now, so that they do not disappear during the comparison.
    gc.collect()
    before = everything(model, x)
    way(model, x)
    assert [] == differences(before, everything(model, x))


def test_a_trial_that_draws_random_numbers_is_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above finds random numbers that a trial draws.

    In this test, the matmul of the trial is replaced by a function that draws one.
    """
    monkeypatch.setattr(module_hooks, "mm", lambda x, _: x * torch.rand(()))
    before = random_numbers()
    with_a_trial(small(), torch.ones(3, 4))
    watching_module._overhead.cache_clear()
    assert ["random numbers: torch"] == differences(before, random_numbers())
