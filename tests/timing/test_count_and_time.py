"""Counting and timing the same pass.

The counts are those of a count, the times those of the modules, without what counting took.
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
"""What the operator below advances."""


@torch.library.custom_op("timed_tests::wait", mutates_args=())
def wait(x: Tensor, seconds: float, backward: float) -> Tensor:
    """An operator that takes its time, and so does the one that goes backward."""
    CLOCKS[-1].advance(seconds)
    return x.clone()


def remember(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
    """How long backward takes."""
    ctx.seconds = inputs[2]


wait.register_autograd(
    lambda ctx, gradient: (torch.ops.timed_tests.wait(gradient, ctx.seconds, 0.0), None, None),
    setup_context=remember,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[StillClock]:
    """A clock, on which to count the operator above takes 1000 s."""
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
    """Waits in an operator."""

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
    """What runs in the action, counted and timed."""
    watching = CountAndTime(model, clock=clock, overhead=overhead, **options)
    with watching:
        action()
    return watching.profile


def seconds(profile: Profile, phase: str) -> dict[str, float]:
    """Of each row itself; rows whose seconds are unknown are left out."""
    works = {name: module.work(phase) for name, module in profile.modules.items()}
    return {
        name: work.self_seconds.median
        for name, work in works.items()
        if work.self_seconds is not None
    }


def differentiated(model: nn.Module, x: Tensor) -> None:
    """Forward and backward, without a loss."""
    out = model(x)
    out.backward(torch.ones_like(out))


def penalised(model: nn.Module, x: Tensor) -> None:
    """A gradient that is itself differentiated."""
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    gradient.backward(torch.ones_like(gradient))


def recomputed(reentrant: bool) -> Callable[[nn.Module, Tensor], None]:
    """A checkpoint around the model."""

    def step(model: nn.Module, x: Tensor) -> None:
        out = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
        out.backward(torch.ones_like(out))

    return step


def stepped(model: nn.Module, x: Tensor) -> None:
    """With an optimizer's step."""
    optimizer = torch.optim.AdamW(model.parameters())
    differentiated(model, x)
    optimizer.step()


def small() -> nn.Module:
    """Three layers that can be differentiated twice."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def encoder() -> nn.Module:
    """A layer that evaluates in one fused operator."""
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
    """Cells but those of what is neither in the model nor in backward nor in the optimizer.

    Another model's, perhaps.
    """
    return [
        cell for cell in profile.op_counts if cell.module or cell.phase not in {"forward", "other"}
    ]


def counted(model: nn.Module, action: Callable[[], object]) -> Profile:
    """What runs in the action, counted only."""
    with lflops.counting(model) as counting:
        action()
    return counting.profile


def watched(model: nn.Module, action: Callable[[], object]) -> Profile:
    """By this machine's own clock."""
    return watch(model, None, action)


@pytest.mark.parametrize(("make", "step"), STEPS.values(), ids=STEPS)
def test_counts_are_those_of_a_count(
    make: Callable[[], nn.Module], step: Callable[[nn.Module, Tensor], object]
) -> None:
    """OpCount by cell, and what is in no cell."""
    profiles = []
    for way in (counted, watched):
        torch.manual_seed(0)
        model, x = make(), torch.ones(3, 4)
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
    """Waits in Python and in operators, 119 s forward and 56 s backward."""
    return Waiting(clock, first=Waits(16, 32), second=nn.Sequential(Part(clock, 32), Waits(0, 16)))


x = torch.ones(3, 4)


def test_times_are_the_modules_own_and_not_those_of_counting_them(clock: StillClock) -> None:
    """To count the operator takes 1000 s each of three times forward and three times backward."""
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
    assert ("counting", {"forward": 119, "backward": 56}, 175) == (
        step.kind,
        step.phases,
        step.seconds,
    )
    assert ("measure", (175 + 6000) / 175) == (profile.run.kind, profile.run.observer_ratio)
    assert 7 == profile.modules["first"].forward.macs == profile.modules["first"].backward.macs


def test_own_seconds_add_up_to_those_of_the_rows_above(clock: StillClock) -> None:
    """In each phase, and no phase that did not run has any."""
    model = waiting(clock)
    profile = watch(model, clock, lambda: checkpointed(model))
    assert 119 == profile.modules[""].recompute.seconds.median
    for phase in PHASES:
        rows = seconds(profile, phase)
        for name, module in profile.modules.items():
            spread = module.work(phase).seconds
            assert (spread is None) == (not any(name in ancestry(row) for row in rows))
            if spread is not None:
                assert (
                    sum(mine for row, mine in rows.items() if name in ancestry(row))
                    == spread.median
                )


def checkpointed(model: nn.Module) -> None:
    """A checkpoint around the model, which saves a tensor at its end so that all of it is computed again."""
    out = checkpoint(lambda x: model(x).exp(), x.clone().requires_grad_(), use_reentrant=False)
    out.backward(torch.ones_like(out))


def test_the_overhead_is_taken_off_once_for_each_call_and_operator(clock: StillClock) -> None:
    """Two calls: of the root, which makes another, and of its part, which runs an operator of 16 s."""
    model = nn.Sequential(Waits(16))
    profile = watch(
        model, clock, lambda: model(x), overhead=HookOverhead(inside=1, outside=2, operator=4)
    )
    assert {"": 0, "0": 16 - 1 - 4} == seconds(profile, "forward")
    assert profile.run.observer_ratio == (11 + 1000 + 1 + 2 + 1 + 4 + 2) / 11


def test_an_overhead_that_would_leave_nothing_is_not_taken_off(clock: StillClock) -> None:
    """A trial on a busy machine says more than the pass took.

    An operator of 16 s and 17 s of overhead in its module.
    """
    model = nn.Sequential(Waits(16))
    profile = watch(
        model, clock, lambda: model(x), overhead=HookOverhead(inside=17, outside=0, operator=0)
    )
    assert {"": 0, "0": 16} == seconds(profile, "forward")


def test_what_runs_between_passes_is_in_no_time(clock: StillClock) -> None:
    """Data that is waited for, a loss in Python, another model.

    Before, between and behind two passes.
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
    """Nothing says when it ends.

    Seconds behind the first, between two, and behind the last are those of none.
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
    """Gives a gradient, and goes on."""

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
    """64 s of the model itself, which has gone back into its body for 2."""
    model = Force(clock)
    profile = watch(model, clock, lambda: model(x.clone().requires_grad_()))
    assert {"": 64, "body": 1} == seconds(profile, "forward")
    assert {"body": 2} == {row: mine for row, mine in seconds(profile, "backward").items() if row}


def test_what_is_ignored_takes_its_time_with_it(clock: StillClock) -> None:
    """16 s forward and 32 s backward."""
    model = waiting(clock)
    profile = watch(model, clock, lambda: differentiated(model, x), ignore=["first"])
    assert {"forward": 119 - 16, "backward": 56 - 32} == profile.steps[0].phases
    (note,) = profile.notes
    assert ("ignored", "first", 48) == (note.code, note.subject, note.values["seconds"])


def test_an_error_leaves_what_was_found_until_then(clock: StillClock) -> None:
    """16 s of forward, and none of what would have followed; the error goes on."""

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
    """A pass that failed when it went backward, and one that did not: both were timed."""
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
    """And within the watch another count.

    Its formula takes its time while the operator runs, which nobody but it can know of.
    """
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
    """What watching costs is tried out on products of its own.

    Only the model's are counted, by either.
    """
    watching_module._overhead.cache_clear()
    model = small()
    with lflops.counting(model) as outer, CountAndTime(model):
        model(x)
    assert {"addmm", "tanh"} == {cell.operator for cell in outer.profile.op_counts}


def test_a_watch_that_is_entered_again_says_so_and_goes_on(clock: StillClock) -> None:
    """The one that is running is not ended by it."""
    model = nn.Sequential(Waits(16))
    watching = CountAndTime(model, clock=clock, overhead=NO_OVERHEAD)
    with watching:
        with pytest.raises(lflops.CountError, match="has already been used"), watching:
            pass
        model(x)
    assert 7 == watching.profile.total()
    assert {"": 0, "0": 16} == seconds(watching.profile, "forward")


def test_there_is_no_profile_before_the_end(clock: StillClock) -> None:
    """Nor is there a time."""
    watching = CountAndTime(nn.Sequential(Waits(16)), clock=clock, overhead=NO_OVERHEAD)
    with watching, pytest.raises(lflops.CountError, match="until the `with` block has ended"):
        _ = watching.profile
    profile = watching.profile
    assert (None, None) == (profile.modules[""].forward.seconds, profile.run.observer_ratio)


def test_other_threads_are_counted_and_not_timed(clock: StillClock) -> None:
    """Two at once would cut each other's time short."""
    model = nn.Sequential(Waits(16), Part(clock, 1, 2))
    with ThreadPoolExecutor(1) as pool:
        profile = watch(model, clock, lambda: pool.submit(model, x).result(60))
    assert profile.total() == 7
    assert {} == seconds(profile, "forward")


def with_a_trial(model: nn.Module, x: Tensor) -> None:
    """As a user's: what it costs is tried out first."""
    watching_module._overhead.cache_clear()
    watching = CountAndTime(model)
    with watching:
        model(x)
    assert watching.profile.run.observer_ratio > 1


def until_an_error(model: nn.Module, x: Tensor) -> None:
    """Left by an error out of backward."""
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
    """Hooks, modes, attributes, gradients, random numbers.

    The model evaluates, so that the loop itself changes nothing.
    """
    model, x = Patient().eval(), torch.randn(3, 4, requires_grad=True)
    way(
        Patient().eval(), torch.randn(3, 4, requires_grad=True)
    )  # what torch loads when it is first asked is loaded
    gc.collect()  # what others have left is not to go away meanwhile
    before = everything(model, x)
    way(model, x)
    assert [] == differences(before, everything(model, x))


def test_a_trial_that_draws_random_numbers_is_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that draws some in place of the one that is tried."""
    monkeypatch.setattr(module_hooks, "mm", lambda x, _: x * torch.rand(()))
    before = random_numbers()
    with_a_trial(small(), torch.ones(3, 4))
    watching_module._overhead.cache_clear()
    assert ["random numbers: torch"] == differences(before, random_numbers())
