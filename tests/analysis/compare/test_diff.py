"""Test the comparison of two runs: which modules and phases are slower, faster, or the same.

The runs are handmade profiles with chosen module times (`tests/support/profile_pairs.py`).
"""

import math
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

import lflops
from lflops.analysis.compare.diff import Diff, ModuleDiff, diff
from lflops.profile.profile import Profile
from lflops.profile.records import TimingStats
from tests.support.profile_builders import (
    module_profile,
    product,
    profile,
    small_profile,
    untimed,
)
from tests.support.profile_pairs import around, clean, ran

MODULES = {
    "encoder.a": 20e-3,
    "encoder.b": 20e-3,
    "decoder.c": 20e-3,
    "decoder.d": 20e-3,
    "head": 20e-3,
}
"""Self time of five modules, each 20 % of 100 ms."""


def slowed(seconds: Mapping[str, float], factor: float, *names: str) -> dict[str, float]:
    """Return the times, in which the times of the named modules are multiplied by a factor."""
    return dict(seconds) | {name: seconds[name] * factor for name in names}


def news(found: Diff) -> dict[str, str | None]:
    """Return the verdict of each module that is slower or faster."""
    return {module.name: module.news.verdict for module in (*found.slower, *found.faster)}


def module(found: Diff, name: str) -> ModuleDiff:
    """Return the comparison of one module."""
    return next(each for each in found.modules if each.name == name)


def test_a_module_that_is_slower_is_found_and_nothing_else() -> None:
    """A module that takes 22 ms instead of 20 ms is slower, by 10 % and 2 ms per step.

    The modules above it are not reported as well, because this module explains their time.
    """
    found = lflops.diff(
        ran(MODULES, width=0.01), ran(slowed(MODULES, 1.1, "encoder.b"), width=0.01)
    )
    assert {"encoder.b": "slower"} == news(found)
    time = module(found, "encoder.b").self_work.time
    assert (pytest.approx(1.1), pytest.approx(2e-3)) == (time.beyond, time.lost)
    assert {"same"} == {
        module(found, name).inclusive.time.verdict
        for name in ("", "encoder", "encoder.b", "decoder")
    }
    assert pytest.approx(42 / 40) == module(found, "encoder").inclusive.time.ratio


def test_runs_can_be_given_by_the_paths_of_their_files(tmp_path: Path) -> None:
    """Each run can be passed as a profile, or as the path of a file."""
    before = ran(MODULES, width=0.01)
    after = ran(slowed(MODULES, 1.1, "encoder.b"), width=0.01)
    before.save(tmp_path / "before.json")
    after.save(tmp_path / "after.json")
    compared = lflops.diff(before, after)
    assert (
        compared
        == lflops.diff(str(tmp_path / "before.json"), tmp_path / "after.json")
        == lflops.diff(before, tmp_path / "after.json")
    )
    with pytest.raises(
        lflops.ProfileError,
        match=r"none\.json: No such file or directory; pass a file that FlopsMonitor or "
        r"Profile\.save wrote",
    ):
        lflops.diff(tmp_path / "none.json", after)


def test_a_slower_machine_is_the_whole_run_and_no_module() -> None:
    """If all modules and the step take 10 % longer, the whole run is slower, but no module is."""
    found = diff(
        ran(MODULES, width=0.01, steps=clean(0.1, 0.1, 0.1, forward=1.0)),
        ran(
            {name: 1.1 * each for name, each in MODULES.items()},
            width=0.01,
            steps=clean(0.11, 0.11, 0.11, forward=1.0),
        ),
    )
    assert {} == news(found)
    assert found.whole is not None
    assert (pytest.approx(1.1), 5) == (found.whole.ratio, found.whole.modules)
    assert (pytest.approx(1.1), "slower") == (found.step.ratio, found.step.verdict)
    assert (pytest.approx(1.0), "same") == (
        found.phases["forward"].beyond,
        found.phases["forward"].verdict,
    )


def test_a_slower_module_is_found_on_a_slower_machine() -> None:
    """The machine is 1.1 times slower, and the head is another 1.25 times slower.

    On that machine, the 20 ms of the head are 22 ms. The additional quarter is 5.5 ms.
    """
    after = {name: 1.1 * each for name, each in slowed(MODULES, 1.25, "head").items()}
    found = diff(ran(MODULES), ran(after))
    assert {"head": "slower"} == news(found)
    time = module(found, "head").self_work.time
    assert (pytest.approx(1.375), pytest.approx(1.25), pytest.approx(5.5e-3)) == (
        time.ratio,
        time.beyond,
        time.lost,
    )


def test_what_is_faster_is_news_too() -> None:
    """Faster modules are sorted by the saved time: 10 ms of the head, then 4 ms of `encoder.a`."""
    found = diff(ran(MODULES), ran(slowed(slowed(MODULES, 0.5, "head"), 0.8, "encoder.a")))
    assert ["head", "encoder.a"] == [each.name for each in found.faster]
    assert () == found.slower


def test_the_interval_is_what_the_docstring_derives() -> None:
    """The interval of a ratio follows from the quartiles, the number of steps and of modules.

    The quartiles are 1 % below and above each median, over 25 steps. So each median has an error of
    0.93 * 0.02 * 5 / 24. The ratio has the errors of two medians, and of the factor of the whole
    run, which is the median of 5 modules.
    """
    time = module(
        diff(ran(MODULES, width=0.01, n=25), ran(MODULES, width=0.01, n=25)), "head"
    ).self_work.time
    # A normal variable is further away from its mean than this once in 10 * 1000 samples.
    reach = 3.8906
    error = 0.93 * 0.02 * 5 / 24 * math.sqrt(2 + 2 * 1.2533**2 / 5)
    assert (
        pytest.approx(math.exp(-reach * error), abs=1e-6),
        pytest.approx(math.exp(reach * error), abs=1e-6),
    ) == (time.low, time.high)


def test_a_change_within_the_noise_is_none() -> None:
    """A module that takes 10 % longer is not reported if its steps vary too much.

    The quartiles are 20 % below and above the median over 10 steps, so each median has an error of
    0.93 * 0.4 * 3.16 / 9 = 13 %. With 1 %, the change is reported.
    """
    assert {} == news(
        diff(ran(MODULES, width=0.2, n=10), ran(slowed(MODULES, 1.1, "head"), width=0.2, n=10))
    )
    assert {"head": "slower"} == news(
        diff(ran(MODULES, width=0.01, n=10), ran(slowed(MODULES, 1.1, "head"), width=0.01, n=10))
    )


def test_a_module_whose_steps_agree_by_chance_has_the_error_of_the_others() -> None:
    """The steps of the head agree exactly, but the other modules vary by 20 %.

    So the error of the head is assumed to be as large, and its 10 % are not reported.
    """
    still = {"head": around(22e-3, 0.0, 10)}
    assert {} == news(
        diff(ran(MODULES, width=0.2, n=10), ran(MODULES, width=0.2, n=10, spreads=still))
    )


def test_modules_that_scatter_from_run_to_run_hide_a_change_of_that_size() -> None:
    """If modules differ by random ratios, none of them is reported, even if no module varies.

    The ratios are 0.9, 0.95, 1, 1.05 and 1.1, so the runs differ in something else.
    """
    after = dict(zip(MODULES, [18e-3, 19e-3, 20e-3, 21e-3, 22e-3], strict=True))
    assert {} == news(diff(ran(MODULES), ran(after)))


def test_small_modules_vary_most_and_have_no_say_in_what_is_large() -> None:
    """Small modules with very different ratios do not hide the change of a large module.

    Three modules of 1 ms, together 3 % of the time, take half, twice and three times as long. The
    head is still reported with its 10 %.
    """
    small = {"norm": 1e-3, "act": 1e-3, "drop": 1e-3}
    after = slowed(MODULES, 1.1, "head") | {"norm": 0.5e-3, "act": 2e-3, "drop": 3e-3}
    found = diff(ran(MODULES | small, width=0.005), ran(after, width=0.005))
    assert {"head": "slower"} == news(found)
    assert found.whole is not None
    assert (pytest.approx(1.0), 5) == (found.whole.ratio, found.whole.modules)


def test_small_parts_of_a_large_one_are_news_together() -> None:
    """If many small modules become slower, the module that contains them is reported.

    Each of the 20 modules is 0.2 % of the step, which is too little to be reported, and takes 50 %
    longer. The block is reported, but not the root above it.
    """
    parts = {f"block.{i}": 0.2e-3 for i in range(20)}
    found = diff(ran(MODULES | parts), ran(MODULES | slowed(parts, 1.5, *parts)))
    assert {"block": "slower"} == news(found)
    assert pytest.approx(2e-3) == module(found, "block").news.lost


@pytest.mark.parametrize(
    ("seconds", "after"),
    [(1e-3, 1.02e-3), (0.1e-3, 0.2e-3)],
    ids=["2 % of a module", "0.1 % of the step"],
)
def test_what_is_too_little_to_matter_is_no_news(seconds: float, after: float) -> None:
    """A small change is not reported, even if there is no noise."""
    assert {} == news(diff(ran(MODULES | {"tail": seconds}), ran(MODULES | {"tail": after})))


def test_two_modules_are_not_judged() -> None:
    """With two modules, a slower module looks the same as a faster machine and a faster module.

    The ratios of their times are still known.
    """
    found = diff(ran({"a": 1e-3, "b": 1e-3}), ran({"a": 2e-3, "b": 1e-3}))
    assert found.whole is None
    assert [(2.0, None), (1.0, None)] == [
        (module(found, name).self_work.time.ratio, module(found, name).self_work.time.verdict)
        for name in "ab"
    ]


def test_the_few_layers_that_two_models_share_are_not_judged() -> None:
    """Modules are judged only if the modules with equal work take at least a third of the time.

    Three modules of 20 ms have equal work in both runs. They are more than a third of 170 ms, but
    less than a third of 190 ms.
    """

    def model(own: float, macs: int) -> Profile:
        return ran(dict.fromkeys("abc", 20e-3) | {"own": own}, width=0.01, macs={"own": macs})

    assert diff(model(0.11, 1), model(0.11, 2)).whole is not None
    assert diff(model(0.13, 1), model(0.13, 2)).whole is None


def test_a_single_step_is_not_judged() -> None:
    """With a single step, the noise is unknown, so there is no verdict."""
    found = diff(
        ran(MODULES, n=1, steps=clean(0.1)),
        ran(slowed(MODULES, 2.0, "head"), n=1, steps=clean(0.2)),
    )
    assert (None, 2.0, None) == (found.whole, found.step.ratio, found.step.verdict)
    assert {None} == {each.self_work.time.verdict for each in found.modules}


def test_time_of_other_work_is_compared_a_mac_and_not_judged() -> None:
    """A module with different work is compared by its time per MAC, without a verdict.

    The head has twice the MACs and takes 50 % longer, so it needs 0.75 of the time per MAC.
    """
    found = diff(ran(MODULES), ran(slowed(MODULES, 1.5, "head"), macs={"head": 200}))
    head = module(found, "head")
    assert (100, 200, 2.0) == (
        head.self_work.macs.before,
        head.self_work.macs.after,
        head.self_work.macs.ratio,
    )
    assert (pytest.approx(1.5), pytest.approx(0.75), None) == (
        head.self_work.time.ratio,
        head.self_work.time.per_mac,
        head.self_work.time.verdict,
    )
    assert (500, 600) == (
        found.modules[0].inclusive.macs.before,
        found.modules[0].inclusive.macs.after,
    )
    assert ["", "head"] == [each.name for each in found.modules if each.inclusive.differs]
    assert {} == news(found)


def test_a_phase_that_grew_is_news_whatever_the_modules_did() -> None:
    """The wait for data takes 25 of 120 ms instead of 5 of 100 ms. Forward still takes 95 ms."""
    before = clean(0.1, 0.1, data=0.05, forward=0.95)
    after = clean(0.12, 0.12, data=0.25 / 1.2, forward=0.95 / 1.2)
    found = diff(ran(MODULES, steps=before), ran(MODULES, steps=after))
    assert {"data": "slower", "forward": "same"} == {
        name: phase.verdict for name, phase in found.phases.items()
    }
    assert pytest.approx(20e-3) == found.phases["data"].lost


def test_without_times_work_and_memory_are_compared() -> None:
    """An estimate without times can be compared with a run.

    Both have 640 MACs in forward and 768 in backward. Times and ratios are unknown, not 0.
    """
    estimate = untimed(small_profile())
    found = diff(replace(estimate, run=replace(estimate.run, kind="estimate")), small_profile())
    assert ("estimate", "training") == found.facts["kind"]
    assert (1408, 1408) == (
        found.modules[0].inclusive.macs.before,
        found.modules[0].inclusive.macs.after,
    )
    assert (3000, 3000, None) == (found.peak_bytes.before, found.peak_bytes.after, found.whole)
    for each in found.modules:
        assert each.self_work.time.before is None
        assert each.self_work.time.ratio is None
        assert each.inclusive.time.verdict is None
    assert (None, 3e-3, None) == (found.step.before, found.step.after, found.step.ratio)


def worked(**phases: int) -> Profile:
    """Return the profile of a Linear with this number of MACs in each phase."""
    return profile(
        {"": {}, "fc": {}},
        [
            product("fc", "aten::mm", phase, macs=macs, bytes_moved=1)
            for phase, macs in phases.items()
        ],
    )


def test_what_only_one_run_has_is_in_no_figure() -> None:
    """Only phases that both runs have are compared: here, a forward pass with a training step.

    The MACs of forward are equal. The different phases are listed in the facts.
    """
    found = diff(worked(forward=100), worked(forward=100, backward=200, optimizer=10))
    assert ("forward", "forward, backward, optimizer") == found.facts["phases"]
    assert (100, 100) == (
        module(found, "fc").self_work.macs.before,
        module(found, "fc").self_work.macs.after,
    )


def test_recomputing_is_work_that_changed() -> None:
    """If a run starts to use activation checkpointing, its 300 MACs become 400.

    Recompute is not a phase that is left out because only one run has it.
    """
    found = diff(
        worked(forward=100, backward=200), worked(forward=100, backward=200, recompute=100)
    )
    assert (300, 400) == (
        module(found, "fc").self_work.macs.before,
        module(found, "fc").self_work.macs.after,
    )
    assert {} == found.facts


def test_what_was_not_counted_is_no_equal_work() -> None:
    """Without counts, it is unknown whether modules do the same work, so no module is judged."""
    before = replace(ran(MODULES), op_counts=())
    after = replace(ran(slowed(MODULES, 2.0, "head")), op_counts=())
    found = diff(before, after)
    assert (None, None) == (
        found.modules[0].self_work.macs.before,
        found.modules[0].self_work.macs.after,
    )
    assert (None, 2.0, None) == (
        found.whole,
        module(found, "head").self_work.time.ratio,
        module(found, "head").self_work.time.verdict,
    )


def test_rates_and_peaks_are_compared() -> None:
    """4 samples take 100 ms and then 80 ms. The peak is 1000 bytes and then 1500."""

    def stepped(seconds: float, peak: int) -> Profile:
        given = ran({"a": 1e-3}, steps=clean(seconds, seconds), samples_per_step=4)
        return replace(given, modules={"": module_profile(peak_bytes=peak)}, op_counts=())

    found = diff(stepped(0.1, 1000), stepped(0.08, 1500))
    assert (40.0, 50.0) == (found.samples_per_second.before, found.samples_per_second.after)
    assert (1000, 1500, True) == (
        found.peak_bytes.before,
        found.peak_bytes.after,
        found.peak_bytes.differs,
    )


def sampled(
    random_numbers: random.Random, seconds: Mapping[str, float], noise: float, steps: int
) -> Profile:
    """Return a run with random noise.

    The time of a module in each step is its `seconds` times a log-normal random number.
    """
    spreads = {}
    for name, each in seconds.items():
        times = [each * math.exp(noise * random_numbers.gauss(0, 1)) for _ in range(steps)]
        spread = TimingStats.of(times)
        assert spread is not None
        spreads[name] = spread
    return ran(seconds, spreads=spreads, n=steps)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    noise=st.floats(0.0, 0.1),
    steps=st.integers(5, 40),
    modules=st.integers(3, 12),
)
def test_two_samples_of_the_same_times_give_no_news(
    seed: int, noise: float, steps: int, modules: int
) -> None:
    """Noise alone is never reported, for any level of noise and number of steps and modules."""
    random_numbers = random.Random(seed)  # noqa: S311 - noise, no secret
    seconds = {f"m{i}": random_numbers.uniform(1e-3, 5e-3) for i in range(modules)}
    before = sampled(random_numbers, seconds, noise, steps)
    after = sampled(random_numbers, seconds, noise, steps)
    assert {} == news(diff(before, after))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), noise=st.floats(0.0, 0.02))
def test_a_planted_change_is_found_in_such_samples(seed: int, noise: float) -> None:
    """A slowdown of 10 % is found in spite of noise of up to 2 % from step to step.

    The module is a fifth of the step, and both runs have 30 steps.
    """
    random_numbers = random.Random(seed)  # noqa: S311 - noise, no secret
    before = sampled(random_numbers, MODULES, noise, 30)
    after = sampled(random_numbers, slowed(MODULES, 1.1, "decoder.d"), noise, 30)
    assert {"decoder.d": "slower"} == news(diff(before, after))
