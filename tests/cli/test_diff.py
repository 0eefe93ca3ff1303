"""Test `lflops diff`: its headline, its table, its limits and its JSON output."""

import json
from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from lflops.analysis.compare.compared_run import Change
from lflops.analysis.compare.diff import diff, limits
from lflops.cli.main import main
from lflops.hardware.chips import Hardware
from lflops.profile.json_file import load
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.steps import Step
from lflops.report.diff import headline
from lflops.report.terminal.diff import render_diff
from tests.support.profile_builders import product, profile, run, small_profile, untimed
from tests.support.profile_pairs import clean, ran
from tests.support.warm_python import WarmPython

MODULES = {"encoder.a": 20e-3, "encoder.b": 20e-3, "decoder": 20e-3, "head": 40e-3}
SLOWER = MODULES | {"encoder.b": 22e-3}


def drawn(before: Profile, after: Profile, width: int = 140, **limit: float) -> list[str]:
    """Return the printed lines, without colors, with one blank between words.

    `limit` are arguments of `limits`.
    """
    console = Console(file=StringIO(), width=width, color_system=None)
    found = diff(before, after)
    console.print(render_diff(found, limits(found, **limit)))
    assert isinstance(console.file, StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def files(folder: Path, before: Profile, after: Profile) -> list[str]:
    """Save both profiles, and return their paths."""
    paths = [folder / "before.json", folder / "after.json"]
    for path, each in zip(paths, (before, after), strict=True):
        each.save(path)
    return [str(path) for path in paths]


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """The paths of two runs. In the second, a module is slower: 102 ms instead of 100 ms."""
    before = clean(*[0.1] * 5, forward=1.0)
    after = clean(*[0.102] * 5, forward=1.0)
    return files(tmp_path, ran(MODULES, steps=before), ran(SLOWER, steps=after))


def test_the_verdict_is_about_the_step() -> None:
    """The headline is about the step, which may be slower although all modules are faster.

    The step takes 126.9 ms instead of 100 ms, because the wait for data is 45.3 ms longer. Each
    module takes 18.4 % less time.
    """
    before = clean(*[0.1] * 5, data=0.1, forward=0.9)
    after = clean(*[0.1269] * 5, data=0.0553 / 0.1269, forward=0.0716 / 0.1269)
    faster = {name: 0.816 * each for name, each in MODULES.items()}
    assert (
        "The step is 26.9 % slower (+26.9 % to +26.9 %): 100 ms before, 127 ms after.",
        "data wait takes 5.5× as long: +45.3 ms per step.",
        "No module became slower or faster than the others by more than noise.",
        (
            "All other modules are 18.4 % faster (the median of 4 modules with the same work): the "
            "second run used a different machine, or the load of the machine changed."
        ),
        "The work is the same, to the last FLOP and byte.",
    ) == headline(diff(ran(MODULES, steps=before), ran(faster, steps=after)))


def test_the_headline_says_what_is_slower_and_by_how_much() -> None:
    """A module takes 2 ms more than 20 ms. The step takes about as long as before."""
    sentences = headline(
        diff(ran(MODULES, steps=clean(*[0.1] * 5)), ran(SLOWER, steps=clean(*[0.102] * 5)))
    )
    assert (
        (
            "The step takes as long as before, within the usual difference between two runs of the "
            "same code (+2.0 % to +2.0 %): 100 ms before, 102 ms after."
        ),
        "encoder.b is 10.0 % slower (+10.0 % to +10.0 %): +2.00 ms per step.",
        "The work is the same, to the last FLOP and byte.",
    ) == sentences


def test_a_layer_that_does_more_work_and_takes_longer_is_the_cause() -> None:
    """A layer with four times the MACs takes 16 ms instead of 4 ms, and is named as the cause.

    The change of the work comes first, because counts have no noise.
    """
    layers = {}
    for block in range(4):
        layers[f"layers.{block}.linear1"] = 4e-3
        layers[f"layers.{block}.linear2"] = 4e-3
    after = ran(
        layers | {"layers.2.linear1": 16e-3},
        macs={"layers.2.linear1": 400},
        width=0.01,
        steps=clean(*[0.044] * 5),
    )
    found = headline(diff(ran(layers, width=0.01, steps=clean(*[0.032] * 5)), after))
    assert (
        (
            "The MACs of a step went from 800 to 1.10 k (+37.5 %), and the whole change is in "
            "layers.2.linear1."
        ),
        "The step is 37.5 % slower (+37.5 % to +37.5 %): 32.0 ms before, 44.0 ms after.",
        "layers.2.linear1 does 4.0× as much work: +12.0 ms per step.",
    ) == found[:3]


def test_a_larger_batch_is_named_as_that() -> None:
    """If the batch is twice as large, the headline compares the time per sample.

    All modules have twice the work, and the step takes 180 ms instead of 100 ms, so a sample takes
    a tenth less. No module is named.
    """
    before = ran(MODULES, steps=clean(*[0.1] * 5), samples_per_step=4)
    double = {name: 1.8 * each for name, each in MODULES.items()}
    after = ran(
        double, macs=dict.fromkeys(MODULES, 200), steps=clean(*[0.18] * 5), samples_per_step=8
    )
    assert (
        "The step is 80.0 % slower (+80.0 % to +80.0 %): 100 ms before, 180 ms after.",
        (
            "The batch went from 4 to 8 samples per step, and the work changed in proportion. A "
            "sample takes 10.0 % less time."
        ),
        "Modules are not compared: too few modules were timed in both runs with the same work.",
    ) == headline(diff(before, after))


def test_what_was_added_everywhere_is_one_line() -> None:
    """Modules of one class that were added in every layer are one line without their names.

    Two dropouts of 0.5 ms were added in each of 6 layers, which are 6 ms.
    """
    layers = {}
    dropouts = {}
    for block in range(6):
        layers[f"layers.{block}.attention"] = 5e-3
        layers[f"layers.{block}.mlp"] = 5e-3
        dropouts[f"layers.{block}.dropout1"] = 0.5e-3
        dropouts[f"layers.{block}.dropout2"] = 0.5e-3
    kinds = dict.fromkeys(dropouts, "Dropout")
    after = ran(
        layers | dropouts, macs=dict.fromkeys(dropouts, 0), kinds=kinds, steps=clean(*[0.066] * 5)
    )
    found = headline(diff(ran(layers, steps=clean(*[0.06] * 5)), after))
    assert ["Dropout ×12 was added: +6.00 ms per step."] == [
        sentence for sentence in found if "added" in sentence
    ]


def test_module_times_that_their_profile_warns_of_are_not_judged() -> None:
    """Module times that had to be scaled by 3 are unreliable, so no module is called slower.

    The headline gives the reason.
    """
    warned = replace(
        ran(SLOWER, steps=clean(*[0.1] * 5)),
        notes=(Note(code="time_scaled", subject="", values={"forward": 3.0}),),
    )
    found = headline(diff(ran(MODULES, steps=clean(*[0.1] * 5)), warned))
    assert "Modules are not compared: module times are unreliable in the run after." in found
    assert not [sentence for sentence in found if "encoder.b" in sentence]


def test_steps_that_vary_too_much_give_no_interval() -> None:
    """If the steps vary from 20 to 300 ms, the interval would be too wide, so it is unknown."""
    wild = ran(MODULES, steps=clean(0.02, 0.05, 0.1, 0.2, 0.3))
    found = diff(wild, ran(MODULES, steps=clean(0.03, 0.06, 0.11, 0.25, 0.3)))
    assert (None, None, None) == (found.step.low, found.step.high, found.step.verdict)
    assert headline(found)[0] == (
        "Cannot tell whether the step is slower or faster, because the steps vary too much: "
        "100 ms before, 110 ms after."
    )


def test_the_headline_of_a_count_tells_of_work_alone() -> None:
    """Without times, the headline says so and describes the changes of work and modules.

    The head is wider, an adapter was added, and a layer has another name.
    """
    before = untimed(ran(MODULES))
    after = untimed(
        ran(
            {"encoder.first": 0, "encoder.b": 0, "decoder": 0, "head": 0, "adapter": 0},
            macs={"head": 150},
        )
    )
    assert (
        "The MACs of a step went from 400 to 550 (+37.5 %).",
        "Times are not compared: one of the two runs has no times.",
        "Modules added: adapter.",
        "Modules renamed: encoder.a → encoder.first.",
    ) == headline(diff(before, after))


def test_work_that_moved_from_one_module_to_another_is_told() -> None:
    """The total of 200 MACs did not change, but the headline says that they moved."""
    before = untimed(ran({"a": 0, "b": 0}, macs={"a": 150, "b": 50}))
    after = untimed(ran({"a": 0, "b": 0}, macs={"a": 50, "b": 150}))
    assert "The total work is the same, but the work of some modules changed." in headline(
        diff(before, after)
    )


def test_what_two_modules_tell_is_not_judged_and_said_so() -> None:
    """Two modules are too few to be judged, so only the step is compared. The headline says so."""
    found = diff(
        ran({"a": 1e-3, "b": 1e-3}, steps=clean(2e-3, 2e-3)),
        ran({"a": 2e-3, "b": 1e-3}, steps=clean(3e-3, 3e-3)),
    )
    assert (
        "Modules are not compared: too few modules were timed in both runs with the same work."
        in headline(found)
    )


def test_many_modules_are_not_all_named() -> None:
    """If seven modules are faster, the five that save the most time are named.

    Of twelve added modules, only the outermost one is named.
    """
    before = {f"m{i}": 10e-3 for i in range(20)}
    faster = {f"m{i}": 5e-3 - i * 1e-4 for i in range(7)}
    new = {f"new.{i}": 0.0 for i in range(11)}
    found = headline(
        diff(
            ran(before, steps=clean(0.2, 0.2)), ran(before | faster | new, steps=clean(0.17, 0.17))
        )
    )
    assert ["m6", "m5", "m4", "m3", "m2", "2"] == [sentence.split()[0] for sentence in found[2:8]]
    assert [] == [sentence for sentence in found if "new.0" in sentence]


def test_the_table_has_the_run_and_the_modules_that_changed() -> None:
    """The table has the changes of the run and of modules. Unknown values are dashes.

    Unchanged modules, and an MFU that is unknown in both runs, are not shown.
    """
    lines = drawn(
        ran(MODULES, steps=clean(*[0.1] * 5, forward=1.0), samples_per_step=4),
        ran(
            SLOWER,
            steps=clean(*[0.102] * 5, forward=1.0),
            samples_per_step=4,
            device_name="NVIDIA H200",
        ),
    )
    assert "device name cpu → NVIDIA H200" in lines
    assert "median step 100 ms 102 ms +2.0 %" in lines
    assert "forward 100 ms 102 ms +2.0 % +2.0 % to +2.0 %" in lines
    assert "samples/s 40.0 39.2 -2.0 %" in lines
    assert (
        "encoder.b self 20.0 ms 22.0 ms +10.0 % slower +10.0 % to +10.0 % 0 % 0 % 0 % – –" in lines
    )
    assert not [line for line in lines if line.startswith(("head", "MFU"))]


def test_an_estimate_against_a_run_prints_dashes() -> None:
    """The times of an estimate are unknown, so they are dashes and not 0."""
    estimate = untimed(small_profile())
    lines = drawn(replace(estimate, run=replace(estimate.run, kind="estimate")), small_profile())
    assert "median step – 3.00 ms –" in lines
    assert "peak live memory 2.93 KiB 2.93 KiB 0 %" in lines


@pytest.mark.parametrize(
    "option",
    [
        [],
        ["--max-regress", "2.1%"],
        ["--max-regress", "0.03"],
        ["--max-memory", "0%"],
        ["--max-memory", "1KiB"],
    ],
)
def test_limits_that_are_held_are_fine(option: list[str], runs: list[str], tmp_path: Path) -> None:
    """The step is 2 % slower, and the peak is 1024 bytes in both runs: no limit is violated."""
    files(tmp_path, *(_with_peak(Path(path), 1024) for path in runs))
    assert 0 == main(["diff", *runs, *option])


@pytest.mark.parametrize(
    "option",
    [
        ["--max-regress", "1.9%"],
        ["--max-memory", "1kB"],
        ["--max-memory", "1023B"],
        ["--max-regress", "0"],
    ],
)
def test_a_broken_limit_is_status_1(
    option: list[str], runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is 1, and the text or the JSON output names the violated limit."""
    files(tmp_path, *(_with_peak(Path(path), 1024) for path in runs))
    assert 1 == main(["diff", *runs, *option])
    assert "limit violated" in capsys.readouterr().out
    assert 1 == main(["diff", *runs, *option, "--json"])
    assert [True] == [limit["is_broken"] for limit in json.loads(capsys.readouterr().out)["limits"]]


def _with_peak(path: Path, peak: int) -> Profile:
    """Return the saved profile, with another memory peak."""
    given = load(path)
    root = replace(given.modules[""], peak_bytes=peak)
    return replace(given, modules=dict(given.modules) | {"": root})


def test_memory_may_grow_by_a_share(runs: list[str], tmp_path: Path) -> None:
    """The peak grows from 1000 to 1040 bytes: a limit of 5 % allows this, and 3 % does not."""
    files(tmp_path, _with_peak(Path(runs[0]), 1000), _with_peak(Path(runs[1]), 1040))
    assert 0 == main(["diff", *runs, "--max-memory", "5%"])
    assert 1 == main(["diff", *runs, "--max-memory", "3%"])


def test_the_least_mfu_is_the_second_runs(tmp_path: Path) -> None:
    """`--min-mfu` checks the MFU of the second run.

    It has 2 * 10**6 FLOPs in 1 ms, which is half of the peak of 4 * 10**9 FLOP/s.
    """
    chip = Hardware(name="chip", source="a test", peak_flops_per_second={"fp32": 4e9})
    fast = profile(
        {"": {}},
        [product("", "aten::mm", "forward", macs=10**6, bytes_moved=1)],
        run=run(kind="measure", hardware=chip),
        steps=tuple(clean(1e-3)),
    )
    paths = files(tmp_path, fast, fast)
    assert [0, 0, 1, 1] == [
        main(["diff", *paths, "--min-mfu", least]) for least in ("0.5", "50%", "0.51", "51%")
    ]


def test_a_regress_within_the_noise_breaks_nothing() -> None:
    """A median that is 2 % slower does not break a limit of 1 % if the steps vary by a fifth."""
    noisy = ran(MODULES, steps=clean(0.08, 0.09, 0.1, 0.11, 0.12))
    found = diff(noisy, ran(MODULES, steps=clean(*[0.102] * 5)))
    (limit,) = limits(found, max_regress=0.01)
    assert (pytest.approx(0.02), False) == (limit.found, limit.is_broken)


def _beside_others(seconds: float, lost: float) -> Profile:
    """Return a run next to other processes, with five unprofiled and five module-timing steps.

    In the module-timing steps, the other processes took the share `lost` of the CPU time.
    """
    timed = Step(
        index=9,
        kind="module_timing",
        seconds=1.0,
        phases={},
        cpu_user=1 - lost,
        cpu_system=0.0,
        cpu_lost=lost,
    )
    return ran(
        {name: each * seconds / 0.1 for name, each in MODULES.items()},
        steps=[*clean(*[seconds] * 5), *[timed] * 5],
    )


@pytest.mark.parametrize(
    ("seconds", "lost", "status"),
    [
        (0.1, 0.0, 0),
        (0.1, 0.4, 0),
        # Losing 40 % of the CPU time may make a step 0.6 ** -3 = 4.6 times as long. This explains
        # a step that is 2.5 times as long, but not 5 times.
        (0.25, 0.4, 0),
        (0.5, 0.4, 1),
        # Losing 10 % explains only a factor of 0.9 ** -3 = 1.4.
        (0.25, 0.1, 1),
    ],
)
def test_a_busy_machine_breaks_no_limit(
    seconds: float, lost: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If other processes explain a slower step, the limit is not violated, and the status says so.

    The first run takes 100 ms on an idle machine. With `--strict`, a limit that cannot be checked
    counts as broken.
    """
    is_slower = seconds > 0.1
    is_explained = is_slower and not status
    if is_explained:
        step_status = "cannot tell"
        caveat = "busy"
        strict_status = 1
    elif is_slower:
        step_status = "slower"
        caveat = None
        strict_status = 1
    else:
        step_status = "same"
        caveat = None
        strict_status = 0

    paths = files(tmp_path, _beside_others(0.1, 0.0), _beside_others(seconds, lost))
    assert status == main(["diff", *paths, "--max-regress", "5%", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert step_status == found["status"]
    assert [caveat] == [limit["caveat"] for limit in found["limits"]]
    assert strict_status == main(["diff", *paths, "--max-regress", "5%", "--strict"])
    printed = " ".join(capsys.readouterr().out.split())
    assert is_explained == ("cannot tell the step time changed" in printed)


def test_an_idle_machine_after_a_busy_one_is_no_progress(tmp_path: Path) -> None:
    """If other processes slowed down the first run, the second run is not called faster."""
    found = diff(_beside_others(0.25, 0.4), _beside_others(0.1, 0.0))
    assert ("cannot tell", "busy", ()) == (found.status, found.step.caveat, found.faster)
    assert headline(found)[0] == (
        "Cannot tell whether the step is slower or faster, because other processes took CPU "
        "time from the steps: 40.0 % in the first run, 0 % in the second run: 250 ms before, 100 ms "
        "after."
    )


def test_a_low_mfu_on_a_busy_machine_is_no_proof() -> None:
    """A low MFU breaks the limit only if other processes do not explain it.

    Other processes took enough CPU time to halve the MFU of 40 %, but not to divide it by ten.
    """
    given = diff(_beside_others(0.1, 0.0), _beside_others(0.2, 0.4))
    halved = replace(given, mfu=Change(before=0.4, after=0.2))
    (limit,) = limits(halved, min_mfu=0.4)
    assert (None, "busy") == (limit.is_broken, limit.caveat)
    a_tenth = replace(given, mfu=Change(before=0.4, after=0.04))
    (limit,) = limits(a_tenth, min_mfu=0.4)
    assert (True, None) == (limit.is_broken, limit.caveat)


def test_steps_that_vary_too_much_break_nothing(tmp_path: Path) -> None:
    """If the steps vary from 10 to 400 ms, a limit is violated only with `--strict`."""
    wild = ran(MODULES, steps=clean(0.05, 0.1, 0.2, 0.4, 0.01))
    paths = files(tmp_path, ran(MODULES, steps=clean(*[0.05] * 5)), wild)
    assert 0 == main(["diff", *paths, "--max-regress", "5%"])
    assert 1 == main(["diff", *paths, "--max-regress", "5%", "--strict"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-regress", "3"], "--max-regress='3': pass a share, such as 3% or 0.03"),
        (["--max-regress", "-3%"], "--max-regress='-3%': pass a share"),
        (["--max-regress", "nan"], "--max-regress='nan': pass a share"),
        (["--min-mfu", "high"], "--min-mfu='high': pass a share"),
        (
            ["--max-memory", "24 apples"],
            "--max-memory='24 apples': pass a size, such as 24GiB or 24GB, or a growth, such as 5%",
        ),
        (
            ["--max-memory", "20"],
            "--max-memory='20' has no unit: pass a size, such as 20GiB or 20GB, or a growth, such as 20%",
        ),
        (["--max-memory", "iB"], "--max-memory='iB': pass a size"),
        (["--max-memory", "x%"], "--max-memory='x%': pass a share"),
        (
            ["--max-memory", "5%"],
            (
                "--max-memory='5%' limits the growth of the peak memory, but the peak memory of the "
                "first run is unknown: pass a size, such as 24GiB"
            ),
        ),
        (
            ["--max-memory", "5GiB"],
            "--max-memory cannot be checked: the peak memory of the second run is unknown",
        ),
        (["--min-mfu", "0.3"], "--min-mfu cannot be checked: the second run has no MFU"),
        (
            ["--max-regress", "3%"],
            "--max-regress cannot be checked: each run needs at least two unprofiled steps",
        ),
    ],
)
def test_a_wrong_call_is_status_2_in_one_line(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line has the wrong value and the accepted values.

    A limit that cannot be checked is also an error, so it does not seem to hold.
    """
    paths = files(tmp_path, untimed(ran(MODULES)), untimed(ran(MODULES)))
    assert 2 == main(["diff", *paths, *options])
    shown = capsys.readouterr()
    assert ("", 1) == (shown.out, len(shown.err.splitlines()))
    assert shown.err.startswith(f"lflops: {said}")


def test_a_file_that_is_none_is_status_2(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names a file that is not a profile or does not exist."""
    (tmp_path / "text.json").write_text("no profile")
    for second in (tmp_path / "text.json", tmp_path / "nowhere.json"):
        assert 2 == main(["diff", runs[0], str(second)])
        shown = capsys.readouterr()
        assert ("", 1) == (shown.out, len(shown.err.splitlines()))
        assert second.name in shown.err
    assert 2 == main(["diff", runs[0]])


def test_json_has_all_of_it(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON output has each module with its names in both runs. Unknown values are null."""
    assert 0 == main(["diff", *runs, "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert (1.0, 4, []) == (shown["whole"]["ratio"], shown["whole"]["modules"], shown["limits"])
    assert shown["headline"][1].startswith("encoder.b is 10.0 %")
    slow = next(module for module in shown["modules"] if module["after"] == "encoder.b")
    assert ("encoder.b", {"before": 100, "after": 100}, "slower") == (
        slow["before"],
        slow["self_work"]["macs"],
        slow["self_work"]["time"]["verdict"],
    )
    assert {"before": None, "after": None} == shown["mfu"]


def test_all_lists_every_module(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`--all` also lists the modules that did not change."""
    main(["diff", *runs, "--all"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert {"encoder", "encoder.a", "decoder", "head"} <= set(listed)


def test_the_example_fails_where_a_limit_is_broken(tmp_path: Path, warm_python: WarmPython) -> None:
    """`examples/compare.py` records the first run, and compares the other runs with it.

    The second run needs the same memory, and the third has four times the hidden features.
    """

    def build(*args: str) -> int:
        script = "import runpy; runpy.run_path('examples/compare.py', run_name='__main__')"
        return warm_python.run(
            script, "--baseline", tmp_path / "good.json", "--repeats", "2", *args
        ).status

    assert 0 == build()
    assert 0 == build("--max-memory", "5%")
    assert 1 == build("--max-memory", "5%", "--hidden", "1024")
