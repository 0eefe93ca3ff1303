import json
from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from lflops.analyze.compare.diff import diff
from lflops.analyze.compare.regression_limits import limits
from lflops.cli.main import main
from lflops.profile.model import Profile
from lflops.report.terminal.diff import headline, render_diff
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


def test_the_headline_says_what_is_slower_and_by_how_much() -> None:
    """2 of 20 ms, in a run that is as fast as it was; nothing else is said of time."""
    sentences = headline(diff(ran(MODULES), ran(SLOWER)))
    assert (
        "encoder.b is 10.0 % (+10.0 % to +10.0 %) slower than the rest of the run: 2.00 ms a step lost",
        "the whole run is as fast as before, as the median of 4 modules; what one does beyond that is its own",
        "the work is the same, to the last FLOP and byte",
    ) == sentences


def test_the_headline_of_a_slower_machine_names_no_module() -> None:
    """Everything takes a tenth longer."""
    sentences = headline(diff(ran(MODULES), ran({name: 1.1 * each for name, each in MODULES.items()})))
    assert (
        "no module is slower or faster than the rest of the run, beyond the noise",
        "the whole run is 10.0 % slower, as the median of 4 modules; what one does beyond that is its own",
    ) == sentences[:2]


def test_the_headline_of_a_count_tells_of_work_alone() -> None:
    """Of times is said that they are not there; the head is wider, an adapter is new, and a layer has another name."""
    before = untimed(ran(MODULES))
    after = untimed(ran({"encoder.first": 0, "encoder.b": 0, "decoder": 0, "head": 0, "adapter": 0}, macs={"head": 150}))
    assert (
        "times are not compared: one of the two has none",
        "MACs went from 400 to 550, +37.5 %",
        "added: adapter",
        "renamed: encoder.a → encoder.first",
    ) == headline(diff(before, after))


def test_work_that_moved_from_one_module_to_another_is_told() -> None:
    """200 MACs in all, before and after."""
    before, after = (untimed(ran({"a": 0, "b": 0}, macs=macs)) for macs in ({"a": 150, "b": 50}, {"a": 50, "b": 150}))
    assert "the work is the same in all, and not module by module" in headline(diff(before, after))


def test_what_two_modules_tell_is_not_judged_and_said_so() -> None:
    """The step alone is compared: 2 ms became 3."""
    found = diff(ran({"a": 1e-3, "b": 1e-3}, steps=clean(2e-3, 2e-3)), ran({"a": 2e-3, "b": 1e-3}, steps=clean(3e-3, 3e-3)))
    assert "the step is 50.0 % slower; modules are not judged: those that did the same work in both are too few" in headline(found)


def test_many_modules_are_not_all_named() -> None:
    """Of five that are faster the three that win the most; of twelve added ones the uppermost."""
    before = {f"m{i}": 10e-3 for i in range(20)}
    found = headline(diff(ran(before), ran(before | {f"m{i}": 5e-3 - i * 1e-4 for i in range(5)} | {f"new.{i}": 0.0 for i in range(11)})))
    assert ["m4", "m3", "m2", "2"] == [sentence.split()[0] for sentence in found[:4]]
    assert "added: new, 12 modules with what is below" in found


def test_the_table_has_the_run_and_the_modules_that_changed() -> None:
    """Unknown is a dash: what another unit of the run's was, an MFU without a peak is not shown."""
    lines = drawn(
        ran(MODULES, steps=clean(*[0.1] * 5, forward=1.0), samples_per_step=4),
        ran(SLOWER, steps=clean(*[0.102] * 5, forward=1.0), samples_per_step=4, device_name="NVIDIA H200"),
    )
    assert "device name cpu → NVIDIA H200" in lines
    assert "step 100.00 ms 102.00 ms +2.0 %" in lines
    assert "forward 100.00 ms 102.00 ms +2.0 % +2.0 % to +2.0 %" in lines
    assert "samples/s 40 39.22 -2.0 %" in lines
    assert "encoder.b 20.00 ms 22.00 ms +10.0 % slower +10.0 % to +10.0 % 0 % 0 % 0 % – –" in lines
    assert not [line for line in lines if line.startswith(("head", "MFU"))]


def test_an_estimate_against_a_run_prints_dashes() -> None:
    """No time of the first is known, and none reads as 0."""
    estimate = untimed(small_profile())
    lines = drawn(replace(estimate, run=replace(estimate.run, kind="estimate")), small_profile())
    assert "step – 3.00 ms –" in lines
    assert "peak live memory 2.93 KiB 2.93 KiB 0 %" in lines


@pytest.mark.parametrize(
    "option", [[], ["--max-regress", "2.1%"], ["--max-regress", "0.03"], ["--max-memory", "0%"], ["--max-memory", "1KiB"]]
)
def test_limits_that_are_held_are_fine(option: list[str], runs: list[str], tmp_path: Path) -> None:
    """The step is 2 % slower, and 1024 bytes are the peak of both."""
    files(tmp_path, *(_with_peak(Path(path), 1024) for path in runs))
    assert 0 == main(["diff", *runs, *option])


@pytest.mark.parametrize("option", [["--max-regress", "1.9%"], ["--max-memory", "1kB"], ["--max-memory", "1023"], ["--max-regress", "0"]])
def test_a_broken_limit_is_status_1(option: list[str], runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says by how much, also as JSON."""
    files(tmp_path, *(_with_peak(Path(path), 1024) for path in runs))
    assert 1 == main(["diff", *runs, *option])
    assert "limit broken" in capsys.readouterr().out
    assert 1 == main(["diff", *runs, *option, "--json"])
    assert [True] == [limit["broken"] for limit in json.loads(capsys.readouterr().out)["limits"]]


def _with_peak(path: Path, peak: int) -> Profile:
    from lflops.profile.json_file import load

    given = load(path)
    return replace(given, modules=dict(given.modules) | {"": replace(given.modules[""], peak_bytes=peak)})


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
    assert [0, 0, 1, 1] == [main(["diff", *paths, "--min-mfu", least]) for least in ("0.5", "50%", "0.51", "51%")]


def test_a_regress_within_the_noise_breaks_nothing() -> None:
    """The same 2 % of median, on steps that vary by a fifth: the limit is held, if it is known at all."""
    noisy = [
        diff(ran(MODULES, steps=clean(*(middle * each for each in (0.8, 0.9, 1.0, 1.1, 1.2)))), ran(MODULES, steps=clean(*[0.102] * 5)))
        for middle in (0.1,)
    ]
    (limit,) = limits(noisy[0], max_regress=0.01)
    assert (pytest.approx(0.02), False) == (limit.found, limit.broken)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-regress", "3"], "--max-regress='3': give a share, as 3% or 0.03"),
        (["--max-regress", "-3%"], "--max-regress='-3%': give a share"),
        (["--max-regress", "nan"], "--max-regress='nan': give a share"),
        (["--min-mfu", "high"], "--min-mfu='high': give a share"),
        (["--max-memory", "24 apples"], "--max-memory='24 apples': give a size, as 24GiB or 24GB, or a growth, as 5%"),
        (["--max-memory", "iB"], "--max-memory='iB': give a size"),
        (["--max-memory", "x%"], "--max-memory='x%': give a share"),
        (["--max-memory", "5%"], "--max-memory='5%': the first run has no peak of memory, give a size, as 24GiB"),
        (["--max-memory", "5GiB"], "--max-memory: cannot be told: the second run has no peak of memory"),
        (["--min-mfu", "0.3"], "--min-mfu: cannot be told: the second run has no MFU"),
        (["--max-regress", "3%"], "--max-regress: cannot be told: both runs have to have the times of two clean steps at least"),
    ],
)
def test_a_wrong_call_is_status_2_in_one_line(options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was given and what is taken; a limit of which nothing is known does not pass in silence."""
    paths = files(tmp_path, untimed(ran(MODULES)), untimed(ran(MODULES)))
    assert 2 == main(["diff", *paths, *options])
    shown = capsys.readouterr()
    assert ("", 1) == (shown.out, len(shown.err.splitlines()))
    assert shown.err.startswith(f"lflops: {said}")


def test_a_file_that_is_none_is_status_2(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert shown["headline"][0].startswith("encoder.b is 10.0 %")
    slow = next(module for module in shown["modules"] if module["after"] == "encoder.b")
    assert ("encoder.b", {"before": 100, "after": 100}, "slower") == (slow["before"], slow["own"]["macs"], slow["own"]["time"]["verdict"])
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
        return warm_python.run(script, "--baseline", tmp_path / "good.json", "--repeats", "2", *args).status

    assert [0, 0, 1] == [build(), build("--max-memory", "5%"), build("--max-memory", "5%", "--hidden", "1024")]
