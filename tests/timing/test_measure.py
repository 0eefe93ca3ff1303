"""Test `measure` with models whose durations the test chooses.

The unprofiled passes give the total time, and the hooked passes divide it among the modules.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lflops
from lflops.model.call import Gradients
from lflops.profile.module_names import ancestry
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.records import PHASES, TimingStats
from lflops.timing.clock import HostClock
from lflops.timing.module_hooks import _of_timer, hook_overhead
from lflops.timing.module_times import NO_OVERHEAD
from lflops.torch_private import autograd
from tests.support.fake_clock import StillClock
from tests.support.leaky_profilers import PlainMode
from tests.support.profile_checks import names_what_is_taken, spent
from tests.support.timed_modules import Itself, Part, Takes

FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTE = "recompute"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    """Return the clock that `measure` uses in this test."""
    still = StillClock()
    monkeypatch.setattr("lflops.timing.measure.clock_of", lambda _device: still)
    return still


def measure(model: nn.Module, *args: Any, **options: Any) -> Profile:
    """Call `lflops.measure`; by default, with as few passes as possible."""
    return spent(lflops.measure(model, *args, **({"warmup": 0, "repeats": 1} | options)))


def own(profile: Profile, phase: str) -> dict[str, float]:
    """Return the self seconds of each module, without modules whose time is unknown."""
    works = {name: module.work(phase) for name, module in profile.modules.items()}
    return {
        name: work.self_seconds.median
        for name, work in works.items()
        if work.self_seconds is not None
    }


def inclusive(profile: Profile, phase: str) -> dict[str, float]:
    """Return the inclusive seconds of each module, without modules whose time is unknown."""
    works = {name: module.work(phase) for name, module in profile.modules.items()}
    return {name: work.seconds.median for name, work in works.items() if work.seconds is not None}


def once(seconds: float, passes: int = 1) -> TimingStats:
    """Return the statistics of a time that is the same in all passes."""
    return TimingStats(median=seconds, low=seconds, high=seconds, n=passes)


class Block(Itself):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.take(self.first(x), 1, 2))


def block(clock: StillClock) -> nn.Module:
    """Return a model with a part, work of its own, a second part, and a part that never runs."""
    return Block(
        clock, first=Part(clock, 4, 8), second=Part(clock, 16, 32), unused=Part(clock, 64, 128)
    )


x = torch.ones(3, 2)


def test_forward_is_timed_and_nothing_else(clock: StillClock) -> None:
    """Without backward, only forward is timed: 1 + 4 + 16 s in each of four passes."""
    profile = measure(block(clock), x, repeats=2)
    assert profile.run.kind == "measure"
    assert profile.run.observer_ratio == 1
    assert ["unprofiled", "module_timing", "module_timing", "unprofiled"] == [
        step.kind for step in profile.steps
    ]
    assert [{"forward": 21}] * 4 == [step.phases for step in profile.steps]
    assert [21] * 4 == [step.seconds for step in profile.steps]
    assert {"": once(21, 2), "first": once(4, 2), "second": once(16, 2), "unused": None} == {
        name: module.forward.seconds for name, module in profile.modules.items()
    }
    assert {"": 1, "first": 4, "second": 16} == own(profile, FORWARD)
    assert () == profile.notes


def test_backward_is_timed_too(clock: StillClock) -> None:
    """With `backward=True`, backward is timed, too; it takes twice as long as forward here.

    The counts are the same as those of `lflops.count`.
    """
    model = block(clock)
    profile = measure(model, x, backward=True)
    assert [{"forward": 21, "backward": 42}] * 2 == [step.phases for step in profile.steps]
    assert {"": 2, "first": 8, "second": 32} == own(profile, BACKWARD)
    assert {"": 42, "first": 8, "second": 32} == inclusive(profile, BACKWARD)
    assert lflops.count(model, x, backward=True).op_counts == profile.op_counts


def test_where_nothing_ran_the_seconds_are_unknown_and_not_zero(clock: StillClock) -> None:
    """The time of a phase that did not run is unknown, not zero.

    The model runs no backward, recompute, optimizer or other, and one module is never called. A
    module has self seconds if and only if it has inclusive seconds.
    """
    profile = measure(block(clock), x)
    timed = set()
    for name, module in profile.modules.items():
        for phase in PHASES:
            work = module.work(phase)
            assert (work.seconds is None) == (work.self_seconds is None)
            if work.seconds is not None:
                timed.add((name, phase))
    assert {("", FORWARD), ("first", FORWARD), ("second", FORWARD)} == timed


def test_a_container_has_the_time_of_what_is_in_it_and_none_of_its_own(clock: StillClock) -> None:
    """A container has the time of its modules; its self time is unknown.

    A `ModuleList` is never called.
    """

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Part(clock, 1), Part(clock, 2)])

        def forward(self, x: Tensor) -> Tensor:
            return self.parts[1](self.parts[0](x))

    profile = measure(Listed(), x)
    assert {"": 3, "parts": 3, "parts.0": 1, "parts.1": 2} == inclusive(profile, FORWARD)
    assert {"": 0, "parts.0": 1, "parts.1": 2} == own(profile, FORWARD)


class Watched(Part):
    """A part that takes longer with hooks, and whose forward takes longer in each pass."""

    def __init__(self, clock: StillClock, slower: float) -> None:
        super().__init__(clock)
        self.slower = slower
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        has_hooks = bool(module_module._global_forward_pre_hooks)
        factor = self.slower if has_hooks else 1.0
        self.seconds = self.calls * factor, 2.0 * factor
        return super().forward(x)


def test_the_total_is_that_of_the_clean_passes(clock: StillClock) -> None:
    """The times of the modules add up to the mean of the unprofiled passes.

    Pass 1 is counted, and pass 7 is thrown away. Passes 2, 3 and 8 are unprofiled: forward takes 2,
    3 and 8 s, and backward 2 s. Passes 4, 5 and 6 are hooked and take four times as long. The
    factors in the note and `observer_ratio` are ratios of medians.
    """
    mean = (2 + 3 + 8) / 3
    profile = measure(nn.Sequential(Watched(clock, 4)), x, backward=True, repeats=3)
    assert [2, 3, 8] == [
        step.phases["forward"] for step in profile.steps if step.kind == "unprofiled"
    ]
    assert [16, 20, 24] == [
        step.phases["forward"] for step in profile.steps if step.kind == "module_timing"
    ]
    for row in ("", "0"):
        seconds = profile.modules[row].forward.seconds
        assert pytest.approx((mean, mean * 18 / 20, mean * 22 / 20)) == (
            seconds.median,
            seconds.low,
            seconds.high,
        )
    assert once(2, 3) == profile.modules["0"].backward.seconds
    assert profile.run.observer_ratio == (20 + 8) / (3 + 2)
    factors = {"forward": 3 / 20, "backward": 2 / 8}
    assert (Note(code="time_scaled", subject="", values=factors),) == profile.notes


def test_what_is_off_by_a_twentieth_is_not_worth_a_note(clock: StillClock) -> None:
    """A difference of 5 % between hooked and unprofiled passes needs no note.

    A note names only the parts with a larger difference: here forward, but not backward, of which
    the loss takes 1,000 s with and without hooks.
    """

    class Slower(Watched):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = 0
            return super().forward(x)

    assert () == measure(Slower(clock, 1.05), x).notes
    (note,) = measure(
        Slower(clock, 1.25),
        x,
        loss=lambda out: Takes.apply(out, None, clock, (0, 1000)).sum(),
        backward=True,
    ).notes
    assert {"forward": 0.8} == note.values


class Repeated(Itself):
    """A model with a shared part, a list, work of its own, and checkpointed parts."""

    def forward(self, x: Tensor) -> Tensor:
        for each in self.parts:
            x = checkpoint(each, self.take(x, 3, 5), use_reentrant=False)
        return self.twin(x)


def test_own_seconds_over_all_rows_are_the_roots_in_each_phase(clock: StillClock) -> None:
    """In each phase, the inclusive time of a module is the sum of the self times below it.

    So all self times add up to the time of the root.
    """
    part = Part(clock, 7, 11)
    parts = nn.ModuleList(
        [nn.Sequential(part, nn.Tanh()), nn.Sequential(part, Part(clock, 13, 17), nn.Tanh())]
    )
    model = Repeated(clock, parts=parts, twin=part)
    profile = measure(model, x, backward=True, repeats=2)
    assert {FORWARD: 6 + 7 * 3 + 13, BACKWARD: 10 + 11 * 3 + 17, RECOMPUTE: 7 * 2 + 13} == {
        phase: profile.modules[""].work(phase).seconds.median
        for phase in (FORWARD, BACKWARD, RECOMPUTE)
    }
    assert {"forward": 40, "backward": 60 + 27} == profile.steps[0].phases
    for phase in (FORWARD, BACKWARD, RECOMPUTE):
        rows = own(profile, phase)
        for name, seconds in inclusive(profile, phase).items():
            assert sum(mine for row, mine in rows.items() if name in ancestry(row)) == seconds


class Force(Itself):
    """A model whose output is a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.head(self.body(x)).sum(), x, create_graph=True)[0]


def test_a_gradient_that_forward_takes_is_a_part_of_its_time(clock: StillClock) -> None:
    """A gradient that is computed in forward belongs to the part `forward` of the step.

    Its 10 s and the 5 s of forward add up to a pass of 15 s without any scaling.
    """
    profile = measure(Force(clock, body=Part(clock, 1, 2), head=Part(clock, 4, 8)), x)
    assert [{"forward": 15}] * 2 == [step.phases for step in profile.steps]
    assert {"": 5, "body": 1, "head": 4} == inclusive(profile, FORWARD)
    assert {"": 10, "body": 2, "head": 8} == inclusive(profile, BACKWARD)
    assert () == profile.notes


@pytest.mark.parametrize(
    "ignore",
    ["first", ["first"], [Part], (each for each in ["first"])],
    ids=["name", "list", "class", "iterator"],
)
def test_what_is_ignored_takes_its_work_and_its_time_with_it(
    clock: StillClock, ignore: Any
) -> None:
    """The 4 + 8 s of an ignored part are in no total, but in a note."""
    model = Block(clock, first=Part(clock, 4, 8), second=nn.Linear(2, 5))
    profile = measure(model, x, backward=True, ignore=ignore)
    assert {"": 1, "second": 0} == inclusive(profile, FORWARD)
    assert {"": 2, "second": 0} == inclusive(profile, BACKWARD)
    assert 3 * 2 * 5 == profile.modules[""].forward.macs
    (note,) = profile.notes
    assert ("ignored", "first", 12) == (note.code, note.subject, note.values["seconds"])
    assert {"forward": 5, "backward": 10} == profile.steps[0].phases


def test_what_is_prepared_between_forward_and_backward_is_in_no_time(
    clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preparation of backward is in no time.

    It takes 1,000 s to find the leaves whose gradients must be saved, and 100 s to free the
    gradients of the previous pass.
    """
    model = block(clock)
    leaves = autograd.leaves
    clear = Gradients.clear

    def slow_leaves(*args: Any) -> Any:
        clock.advance(1000)
        return leaves(*args)

    def slow_clear(self: Gradients) -> None:
        clock.advance(100)
        clear(self)

    monkeypatch.setattr(autograd, "leaves", slow_leaves)
    monkeypatch.setattr(Gradients, "clear", slow_clear)
    profile = measure(model, x, backward=True)
    assert clock.now > 2 * 1100
    assert [{"forward": 21, "backward": 42}] * 2 == [step.phases for step in profile.steps]
    assert {"": 2, "first": 8, "second": 32} == own(profile, BACKWARD)
    assert {"": 1, "first": 4, "second": 16} == own(profile, FORWARD)


class Frees:
    """An object whose deletion takes 1,000 s."""

    def __init__(self, clock: StillClock) -> None:
        self.clock = clock

    def __del__(self) -> None:
        self.clock.advance(1000)


class Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: StillClock) -> Tensor:
        ctx.held = Frees(clock)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def test_to_free_the_graph_is_no_part_of_going_back_through_it(clock: StillClock) -> None:
    """The time to free the autograd graph is not part of backward.

    The graph and the object that it holds are freed after the pass.
    """
    profile = measure(
        block(clock), x, backward=True, loss=lambda out: Holds.apply(out, clock).sum()
    )
    assert clock.now > 3 * 1000
    assert [{"forward": 21, "backward": 42}] * 2 == [step.phases for step in profile.steps]
    assert {"": 2, "first": 8, "second": 32} == own(profile, BACKWARD)


def test_every_pass_makes_gradients_of_its_own(clock: StillClock) -> None:
    """Each pass starts without gradients, because adding to existing gradients takes longer.

    There are one counting pass, two warm-up passes, four passes that are kept, and one that is
    thrown away.
    """
    found: list[Any] = []

    class Looks(Part):
        def forward(self, x: Tensor) -> Tensor:
            found.append(self.weight.grad)
            return super().forward(x) * self.weight

    measure(Looks(clock), x, backward=True, warmup=2, repeats=2)
    assert [None] * (1 + 2 + 4 + 1) == found


def test_as_many_passes_run_as_are_asked_for(clock: StillClock) -> None:
    """By default, 10 unprofiled and 10 hooked passes are kept.

    In addition, one pass is counted, three are the warm-up, and one is thrown away.
    """
    model = Watched(clock, 1)
    profile = lflops.measure(model, x)
    assert 1 + 3 + 20 + 1 == model.calls
    assert 10 == sum(step.kind == "unprofiled" for step in profile.steps)
    assert 10 == profile.modules[""].forward.seconds.n


class Tokens(nn.Module):
    def __init__(self, clock: StillClock) -> None:
        super().__init__()
        self.part = Part(clock, 1, 2)

    def forward(self, ids: Tensor, batch: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        if batch is None:
            return {"logits": self.part(ids.float())}
        return {"logits": self.part(batch["x"])}


UNITS: dict[str, tuple[Any, tuple[int | None, int | None]]] = {
    "found": (None, (4, None)),
    "both": ({"samples": 8, "tokens": 1024}, (8, 1024)),
    "samples alone": ({"samples": 8}, (8, None)),
    "tokens alone": ({"tokens": 20}, (4, 20)),
    "nothing": ({}, (4, None)),
    "a function": (lambda ids: {"samples": len(ids) * 2, "tokens": int(ids.sum())}, (8, 24)),
}


@pytest.mark.parametrize(("units", "expected"), UNITS.values(), ids=UNITS)
def test_samples_and_tokens_are_what_the_user_or_the_shapes_say(
    clock: StillClock, units: Any, expected: tuple[int, int]
) -> None:
    """The run and each of its steps have the samples and tokens of `units`.

    By default, the samples are found from the shapes. The tokens are then unknown, because no
    embedding looks up the integers.
    """
    profile = measure(Tokens(clock), torch.ones(4, 6, dtype=torch.long), units=units)
    assert expected == (profile.run.samples_per_step, profile.run.tokens_per_step)
    assert {expected} == {(step.samples, step.tokens) for step in profile.steps}


def test_a_function_of_the_batch_is_given_what_the_model_is(clock: StillClock) -> None:
    """A function for `units` receives the arguments of the model, also keyword arguments."""
    given: list[Any] = []

    def units(*args: Any, **kwargs: Any) -> dict[str, int]:
        given.append((args, kwargs))
        return {"samples": 1}

    ids = torch.ones(2, 3, dtype=torch.long)
    measure(Tokens(clock), (ids,), {"batch": {"x": x}}, units=units)
    assert [((ids,), {"batch": {"x": x}})] == given


def test_arguments_may_have_a_history_and_structure(clock: StillClock) -> None:
    """Arguments may have an autograd history; no pass times it or runs backward through it.

    The part that computed the features does not belong to the model.
    """
    body = Part(clock, 1000, 1000)
    features = body(torch.ones(3, 2))
    profile = measure(
        Tokens(clock), kwargs={"ids": features, "batch": {"x": features}}, backward=True, repeats=2
    )
    assert [{"forward": 1, "backward": 2}] * 4 == [step.phases for step in profile.steps]
    assert body.weight.grad is None


def test_a_loss_is_timed_with_the_model(clock: StillClock) -> None:
    """The time of the loss is self time of the root. The loss receives the output of the model."""
    profile = measure(
        Tokens(clock),
        torch.ones(3, 2),
        backward=True,
        loss=lambda out: Takes.apply(out["logits"], None, clock, (4, 8)).square().mean(),
    )
    assert {"forward": 5, "backward": 10} == profile.steps[0].phases
    assert ({"": 4, "part": 1}, {"": 8, "part": 2}) == (
        own(profile, FORWARD),
        own(profile, BACKWARD),
    )


OWN = lflops.Hardware("mine", {"fp32": 1e12}, None, None, "a guess")


def test_the_chip_is_looked_up_named_given_or_unknown(
    clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hardware of the run is found by the device's name, or passed as a name or an object.

    It is `None` if `hardware=None` is passed or if the device is unknown.
    """
    model = Part(clock, 1)
    monkeypatch.setattr(
        "lflops.hardware.calibrate.device_name", lambda _device: "NVIDIA H100 80GB HBM3"
    )
    named = lflops.hardware.lookup("NVIDIA H100 80GB HBM3")
    assert named is not None
    assert named == measure(model, x).run.hardware
    assert named == measure(model, x, hardware="NVIDIA H100 80GB HBM3").run.hardware
    assert OWN == measure(model, x, hardware=OWN).run.hardware
    assert measure(model, x, hardware=None).run.hardware is None
    monkeypatch.setattr(
        "lflops.hardware.calibrate.device_name", lambda _device: "a chip that nobody knows"
    )
    assert measure(model, x).run.hardware is None


def test_a_chip_is_measured_where_that_is_asked_for(
    clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `hardware="measure"`, the device of the model is measured."""
    asked: list[Any] = []

    def calibrate(device: Any) -> lflops.Hardware:
        asked.append(device)
        return OWN

    monkeypatch.setattr("lflops.hardware.calibrate.calibrate", calibrate)
    assert OWN == measure(Part(clock, 1), x, hardware="measure").run.hardware
    assert [torch.device("cpu")] == asked


net = nn.Linear(2, 2)
Error = lflops.CountError
WRONG: dict[str, tuple[Callable[[], object], type[Exception], list[str]]] = {
    "model": (
        lambda: lflops.measure(nn.Linear, x),
        Error,
        ["measure: Linear is a class: pass an instance"],
    ),
    "args": (lambda: lflops.measure(net, [x]), Error, ["measure: args is a list", "(batch,)"]),
    "kwargs": (lambda: lflops.measure(net, x, 3), Error, ["measure: kwargs=3", "dict"]),
    "backward": (
        lambda: lflops.measure(net, x, backward=1),
        Error,
        ["measure: backward=1: pass True or False"],
    ),
    "loss": (
        lambda: lflops.measure(net, x, loss=torch.sum),
        Error,
        ["measure: loss= needs a backward pass, but backward=False"],
    ),
    "loss, of many": (
        lambda: measure(net, x, backward=True, loss=lambda out: out),
        Error,
        ["measure: loss returned a tensor", "one element"],
    ),
    "nothing to train": (
        lambda: measure(nn.Identity(), x, backward=True),
        Error,
        ["measure: backward=True", "loss="],
    ),
    "warmup, negative": (
        lambda: lflops.measure(net, x, warmup=-1),
        Error,
        ["measure: warmup=-1", "whole number, at least 0"],
    ),
    "warmup, a truth": (
        lambda: lflops.measure(net, x, warmup=True),
        Error,
        ["measure: warmup=True", "whole number, at least 0"],
    ),
    "repeats, none": (
        lambda: lflops.measure(net, x, repeats=0),
        Error,
        ["measure: repeats=0", "whole number, at least 1"],
    ),
    "repeats, half": (
        lambda: lflops.measure(net, x, repeats=1.5),
        Error,
        ["measure: repeats=1.5", "whole number, at least 1"],
    ),
    "ignore": (
        lambda: lflops.measure(net, x, ignore=["nobody"]),
        Error,
        ["ignore", "'nobody'", "named_modules"],
    ),
    "units, a number": (
        lambda: lflops.measure(net, x, units=3),
        Error,
        ["measure: units is 3", "{'samples': n, 'tokens': n}"],
    ),
    "units, another name": (
        lambda: lflops.measure(net, x, units={"images": 3}),
        Error,
        ["measure: units is {'images': 3}", "'samples'"],
    ),
    "units, no number": (
        lambda: lflops.measure(net, x, units={"samples": "3"}),
        Error,
        ["measure: units is {'samples': '3'}"],
    ),
    "units, negative": (
        lambda: lflops.measure(net, x, units=lambda _: {"tokens": -1}),
        Error,
        ["measure: units is {'tokens': -1}"],
    ),
    "units, nothing": (
        lambda: lflops.measure(net, x, units=lambda _: None),
        Error,
        ["measure: units is None"],
    ),
    "hardware, a typo": (
        lambda: lflops.measure(net, x, hardware="H10"),
        lflops.HardwareError,
        ["hardware='H10'"],
    ),
    "hardware, a number": (
        lambda: lflops.measure(net, x, hardware=3),
        lflops.HardwareError,
        ["hardware=3", '"auto"', '"measure"', "lflops.Hardware", "None"],
    ),
    "device": (
        lambda: lflops.measure(nn.Linear(2, 2, device="meta"), x.to("meta")),
        Error,
        ["'meta'", "'cpu'", "lflops.count"],
    ),
}


@pytest.mark.parametrize(("call", "error", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named_with_what_is_taken(
    call: Callable[[], object], error: type[Exception], said: list[str]
) -> None:
    """The error message names the function, the wrong value and the accepted values, in this order.

    It has one short line.
    """
    names_what_is_taken(call, error, said, shorter_than=350)


def test_a_wrong_argument_is_told_before_anything_runs() -> None:
    """A wrong argument raises an error before any pass runs."""
    calls: list[Tensor] = []

    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            return super().forward(x)

    wrongs: list[dict[str, Any]] = [
        {"warmup": -1},
        {"repeats": 0},
        {"units": 3},
        {"hardware": "H10"},
        {"ignore": ["nobody"]},
        {"backward": 1},
    ]
    for wrong in wrongs:
        with pytest.raises(lflops.LflopsError):
            lflops.measure(Counts(2, 2), x, **wrong)
    assert [] == calls


def test_what_the_user_raises_is_let_through(clock: StillClock) -> None:
    """An error that the model raises is not replaced by an error of lflops."""
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        measure(Part(clock), x, {"nobody": 1})


def test_a_trial_is_no_work_of_who_counts_around_it() -> None:
    """A count around `measure` counts only passes of the model, not the trial of the hook overhead.

    There are three passes: a counting pass, an unprofiled pass and a hooked pass.
    """
    _of_timer.cache_clear()
    model = nn.Linear(2, 2)
    with lflops.counting(model) as outer:
        measure(model, x)
    assert {"addmm": 3} == {cell.operator: cell.calls for cell in outer.profile.op_counts}


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta"), PlainMode]
)
def test_a_trial_may_be_the_first_thing_anywhere(
    context: Callable[[], AbstractContextManager[object]],
) -> None:
    """The trial of the hook overhead works in any context in which `measure` is called first.

    It runs on the host and builds an autograd graph.
    """
    _of_timer.cache_clear()
    with context():
        overhead = hook_overhead(HostClock())
    assert [] == [name for name, seconds in vars(overhead).items() if seconds < 0]


def test_a_clock_of_ones_own_has_no_overhead() -> None:
    """With a clock of a test, the hook overhead is assumed to be zero."""
    assert NO_OVERHEAD == hook_overhead(StillClock())


class Around(nn.Module):
    """A model with a compiled part."""

    def __init__(self, clock: StillClock, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.head = Part(clock, 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


class Compiled:
    """A backend of `torch.compile` whose graphs take 1 s."""

    def __init__(self, clock: StillClock) -> None:
        torch.compiler.reset()
        self.clock = clock

    def __call__(self, module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.clock.advance(1)
            return module.forward(*args)

        return run


def test_what_is_compiled_is_one_row_with_time(clock: StillClock) -> None:
    """A compiled module has a time, but the times of its submodules are unknown.

    The submodules ran only in the counting pass, which is eager, so they have MACs. There is a note
    about this, and no warning.
    """
    inner = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), backend=Compiled(clock))
    profile = measure(Around(clock, inner), x, backward=True)
    assert {"": 5, "inner": 1, "head": 4} == inclusive(profile, FORWARD)
    assert (3 * 2 * 2, None) == (
        profile.modules["inner.0"].forward.macs,
        profile.modules["inner.0"].forward.seconds,
    )
    assert {"forward": 5, "backward": 8} == profile.steps[0].phases
    assert ["compiled_ran_eager"] == [note.code for note in profile.notes]


def test_a_model_that_is_compiled_whole_has_the_time_of_its_root(clock: StillClock) -> None:
    """If the whole model is compiled, in place or in a wrapper, only the root has a time."""
    in_place = Around(clock, nn.ReLU())
    in_place.head = nn.Linear(2, 2)
    in_place.compile(backend=Compiled(clock))
    assert {"": 1} == inclusive(measure(in_place, x), FORWARD)
    wrapped = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), backend=Compiled(clock))
    assert {"": 1} == inclusive(measure(wrapped, x), FORWARD)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_wrapper_in_a_dict_has_the_time_of_what_it_wraps(clock: StillClock) -> None:
    """The time of a compiled wrapper that is not a submodule belongs to the module that it wraps.

    The original module is a submodule of the model. The wrapper, which the model calls, is in a
    dict.
    """
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = Around(clock, inner)
    wrappers = {"inner": torch.compile(inner, backend=Compiled(clock))}

    def forward(self: Around, x: Tensor) -> Tensor:
        return self.head(wrappers["inner"](x))

    model.forward = MethodType(forward, model)  # type: ignore[method-assign]
    profile = measure(model, x)
    assert {"": 5, "inner": 1, "head": 4} == inclusive(profile, FORWARD)
    assert (profile.modules["inner"].compiled, profile.modules[""].forward.self_macs) == (True, 0)


def test_a_compiled_function_is_the_time_of_who_calls_it(clock: StillClock) -> None:
    """The time of a compiled function belongs to its caller, because a function is no module."""
    function = torch.compile(lambda x: x.relu() * 2, backend=Compiled(clock))
    assert {"": 1 + 4, "head": 4} == inclusive(measure(Around(clock, function), x), FORWARD)


class Fused(nn.Module):
    """An encoder layer that records in `RAN` which operators run in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with Operators() as operators:
            out = self.layer(x)
        RAN.append(operators.names)
        return out


RAN: list[list[str]] = []


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(function.overloadpacket))
        return function(*args, **(kwargs or {}))


FUSED = "aten._transformer_encoder_layer_fwd"


def test_a_layer_that_evaluates_in_one_operator_does_so_while_it_is_timed(
    clock: StillClock,
) -> None:
    """An encoder layer that evaluates in one fused operator also does so while it is timed.

    A hook on the layer itself would turn this off, as the second part of the test shows. The global
    hooks of lflops do not.
    """
    model = Fused().eval()
    batch = torch.ones(1, 3, 4)
    RAN.clear()
    with torch.no_grad():
        measure(model, batch)
        assert 3 == sum(names.count(FUSED) for names in RAN)
        RAN.clear()
        model.layer.register_forward_hook(lambda *_: None)
        measure(model, batch)
        assert 3 == len(RAN)
        for names in RAN:
            assert FUSED not in names


def test_real_time_is_real() -> None:
    """With the clock of the machine, all times are positive and add up."""
    profile = measure(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), x, backward=True)
    for phase in (FORWARD, BACKWARD):
        root = profile.modules[""].work(phase).seconds
        assert root is not None
        assert root.median > 0
        assert sum(own(profile, phase).values()) == pytest.approx(root.median)
        assert root.median == pytest.approx(profile.steps[0].phases[phase])
