"""Test the step breakdown: its parts add up to 1, and each part is worked out by hand.

The last tests read the breakdown from the verdict, from `lflops show` and from real runs.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F

import lflops
from lflops.analysis.analysis import analyze
from lflops.analysis.step_breakdown import StepBreakdown
from lflops.analysis.utilization import utilization
from lflops.cli.main import main
from lflops.hardware.chips import Hardware
from lflops.profile.notes import Note
from lflops.profile.profile import Communication, OpCount, Profile
from lflops.profile.records import PHASES, Phase, Trace
from lflops.profile.steps import Step
from lflops.report.summary_facts import report_of
from tests.support.fake_clock import StillClock, use_clock
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, Classifier, fit, loader, watching
from tests.support.profile_builders import cell, clocked, product, profile, run, spread
from tests.support.terminal import drawn

pytestmark = LIGHTNINGS_WARNINGS

CHIP = Hardware("chip", {"fp32": 1000.0}, 100.0)
"""A chip that takes 1/1000 s for a FLOP and 1/100 s for a byte."""

ROWS: dict[str, dict[str, Any]] = {
    "": {"class_name": "Model"},
    "linear": {"class_name": "Linear"},
    "norm": {"class_name": "LayerNorm"},
}

CELLS = (
    product("linear", "aten::addmm", "forward", macs=50, bytes_moved=20),
    cell("norm", "aten::native_layer_norm", "forward", flops=30, bytes_moved=40),
    product("linear", "aten::mm", "backward", macs=100, bytes_moved=20),
    product("linear", "aten::addmm", "recompute", macs=50, bytes_moved=20),
)
"""The operators of `ROWS`, with these times on `CHIP`:

- `linear` in forward: 0.1 s for the FLOPs and 0.2 s for the bytes, so 0.1 s beyond the FLOPs
- `norm` in forward: 0.4 s for the bytes
- `linear` in backward: 0.2 s for the FLOPs, and 0.2 s for the bytes
- `linear` in recompute: as in forward
"""

OWN: dict[tuple[str, Phase], float] = {
    ("", "forward"): 0.25,
    ("linear", "forward"): 0.5,
    ("norm", "forward"): 0.25,
    ("linear", "backward"): 0.75,
    ("linear", "recompute"): 0.25,
}

PHASE_SECONDS = {"data": 0.5, "forward": 1.0, "backward": 1.0, "optimizer": 0.75, "other": 0.75}


def stepped(
    cells: Iterable[OpCount] = CELLS,
    phases: Mapping[str, float] = PHASE_SECONDS,
    seconds: float = 4.0,
    **fields: Any,
) -> Profile:
    """Return the profile of one unprofiled step of the modules in `ROWS`."""
    step = Step(index=0, kind="unprofiled", seconds=seconds, phases=phases)
    facts = {"kind": "training", "hardware": CHIP, "device_type": "cpu"} | fields.pop("facts", {})
    return profile(ROWS, cells, run=run(**facts), steps=(step,), **fields)


def breakdown(given_profile: Profile, hardware: Hardware | None = None) -> StepBreakdown:
    """Return the step breakdown of a profile. It must be known."""
    found = utilization(given_profile, hardware).breakdown
    assert found is not None
    return found


def seconds(found: StepBreakdown) -> dict[str, float]:
    """Return the seconds of each part."""
    return {name: share * found.seconds for name, share in found.parts.items()}


def test_a_step_is_cut_into_its_phases_and_the_modules_time_into_what_it_was_for() -> None:
    """The time of modules is divided into four parts, and the other phases are one part each.

    - ideal compute: 0.1 s of forward and 0.2 s of backward
    - recompute: 0.1 s
    - memory-bound: 0.1 s of `linear` in forward, 0.1 s in recompute, and the whole 0.25 s of `norm`
    - inefficient kernels: the rest, 0.25 s of the root and 0.9 s of `linear`
    """
    found = breakdown(clocked(stepped(), OWN))
    expected = {
        "ideal_compute": 0.3,
        "recompute": 0.1,
        "memory_bound": 0.45,
        "inefficient_kernels": 1.15,
        "data": 0.5,
        "optimizer": 0.75,
        "other": 0.75,
    }
    assert pytest.approx(expected) == seconds(found)
    linear = {
        "ideal_compute": 0.3,
        "recompute": 0.1,
        "memory_bound": 0.2,
        "inefficient_kernels": 0.9,
    }
    norm = {
        "ideal_compute": 0.0,
        "recompute": 0.0,
        "memory_bound": 0.25,
        "inefficient_kernels": 0.0,
    }
    root = {
        "ideal_compute": 0.0,
        "recompute": 0.0,
        "memory_bound": 0.0,
        "inefficient_kernels": 0.25,
    }
    told = {
        name: {part: share * 4 for part, share in parts.items()}
        for name, parts in found.modules.items()
    }
    assert {
        "": pytest.approx(root),
        "linear": pytest.approx(linear),
        "norm": pytest.approx(norm),
    } == told
    assert () == found.inside_rest


def test_useful_and_recompute_are_what_was_executed() -> None:
    """The executed share is ideal compute plus recompute: 0.4 s of 4 s.

    This holds here because no module is faster than the peak allows.
    """
    found = utilization(clocked(stepped(), OWN))
    assert found.breakdown is not None
    assert (
        pytest.approx(0.1)
        == found.executed
        == pytest.approx(
            found.breakdown.parts["ideal_compute"] + found.breakdown.parts["recompute"]
        )
    )


@pytest.mark.parametrize(("took", "is_too_low"), [(0.09, True), (0.095, False), (0.3, False)])
def test_a_peak_that_modules_exceed_is_too_low(took: float, is_too_low: bool) -> None:
    """If a module is much faster than the peak allows, the verdict says that the peak is too low.

    `linear` needs 0.1 s at the peak, so MFU is 10 % of the step of 1 s. In 0.09 s, `linear` is 1.11
    times as fast as the peak, and in 0.095 s 1.05 times, which may be a measurement error.
    """
    given_profile = clocked(
        stepped(CELLS[:1], {"forward": took, "optimizer": 1 - took}, 1.0),
        {("linear", "forward"): took},
    )
    found = utilization(given_profile)
    assert (pytest.approx(0.1), is_too_low) == (found.mfu, found.is_peak_too_low)
    told = report_of(analyze(given_profile)).verdict
    reasons = (*told.why, *told.also)
    is_named = any(
        "than the peak of chip allows, so this peak is too low" in reason for reason in reasons
    )
    has_advice = any("lflops hardware --measure" in advice for advice in told.next)
    assert is_too_low == is_named == has_advice


def test_no_part_takes_more_than_what_the_ones_before_it_left() -> None:
    """A part gets at most the time that the parts before it have left.

    `linear` takes 0.15 s of forward: 0.1 s are ideal compute, and memory-bound gets the other
    0.05 s, although the bytes need 0.1 s more. Nothing is left for inefficient kernels.
    """
    found = breakdown(
        clocked(stepped(CELLS[:1], {"forward": 0.15}, 0.15), {("linear", "forward"): 0.15})
    )
    assert pytest.approx({"ideal_compute": 0.1, "memory_bound": 0.05}) == seconds(found)


def test_what_no_module_has_the_time_of_is_the_nearest_ones_above() -> None:
    """The work of modules without a time belongs to the nearest timed module above them.

    Here, the root is compiled and only the root is timed. It has the work of both layers in 1 s:
    0.1 s are ideal compute, 0.5 s memory-bound, and the rest inefficient kernels.
    """
    found = breakdown(clocked(stepped(CELLS[:2], {"forward": 1.0}, 1.0), {("", "forward"): 1.0}))
    assert pytest.approx(
        {"ideal_compute": 0.1, "memory_bound": 0.5, "inefficient_kernels": 0.4}
    ) == seconds(found)
    assert [""] == list(found.modules)


def test_without_times_of_modules_a_phase_is_cut_as_a_whole() -> None:
    """Without module times, forward and backward are divided as a whole.

    Forward has 0.1 s of ideal compute and 0.5 s memory-bound. Backward has 0.2 s of ideal compute,
    0.1 s of recompute and 0.1 s memory-bound. Together they take 2 s, so 1 s is left.
    """
    found = breakdown(stepped())
    inside = {
        "ideal_compute": 0.3,
        "recompute": 0.1,
        "memory_bound": 0.6,
        "inefficient_kernels": 1.0,
    }
    assert pytest.approx(inside) == {
        name: took for name, took in seconds(found).items() if name not in PHASE_SECONDS
    }
    assert {} == found.modules


def test_a_step_without_phases_is_cut_as_a_whole() -> None:
    """Without phases, all 4 s are divided, and the remaining 3 s are inefficient kernels."""
    assert pytest.approx(
        {"ideal_compute": 0.3, "recompute": 0.1, "memory_bound": 0.6, "inefficient_kernels": 3.0}
    ) == seconds(breakdown(stepped(phases={})))


def test_time_of_a_phase_that_is_in_no_module_shown_keeps_its_name() -> None:
    """Time of a phase that belongs to no module keeps the name of the phase.

    Here, an ignored module took half of forward.
    """
    found = breakdown(
        clocked(stepped(CELLS[1:2], {"forward": 1.0}, 1.0), {("norm", "forward"): 0.5})
    )
    assert pytest.approx(
        {"memory_bound": 0.4, "inefficient_kernels": 0.1, "forward": 0.5}
    ) == seconds(found)


def test_what_no_phase_tells_of_is_other() -> None:
    """Forward takes 1 s of 4 s, and the other 3 s are in no phase, so they are `other`."""
    assert pytest.approx(3.0) == seconds(breakdown(stepped(CELLS[1:2], {"forward": 1.0})))["other"]


def test_the_parts_of_generating_are_in_forward_already() -> None:
    """Prefill and decode are inside forward, so they are not counted again."""
    found = breakdown(stepped(CELLS[1:2], {"forward": 4.0, "prefill": 1.0, "decode": 3.0}))
    assert pytest.approx({"memory_bound": 0.4, "inefficient_kernels": 3.6}) == seconds(found)


def test_a_part_is_a_share_of_the_summed_steps() -> None:
    """A share is a ratio of sums: data takes 6 of 16 s. With medians, it would be 2 of 4 s."""
    phases = [
        {"data": 1.0, "forward": 3.0},
        {"data": 2.0, "forward": 2.0},
        {"data": 3.0, "forward": 5.0},
    ]
    steps = tuple(
        Step(index=i, kind="unprofiled", seconds=sum(each.values()), phases=each)
        for i, each in enumerate(phases)
    )
    assert pytest.approx(6 / 16) == breakdown(replace(stepped(), steps=steps)).parts["data"]


def test_a_causal_mask_leaves_less_to_be_useful() -> None:
    """Only executed MACs are ideal compute: 60 of 100 MACs take 0.12 s."""
    masked = replace(
        product("linear", "aten::sdpa", "forward", macs=100, bytes_moved=0), executed_macs=60
    )
    assert pytest.approx({"ideal_compute": 0.12, "inefficient_kernels": 0.88}) == seconds(
        breakdown(stepped([masked], {"forward": 1.0}, 1.0))
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"hardware": None}, "no chip"),
        ({"hardware": Hardware("chip", {"bf16": 1000.0}, 100.0)}, "no peak of that dtype"),
    ],
)
def test_without_a_peak_there_is_no_budget(changed: dict[str, Any], why: str) -> None:
    """Without a peak of the run's dtype, the breakdown is unknown."""
    assert utilization(stepped(facts=changed)).breakdown is None, why


def test_without_times_or_counts_there_is_no_budget() -> None:
    """The breakdown needs both: a count has no times, and times alone have no work."""
    assert utilization(replace(stepped(), steps=())).breakdown is None
    assert utilization(stepped(())).breakdown is None


def test_what_cannot_be_told_apart_is_said() -> None:
    """`inside_rest` names the parts that are unknown and therefore included in the rest.

    Without a bandwidth, memory-bound time is unknown. Without a trace of the GPU, idle time is.
    """
    found = breakdown(stepped(facts={"device_type": "cuda"}), Hardware("chip", {"fp32": 1000.0}))
    assert ("idle", "memory_bound") == found.inside_rest
    assert pytest.approx({"ideal_compute": 0.3, "recompute": 0.1, "inefficient_kernels": 1.6}) == {
        name: took for name, took in seconds(found).items() if name not in PHASE_SECONDS
    }


def traced(
    kernels: Mapping[tuple[str, Phase], float], *, idle: float = 6.0, data: float = 0.0
) -> Profile:
    """Return the profile of a step of 10 s on a GPU, with a trace of two steps.

    In the whole trace, the device computes for 8 s, communicates for 4 s, copies for 2 s, and does
    nothing for `idle` seconds.

    Args:
        kernels: Device seconds by module and phase.
        idle: Idle seconds in the trace.
        data: Seconds of the step in which it waits for data. Forward is shorter by this time.
    """
    trace = Trace(
        files={},
        batches=2,
        device_compute_seconds=8.0,
        exposed_comm_seconds=4.0,
        exposed_copy_seconds=2.0,
        device_idle_seconds=idle,
    )
    phases = {"forward": 5.0 - data, "backward": 4.0, "optimizer": 1.0}
    if data:
        phases["data"] = data
    untimed = stepped(phases=phases, seconds=10.0, trace=trace, facts={"device_type": "cuda"})

    modules = dict(untimed.modules)
    for (name, phase), took in kernels.items():
        work = replace(modules[name].work(phase), device_seconds=spread(took))
        modules[name] = replace(modules[name], **{phase: work})
    return replace(untimed, modules=modules)


KERNELS: dict[tuple[str, Phase], float] = {
    ("", "forward"): 2.0,
    ("linear", "forward"): 1.0,
    ("norm", "forward"): 1.0,
    ("", "backward"): 1.0,
    ("linear", "backward"): 1.0,
    ("", "optimizer"): 1.0,
}


def test_a_traced_devices_work_is_that_of_the_clean_step() -> None:
    """The trace divides the unprofiled step of 10 s.

    The traced 20 s are two steps. Each has 4 s of kernels (2 s in forward, 1 s in backward and 1 s
    in the optimizer), 2 s of communication, 1 s of copies, and 3 s of idle time.

    In forward, `linear` takes 1 s: 0.1 s of ideal compute and 0.1 s memory-bound. `norm` takes 1 s,
    of which 0.4 s are memory-bound. In backward, `linear` takes 1 s: 0.2 s of ideal compute, 0.1 s
    of recompute and 0.1 s memory-bound.
    """
    found = breakdown(traced(KERNELS))
    expected = {
        "ideal_compute": 0.3,
        "recompute": 0.1,
        "memory_bound": 0.6,
        "inefficient_kernels": 2.0,
    }
    apart = {"optimizer": 1.0, "communication": 2.0, "copy": 1.0, "idle": 3.0}
    assert pytest.approx(expected | apart) == seconds(found)
    assert () == found.inside_rest
    assert pytest.approx(0.06) == found.modules["norm"]["inefficient_kernels"]
    assert {"forward": pytest.approx(0.3), "backward": pytest.approx(0.3)} == found.idle
    idle = "30.0 % of the step (3.00 s) is idle time of the device, mostly in forward."
    assert idle in report_of(analyze(traced(KERNELS))).verdict.why


def test_a_timeline_without_kernels_by_module_is_cut_as_a_whole() -> None:
    """Without kernels by module, forward and backward are divided as a whole.

    They take 9 s: 2 s are communication, 1 s is a copy, and the device is idle for 2 s. The trace
    has 4 s of kernels per step.
    """
    inside = {
        "ideal_compute": 0.3,
        "recompute": 0.1,
        "memory_bound": 0.6,
        "inefficient_kernels": 3.0,
        "idle": 2.0,
    }
    assert pytest.approx(inside | {"communication": 2.0, "copy": 1.0, "optimizer": 1.0}) == seconds(
        breakdown(traced({}))
    )


def test_a_host_that_tracing_slows_down_makes_no_idle_time() -> None:
    """Tracing slows down the host, so the device is idle for longer in the trace.

    The breakdown does not change, because it has the idle time of an unprofiled step.
    """
    assert seconds(breakdown(traced(KERNELS))) == seconds(breakdown(traced(KERNELS, idle=60.0)))


def test_copies_outside_of_all_phases_are_no_kernels_of_a_pass() -> None:
    """Copies outside all phases, such as a batch's copy, do not change forward and backward."""
    assert seconds(breakdown(traced(KERNELS))) == seconds(
        breakdown(traced(KERNELS | {("", "other"): 9.0}))
    )


def test_kernels_of_collectives_compute_nothing() -> None:
    """Kernels of collectives count as communication, so the computing parts do not change.

    Backward launches collectives that take 2 s.
    """
    sent = Communication(
        module="linear",
        phase="backward",
        collective="all_reduce",
        group="",
        group_size=2,
        calls=1,
        bytes=8,
        seconds=2.0,
    )
    longer = traced(KERNELS | {("", "backward"): 3.0, ("linear", "backward"): 3.0})
    assert seconds(breakdown(traced(KERNELS))) == seconds(
        breakdown(replace(longer, communication=(sent,)))
    )


def test_a_device_without_work_while_the_loader_is_waited_for_waits_for_data() -> None:
    """If the device has no work during the wait for data, the time is data wait, not idle time.

    The loader takes 2 s of forward's 5 s. The idle time is 2 s shorter, and no other part changes.
    """
    without = seconds(breakdown(traced(KERNELS, data=0.0)))
    waiting = seconds(breakdown(traced(KERNELS, data=2.0)))
    assert pytest.approx(without | {"data": 2.0, "idle": 1.0}) == waiting


TIMES = st.floats(0.0, 100.0)
MADE_CELLS = st.lists(
    st.builds(
        lambda module, phase, macs, moved: product(
            module, "aten::mm", phase, macs=macs, bytes_moved=moved
        ),
        st.sampled_from(list(ROWS)),
        st.sampled_from(PHASES),
        st.integers(0, 10_000),
        st.integers(0, 10_000),
    ),
    min_size=1,
    max_size=12,
)
MADE_PHASES = st.dictionaries(
    st.sampled_from(
        ["data", "transfer", "forward", "backward", "clip", "optimizer", "other", "mine"]
    ),
    TIMES,
)
MADE_STEPS = st.lists(st.tuples(st.floats(1e-6, 1000.0), MADE_PHASES), min_size=1, max_size=4)
MADE_OWN = st.dictionaries(
    st.tuples(st.sampled_from(list(ROWS)), st.sampled_from(("forward", "backward", "recompute"))),
    TIMES,
)


@settings(max_examples=200, deadline=None)
@given(MADE_CELLS, MADE_STEPS, MADE_OWN)
def test_a_budget_adds_up_whatever_was_measured(
    cells: list[OpCount], made: list[tuple[float, dict[str, float]]], own: Any
) -> None:
    """For any profile, the parts add up to 1 within a thousandth, and none is negative.

    The parts of all modules together are not larger than the parts of the step.
    """
    steps = tuple(
        Step(index=i, kind="unprofiled", seconds=took, phases=phases)
        for i, (took, phases) in enumerate(made)
    )
    found = breakdown(clocked(replace(stepped(cells), steps=steps), own))
    assert math.isclose(1.0, sum(found.parts.values()), abs_tol=1e-3)
    assert [] == [name for name, share in found.parts.items() if share < 0]
    for part in ("ideal_compute", "recompute", "memory_bound", "inefficient_kernels"):
        assert (
            sum(parts[part] for parts in found.modules.values())
            <= found.parts.get(part, 0.0) + 1e-9
        )


def test_a_part_counted_twice_would_be_found() -> None:
    """The check of the sum can fail: if recompute is also part of ideal compute, it is not 1."""
    found = breakdown(clocked(stepped(), OWN))
    twice = found.parts | {"ideal_compute": found.parts["ideal_compute"] + found.parts["recompute"]}
    assert not math.isclose(1.0, sum(twice.values()), abs_tol=1e-3)


class Slow(Classifier):
    """A model with a forward of 4 s on the test's clock.

    With `pointwise`, it also runs a `Pointwise` with this many operators. `idle` are seconds after
    each batch.
    """

    def __init__(self, clock: StillClock, *, idle: float = 0.0, pointwise: int = 0) -> None:
        super().__init__()
        self.clock = clock
        self.idle = idle
        self.pointwise = pointwise
        self.slow = Pointwise(clock, pointwise) if pointwise else nn.Identity()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.clock.advance(4.0)
        return F.cross_entropy(self.head(self.slow(self.body(batch[0]))), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        self.clock.advance(self.idle)


class Pointwise(nn.Module):
    """Multiplies 4 x 8 floats by a number, `times` times, without autograd.

    Each multiplication moves 2 x 128 bytes, which takes 2 s at 128 bytes/s.
    """

    def __init__(self, clock: StillClock, times: int) -> None:
        super().__init__()
        self.clock = clock
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        y = x.detach()
        for _ in range(self.times):
            y = y * 1.5
            self.clock.advance(2.0)
        return x


SLOW_CHIP = Hardware("abacus", {"fp32": 1e6}, 128.0)


def trained(
    monkeypatch: pytest.MonkeyPatch, *, data: float = 0.0, idle: float = 0.0, pointwise: int = 0
) -> dict[str, float]:
    """Train a `Slow` model, and return the seconds of each part of its step breakdown.

    Only the planted times and the 4 s of forward advance the clock.
    """
    clock = StillClock()
    use_clock(monkeypatch, clock)
    monitor = watching(hardware=SLOW_CHIP)
    fit(
        Slow(clock, idle=idle, pointwise=pointwise),
        monitor,
        data=loader(30, look=lambda: clock.advance(data)),
    )
    found = breakdown(monitor.profiles[0])
    assert math.isclose(1.0, sum(found.parts.values()), abs_tol=1e-3)
    return seconds(found)


@pytest.mark.parametrize(
    ("planted", "part", "amount"),
    [
        ({"data": 3.0}, "data", 3.0),
        ({"idle": 5.0}, "other", 5.0),
        ({"pointwise": 3}, "memory_bound", 6.0),
    ],
    ids=["data wait", "idle host", "slow pointwise work"],
)
def test_the_part_that_grows_is_the_planted_one(
    planted: Any, part: str, amount: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted seconds make one part longer by this time, and no other part by more than 1 ms."""
    before = trained(monkeypatch)
    after = trained(monkeypatch, **planted)
    grown = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in after | before}
    expected = dict.fromkeys(grown, 0.0) | {part: amount}
    assert pytest.approx(expected, abs=1e-3) == grown


def test_a_measured_model_adds_up() -> None:
    """The parts of a model that was really measured add up to 1."""
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    measured = lflops.measure(
        model,
        Tensor(4, 16),
        backward=True,
        warmup=0,
        repeats=2,
        hardware=Hardware("toy", {"fp32": 1e9}, 1e9),
    )
    assert math.isclose(1.0, sum(breakdown(measured).parts.values()), abs_tol=1e-3)
    assert {"", "0", "1", "2"} == set(breakdown(measured).modules)


def test_a_profile_that_was_only_counted_has_none() -> None:
    """A count has no times, so there is no breakdown."""
    assert utilization(lflops.count(nn.Linear(2, 2), Tensor(1, 2)), CHIP).breakdown is None


def test_the_verdict_names_the_largest_parts_in_words() -> None:
    """The verdict names issues first, and counts no second twice.

    `linear` has 0.9 s of inefficient kernels. Recomputing it takes 0.25 s, of which 0.1 s are its
    matmuls at the peak. The other 0.15 s belong to the finding about recompute, so 0.75 s remain.
    The 0.25 s of the model itself are a different finding.

    The optimizer, the time outside all phases and the wait for data are issues, and leave no room
    for other findings.
    """
    told = report_of(analyze(clocked(stepped(), OWN))).verdict
    assert (
        "Another 18.8 % of the step (750 ms) is lost to inefficient kernels, mostly in linear."
        == told.findings[3].sentence
    )
    assert (
        "18.8 % of the step (750 ms) is optimizer work.",
        (
            "18.8 % of the step (750 ms) is spent outside forward, backward and the other phases, "
            "for example on metrics, logging, checkpoints or the preparation of batches."
        ),
        "12.5 % of the step (500 ms) is spent waiting for data.",
    ) == told.why
    advice = "Pass fused=True to the optimizer if it accepts this argument, or use larger batches."
    assert advice == told.next[0]


def test_pointwise_work_is_named_by_the_kinds_of_its_modules() -> None:
    """Two norms are memory-bound for 0.4 s each. They have no matmuls: it is pointwise work."""
    rows: dict[str, dict[str, Any]] = {
        "": {"class_name": "Model"},
        "a": {"class_name": "LayerNorm"},
        "b": {"class_name": "LayerNorm"},
    }
    cells = [
        cell(name, "aten::native_layer_norm", "forward", bytes_moved=40) for name in ("a", "b")
    ]
    step = Step(index=0, kind="unprofiled", seconds=1.0, phases={"forward": 1.0})
    of_norms = profile(rows, cells, run=run(hardware=CHIP, device_type="cuda"), steps=(step,))
    assert (
        "80.0 % of the pass (800 ms) is memory-bound pointwise work.",
        "20.0 % of the pass (200 ms) is lost to inefficient kernels or idle time.",
    ) == report_of(
        analyze(clocked(of_norms, {("a", "forward"): 0.5, ("b", "forward"): 0.5}))
    ).verdict.why


def test_the_verdict_rests_on_no_times_that_are_far_off() -> None:
    """If module times had to be scaled by 3, the verdict names no module.

    The optimizer was timed as a whole, so its finding stays. Times that were scaled by 1.5 are
    still reliable.
    """
    given = clocked(stepped(), OWN)

    def scaled(factor: float) -> Profile:
        note = Note(code="time_scaled", subject="", values={"forward": factor})
        return replace(given, notes=(note,))

    told = [each.sentence for each in report_of(analyze(scaled(3.0))).verdict.findings]
    assert "Another 18.8 % of the step (750 ms) is lost to inefficient kernels." in told
    assert "18.8 % of the step (750 ms) is optimizer work." == told[0]
    assert report_of(analyze(given)).verdict.why == report_of(analyze(scaled(1.5))).verdict.why


def test_show_has_all_the_parts() -> None:
    """`lflops show` prints all parts in percent, the largest part first."""
    lines = drawn(clocked(stepped(), OWN), 160)
    first = next(index for index, line in enumerate(lines) if line.startswith("step breakdown"))
    assert ["28.8", "18.8", "18.8", "12.5", "11.2", "7.5", "2.5"] == [
        line.split(" %")[0].split()[-1] for line in lines[first : first + 7]
    ]


def test_show_writes_the_budget_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts in the JSON output add up to 1, and each module has its parts."""
    clocked(stepped(), OWN).save(tmp_path / "step.json")
    assert 0 == main(["show", str(tmp_path / "step.json"), "--json"])
    shown = json.loads(capsys.readouterr().out)["utilization"]["breakdown"]
    assert math.isclose(1.0, sum(shown["parts"].values()), abs_tol=1e-3)
    assert {"", "linear", "norm"} == shown["modules"].keys()
