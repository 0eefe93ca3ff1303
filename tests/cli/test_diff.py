import json
from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from lflops.analysis.compare.compared_run import Change
from lflops.analysis.compare.diff import diff, limits
from lflops.cli.main import main
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
    """The lines on a terminal without colours, with one blank between words."""
    console = Console(file=StringIO(), width=width, color_system=None)
    found = diff(before, after)
    console.print(render_diff(found, limits(found, **limit)))
    assert isinstance(console.file, StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def files(folder: Path, before: Profile, after: Profile) -> list[str]:
    """Both of them, saved."""
    paths = [folder / "before.json", folder / "after.json"]
    for path, each in zip(paths, (before, after), strict=True):
        each.save(path)
    return [str(path) for path in paths]


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two runs of which the second has a slower module: 100 ms became 102."""
    before, after = clean(*[0.1] * 5, forward=1.0), clean(*[0.102] * 5, forward=1.0)
    return files(tmp_path, ran(MODULES, steps=before), ran(SLOWER, steps=after))


def test_the_verdict_is_about_the_step() -> None:
    """100 ms became 126.9, while each of the modules takes 18.4 % less time.

    The wait for data did it, 45.3 ms longer.
    """
    before, after = (
        clean(*[0.1] * 5, data=0.1, forward=0.9),
        clean(*[0.1269] * 5, data=0.0553 / 0.1269, forward=0.0716 / 0.1269),
    )
    faster = {name: 0.816 * each for name, each in MODULES.items()}
    assert (
        "The step is 26.9 % slower (+26.9 % to +26.9 %): 100 ms before, 127 ms after.",
        "data wait is 5.5× as slow: +45.3 ms per step.",
        "Relative to the other modules, no module became slower or faster beyond the noise.",
        (
            "All other modules are 18.4 % faster (the median of 4 modules with the same work): the "
            "second run used another machine, or the load of the machine changed."
        ),
        "The work is the same, to the last FLOP and byte.",
    ) == headline(diff(ran(MODULES, steps=before), ran(faster, steps=after)))


def test_the_headline_says_what_is_slower_and_by_how_much() -> None:
    """2 of 20 ms, in a run that is as fast as it was; nothing else is said of time."""
    sentences = headline(
        diff(ran(MODULES, steps=clean(*[0.1] * 5)), ran(SLOWER, steps=clean(*[0.102] * 5)))
    )
    assert (
        "The step takes as long as before, within the differences between two runs of the same code (+2.0 % to +2.0 %): 100 ms before, 102 ms after.",
        "encoder.b is 10.0 % slower (+10.0 % to +10.0 %): +2.00 ms per step.",
        "The work is the same, to the last FLOP and byte.",
    ) == sentences


def test_a_layer_that_does_more_work_and_takes_longer_is_the_cause() -> None:
    """Four times the MACs of one layer, 4 ms became 16.

    The work comes first: counts have no noise.
    """
    layers = {f"layers.{block}.linear{layer}": 4e-3 for block in range(4) for layer in (1, 2)}
    after = ran(
        layers | {"layers.2.linear1": 16e-3},
        macs={"layers.2.linear1": 400},
        width=0.01,
        steps=clean(*[0.044] * 5),
    )
    found = headline(diff(ran(layers, width=0.01, steps=clean(*[0.032] * 5)), after))
    assert (
        (
            "The work of the step changed: +37.5 % MACs (800 to 1.10 k), all of it in "
            "layers.2.linear1."
        ),
        "The step is 37.5 % slower (+37.5 % to +37.5 %): 32.0 ms before, 44.0 ms after.",
        "layers.2.linear1 does 4.0× the work: +12.0 ms per step.",
    ) == found[:3]


def test_a_larger_batch_is_named_as_that() -> None:
    """Twice the samples, twice the work of all modules, and 180 ms in place of 100: a sample takes a tenth less.

    No module is named.
    """
    before = ran(MODULES, steps=clean(*[0.1] * 5), samples_per_step=4)
    double = {name: 1.8 * each for name, each in MODULES.items()}
    after = ran(
        double, macs=dict.fromkeys(MODULES, 200), steps=clean(*[0.18] * 5), samples_per_step=8
    )
    assert (
        "The step is 80.0 % slower (+80.0 % to +80.0 %): 100 ms before, 180 ms after.",
        "The batch went from 4 to 8 samples per step, and the work with it. A sample takes 10.0 % less time.",
        "Modules are not compared: too few modules have times and the same work in both runs.",
    ) == headline(diff(before, after))


def test_what_was_added_everywhere_is_one_line() -> None:
    """Two dropouts in each of 6 layers, of 0.5 ms each: 6 ms; the modules' names are not listed."""
    layers = {f"layers.{block}.{name}": 5e-3 for block in range(6) for name in ("attention", "mlp")}
    dropouts = {
        f"layers.{block}.dropout{number}": 0.5e-3 for block in range(6) for number in (1, 2)
    }
    kinds = dict.fromkeys(dropouts, "Dropout")
    after = ran(
        layers | dropouts, macs=dict.fromkeys(dropouts, 0), kinds=kinds, steps=clean(*[0.066] * 5)
    )
    found = headline(diff(ran(layers, steps=clean(*[0.06] * 5)), after))
    assert ["Dropout ×12 was added: +6.00 ms per step."] == [
        sentence for sentence in found if "added" in sentence
    ]


def test_module_times_that_their_profile_warns_of_are_not_judged() -> None:
    """Scaled by 3, which is no measure of anything: nothing is said to be slower, and why."""
    warned = replace(
        ran(SLOWER, steps=clean(*[0.1] * 5)),
        notes=(Note(code="time_scaled", subject="", values={"forward": 3.0}),),
    )
    found = headline(diff(ran(MODULES, steps=clean(*[0.1] * 5)), warned))
    assert "Modules are not compared: their times are unreliable in the profile after." in found
    assert not [sentence for sentence in found if "encoder.b" in sentence]


def test_steps_that_vary_too_much_give_no_interval() -> None:
    """From 20 to 300 ms: an interval from nothing to a thousand times says nothing, so it is not known."""
    wild = ran(MODULES, steps=clean(0.02, 0.05, 0.1, 0.2, 0.3))
    found = diff(wild, ran(MODULES, steps=clean(0.03, 0.06, 0.11, 0.25, 0.3)))
    assert (None, None, None) == (found.step.low, found.step.high, found.step.verdict)
    assert headline(found)[0] == (
        "Cannot tell whether the step is slower or faster, because the steps vary too much: 100 ms before, 110 ms after."
    )


def test_the_headline_of_a_count_tells_of_work_alone() -> None:
    """Of times is said that they are not there.

    The head is wider, an adapter is new, and a layer has another name.
    """
    before = untimed(ran(MODULES))
    after = untimed(
        ran(
            {"encoder.first": 0, "encoder.b": 0, "decoder": 0, "head": 0, "adapter": 0},
            macs={"head": 150},
        )
    )
    assert (
        "The work of the step changed: +37.5 % MACs (400 to 550).",
        "Times are not compared: one of the two runs has no times.",
        "Added: adapter.",
        "Renamed: encoder.a → encoder.first.",
    ) == headline(diff(before, after))


def test_work_that_moved_from_one_module_to_another_is_told() -> None:
    """200 MACs in all, before and after."""
    before, after = (
        untimed(ran({"a": 0, "b": 0}, macs=macs))
        for macs in ({"a": 150, "b": 50}, {"a": 50, "b": 150})
    )
    assert "The total work is the same, but not module by module." in headline(diff(before, after))


def test_what_two_modules_tell_is_not_judged_and_said_so() -> None:
    """The step alone is compared: 2 ms became 3."""
    found = diff(
        ran({"a": 1e-3, "b": 1e-3}, steps=clean(2e-3, 2e-3)),
        ran({"a": 2e-3, "b": 1e-3}, steps=clean(3e-3, 3e-3)),
    )
    assert (
        "Modules are not compared: too few modules have times and the same work in both runs."
        in headline(found)
    )


def test_many_modules_are_not_all_named() -> None:
    """Of seven that are faster the five that win the most; of twelve added ones the uppermost."""
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
    """Unknown is a dash: what another unit of the run's was, an MFU without a peak is not shown."""
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
    """No time of the first is known, and none reads as 0."""
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
    """The step is 2 % slower, and 1024 bytes are the peak of both."""
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
    """And says by how much, also as JSON."""
    files(tmp_path, *(_with_peak(Path(path), 1024) for path in runs))
    assert 1 == main(["diff", *runs, *option])
    assert "limit broken" in capsys.readouterr().out
    assert 1 == main(["diff", *runs, *option, "--json"])
    assert [True] == [limit["is_broken"] for limit in json.loads(capsys.readouterr().out)["limits"]]


def _with_peak(path: Path, peak: int) -> Profile:
    from lflops.profile.json_file import load

    given = load(path)
    return replace(
        given, modules=dict(given.modules) | {"": replace(given.modules[""], peak_bytes=peak)}
    )


def test_memory_may_grow_by_a_share(runs: list[str], tmp_path: Path) -> None:
    """From 1000 bytes to 1040: 5 % may be, 3 % not."""
    files(tmp_path, _with_peak(Path(runs[0]), 1000), _with_peak(Path(runs[1]), 1040))
    assert [0, 1] == [main(["diff", *runs, "--max-memory", share]) for share in ("5%", "3%")]


def test_the_least_mfu_is_the_second_runs(tmp_path: Path) -> None:
    """2 * 10**6 FLOPs in 1 ms, of a peak of 4 * 10**9 a second: half of it."""
    from lflops.hardware.chips import Hardware

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
    """The same 2 % of median, on steps that vary by a fifth.

    The limit is held, if it is known at all.
    """
    noisy = [
        diff(
            ran(MODULES, steps=clean(*(middle * each for each in (0.8, 0.9, 1.0, 1.1, 1.2)))),
            ran(MODULES, steps=clean(*[0.102] * 5)),
        )
        for middle in (0.1,)
    ]
    (limit,) = limits(noisy[0], max_regress=0.01)
    assert (pytest.approx(0.02), False) == (limit.found, limit.is_broken)


def _beside_others(seconds: float, lost: float) -> Profile:
    """Five clean steps, and five hooked ones in which other processes took a share of the CPU time."""
    hooked = Step(
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
        steps=[*clean(*[seconds] * 5), *[hooked] * 5],
    )


@pytest.mark.parametrize(
    ("seconds", "lost", "status"),
    [
        (0.1, 0.0, 0),
        (0.1, 0.4, 0),
        (0.25, 0.4, 0),  # 0.6 ** -3 = 4.6: others may have made it 2.5 times as long
        (0.5, 0.4, 1),  # but not 5 times
        (0.25, 0.1, 1),  # 0.9 ** -3 = 1.4
    ],
)
def test_a_busy_machine_breaks_no_limit(
    seconds: float, lost: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From 100 ms on an idle machine.

    What others took of the CPU explains a change up to a size; then the step's status says so.
    """
    paths = files(tmp_path, _beside_others(0.1, 0.0), _beside_others(seconds, lost))
    assert status == main(["diff", *paths, "--max-regress", "5%", "--json"])
    found = json.loads(capsys.readouterr().out)
    cannot = seconds > 0.1 and not status
    assert ("cannot tell" if cannot else "slower" if status else "same") == found["status"]
    assert ["busy" if cannot else None] == [limit["caveat"] for limit in found["limits"]]
    assert (1 if cannot else status) == main(["diff", *paths, "--max-regress", "5%", "--strict"])
    assert (
        f"cannot tell {'the step takes'}" in " ".join(capsys.readouterr().out.split())
    ) is cannot


def test_an_idle_machine_after_a_busy_one_is_no_progress(tmp_path: Path) -> None:
    """Nor is the code faster where the first run was beside others."""
    found = diff(_beside_others(0.25, 0.4), _beside_others(0.1, 0.0))
    assert ("cannot tell", "busy", ()) == (found.status, found.step.caveat, found.faster)
    assert headline(found)[0] == (
        "Cannot tell whether the step is slower or faster, because other processes took a part of the CPU time that the step needed, "
        "40.0 % before and 0 % after: 250 ms before, 100 ms after."
    )


def test_a_low_mfu_on_a_busy_machine_is_no_proof() -> None:
    """20 % where 40 % is the least: others took enough to halve it. Of a tenth it is too little."""
    given = diff(_beside_others(0.1, 0.0), _beside_others(0.2, 0.4))
    found = replace(given, mfu=Change(before=0.4, after=0.2))
    assert [(None, "busy")] == [
        (each.is_broken, each.caveat) for each in limits(found, min_mfu=0.4)
    ]
    assert [(True, None)] == [
        (each.is_broken, each.caveat)
        for each in limits(replace(found, mfu=Change(before=0.4, after=0.04)), min_mfu=0.4)
    ]


def test_steps_that_vary_too_much_break_nothing(tmp_path: Path) -> None:
    """From half to twice a median: nobody can tell."""
    wild = ran(MODULES, steps=clean(0.05, 0.1, 0.2, 0.4, 0.01))
    paths = files(tmp_path, ran(MODULES, steps=clean(*[0.05] * 5)), wild)
    assert [0, 1] == [
        main(["diff", *paths, "--max-regress", "5%", *strict]) for strict in ([], ["--strict"])
    ]


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
            "--max-memory='20' has no unit: pass 20GiB, 20GB or, as a growth, 20%",
        ),
        (["--max-memory", "iB"], "--max-memory='iB': pass a size"),
        (["--max-memory", "x%"], "--max-memory='x%': pass a share"),
        (
            ["--max-memory", "5%"],
            "--max-memory='5%': the peak memory of the first run is unknown: pass a size, such as 24GiB",
        ),
        (
            ["--max-memory", "5GiB"],
            "--max-memory: cannot be checked: the peak memory of the second run is unknown",
        ),
        (["--min-mfu", "0.3"], "--min-mfu: cannot be checked: the second run has no MFU"),
        (
            ["--max-regress", "3%"],
            "--max-regress: cannot be checked: each run needs at least two unprofiled steps",
        ),
    ],
)
def test_a_wrong_call_is_status_2_in_one_line(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was given and what is taken; a limit of which nothing is known does not pass in silence."""
    paths = files(tmp_path, untimed(ran(MODULES)), untimed(ran(MODULES)))
    assert 2 == main(["diff", *paths, *options])
    shown = capsys.readouterr()
    assert ("", 1) == (shown.out, len(shown.err.splitlines()))
    assert shown.err.startswith(f"lflops: {said}")


def test_a_file_that_is_none_is_status_2(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named."""
    (tmp_path / "text.json").write_text("no profile")
    for second in (tmp_path / "text.json", tmp_path / "nowhere.json"):
        assert 2 == main(["diff", runs[0], str(second)])
        shown = capsys.readouterr()
        assert ("", 1) == (shown.out, len(shown.err.splitlines()))
        assert second.name in shown.err
    assert 2 == main(["diff", runs[0]])


def test_json_has_all_of_it(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every module with both of its names, exact counts, unknown as null."""
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
    """Those too that did not change."""
    main(["diff", *runs, "--all"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert {"encoder", "encoder.a", "decoder", "head"} <= set(listed)


def test_the_example_fails_where_a_limit_is_broken(tmp_path: Path, warm_python: WarmPython) -> None:
    """The first run is recorded, the second is as large, the third has four times the hidden features."""

    def build(*args: str) -> int:
        script = "import runpy; runpy.run_path('examples/compare.py', run_name='__main__')"
        return warm_python.run(
            script, "--baseline", tmp_path / "good.json", "--repeats", "2", *args
        ).status

    assert [0, 0, 1] == [
        build(),
        build("--max-memory", "5%"),
        build("--max-memory", "5%", "--hidden", "1024"),
    ]
