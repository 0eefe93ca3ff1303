"""`measure` on models that take as long as they are told.

The clean passes are the truth, the hooked ones divide it.
"""

from collections.abc import Callable, Iterator
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

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    """What `measure` times by."""
    still = StillClock()
    monkeypatch.setattr("lflops.timing.measure.clock_of", lambda _device: still)
    return still


def measure(model: nn.Module, *args: Any, **options: Any) -> Profile:
    """With as few passes as can be."""
    return spent(lflops.measure(model, *args, **({"warmup": 0, "repeats": 1} | options)))


def own(profile: Profile, phase: str) -> dict[str, float]:
    """The seconds of each row itself; rows whose seconds are unknown are left out."""
    works = {name: module.work(phase) for name, module in profile.modules.items()}
    return {
        name: work.self_seconds.median
        for name, work in works.items()
        if work.self_seconds is not None
    }


def inclusive(profile: Profile, phase: str) -> dict[str, float]:
    """The seconds of each row and those below; rows whose seconds are unknown are left out."""
    works = {name: module.work(phase) for name, module in profile.modules.items()}
    return {name: work.seconds.median for name, work in works.items() if work.seconds is not None}


def once(seconds: float, passes: int = 1) -> TimingStats:
    """The same in all passes."""
    return TimingStats(median=seconds, low=seconds, high=seconds, n=passes)


class Block(Itself):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.take(self.first(x), 1, 2))


def block(clock: StillClock) -> nn.Module:
    """A part, something of its own, a part; and one that never runs."""
    return Block(
        clock, first=Part(clock, 4, 8), second=Part(clock, 16, 32), unused=Part(clock, 64, 128)
    )


x = torch.ones(3, 2)


def test_forward_is_timed_and_nothing_else(clock: StillClock) -> None:
    """1 + 4 + 16 s, over two passes of each kind."""
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
    """Twice the seconds; the rest of what `count` says is what `count` says."""
    model = block(clock)
    profile = measure(model, x, backward=True)
    assert [{"forward": 21, "backward": 42}] * 2 == [step.phases for step in profile.steps]
    assert {"": 2, "first": 8, "second": 32} == own(profile, BACKWARD)
    assert {"": 42, "first": 8, "second": 32} == inclusive(profile, BACKWARD)
    assert lflops.count(model, x, backward=True).op_counts == profile.op_counts


def test_where_nothing_ran_the_seconds_are_unknown_and_not_zero(clock: StillClock) -> None:
    """No backward without one, none of a module that is never called, never a recompute, optimizer or other."""
    profile = measure(block(clock), x)
    works = {
        (name, phase): module.work(phase)
        for name, module in profile.modules.items()
        for phase in PHASES
    }
    assert {("", FORWARD), ("first", FORWARD), ("second", FORWARD)} == {
        place for place, work in works.items() if work.seconds is not None
    }
    assert [] == [
        place
        for place, work in works.items()
        if (work.seconds is None) != (work.self_seconds is None)
    ]


def test_a_container_has_the_time_of_what_is_in_it_and_none_of_its_own(clock: StillClock) -> None:
    """A list of modules is never called, so what it takes itself is unknown."""

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
    """Takes longer while somebody watches, as everything does; and no pass is like the one before."""

    def __init__(self, clock: StillClock, slower: float) -> None:
        super().__init__(clock)
        self.slower = slower
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hooked = bool(module_module._global_forward_pre_hooks)
        self.seconds = (
            self.calls * (self.slower if hooked else 1.0),
            2.0 * (self.slower if hooked else 1.0),
        )
        return super().forward(x)


def test_the_total_is_that_of_the_clean_passes(clock: StillClock) -> None:
    """Passes 2, 3 and 8 are clean and take as many seconds, and 2 s backward.

    4, 5 and 6 are hooked, and take four times as long.
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
    assert (
        Note(code="time_scaled", subject="", values={"forward": 3 / 20, "backward": 2 / 8}),
    ) == profile.notes  # median by median


def test_what_is_off_by_a_twentieth_is_not_worth_a_note(clock: StillClock) -> None:
    """1.05 is the last that goes without, and a note names no part that fits."""

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
    """Everything at once: a shared part, a list, something of its own, a part that is computed again."""

    def forward(self, x: Tensor) -> Tensor:
        for each in self.parts:
            x = checkpoint(each, self.take(x, 3, 5), use_reentrant=False)
        return self.twin(x)


def test_own_seconds_over_all_rows_are_the_roots_in_each_phase(clock: StillClock) -> None:
    """And each row's are its own and those of the rows below it."""
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
    """Its output is a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.head(self.body(x)).sum(), x, create_graph=True)[0]


def test_a_gradient_that_forward_takes_is_a_part_of_its_time(clock: StillClock) -> None:
    """5 s forward and 10 s backward are one pass of 15 s, and nothing is scaled to make it so."""
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
    """4 + 8 s of a part are in no total, but in its note."""
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
    """To look for leaves whose gradients have to be put aside takes 1000 s, to free the last ones 100 s."""
    model = block(clock)
    leaves, clear = autograd.leaves, Gradients.clear

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
    """Takes a thousand seconds to free."""

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
    """It goes when the pass is over, and with it what it holds."""
    profile = measure(
        block(clock), x, backward=True, loss=lambda out: Holds.apply(out, clock).sum()
    )
    assert clock.now > 3 * 1000
    assert [{"forward": 21, "backward": 42}] * 2 == [step.phases for step in profile.steps]
    assert {"": 2, "first": 8, "second": 32} == own(profile, BACKWARD)


def test_every_pass_makes_gradients_of_its_own(clock: StillClock) -> None:
    """None finds one of the pass before: else torch would add to it, which takes longer."""
    found: list[Any] = []

    class Looks(Part):
        def forward(self, x: Tensor) -> Tensor:
            found.append(self.weight.grad)
            return super().forward(x) * self.weight

    measure(Looks(clock), x, backward=True, warmup=2, repeats=2)
    assert [None] * (1 + 2 + 4 + 1) == found


def test_as_many_passes_run_as_are_asked_for(clock: StillClock) -> None:
    """One is counted, 3 warm up, 10 of each kind are kept and one between them is not, where nothing else is said."""
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
        return {"logits": self.part(ids.float() if batch is None else batch["x"])}


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
    """Of the run and of each of its steps. No embedding looks up the integers as tokens."""
    profile = measure(Tokens(clock), torch.ones(4, 6, dtype=torch.long), units=units)
    assert expected == (profile.run.samples_per_step, profile.run.tokens_per_step)
    assert {expected} == {(step.samples, step.tokens) for step in profile.steps}


def test_a_function_of_the_batch_is_given_what_the_model_is(clock: StillClock) -> None:
    """Also by keyword."""
    given: list[Any] = []

    def units(*args: Any, **kwargs: Any) -> dict[str, int]:
        given.append((args, kwargs))
        return {"samples": 1}

    ids = torch.ones(2, 3, dtype=torch.long)
    measure(Tokens(clock), (ids,), {"batch": {"x": x}}, units=units)
    assert [((ids,), {"batch": {"x": x}})] == given


def test_arguments_may_have_a_history_and_structure(clock: StillClock) -> None:
    """The body that made the features is no part of the model.

    It is neither timed nor gone back into, by any pass.
    """
    body = Part(clock, 1000, 1000)
    features = body(torch.ones(3, 2))
    profile = measure(
        Tokens(clock), kwargs={"ids": features, "batch": {"x": features}}, backward=True, repeats=2
    )
    assert [{"forward": 1, "backward": 2}] * 4 == [step.phases for step in profile.steps]
    assert body.weight.grad is None


def test_a_loss_is_timed_with_the_model(clock: StillClock) -> None:
    """It is the root's own, and gets what the model gives."""
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
    """Its figures are the run's."""
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
    """On the device that the model is on."""
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
    """Who asked, what was given, what is taken, in that order and on one line that can be read."""
    names_what_is_taken(call, error, said, shorter_than=350)


def test_a_wrong_argument_is_told_before_anything_runs() -> None:
    """No pass for someone who has to ask again."""
    calls: list[Tensor] = []

    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            return super().forward(x)

    wrongs: Iterator[dict[str, Any]] = iter(
        [
            {"warmup": -1},
            {"repeats": 0},
            {"units": 3},
            {"hardware": "H10"},
            {"ignore": ["nobody"]},
            {"backward": 1},
        ]
    )
    for wrong in wrongs:
        with pytest.raises(lflops.LflopsError):
            lflops.measure(Counts(2, 2), x, **wrong)
    assert [] == calls


def test_what_the_user_raises_is_let_through(clock: StillClock) -> None:
    """An error of the model's own is not one of ours, in whichever pass."""
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        measure(Part(clock), x, {"nobody": 1})


def test_a_trial_is_no_work_of_who_counts_around_it() -> None:
    """One pass is counted, three are timed.

    What a trial runs to find out what hooks cost is no model's.
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
    """Whatever holds where `measure` is called first.

    What hooks cost is tried out on the host, with a graph.
    """
    _of_timer.cache_clear()
    with context():
        overhead = hook_overhead(HostClock())
    assert [] == [name for name, seconds in vars(overhead).items() if seconds < 0]


def test_a_clock_of_ones_own_has_no_overhead() -> None:
    """What hooks cost this machine is nothing on it."""
    assert NO_OVERHEAD == hook_overhead(StillClock())


class Around(nn.Module):
    """A model of which a part is compiled."""

    def __init__(self, clock: StillClock, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.head = Part(clock, 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


class Compiled:
    """A compiler whose graphs take a second."""

    def __init__(self, clock: StillClock) -> None:
        torch.compiler.reset()
        self.clock = clock

    def __call__(self, module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.clock.advance(1)
            return module.forward(*args)

        return run


def test_what_is_compiled_is_one_row_with_time(clock: StillClock) -> None:
    """Its parts ran when they were counted, eagerly; what they take of it when it is compiled is unknown.

    No warning is heard.
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
    """As a wrapper, and in place."""
    in_place = Around(clock, nn.ReLU())
    in_place.head = nn.Linear(2, 2)
    in_place.compile(backend=Compiled(clock))
    assert {"": 1} == inclusive(measure(in_place, x), FORWARD)
    wrapped = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), backend=Compiled(clock))
    assert {"": 1} == inclusive(measure(wrapped, x), FORWARD)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_wrapper_in_a_dict_has_the_time_of_what_it_wraps(clock: StillClock) -> None:
    """The model holds the plain module, and calls the wrapper, which no module of it holds."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = Around(clock, inner)
    wrappers = {"inner": torch.compile(inner, backend=Compiled(clock))}
    model.forward = MethodType(lambda self, x: self.head(wrappers["inner"](x)), model)  # type: ignore[method-assign]
    profile = measure(model, x)
    assert {"": 5, "inner": 1, "head": 4} == inclusive(profile, FORWARD)
    assert (profile.modules["inner"].compiled, profile.modules[""].forward.self_macs) == (True, 0)


def test_a_compiled_function_is_the_time_of_who_calls_it(clock: StillClock) -> None:
    """It is no module, and has no row."""
    function = torch.compile(lambda x: x.relu() * 2, backend=Compiled(clock))
    assert {"": 1 + 4, "head": 4} == inclusive(measure(Around(clock, function), x), FORWARD)


class Fused(nn.Module):
    """Says which operators run."""

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
    """A hook on the layer itself turns that off: hooks on all modules do not."""
    model, batch = Fused().eval(), torch.ones(1, 3, 4)
    RAN.clear()
    with torch.no_grad():
        measure(model, batch)
        assert [FUSED] * 3 == [name for names in RAN for name in names if name == FUSED]
        RAN.clear()
        model.layer.register_forward_hook(lambda *_: None)
        measure(model, batch)
        assert 3 == len(RAN)
        assert FUSED not in {name for names in RAN for name in names}


def test_real_time_is_real() -> None:
    """By this machine's own clock everything has some, which adds up."""
    profile = measure(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), x, backward=True)
    for phase in (FORWARD, BACKWARD):
        root = profile.modules[""].work(phase).seconds
        assert root is not None
        assert root.median > 0
        assert sum(own(profile, phase).values()) == pytest.approx(root.median)
        assert root.median == pytest.approx(profile.steps[0].phases[phase])
