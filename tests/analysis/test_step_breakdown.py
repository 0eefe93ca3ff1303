"""Where a step's peak-seconds went: parts that add up to 1, each worked out by hand."""

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
from lflops.report.report import report_of
from tests.support.fake_clock import StillClock, use_clock
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, Classifier, fit, loader, watching
from tests.support.profile_builders import cell, clocked, product, profile, run, spread
from tests.support.terminal import drawn

pytestmark = LIGHTNINGS_WARNINGS

CHIP = Hardware("chip", {"fp32": 1000.0}, 100.0)
"""1 FLOP takes a thousandth of a second, 1 byte a hundredth."""

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
"""Forward: 100 FLOPs in 0.1 s, bytes in 0.2, so 0.1 beyond; the norm 0.4.

Backward: 0.2 s, and bytes in no more; again: as forward.
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
    """One clean step of `ROWS`."""
    step = Step(index=0, kind="unprofiled", seconds=seconds, phases=phases)
    facts = {"kind": "training", "hardware": CHIP, "device_type": "cpu"} | fields.pop("facts", {})
    return profile(ROWS, cells, run=run(**facts), steps=(step,), **fields)


def breakdown(given_profile: Profile, hardware: Hardware | None = None) -> StepBreakdown:
    """It is known."""
    found = utilization(given_profile, hardware).breakdown
    assert found is not None
    return found


def seconds(found: StepBreakdown) -> dict[str, float]:
    """Of each part."""
    return {name: share * found.seconds for name, share in found.parts.items()}


def test_a_step_is_cut_into_its_phases_and_the_modules_time_into_what_it_was_for() -> None:
    """Useful 0.1 + 0.2, again 0.1.

    Beyond: 0.1 + the norm's 0.25, its whole time, + 0.1 again. Left: root 0.25, linear 0.3, 0.6.
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
    """0.4 s of 4, where nothing is clipped."""
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
    """Linear needs 0.1 s at the peak of a step of 1 s, so MFU is 10 %. in 0.09 s it is 1.11 times that fast, in 0.095 s 1.05 times."""
    given_profile = clocked(
        stepped(CELLS[:1], {"forward": took, "optimizer": 1 - took}, 1.0),
        {("linear", "forward"): took},
    )
    found = utilization(given_profile)
    assert (pytest.approx(0.1), is_too_low) == (found.mfu, found.is_peak_too_low)
    told = report_of(analyze(given_profile)).verdict
    named = any(
        "than the peak of chip allows, so this peak is too low" in each
        for each in (*told.why, *told.also)
    )
    assert is_too_low == named == any("lflops hardware --measure" in each for each in told.next)


def test_no_part_takes_more_than_what_the_ones_before_it_left() -> None:
    """Linear's 0.15 s of forward: 0.1 useful, 0.05 of the 0.1 that its bytes ask for, nothing left."""
    found = breakdown(
        clocked(stepped(CELLS[:1], {"forward": 0.15}, 0.15), {("linear", "forward"): 0.15})
    )
    assert pytest.approx({"ideal_compute": 0.1, "memory_bound": 0.05}) == seconds(found)


def test_what_no_module_has_the_time_of_is_the_nearest_ones_above() -> None:
    """Within a compiled module parts have no time of their own: both rows' work is in the root's second.

    What is left is 1 - 0.1 - 0.5.
    """
    found = breakdown(clocked(stepped(CELLS[:2], {"forward": 1.0}, 1.0), {("", "forward"): 1.0}))
    assert pytest.approx(
        {"ideal_compute": 0.1, "memory_bound": 0.5, "inefficient_kernels": 0.4}
    ) == seconds(found)
    assert [""] == list(found.modules)


def test_without_times_of_modules_a_phase_is_cut_as_a_whole() -> None:
    """0.1 useful and 0.5 of bytes in forward, 0.2 useful, 0.1 again and 0.1 of bytes in backward.

    1 + 1 - 1.
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
    """3 s of the 4 are left."""
    assert pytest.approx(
        {"ideal_compute": 0.3, "recompute": 0.1, "memory_bound": 0.6, "inefficient_kernels": 3.0}
    ) == seconds(breakdown(stepped(phases={})))


def test_time_of_a_phase_that_is_in_no_module_shown_keeps_its_name() -> None:
    """Half of forward was an ignored module's."""
    found = breakdown(
        clocked(stepped(CELLS[1:2], {"forward": 1.0}, 1.0), {("norm", "forward"): 0.5})
    )
    assert pytest.approx(
        {"memory_bound": 0.4, "inefficient_kernels": 0.1, "forward": 0.5}
    ) == seconds(found)


def test_what_no_phase_tells_of_is_other() -> None:
    """3 of the 4 seconds."""
    assert pytest.approx(3.0) == seconds(breakdown(stepped(CELLS[1:2], {"forward": 1.0})))["other"]


def test_the_parts_of_generating_are_in_forward_already() -> None:
    """Nothing is counted twice."""
    found = breakdown(stepped(CELLS[1:2], {"forward": 4.0, "prefill": 1.0, "decode": 3.0}))
    assert pytest.approx({"memory_bound": 0.4, "inefficient_kernels": 3.6}) == seconds(found)


def test_a_part_is_a_share_of_the_summed_steps() -> None:
    """Data 1, 2, 3 and forward 3, 2, 5: 6 of 16 seconds, where the medians would say 2 of 4."""
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
    """60 of 100 MACs ran."""
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
    """Unknown, not 0."""
    assert utilization(stepped(facts=changed)).breakdown is None, why


def test_without_times_or_counts_there_is_no_budget() -> None:
    """Neither of a count, nor of times alone."""
    assert utilization(replace(stepped(), steps=())).breakdown is None
    assert utilization(stepped(())).breakdown is None


def test_what_cannot_be_told_apart_is_said() -> None:
    """Without a bandwidth nothing is memory-bound; on a device that nobody traced idle is unknown."""
    found = breakdown(stepped(facts={"device_type": "cuda"}), Hardware("chip", {"fp32": 1000.0}))
    assert ("idle", "memory_bound") == found.inside_rest
    assert pytest.approx({"ideal_compute": 0.3, "recompute": 0.1, "inefficient_kernels": 1.6}) == {
        name: took for name, took in seconds(found).items() if name not in PHASE_SECONDS
    }


def traced(
    kernels: Mapping[tuple[str, Phase], float], *, idle: float = 6.0, data: float = 0.0
) -> Profile:
    """A step of 10 s, of which a trace of two steps saw 8 s of kernels, 4 of communication, 2 of copies and 6 of nothing."""
    trace = Trace(
        files={},
        batches=2,
        device_compute_seconds=8.0,
        exposed_comm_seconds=4.0,
        exposed_copy_seconds=2.0,
        device_idle_seconds=idle,
    )
    phases = {"forward": 5.0 - data, "backward": 4.0, "optimizer": 1.0} | (
        {"data": data} if data else {}
    )
    untimed = stepped(phases=phases, seconds=10.0, trace=trace, facts={"device_type": "cuda"})

    def row(name: str) -> Any:
        works = {
            phase: replace(
                untimed.modules[name].work(phase), device_seconds=spread(kernels[name, phase])
            )
            for phase in PHASES
            if (name, phase) in kernels
        }
        return replace(untimed.modules[name], **works)

    return replace(untimed, modules={name: row(name) for name in untimed.modules})


KERNELS: dict[tuple[str, Phase], float] = {
    ("", "forward"): 2.0,
    ("linear", "forward"): 1.0,
    ("norm", "forward"): 1.0,
    ("", "backward"): 1.0,
    ("linear", "backward"): 1.0,
    ("", "optimizer"): 1.0,
}


def test_a_traced_devices_work_is_that_of_the_clean_step() -> None:
    """20 s of trace are two steps of 10 s, with 4 of kernels each.

    2 in forward's 5, 1 in backward's 4, and the optimizer's 1.

    Of the 6 that are left 1 is a copy and 2 are communication.

    Forward: linear 1 s, of which 0.1 + 0.1; norm 1 s, of which 0.4. Backward: linear 1 s: 0.2
        useful, 0.1 again, 0.1 of its bytes.
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
    """4 s of kernels in the 9 of forward and backward, of whose rest 3 have another name."""
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
    """It is what a clean step has, however long the device had nothing to do while it was traced."""
    assert seconds(breakdown(traced(KERNELS))) == seconds(breakdown(traced(KERNELS, idle=60.0)))


def test_copies_outside_of_all_phases_are_no_kernels_of_a_pass() -> None:
    """As of a batch: forward and backward computed for as long as without them."""
    assert seconds(breakdown(traced(KERNELS))) == seconds(
        breakdown(traced(KERNELS | {("", "other"): 9.0}))
    )


def test_kernels_of_collectives_compute_nothing() -> None:
    """2 s that backward launches.

    They are communication, and what is computed is as long as without.
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
    """2 s of forward's 5 are the loader's: so much less is idle, and no kernel was."""
    without, waiting = (seconds(breakdown(traced(KERNELS, data=data))) for data in (0.0, 2.0))
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
    """To 1 within a thousandth, no part below 0.

    And the modules' parts are no more than the step's.
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
    """The sum that guards the breakdown: with a recompute that is also useful it is no longer 1."""
    found = breakdown(clocked(stepped(), OWN))
    twice = found.parts | {"ideal_compute": found.parts["ideal_compute"] + found.parts["recompute"]}
    assert not math.isclose(1.0, sum(twice.values()), abs_tol=1e-3)


class Slow(Classifier):
    """Forward takes 4 s on the test's clock.

    With `pointwise` an activation of its own takes as long as its bytes do.
    """

    def __init__(self, clock: StillClock, *, idle: float = 0.0, pointwise: int = 0) -> None:
        super().__init__()
        self.clock, self.idle, self.pointwise = clock, idle, pointwise
        self.slow = Pointwise(clock, pointwise) if pointwise else nn.Identity()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.clock.advance(4.0)
        return F.cross_entropy(self.head(self.slow(self.body(batch[0]))), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        self.clock.advance(self.idle)


class Pointwise(nn.Module):
    """Multiplies 4 x 8 floats so many times without a graph.

    2 x 128 bytes each, at 128 bytes/s 2 s.
    """

    def __init__(self, clock: StillClock, times: int) -> None:
        super().__init__()
        self.clock, self.times = clock, times

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
    """Seconds of each part of a training's breakdown, on a clock that only what is planted moves, and the 4 s of its step."""
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
    """By what was planted, and no other by a thousandth of it."""
    before, after = trained(monkeypatch), trained(monkeypatch, **planted)
    grown = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in after | before}
    assert (
        pytest.approx({name: amount if name == part else 0.0 for name in grown}, abs=1e-3) == grown
    )


def test_a_measured_model_adds_up() -> None:
    """Real times, forward and backward."""
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
    """There is no time to cut."""
    assert utilization(lflops.count(nn.Linear(2, 2), Tensor(1, 2)), CHIP).breakdown is None


def test_the_verdict_names_the_largest_parts_in_words() -> None:
    """Of 4 s: below the roof 0.9 in linear, and 0.25 in the model itself, which is another cause.

    Then two phases of 0.75.

    Linear is computed again in 0.25, of which 0.1 are its products at the peak: the other 0.15 are
    no longer below the roof. Both phases and the 0.5 of the loader are faults, and these leave room
    for no other.
    """
    told = report_of(analyze(clocked(stepped(), OWN))).verdict
    assert (
        "Another 18.8 % of the step (750 ms) is lost to inefficient kernels, mostly in linear."
        == told.findings[3].sentence
    )
    assert (
        "18.8 % of the step (750 ms) is optimizer work.",
        "18.8 % of the step (750 ms) is spent outside all phases, in callbacks, metrics, logging or other code of the loop.",
        "12.5 % of the step (500 ms) is spent waiting for data.",
    ) == told.why
    assert "Pass fused=True to the optimizer, or use larger batches." == told.next[0]


def test_pointwise_work_is_named_by_the_kinds_of_its_modules() -> None:
    """Two norms, 0.4 s of each: no product in them."""
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
    """Modules' times that were scaled by three say nothing of a module; the optimizer was timed as a whole.

    By 1.5 they still do.
    """
    given = clocked(stepped(), OWN)
    doubtful, near = (
        replace(given, notes=(Note(code="time_scaled", subject="", values={"forward": by}),))
        for by in (3.0, 1.5)
    )
    told = [each.sentence for each in report_of(analyze(doubtful)).verdict.findings]
    assert "Another 18.8 % of the step (750 ms) is lost to inefficient kernels." in told
    assert "18.8 % of the step (750 ms) is optimizer work." == told[0]
    assert report_of(analyze(given)).verdict.why == report_of(analyze(near)).verdict.why


def test_show_has_all_the_parts() -> None:
    """The largest first."""
    lines = drawn(clocked(stepped(), OWN), 160)
    first = next(index for index, line in enumerate(lines) if line.startswith("step breakdown"))
    assert ["28.8", "18.8", "18.8", "12.5", "11.2", "7.5", "2.5"] == [
        line.split(" %")[0].split()[-1] for line in lines[first : first + 7]
    ]


def test_show_writes_the_budget_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts add up there too."""
    clocked(stepped(), OWN).save(tmp_path / "step.json")
    assert 0 == main(["show", str(tmp_path / "step.json"), "--json"])
    shown = json.loads(capsys.readouterr().out)["utilization"]["breakdown"]
    assert math.isclose(1.0, sum(shown["parts"].values()), abs_tol=1e-3)
    assert {"", "linear", "norm"} == shown["modules"].keys()
