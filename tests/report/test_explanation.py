"""What `lflops.explain` and `lflops why` say.

Which findings are faults, what the ledger adds, and that all of it stays small.
"""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import json as struct_json
from msgspec.structs import replace

import lflops
from lflops.analysis import analysis
from lflops.analysis.analysis import analyze
from lflops.analysis.compare import compared_run
from lflops.analysis.step_times import StepTimes, step_times
from lflops.cli.main import main
from lflops.hardware.chips import Hardware
from lflops.ledger.account import Ledger, SlowStep, Span, Start
from lflops.profile.json_file import json_schema
from lflops.profile.notes import Note
from lflops.profile.profile import Communication, Profile
from lflops.profile.records import ModulePhase, Phase, Trace
from lflops.profile.steps import Step
from lflops.report import explanation
from lflops.report.explanation import (
    Explanation,
    explain,
    issue_changes,
    issue_lines,
    lines_of,
    markdown,
)
from lflops.report.log_text import log_text
from tests.support.profile_builders import cell, clocked, product, profile, run, weights

USUAL = {"data": 1e-3, "forward": 10e-3, "backward": 20e-3, "optimizer": 2e-3, "other": 1e-3}
"""Seconds of a step of 34 ms."""


def trained(
    steps: int = 6,
    *,
    own: dict[tuple[str, Phase], float] | None = None,
    cells: Any = (),
    facts: Any = (),
    waiting: float | None = None,
    **phases: float,
) -> Profile:
    """A training of two layers, of which nothing is slow, but for what is given."""
    took = USUAL | phases
    rows = {name: {"class_name": "Linear"} | weights(4) for name in ("a", "b")}
    work = [
        product(name, "aten::mm", phase, macs=macs, bytes_moved=8)
        for name in rows
        for phase, macs in (("forward", 4), ("backward", 8))
    ]
    adam = cell("", "aten::_foreach_add_", "optimizer", calls=40, bytes_moved=1000)
    clean = [
        Step(index=n, kind="unprofiled", seconds=sum(took.values()), phases=took, waiting=waiting)
        for n in range(steps)
    ]
    made = profile(
        {"": {"class_name": "Net"} | weights(0, 8)} | rows,
        [*work, adam, *cells],
        run=run(kind="training"),
        steps=tuple(clean),
        **dict(facts),
    )
    each: dict[tuple[str, Phase], float] = {(name, "forward"): took["forward"] / 2 for name in rows}
    each |= {(name, "backward"): took["backward"] / 2 for name in rows}
    return clocked(made, each | (own or {}))


def account(**seconds: float) -> Ledger:
    """Of a run of 100 steps."""
    spent = {
        "start_up": 50.0,
        "training/forward": 80.0,
        **{name.replace("__", "/"): each for name, each in seconds.items()},
    }
    begin = 1_800_000_000.0
    start = Start(
        begin=begin, seconds=sum(spent.values()), first_step=0, last_step=100, ended="finished"
    )
    span = Span(begin=begin, seconds=start.seconds, steps=100, spent=spent)
    return Ledger(
        seconds=spent, total=start.seconds, steps=100, slow_steps=(), starts=(start,), spans=(span,)
    )


def faults(given: Profile | Ledger) -> list[tuple[str, float | None]]:
    """Cause and cost."""
    return [
        (each.cause, None if each.seconds is None else round(each.seconds, 9))
        for each in explain(given).findings
        if each.is_issue
    ]


def test_a_training_like_any_other_has_no_fault_though_its_time_goes_somewhere() -> None:
    """Of 34 ms the optimizer has 2, which is more than 2 %: that is said, and is no fault."""
    found = explain(trained())
    assert ("nothing found", None) == (found.status, found.cause)
    assert {"data", "optimizer", "other"} == {
        each.cause for each in found.findings if each.cause in USUAL
    }
    assert not any(each.is_issue for each in found.findings)


def test_few_steps_or_a_busy_machine_cannot_tell() -> None:
    """Five clean steps are needed; a fault is named anyway."""
    assert "cannot tell" == explain(trained(4)).status
    assert "found" == explain(trained(4, data=20e-3)).status


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        ({"data": 20e-3}, [("data", 20e-3)]),
        ({"other": 10e-3}, [("other", 10e-3)]),
        ({"clip": 8e-3}, [("clip", 8e-3)]),
        # 40 operators need 1.2 ms at the most, and 1,000 bytes hardly anything: 7 ms is too long, 2
        # are not.
        ({"optimizer": 7e-3}, [("optimizer", 7e-3)]),
        ({"optimizer": 2.3e-3}, []),
        ({"data": 2e-3}, []),
    ],
)
def test_from_which_share_on_a_phase_is_a_fault(
    phases: dict[str, float], said: list[tuple[str, float]]
) -> None:
    """A tenth of the step, or a little more."""
    assert said == faults(trained(**phases))


def test_products_outside_of_all_phases_are_a_model_s() -> None:
    """As of another model of a GAN: 2 MACs where forward has 24. One is some metric's."""
    for macs, said in ((1, [("other", 20e-3)]), (2, [])):
        cells = [
            product("", "aten::mm", "other", macs=macs, bytes_moved=8),
            product("a", "aten::addmm", "forward", macs=16, bytes_moved=8),
        ]
        assert said == faults(trained(other=20e-3, cells=cells))


def test_a_clip_of_a_short_step_is_no_fault() -> None:
    """0.4 ms of 2.4 are the work of a few operators, however large the share.

    0.6 ms of 2.6 are more.
    """

    def short(clip: float) -> Profile:
        return trained(
            data=0.1e-3,
            forward=0.6e-3,
            backward=1.2e-3,
            optimizer=0.05e-3,
            other=0.05e-3,
            clip=clip,
        )

    assert [] == faults(short(0.4e-3))
    assert [("clip", 0.6e-3)] == faults(short(0.6e-3))


@pytest.mark.parametrize(
    ("strategy", "clip", "outside"),
    [
        (
            "DDPStrategy",
            "between backward and the optimizer's step",
            ("is spent in Net itself, outside its layers.", "out of training_step"),
        ),
        (
            "Fabric",
            "between backward and the optimizer's step",
            ("outside its layers, or between it and backward.", "of the loss"),
        ),
        (
            None,
            "between backward and the optimizer's step",
            ("outside its layers, or between it and backward.", "of the loss"),
        ),
    ],
)
def test_a_loop_of_the_users_own_has_its_own_words(
    strategy: str | None, clip: str, outside: tuple[str, str]
) -> None:
    """Only Lightning, whose strategies have such names, has a `training_step`, and a hook that clips and does nothing else."""
    own: dict[tuple[str, Phase], float] = {
        ("", "forward"): 8e-3,
        ("a", "forward"): 1e-3,
        ("b", "forward"): 1e-3,
    }
    given = trained(own=own, clip=8e-3)
    found = {
        each.cause: each
        for each in explain(replace(given, run=replace(given.run, strategy=strategy))).findings
        if each.is_issue
    }
    assert {"clip", "outside"} == found.keys()
    assert clip in found["clip"].sentence
    assert outside[0] in found["outside"].sentence
    assert outside[1] in found["outside"].fix
    assert ("training_step" in found["outside"].fix) == (strategy == "DDPStrategy")


@pytest.mark.parametrize(("seconds", "said"), [(8e-3, []), (9e-3, [("optimizer", 9e-3)])])
def test_an_optimizer_with_many_operators_may_take_long(
    seconds: float, said: list[tuple[str, float]]
) -> None:
    """440 need 8.8 ms at the most."""
    many = cell("", "aten::_foreach_add_", "optimizer", calls=400)
    assert said == faults(trained(optimizer=seconds, cells=[many]))


@pytest.mark.parametrize(("calls", "said"), [(10, []), (60, [("optimizer", 7e-3)])])
def test_an_optimizer_s_large_operators_read_memory_and_small_ones_a_cache(
    calls: int, said: list[tuple[str, float]]
) -> None:
    """60 MB need 12 ms at 5 GB/s.

    Of 100 operators they are small, and need 2 ms for these and 3 ms at 20 GB/s.
    """
    large = cell("", "aten::_foreach_add_", "optimizer", calls=calls, bytes_moved=60_000_000)
    assert said == faults(trained(optimizer=7e-3, cells=[large]))


def test_one_slow_step_of_an_optimizer_is_no_slow_optimizer() -> None:
    """22 ms in one of 6 steps, and 2 ms in the others: 5.33 ms in the mean."""
    given = trained()
    slow = replace(given.steps[0], seconds=54e-3, phases=USUAL | {"optimizer": 22e-3})
    assert [] == faults(replace(given, steps=(slow, *given.steps[1:])))


@pytest.mark.parametrize(("moved", "said"), [(1000, [("optimizer", 7e-3)]), (4_000_000, [])])
def test_on_a_device_an_optimizer_may_take_its_bytes_and_not_each_launch(
    moved: int, said: list[tuple[str, float]]
) -> None:
    """At 1 GB/s 4 MB take 4 ms, so 7 ms are not too long.

    1,000 bytes take nothing, whatever 400 launches of the host take.
    """
    many = cell("", "aten::add_", "optimizer", calls=400, bytes_moved=moved)
    given = trained(optimizer=7e-3, cells=[many])
    chip = Hardware("chip", {"fp32": 1e6}, 1e9)
    assert said == faults(replace(given, run=replace(given.run, device_type="cuda", hardware=chip)))


def test_with_a_known_peak_recomputing_still_costs_its_time() -> None:
    """8 ms of 34, and not the 4 MACs' 4 µs at the peak."""
    again = product("a", "aten::mm", "recompute", macs=2, bytes_moved=8)
    given = trained(own={("a", "recompute"): 8e-3, ("a", "backward"): 2e-3}, cells=[again])
    chip = Hardware("chip", {"fp32": 1e6}, 1e9)
    assert [("recomputed", 8e-3)] == faults(replace(given, run=replace(given.run, hardware=chip)))


def test_a_second_backward_costs_what_is_more_than_twice_the_forward() -> None:
    """8 MACs forward and 16 + 16 backward: half of 20 ms."""
    again = [product(name, "aten::mm", "backward", macs=8, bytes_moved=8) for name in ("a", "b")]
    given = trained(cells=again)
    assert [("backward_twice", 10e-3)] == faults(given)
    assert (
        "Backward has 4.0× as many MACs as forward, while twice as many are normal"
        in explain(given).findings[0].sentence
    )


def test_a_large_matmul_only_in_backward_is_no_second_backward() -> None:
    """The twin: one matmul of 32 MACs, eight times the largest of forward, as of a Cholesky."""
    large = product("a", "aten::mm", "backward", macs=32, bytes_moved=8)
    assert [] == faults(trained(cells=[large]))


def test_a_layer_that_nothing_is_learned_from_is_unused() -> None:
    """It could learn: a layer without parameters, or with frozen ones, is not told of."""
    wasted = product("c", "aten::mm", "forward", macs=4, bytes_moved=8)

    def with_third(parameters: int) -> Profile:
        rows = {name: {"class_name": "Linear"} | weights(4) for name in ("a", "b")} | {
            "c": {"class_name": "Linear"} | weights(parameters)
        }
        work = [
            wasted,
            *(product(name, "aten::mm", "forward", macs=4, bytes_moved=8) for name in ("a", "b")),
        ]
        work += [
            product(name, "aten::mm", "backward", macs=8, bytes_moved=8) for name in ("a", "b")
        ]
        steps = tuple(
            Step(index=n, kind="unprofiled", seconds=sum(USUAL.values()), phases=USUAL)
            for n in range(6)
        )
        root = {"": {"class_name": "Net"} | weights(0, 8 + parameters)}
        own: dict[tuple[str, Phase], float] = {
            ("a", "forward"): 3e-3,
            ("b", "forward"): 3e-3,
            ("c", "forward"): 4e-3,
        }
        return clocked(profile(root | rows, work, run=run(kind="training"), steps=steps), own)

    assert [("unused", "c", 4e-3)] == [
        (each.cause, each.module, each.seconds)
        for each in explain(with_third(4)).findings
        if each.is_issue
    ]
    assert [] == faults(with_third(0))


def built(
    rows: dict[str, Any],
    macs: dict[tuple[str, Phase], int],
    own: dict[tuple[str, Phase], float],
    **facts: Any,
) -> Profile:
    """A training of 34 ms a step, of these modules."""
    work = [
        product(name, "aten::mm", phase, macs=each, bytes_moved=8)
        for (name, phase), each in macs.items()
    ]
    steps = tuple(
        Step(index=n, kind="unprofiled", seconds=sum(USUAL.values()), phases=USUAL)
        for n in range(6)
    )
    return clocked(
        profile(
            {"": {"class_name": "Net"} | weights(0, 8)} | rows,
            work,
            **({"run": run(kind="training"), "steps": steps} | facts),
        ),
        own,
    )


def test_time_of_a_module_without_operators_is_python() -> None:
    """A container needs 50 µs, and as much for each of its two layers: of 4 ms, 3.85 are hooks around these.

    A list has no time.
    """
    names = ("block", "block.0", "block.1")
    rows = {name: {"class_name": "Linear"} | weights(4) for name in names} | {
        "block": {"class_name": "Sequential"} | weights(0, 8)
    }
    macs: dict[tuple[str, Phase], int] = {
        (name, phase): 4 for name in names[1:] for phase in ("forward", "backward")
    }

    def of_block(milliseconds: float, **facts: Any) -> Profile:
        return built(
            rows,
            macs,
            {
                ("block", "forward"): milliseconds * 1e-3,
                ("block.0", "forward"): 3e-3,
                ("block.1", "forward"): 3e-3,
            },
            **facts,
        )

    assert [("python", 3.85e-3)] == faults(of_block(4))
    found = explain(of_block(4)).findings[0]
    assert (
        "block",
        (
            "11.3 % of the step (3.85 ms) is spent in block (Sequential) itself, although it runs "
            "no operators"
        ),
    ) == (
        found.module,
        found.sentence.partition(": in")[0],
    )
    assert "no_products" not in {each.cause for each in explain(of_block(4)).findings}
    assert [] == faults(of_block(1))
    not_counted = Note(code="not_counted", subject="", values={})
    assert [] == faults(of_block(4, notes=(not_counted,)))


def test_frozen_layers_learn_nothing() -> None:
    """Three quarters of the products in forward are in layers without gradients.

    One with an adapter behind it has a backward.
    """
    frozen = weights(4) | {"trainable_parameters": 0}

    def with_backward(*names: str) -> Profile:
        rows = {
            "a": {"class_name": "Linear"} | frozen,
            "b": {"class_name": "Linear"} | frozen,
            "c": {"class_name": "Linear"} | weights(4),
        }
        macs: dict[tuple[str, Phase], int] = {
            ("a", "forward"): 4,
            ("b", "forward"): 8,
            ("c", "forward"): 4,
        }
        return built(rows, macs | {(name, "backward"): 4 for name in names}, {})

    found = explain(with_backward("c"))
    assert [("frozen", None)] == faults(with_backward("c"))
    assert found.findings[0].sentence.startswith(
        "75.0 % of the matmuls in forward are in frozen layers"
    )
    assert [] == faults(with_backward("c", "b"))
    assert [] == faults(with_backward())


def test_a_step_that_calls_no_model_has_no_frozen_layers() -> None:
    """It goes backward, as from a loss of parameters alone.

    Of no products in forward there is no share.
    """
    rows = {
        "a": {"class_name": "Linear"} | weights(4) | {"trainable_parameters": 0},
        "b": {"class_name": "Linear"} | weights(4),
    }
    assert [] == faults(built(rows, {("b", "backward"): 4}, {}))


def on_busy_machine(given: Profile, own: dict[str, float], *, workers: int = 0) -> Profile:
    """Others had three quarters of the CPU time; `own` is what phases took without them."""
    hooked = Step(
        index=9,
        kind="module_timing",
        seconds=134e-3,
        phases={},
        cpu_user=34e-3,
        cpu_system=0.0,
        cpu_lost=102e-3,
        uncontended_phases=own,
    )
    return replace(
        given, run=replace(given.run, workers=workers), steps=(*given.steps, hooked, hooked, hooked)
    )


@pytest.mark.parametrize(
    ("wall", "own", "said"),
    [
        (9e-3, 8e-3, [("data", 9e-3)]),  # 9 of 132 ms, and 8 of 41 without others: that is 20 %
        (40e-3, 1e-3, []),  # 40 of 163 ms, and 1 of 34 without others: 3 %
    ],
)
def test_on_a_busy_machine_a_phase_is_judged_without_what_others_took(
    wall: float, own: float, said: list[tuple[str, float]]
) -> None:
    """It takes four times as long for computing, and not for sleeping.

    Where what others took is unknown, no one can tell.
    """
    given = trained(data=wall, forward=40e-3, backward=80e-3)
    assert said == faults(on_busy_machine(given, USUAL | {"data": own}))
    assert [] == faults(on_busy_machine(given, {}))


def test_what_hooks_take_is_no_part_of_a_phase() -> None:
    """15 of 54 ms are in no phase where modules are hooked, and 1 of 35 where they are not."""
    assert [("other", 15e-3)] == faults(
        on_busy_machine(trained(other=15e-3), USUAL | {"other": 15e-3})
    )
    assert [] == faults(on_busy_machine(trained(), USUAL | {"other": 15e-3}))


def test_on_a_busy_machine_what_modules_take_is_judged_by_their_phases() -> None:
    """The model itself has 24 of 40 ms of forward, which are 6 of 10 without others: 18 % of 34.

    With 8, it is 2, and 6 %.
    """

    def with_outside(seconds: float) -> Profile:
        own: dict[tuple[str, Phase], float] = {("", "forward"): seconds} | {
            (name, "forward"): 20e-3 - seconds / 2 for name in ("a", "b")
        }
        return trained(own=own, forward=40e-3, backward=80e-3)

    assert [("outside", 24e-3)] == faults(on_busy_machine(with_outside(24e-3), USUAL))
    assert [] == faults(on_busy_machine(with_outside(8e-3), USUAL))


@pytest.mark.parametrize(
    ("workers", "on_core", "is_issue"), [(0, 3e-3, True), (2, 0.1e-3, True), (2, 2e-3, False)]
)
def test_to_take_a_batch_from_a_worker_is_no_waiting(
    workers: int, on_core: float, is_issue: bool
) -> None:
    """Of 39 ms 6 are data, 15 %.

    Handing over takes 1.5 of them at the most: 11 % are left, or 6 % if the thread computes in 2
    more.
    """
    given = trained(data=6e-3)
    hooked = Step(index=9, kind="module_timing", seconds=39e-3, phases={}, fetching_cpu=on_core)
    found = faults(
        replace(given, run=replace(given.run, workers=workers), steps=(*given.steps, hooked))
    )
    assert ([("data", 6e-3)] if is_issue else []) == found


@pytest.mark.parametrize(("on_core", "is_issue"), [(0.0, True), (0.06, False)])
def test_over_the_run_to_take_a_batch_is_no_waiting_either(on_core: float, is_issue: bool) -> None:
    """Of 90 s of training 10 are data, 11 %, in 100 steps.

    If the thread computes for 6 of them, 4 % are left; 0.2 % is handing over.
    """
    given = trained()
    hooked = Step(index=9, kind="module_timing", seconds=34e-3, phases={}, fetching_cpu=on_core)
    given = replace(given, run=replace(given.run, workers=1), steps=(*given.steps, hooked))
    found = explanation._explained(given, account(training__data=10.0))
    assert is_issue == any(each.is_issue for each in found.findings if each.cause == "data")


def test_on_a_busy_machine_workers_that_are_late_are_no_fault() -> None:
    """They have no core either. Of a loader without workers it is one: 20 of 53 ms."""
    given = trained(data=20e-3)
    assert [] == faults(on_busy_machine(given, USUAL | {"data": 20e-3}, workers=1))
    assert [("data", 20e-3)] == faults(on_busy_machine(given, USUAL | {"data": 20e-3}))


@pytest.mark.parametrize(
    ("cause", "seconds", "quiet", "busy"),
    [
        # 16 % of the run's training. The threshold is 10 %, or four times as much if busy.
        ("validation", 15.0, True, False),
        ("validation", 60.0, True, True),  # 43 %
        ("gc", 2000.0, True, False),
    ],
)
def test_what_is_between_steps_takes_longer_on_a_busy_machine_as_steps_do(
    cause: str, seconds: float, quiet: bool, busy: bool, tmp_path: Path
) -> None:
    """Three quarters of the time are others'.

    How much of a collection of garbage theirs was is unknown.
    """
    for is_busy, expected in ((False, quiet), (True, busy)):
        given = on_busy_machine(trained(), USUAL) if is_busy else trained()
        found = explanation._explained(given, account(**{cause: seconds}))
        assert expected == any(each.is_issue for each in found.findings if each.cause == cause)


@pytest.mark.parametrize(
    ("threads", "others", "is_one"), [(1, 10e-3, True), (1, 1e-3, False), (4, 10e-3, False)]
)
def test_another_thread_of_python_is_seen_by_its_time_on_a_core(
    threads: int, others: float, is_one: bool
) -> None:
    """In 34 ms the training's thread has 20 on a core, and other threads of the process 10.

    Torch's own are no fault.
    """
    hooked = Step(
        index=9,
        kind="module_timing",
        seconds=34e-3,
        phases=USUAL,
        cpu_user=20e-3 + others,
        cpu_system=0.0,
        thread_cpu=20e-3,
    )
    given = trained()
    on = replace(given.run, threads=threads, cores=4)
    expected = [("thread", 10e-3)] if is_one else []
    assert expected == faults(replace(given, run=on, steps=(*given.steps, hooked, hooked, hooked)))
    assert [] == faults(replace(given, run=on, steps=(*given.steps, hooked, hooked)))


def test_a_training_in_float64_could_take_half() -> None:
    """The modules have 30 of 34 ms."""
    given = trained()
    assert [("dtype", 15e-3)] == faults(replace(given, run=replace(given.run, dtype="float64")))
    assert (
        "The matmuls of the model run in float64"
        in explain(replace(given, run=replace(given.run, dtype="float64"))).findings[0].sentence
    )


def test_float32_leaves_tensor_cores_unused() -> None:
    """Of 24 MACs, 48 FLOPs take 12 ms at 4000 a second, and 6 ms at 8000. bfloat16 saves nothing, nor does TF32 on AMD's chips."""
    peaks = {"fp32": 4000.0, "tf32": 8000.0}
    plain = trained()
    given = replace(plain, run=replace(plain.run, hardware=Hardware("H100 SXM", peaks)))
    assert ("tensor_cores", 6e-3) in faults(given)
    others = (Hardware("V100 SXM2 32GB", {"fp32": 4000.0}), Hardware("MI300X", peaks), None)
    for other in (
        replace(given.run, dtype="bfloat16"),
        *(replace(given.run, hardware=each) for each in others),
    ):
        assert "tensor_cores" not in dict(faults(replace(given, run=other)))


def test_tf32_is_slower_than_bfloat16() -> None:
    """48 FLOPs take 12 ms at 4000 a second, and 3 ms at 16,000.

    Where the peak of bfloat16 is unknown, so is what it would save.
    """
    plain = trained()
    cells = tuple(replace(each, dtype="tf32") if each.macs else each for each in plain.op_counts)
    of_tf32 = replace(plain, run=replace(plain.run, dtype="tf32"), op_counts=cells)
    for peaks, saved in (({"tf32": 4000.0, "bf16": 16_000.0}, 9e-3), ({"tf32": 4000.0}, None)):
        given = replace(of_tf32, run=replace(of_tf32.run, hardware=Hardware("H100 SXM", peaks)))
        assert saved == dict(faults(given)).get("tensor_cores")
        said = "The matmuls of the model run in tf32. According to the chip's peaks, bfloat16 saves 26.5 % of the step (9.00 ms)."
        assert (saved is not None) == any(said == each.sentence for each in explain(given).findings)


def test_gradients_that_are_averaged_by_hand_are_communication() -> None:
    """Of 21 ms in no phase 12 are 38 all-reduces, after backward."""
    sent = Communication(
        module="", phase="other", collective="allreduce_", group="0", group_size=2, calls=38, bytes=1 << 20, seconds=12e-3
    )  # fmt: skip
    given = trained(other=21e-3, facts={"communication": (sent,), "trace": Trace(files={})})
    assert [("communication", 12e-3), ("other", 9e-3)] == faults(given)
    # Of 10 ms before the optimizer and 11 after it, the first 10 are exchange, and 2 of the others.
    assert [("communication", 12e-3), ("other", 9e-3)] == faults(
        trained(clip=10e-3, other=11e-3, facts={"communication": (sent,), "trace": Trace(files={})})
    )


def test_what_the_model_waits_for_before_its_layers_run_is_no_fault_of_its() -> None:
    """8 ms of forward are in no layer.

    The model's own code, or DDP's look at the buffers of the other ranks.
    """
    own: dict[tuple[str, Phase], float] = {
        ("", "forward"): 8e-3,
        ("a", "forward"): 1e-3,
        ("b", "forward"): 1e-3,
    }
    assert [("outside", 8e-3)] == faults(trained(own=own))
    assert [] == faults(trained(own=own, facts={"waits": (ModulePhase("", "forward"),)}))


@pytest.mark.parametrize(("code", "values", "words"), [
    ("graph_breaks", {"places": 3}, "torch.compile breaks the graph in 3 places"),
    ("find_unused", {}, "DistributedDataParallel looks for unused parameters"),
])  # fmt: skip
def test_what_was_left_on_is_a_fault_whose_cost_is_unknown(
    code: str, values: dict[str, int], words: str
) -> None:
    """It comes first."""
    found = explain(
        trained(facts={"notes": (Note(code=code, subject="", values=values),)}, data=20e-3)
    )
    assert [(code, None), ("data", 20e-3)] == [
        (each.cause, each.seconds) for each in found.findings[:2]
    ]
    assert found.findings[0].sentence.startswith(words)


def test_padding_costs_its_share_of_forward_and_backward() -> None:
    """Of 30 ms of both, 60 % are 18 ms."""
    note = Note(code="padding", subject="", values={"share": 0.6})
    assert [("padding", pytest.approx(18e-3))] == faults(trained(facts={"notes": (note,)}))
    assert (
        "60.0 % of each batch is padding"
        in explain(trained(facts={"notes": (note,)})).findings[0].sentence
    )


def test_many_small_messages_are_a_fault_and_few_large_ones_are_none() -> None:
    """Of 20 ms of backward 10 are exchange: in 16 all-reduces of 64 KiB, or in two of 8 MiB."""

    def exchanging(calls: int, bytes_each: int) -> Profile:
        sent = Communication(
            module="", phase="backward", collective="allreduce_", group="world", group_size=2, calls=calls, bytes=calls * bytes_each,
            seconds=10e-3, exposed_seconds=10e-3,
        )  # fmt: skip
        own: dict[tuple[str, Phase], float] = {
            ("", "backward"): 10e-3,
            ("a", "backward"): 5e-3,
            ("b", "backward"): 5e-3,
        }
        return trained(facts={"communication": (sent,)}, own=own, waiting=10e-3)

    assert [("communication", 10e-3)] == faults(exchanging(16, 1 << 16))
    assert [] == faults(exchanging(2, 1 << 23))


def test_what_is_computed_again_is_told_without_a_peak() -> None:
    """5 ms of a step of 34."""
    again = [product("a", "aten::mm", "recompute", macs=4, bytes_moved=8)]
    assert ("recomputed", 5e-3) in faults(trained(cells=again, own={("a", "recompute"): 5e-3}))


def test_the_ledger_adds_what_is_between_steps() -> None:
    """Of 100 s of training 20 are validation: 0.2 s for each of 100 steps.

    The 50 of start-up are no part of them; 3 % is no fault.
    """
    found = explain(account(validation=17.0, checkpoint_save=3.0))
    assert [("validation", 0.17, 0.17)] == [
        (each.cause, each.seconds, each.share) for each in found.findings
    ]
    assert (
        "17.0 % of the run after its start-up is spent on validation: 170 ms per step."
        == found.findings[0].sentence
    )
    assert ("found", "validation") == (found.status, found.cause)
    assert 50.0 == (found.run or {})["start_up"]
    assert "cannot tell" == explain(account()).status


@pytest.mark.parametrize(
    ("compiling", "is_issue"), [((9.0, 0.0, 0.0, 0.0), False), ((9.0, 1.0, 1.0, 1.0), True)]
)
def test_compilation_is_a_fault_where_it_goes_on(
    compiling: tuple[float, ...], is_issue: bool
) -> None:
    """Four spans of 25 steps and 10 s each.

    A model is compiled at first; one whose shapes change is compiled again and again.
    """
    made = account(compilation=sum(compiling))
    spans = [
        Span(
            begin=made.starts[0].begin + 10 * n,
            seconds=10.0,
            steps=25 * (n + 1),
            spent={"compilation": took, "training/forward": 10 - took},
        )
        for n, took in enumerate(compiling)
    ]
    (finding,) = explain(replace(made, spans=tuple(spans))).findings
    assert ("compilation", is_issue) == (finding.cause, finding.is_issue)


def with_ledger(
    made: Profile, ledger: Ledger, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Explanation:
    """What the folder of a run has to say."""
    made.save(folder / "train-0-9.profile.json")
    monkeypatch.setattr(explanation, "load_run", lambda _path: ledger)
    return explain(folder)


def test_a_loader_that_is_late_beyond_the_window_is_seen_by_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 of 100 s, though the window's steps had their batches ready."""
    ledger = account(training__data=20.0)
    assert [("data", 0.2)] == faults(ledger)
    assert [("data", True)] == [
        (each.cause, each.is_issue)
        for each in with_ledger(trained(), ledger, tmp_path, monkeypatch).findings
        if each.cause == "data"
    ]
    assert [] == faults(account(training__optimizer=20.0))


@pytest.mark.parametrize(
    ("seconds", "status", "said"),
    [
        (2.0, "found", [("data", 0.2)]),  # 2 % of the run's training
        (20.0, "found", [("data", 0.2)]),  # 17 %: waiting may take 1.4 times 9 %, and takes 17 %
        (60.0, "cannot tell", []),  # 38 %: it may take 2.6 times 9 %, and takes 13 %
    ],
)
def test_others_that_had_the_cores_in_some_of_the_run_are_no_fault_of_it(
    seconds: float,
    status: str,
    said: list[tuple[str, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It makes all that is between steps longer, also where the window's steps were quiet."""
    ledger = account(training__data=20.0, slow__not_scheduled=seconds)
    found = with_ledger(trained(), ledger, tmp_path, monkeypatch)
    assert (status, said) == (
        found.status,
        [(each.cause, round(each.seconds or 0.0, 9)) for each in found.findings if each.is_issue],
    )
    assert found.because.endswith(
        "; this machine was busy during a part of the run, or the process was stopped"
    ) == (seconds > 5)
    assert (seconds > 5) == any(
        each.cause == "not_scheduled" and not each.is_issue for each in found.findings
    )


def test_one_stop_of_the_process_excuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for a minute in one step. The others wait for data for a fifth of the rest."""
    stopped = SlowStep(
        step=50,
        end=100.0,
        seconds=61.0,
        usual=1.0,
        cost=60.0,
        cause="not_scheduled",
        phase="forward",
    )
    ledger = replace(account(training__data=20.0, slow__not_scheduled=60.0), slow_steps=(stopped,))
    found = with_ledger(trained(), ledger, tmp_path, monkeypatch)
    assert ["data"] == [each.cause for each in found.findings if each.is_issue]
    assert "busy" not in found.because


def test_garbage_explains_what_is_in_no_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 ms of each step are in no phase, and the collector has 8 of them.

    In slow steps and in usual ones.
    """
    found = with_ledger(
        trained(other=10e-3),
        account(gc=0.5, slow__gc=0.3, training__optimizer=2.0),
        tmp_path,
        monkeypatch,
    )
    assert ["other"] == [each.cause for each in found.findings if each.is_issue]
    found = with_ledger(trained(other=10e-3), account(gc=10.0, slow__gc=6.0), tmp_path, monkeypatch)
    assert [("gc", 0.16)] == [
        (each.cause, each.seconds) for each in found.findings if each.is_issue
    ]


def test_a_window_whose_steps_are_compiled_for_says_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of them, besides the first ones; the ledger has 9 s of it, and no span that is late."""
    for recompiled, is_issue in ((3, True), (2, False)):
        given = trained()
        again = [
            Step(index=9 + n, kind="unprofiled", seconds=1.0, phases={}, marks=("recompiled",))
            for n in range(recompiled)
        ]
        cold = Step(
            index=0, kind="unprofiled", seconds=1.0, phases={}, marks=("warmup", "recompiled")
        )
        found = with_ledger(
            replace(given, steps=(cold, *given.steps, *again)),
            account(compilation=9.0),
            tmp_path,
            monkeypatch,
        )
        assert [is_issue] == [
            each.is_issue for each in found.findings if each.cause == "compilation"
        ]


def test_steps_that_vary_without_a_cause_leave_it_open() -> None:
    """A quarter of the steps takes twice as long."""
    given = trained(8)
    twice = {name: 2 * seconds for name, seconds in USUAL.items()}
    slow = Step(index=9, kind="unprofiled", seconds=sum(twice.values()), phases=twice)
    varied = [*given.steps[3:], slow, slow, slow]
    assert ("nothing found", "cannot tell") == (
        explain(given).status,
        explain(replace(given, steps=tuple(varied))).status,
    )


def test_the_log_says_of_a_window_what_lflops_why_says() -> None:
    """Four steps in which 3 % is the optimizer's are too few; six are enough.

    A wait of 20 ms is a fault in any number of steps.
    """
    few = (
        "cannot tell whether anything is wrong, because fewer than 5 unprofiled steps were timed; "
    )
    judgements = [
        (trained(), " No known issue found.", ""),
        (trained(4), "", few),
        (trained(4, data=20e-3), "", ""),
    ]
    for given, judgement, caveat in judgements:
        first, *others = lines_of(explain(given))
        assert first == ("verdict", explain(given).said + judgement)
        in_log = log_text(analyze(given)).splitlines()
        assert f"verdict           {first[1]}" == in_log[0]
        rows = [f"{label:<18}{text.partition(' (at least ')[0]}" for label, text in others]
        assert rows == in_log[1 : 1 + len(rows)]
        confidence = dict(others)["confidence"]
        assert confidence.startswith(caveat)
        assert bool(caveat) == ("cannot tell whether anything" in confidence)


def test_steps_that_cannot_tell_give_no_advice() -> None:
    """Of 34 ms forward and backward have 30, in products, whose peak is not known.

    Six steps say to measure it, and four do not.
    """
    assert [True, False] == ["next" in dict(lines_of(explain(trained(steps)))) for steps in (6, 4)]


def test_the_figures_are_numbers_of_the_window_and_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 34 ms with 24 MACs.

    The run trained for 80 s in 100 steps, and validated for 20 s: a second for each step.
    """
    found = with_ledger(trained(), account(validation=20.0), tmp_path, monkeypatch)
    expected = {
        "step_seconds": 34e-3,
        "steps": 6,
        "macs": 24,
        "parameters": 8,
        "ranks": 1,
        "mfu": None,
    }
    assert expected == {
        name: pytest.approx(found.figures[name]) if name == "step_seconds" else found.figures[name]
        for name in expected
    }
    of_run = {"run_seconds": 150.0, "run_steps": 100, "run_starts": 1, "run_seconds_per_step": 1.0}
    assert of_run == {name: each for name, each in found.figures.items() if name.startswith("run_")}
    assert (
        "A step takes 34.0 ms. 53.3 % of 2 min 30 s was training; start-up 33.3 %, validation 13.3 %."
        == found.said
    )
    assert [("validation", "run", 0.2)] == [
        (each.cause, each.of, each.share) for each in found.findings if each.is_issue
    ]
    assert "A step takes 34.0 ms." == explain(trained()).said


@pytest.mark.parametrize("cause", ["gc", "unknown"])
@pytest.mark.parametrize("passes", [1, 2])
def test_one_slow_step_belongs_to_any_run(cause: str, passes: int) -> None:
    """16 s of some 100: in one step, as a pass of the collector over all objects takes, or in two."""
    cost = 16.0 / passes
    slow = SlowStep(
        step=50, end=100.0, seconds=cost + 1, usual=1.0, cost=cost, cause=cause, phase="forward"
    )
    said = faults(replace(account(**{f"slow__{cause}": 16.0}), slow_steps=(slow,) * passes))
    assert said == [(cause, 0.16)] * (passes - 1)


@pytest.mark.parametrize(("second", "said"), [(0.0, []), (8.0, [("gc", 0.16)])])
def test_what_the_collector_takes_in_one_part_of_a_run_belongs_to_it(
    second: float, said: list[tuple[str, float]]
) -> None:
    """16 s in the first half of the steps, as where a pass comes in a step of a window.

    Or 8 in each half.
    """
    whole = account(gc=16.0)
    halves = [
        replace(whole.spans[0], steps=50, spent={"training/forward": 40.0, "gc": took})
        for took in (16.0 - second, second)
    ]
    assert said == faults(replace(whole, spans=tuple(halves)))


def test_slow_steps_for_the_loader_are_not_told_twice(tmp_path: Path) -> None:
    """The window sees the wait for data as well, and knows its cost in a usual step.

    Without that the ledger tells.
    """
    waits = account(slow__loader=20.0)
    assert [("data", 0.2)] == faults(waits)
    for data in (20e-3, 1e-3):
        trained(data=data).save(tmp_path / "train-0-9.profile.json")
        (tmp_path / "rank0-1-2.ledger.jsonl").write_bytes(b"")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(explanation, "load_run", lambda _path: waits)
            assert [("data", True)] == [
                (each.cause, each.is_issue)
                for each in explain(tmp_path).findings
                if each.cause == "data"
            ]


def test_the_commands_for_more_are_of_the_files_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page can be made of any window; TensorBoard has something to show where event files are."""
    assert {} == explain(trained()).more
    path = tmp_path / "train-0-9.profile.json"
    of_profile = {
        "the modules": f"lflops show {path}",
        "the operators": f"lflops show {path} --operators",
        "the memory": f"lflops show {path} --memory",
        "the whole profile, as a page": f"lflops html {path}",
    }
    of_run = {
        "every second of the run": f"lflops ledger {tmp_path}",
        "whether a change made it faster": f"lflops diff {tmp_path} AFTER",
    }
    assert of_profile | of_run == with_ledger(trained(), account(), tmp_path, monkeypatch).more
    (tmp_path / "events.out.tfevents.1.host").touch()
    assert (
        f"tensorboard --logdir {tmp_path}" == explain(tmp_path).more["all windows, in TensorBoard"]
    )
    assert (
        of_profile | {"whether a change made it faster": f"lflops diff {path} AFTER"}
        == explain(path).more
    )


def test_a_run_that_ran_out_of_memory_says_so_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And names its report; any other end is no news.

    Its notes are where the window is shown, not below.
    """
    noted = replace(trained(), notes=(Note(code="ranks_missing", subject="3", values={}),))
    ended = account()
    died = replace(ended, starts=(replace(ended.starts[0], last_step=8, ended="OutOfMemoryError"),))
    report = tmp_path / "oom-8-rank0.txt"
    report.touch()
    found = with_ledger(noted, died, tmp_path, monkeypatch)
    assert found.said.startswith(
        f"The run ran out of memory after 8 steps, see {report}. A step takes "
    )
    assert found.because.endswith("1 note in lflops show")
    assert with_ledger(noted, ended, tmp_path, monkeypatch).said.startswith("A step takes ")


def test_a_folder_has_its_last_training_window(tmp_path: Path) -> None:
    """A validation's window is another one; without a ledger the window is enough.

    A folder with nothing is refused.
    """
    trained(data=20e-3).save(tmp_path / "train-0-9.profile.json")
    trained().save(tmp_path / "validate-0-9.profile.json")
    assert "data" == explain(tmp_path).cause
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(
        lflops.ProfileError, match="no ledger of rank 0 found: pass the folder of a run"
    ):
        explain(empty)


def huge() -> Profile:
    """5,000 modules with names of 2,000 letters."""
    rows: dict[str, dict[str, Any]] = {"": {"class_name": "Net"}} | {
        f"{'x' * 2000}{n}": {"class_name": "Kind" * 200} for n in range(5000)
    }
    cells = [
        product(name, f"my::{'operator' * 50}{n}", "forward", macs=1, bytes_moved=1)
        for n, name in enumerate(rows)
    ]
    steps = tuple(
        Step(index=n, kind="unprofiled", seconds=sum(USUAL.values()), phases=USUAL)
        for n in range(6)
    )
    return profile(rows, cells, run=run(kind="training"), steps=steps)


@pytest.mark.parametrize("given", [trained(data=20e-3), huge()], ids=["small", "huge"])
def test_it_is_bounded_and_follows_its_schema(given: Profile) -> None:
    """2,000 tokens are about 8,000 letters."""
    text = struct_json.encode(explain(given)).decode()
    assert len(text) <= 8000
    assert len("\n".join(markdown(explain(given)))) <= 8000
    jsonschema.validate(json.loads(text), json_schema(Explanation, "an explanation"))


def test_the_shell_prints_it_in_three_forms(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Text, Markdown and JSON say the same; another form is refused."""
    path = tmp_path / "run.profile.json"
    trained(data=20e-3).save(path)

    def printed(*options: str) -> str:
        assert 0 == main(["why", str(path), *options])
        return capfdbinary.readouterr().out.decode()

    sentence = "37.7 % of the step (20.0 ms) is spent waiting for data."
    assert f"why         {sentence}" in printed()
    assert re.search(
        rf"1\. {re.escape(sentence)} Use more DataLoader workers",
        printed("--format", "markdown"),
    )
    assert ("found", sentence) == (
        (shown := json.loads(printed("--format", "json")))["status"],
        shown["findings"][0]["sentence"],
    )
    assert f"lflops show {path}" == shown["more"]["the modules"]
    assert 2 == main(["why", str(path), "--format", "xml"])
    assert b"format='xml': pass one of text, markdown, json" in capfdbinary.readouterr().err
    assert 0 == main(["schema", "--why"])
    assert b'"title": "An explanation of lflops, format 1"' in capfdbinary.readouterr().out


def test_two_runs_are_compared_by_their_faults() -> None:
    """Before, each step waits 40 ms of 73 for data; after, 1 ms of 44, of which clipping takes 10.

    Both runs are long enough to see it.
    """
    before, after = analyze(trained(data=40e-3)), analyze(trained(clip=10e-3))
    changes = issue_changes(before, after)
    assert [("new", "clip", None, 10e-3), ("gone", "data", 40e-3, None)] == [
        (
            each.status,
            each.finding.cause,
            each.before,
            None if each.after is None else pytest.approx(each.after),
        )
        for each in changes
    ]
    assert ["new issue", "no longer"] == [label for label, _ in issue_lines(changes)]
    assert ["still"] == [
        each.status for each in issue_changes(before, analyze(trained(data=20e-3)))
    ]
    ((_, said),) = issue_lines(issue_changes(before, analyze(trained(data=20e-3))))
    assert said.endswith("Before it cost 40.0 ms.")


def test_a_run_that_is_too_short_is_not_said_to_be_without_a_fault() -> None:
    """Four unprofiled steps show nothing, but for a phase that is short in all of them.

    A run without faults has none.
    """
    eval_mode = Note(code="eval_mode", subject="", values={})
    short = analyze(trained(steps=4))
    assert ["cannot tell"] == [
        each.status
        for each in issue_changes(analyze(trained(facts={"notes": (eval_mode,)})), short)
    ]
    assert ["gone"] == [each.status for each in issue_changes(analyze(trained(data=40e-3)), short)]
    assert () == issue_changes(analyze(trained()), analyze(trained()))


def test_diff_analyzes_each_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison and the faults need the same times of steps."""
    asked: list[Profile] = []

    def counted(given: Profile) -> StepTimes:
        asked.append(given)
        return step_times(given)

    for module in (analysis, compared_run):
        monkeypatch.setattr(module, "step_times", counted)
    for name, data in (("before", 40e-3), ("after", 1e-3)):
        trained(data=data).save(tmp_path / f"{name}.json")
    assert 0 == main(
        ["diff", str(tmp_path / "before.json"), str(tmp_path / "after.json"), "--json"]
    )
    assert 2 == len(asked)


def test_diff_takes_the_folders_of_two_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last window of the training in each; a folder without one is named."""
    for name, data in (("before", 40e-3), ("after", 1e-3)):
        (tmp_path / name).mkdir()
        trained(data=data).save(tmp_path / name / "train-0-1.profile.json")
    runs = [str(tmp_path / name) for name in ("before", "after")]
    assert 0 == main(["diff", *runs, "--json"])
    (fault,) = json.loads(capsys.readouterr().out)["issues"]
    assert ("gone", "data", 40e-3, None) == (
        fault["status"],
        fault["finding"]["cause"],
        pytest.approx(fault["before"]),
        fault["after"],
    )
    assert 0 == main(["diff", *runs])
    assert "no longer" in capsys.readouterr().out
    assert 2 == main(["diff", str(tmp_path), str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    assert 2 == main(["diff", str(tmp_path / "empty"), runs[0]])
    assert "there is no profile in this folder" in capsys.readouterr().err
