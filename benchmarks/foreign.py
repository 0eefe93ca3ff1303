"""Whether other people's tests notice that each of their trainings is watched.

Each test with and without the monitor.

Lightning's own tests and examples, those of transformers, and the scripts that accelerate ships.
The first three are in no package, so name folders of checkouts that belong to the versions that are
installed:

    make foreign LIGHTNING=/path/of/pytorch-lightning TRANSFORMERS=/path/of/transformers

What fails only where the monitor is, is run again both ways: alone, in a process of its own.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from results import record

ROOT = Path(__file__).parents[1]
SHIM = Path(__file__).with_name("foreign_shim")
SETTINGS = "wait=0,warmup=1,active=1,repeat=2,stages=train,validate,test,predict"
"""Of the monitor in each Trainer of Lightning's.

The rest is as it is where nobody says otherwise, so steps are traced as well.
"""
SECONDS = 1200.0
"""That a file of tests may take."""
OF_A_SCRIPT = 240.0
"""Seconds that a script may take."""
EACH = 120
"""Seconds that a test may take."""
FOLDERS = (
    "loops",
    "trainer",
    "callbacks",
    "loggers",
    "strategies",
    "core",
    "checkpointing",
    "profilers",
    "tuner",
    "plugins",
    "models",
)
"""Of Lightning's tests."""
OF_TRANSFORMERS = re.compile(
    r"test_(trainer\w*|data_collator|emergency_ckpt|loss_reduction|multi_loss|skip_logits_eval)\.py$"
)
SEES = re.compile(r"lflops|FlopsMonitor|InjectedMonitor|FlopsCallback", re.IGNORECASE)
"""In the error of a test that counts callbacks, threads, files or calls of a logger, and found one more."""


@dataclass(frozen=True)
class Run:
    """A file of tests, or a script.

    Attributes:
        suite: What it belongs to.
        name: Its name there.
        command: What runs it. `{xml}` stands for a file that pytest writes.
        folder: Where it runs.
        watched: Variables with which its trainings are watched.
        elsewhere: Further ones, with which the monitor's files are not where the trainings' are.
    """

    suite: str
    name: str
    command: tuple[str, ...]
    folder: Path
    watched: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a test ended: "passed", "skipped", "failed"; and by which error."""

    ended: str
    error: str = ""


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        tests: The outcome of each. A script is one.
        windows: Profiles that lie in its temporary folders at the end, or windows of which the
            monitor told, if these are more.
        off: What the monitor warned of as it gave up.
    """

    tests: dict[str, Outcome]
    windows: int
    off: Counter[str]


def pytest_of(suite: str, path: Path, folder: Path, watched: Mapping[str, str], *tests: str) -> Run:
    """Run a file of tests, or some of them."""
    name = str(path.relative_to(folder))
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={EACH}", "--color=no")
    own = ("-o", "addopts=", "-o", "xfail_strict=false")
    command = (
        sys.executable,
        "-m",
        "pytest",
        *options,
        *own,
        *(tests or (name,)),
        "--junitxml={xml}",
    )
    return Run(suite, name, command, folder, watched)


def lightning(checkout: Path) -> Iterator[Run]:
    """Its tests, and those of its examples that need neither a network nor a GPU."""
    tests, watched = checkout / "tests", {"LFLOPS": SETTINGS}
    for each in FOLDERS:
        for path in sorted((tests / "tests_pytorch" / each).rglob("test_*.py")):
            yield pytest_of("Lightning's tests", path, tests, watched)
    example = checkout / "examples" / "pytorch" / "bug_report" / "bug_report_model.py"
    if example.exists():
        yield Run(
            "Lightning's examples",
            example.name,
            (sys.executable, str(example)),
            example.parent,
            watched,
        )


def transformers(checkout: Path) -> Iterator[Run]:
    """Tests of its Trainer."""
    for path in sorted((checkout / "tests" / "trainer").glob("test_*.py")):
        if OF_TRANSFORMERS.search(path.name):
            run = pytest_of("transformers' tests", path, checkout, {"LFLOPS_SHIM": "transformers"})
            yield replace(run, elsewhere={"LFLOPS_SHIM_ELSEWHERE": "1"})


def accelerate() -> Iterator[Run]:
    """The scripts that it ships, on one process and on two."""
    scripts = (
        "test_script",
        "test_sync",
        "test_ops",
        "test_distributed_data_loop",
        "test_ddp_comm_hook",
        "test_merge_weights",
    )
    scripts += (
        "external_deps.test_checkpointing",
        "external_deps.test_metrics",
        "external_deps.test_performance",
    )
    for script in scripts:
        module = f"accelerate.test_utils.scripts.{script}"
        for processes in (1, 2):
            several = (
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nproc-per-node={processes}",
                "--master-port=29763",
                "-m",
                module,
            )
            command = (sys.executable, "-m", module) if processes == 1 else several
            name = f"{script}, {processes} {'process' if processes == 1 else 'processes'}"
            yield Run(
                "accelerate's scripts", name, command, Path.cwd(), {"LFLOPS_SHIM": "accelerate"}
            )


def ended(run: Run, *, watched: bool) -> Ended:
    """Run it to its end, or until it has taken too long.

    Every process that it started is ended with it.
    """
    place = Path(tempfile.mkdtemp(prefix="foreign-"))
    xml = place / "results.xml"
    of_pytest = any("{xml}" in part for part in run.command)
    command = [part.replace("{xml}", str(xml)) for part in run.command]
    folder = place if "accelerate" in run.suite else run.folder
    environment = _environment(place) | (dict(run.watched) if watched else {})
    with (place / "said").open("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(  # noqa: S603
            command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            status: int | None = process.wait(SECONDS if of_pytest else OF_A_SCRIPT)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill(process.pid)
            process.wait()
        said.seek(0)
        text = said.read()
    errors = re.findall(
        r"^(?:\[rank\d+\]: *)?([\w.]*(?:Error|Exception|Interrupt)\b.*)", text, re.MULTILINE
    )
    error = "hung" if status is None else (errors or [f"status {status}"])[-1] if status else ""
    script = {run.name: Outcome("failed" if error or of_pytest else "passed", error)}
    tests = tests_in(xml) if xml.exists() else script
    off = Counter(re.findall(r"FlopsMonitor has failed.*goes on: (.*)", text))
    noted = place / "windows"
    windows = max(
        len(list(place.rglob("*.profile.json"))), noted.stat().st_size if noted.exists() else 0
    )
    shutil.rmtree(place, ignore_errors=True)
    return Ended(tests, windows, off)


def _environment(place: Path) -> dict[str, str]:
    """Of a run that nobody watches."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LFLOPS", "PYTEST"))
    }
    path = os.pathsep.join(filter(None, (str(SHIM), str(ROOT), inherited.get("PYTHONPATH", ""))))
    one_core = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
    return inherited | one_core | offline | {"PYTHONPATH": path, "TMPDIR": str(place)}


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def tests_in(xml: Path) -> dict[str, Outcome]:
    """What pytest wrote. A test that passed and was torn down with an error has failed."""
    found: dict[str, Outcome] = {}
    for case in ET.parse(xml).iter("testcase"):  # noqa: S314 - our own process wrote it
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome = Outcome("passed")
        for part in case:
            if part.tag in {"failure", "error"}:
                lines = re.findall(r"^E +(.*)", part.text or "", re.MULTILINE)
                said = " ".join(line for line in lines if not line.lstrip().startswith("File "))
                error = said if SEES.search(said) else (part.get("message") or "")
                outcome = Outcome("failed", re.sub(r"\s+", " ", error))
            elif part.tag == "skipped":
                outcome = Outcome("skipped")
        if name not in found or found[name].ended != "failed":
            found[name] = outcome
    return found


def alone(run: Run, test: str) -> Run:
    """The run of one of its tests."""
    if "{xml}" not in " ".join(run.command):
        return run
    module = run.name.removesuffix(".py").replace("/", ".")
    # pytest names a test from its root, which may be above the folder
    classes, _, name = test.partition(module)[2].lstrip(".").partition("::")
    inside = "::".join(filter(None, (*classes.split("."), name)))
    return pytest_of(
        run.suite, run.folder / run.name, run.folder, run.watched, f"{run.name}::{inside}"
    )


@dataclass(frozen=True)
class Difference:
    """A test that passes alone and fails watched.

    The kind is "breaks", "sees" the monitor, or "unsteady" where it ends so either way.
    """

    suite: str
    test: str
    kind: str
    error: str


@dataclass
class Tally:
    """What was found of a suite."""

    ends: Counter[str] = field(default_factory=Counter)
    windows: int = 0
    off: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)


def compared(run: Run) -> Tally:
    """How its tests end without the monitor, and those that end otherwise with it."""
    plain, watched = ended(run, watched=False), ended(run, watched=True)
    tally = Tally(
        Counter(outcome.ended for outcome in plain.tests.values()), watched.windows, watched.off
    )
    lost = next(iter(watched.tests.values())).error if run.name in watched.tests else "was not run"
    for test, outcome in plain.tests.items():
        after = watched.tests.get(test, Outcome("failed", lost))
        if outcome.ended == "passed" and after.ended == "failed":
            kind = (
                "sees" if SEES.search(after.error) and "assert" in after.error.lower() else "breaks"
            )
            if kind == "breaks":
                one = alone(run, test)
                again = [_of_one(one, watched=each) for each in (False, True)]
                kind = "breaks" if again == ["passed", "failed"] else "unsteady"
                if (
                    kind == "breaks" and run.elsewhere
                ):  # what only counts files passes where ours are in another folder
                    kind = (
                        "sees"
                        if _of_one(
                            replace(one, watched={**run.watched, **run.elsewhere}), watched=True
                        )
                        == "passed"
                        else kind
                    )
            tally.differences.append(Difference(run.suite, test, kind, after.error))
    return tally


def _of_one(run: Run, *, watched: bool) -> str:
    """How the only test of a run ended."""
    return next(iter(ended(run, watched=watched).tests.values()), Outcome("failed")).ended


def lines(tallies: Mapping[str, Tally], seconds: float) -> Iterator[str]:
    """The section."""
    installed = ", ".join(
        f"{name} {version(name)}" for name in ("lightning", "transformers", "accelerate")
    )
    yield f"{installed}. Each test runs with and without the monitor, {seconds / 60:.0f} minutes in all."
    yield "Watched is each Trainer, and each model that an Accelerator prepares."
    yield ""
    yield "| suite | tests that pass without it | fail either way | skipped | break with it | see it | unsteady | windows | gave up |"
    yield f"|---|{'--:|' * 8}"
    for suite, tally in tallies.items():
        kinds = Counter(each.kind for each in tally.differences)
        numbers = [tally.ends[each] for each in ("passed", "failed", "skipped")] + [
            kinds[each] for each in ("breaks", "sees", "unsteady")
        ]
        yield f"| {suite} | {' | '.join(map(str, [*numbers, tally.windows, tally.off.total()]))} |"
    yield ""
    yield (
        "*See it* are tests that list all callbacks, threads, files, or calls of a logger, and find the monitor's among them. "
        "*Unsteady* are tests that fail now and then either way. *Windows* are the profiles that lay in temporary folders at the end, "
        "or of which the monitor told, "
        "*gave up* are trainings in which the monitor warned and went off."
    )
    differences = [each for tally in tallies.values() for each in tally.differences]
    for kind in ("breaks", "sees"):
        found = [each for each in differences if each.kind == kind]
        if found:
            yield from ("", f"| {kind} | error |", "|---|---|")
            yield from (f"| {each.test} | {_cell(each.error)} |" for each in found)
    off = Counter(error for tally in tallies.values() for error in tally.off.elements())
    if off:
        yield from ("", "| gave up because | times |", "|---|--:|")
        yield from (f"| {_cell(error)} | {times} |" for error, times in off.most_common())


def _cell(text: str) -> str:
    return re.sub(r"(/[\w.+-]+)+/(?=[\w.+-])", "", text).replace("|", "\\|")[:200]


def suites(given: argparse.Namespace) -> Iterator[Run]:
    """All that there is here."""
    makers: list[tuple[str, Path | None, Callable[[Path], Iterable[Run]]]] = [
        ("LIGHTNING", given.lightning, lightning),
        ("TRANSFORMERS", given.transformers, transformers),
    ]
    for variable, checkout, maker in makers:
        if checkout is None:
            print(
                f"Left out: {maker.__name__}'s tests, which are in no package: give {variable}=DIR, a checkout of its repository."
            )
        else:
            yield from maker(checkout.resolve())
    yield from accelerate()


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lightning", type=Path, help="a checkout of Lightning's repository")
    parser.add_argument("--transformers", type=Path, help="a checkout of transformers' repository")
    parser.add_argument(
        "--matching", default="", help="a regular expression that finds names of files and scripts"
    )
    given = parser.parse_args()
    runs = [run for run in suites(given) if re.search(given.matching, run.name)]
    tallies: dict[str, Tally] = {}
    start = time.monotonic()
    for number, run in enumerate(runs, 1):
        found, tally = compared(run), tallies.setdefault(run.suite, Tally())
        tally.ends += found.ends
        tally.windows += found.windows
        tally.off += found.off
        tally.differences += found.differences
        print(
            f"{number} of {len(runs)}: {run.suite}: {run.name}: {dict(found.ends)}, {found.windows} windows",
            flush=True,
        )
        for each in found.differences:
            print(f"    {each.kind}: {each.test}: {each.error[:300]}", flush=True)
    section = list(lines(tallies, time.monotonic() - start))
    if given.matching:
        print("\n".join(section))
    else:
        record("foreign.py", "Whether other people's tests notice", section)
    raise SystemExit(
        any(each.kind == "breaks" for tally in tallies.values() for each in tally.differences)
    )


if __name__ == "__main__":
    main()
