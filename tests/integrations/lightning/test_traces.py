"""The monitor's traces.

Which steps are in them, what stands in them, and that a training is what it would be without.
"""

import contextlib
import gc
import gzip
import json
import os
import platform
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor, profiler
from torch.profiler import ProfilerActivity, record_function, schedule

from lflops.integrations.lightning.monitor import FlopsMonitor
from lflops.integrations.lightning.training import RUNS
from lflops.monitoring.window import traced_steps as tracing
from lflops.profile.profile import Profile
from lflops.schedule import Schedule
from lflops.trace.annotate import PROCESS
from lflops.trace.annotate_in_background import AnnotationProcess
from lflops.trace.record.tracer import other_profiler_runs
from tests.integrations.lightning.test_endings import (
    ERRORS,
    Around,
    Ending,
    raises,
    signals_kept,
    stop,
)
from tests.integrations.lightning.test_hooked_step import (
    ADVERSARIES,
    ONCE,
    Adversaries,
    Changing,
    Timed,
    Times,
    own,
    times,
)
from tests.integrations.lightning.test_outlets import Recorder
from tests.integrations.lightning.test_same_training import train
from tests.support.fake_clock import use_clock
from tests.support.lightning_runs import (
    CLASSES,
    LIGHTNINGS_WARNINGS,
    ROWS,
    WIDTH,
    Classifier,
    Validated,
    fit,
    watching,
)
from tests.support.process_state import differences, open_files, process, settle
from tests.support.warm_python import WarmPython

pytestmark = LIGHTNINGS_WARNINGS

BODY, HEAD = ROWS * WIDTH * WIDTH, ROWS * WIDTH * CLASSES
"""MACs of a batch in the two layers' forward."""

COUNTED, TRACED, HOOKED = 6, 8, 11
"""Batches of the default schedule: the counted one, and the middle one of three."""

ONE_WINDOW = "un" * 6 + "co" + "tr" * 3 + "mo" * 3 + "un"
"""Five steps waited for, two of warm-up, three traced, three hooked.

Two of the clean ones are cold: a fifth is taken from behind.
"""

BRIEF = Schedule(wait=3, warmup=1, active=1)


def tracing_into(folder: Path, **options: Any) -> FlopsMonitor:
    """A monitor that traces."""
    return watching(**{"trace": True, "dirpath": folder, **options})


def kinds(profile: Profile) -> str:
    """A letter or two for each step."""
    return "".join(step.kind[:2] for step in profile.steps)


def events(profile: Profile) -> list[dict[str, Any]]:
    """What is in the only trace of a window."""
    assert profile.trace is not None
    (path,) = profile.trace.files.values()
    found: list[dict[str, Any]] = json.loads(gzip.decompress(Path(path).read_bytes()))[
        "traceEvents"
    ]
    return found


def annotated(found: list[dict[str, Any]]) -> bool:
    """Whether the modules have rows in it."""
    return PROCESS in {event["args"].get("name") for event in found if event["ph"] == "M"}


def macs(found: list[dict[str, Any]]) -> Counter[tuple[str, int]]:
    """How often a module was called forward with so many MACs, of those that have any."""
    slices = (event["args"] for event in found if event.get("cat") == "lflops_module")
    return Counter((args["module"], args["MACs"]) for args in slices if args.get("MACs"))


def batches(found: list[dict[str, Any]]) -> list[str]:
    """What PyTorch's own readers take for steps, once each: a device shows them again."""
    return sorted({event["name"] for event in found if event["name"].startswith("ProfilerStep#")})


def files(folder: Path) -> list[str]:
    """Below a folder; a trace without the moment that it was written at.

    Copies are there where torch-tb-profiler is installed.
    """
    found = (
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not path.parent.name.startswith("compat-")
    )
    return sorted(re.sub(r"\.\d+\.pt\.trace\.json\.gz$", ".gz", path) for path in found)


def nothing_records() -> bool:
    """Whether no profiler of torch's runs, and one that is started now sees what runs in it."""
    if other_profiler_runs():
        return False
    with profiler.profile(activities=[ProfilerActivity.CPU]) as theirs:
        torch.ones(2, 2) @ torch.ones(2, 2)
    return any(event.name == "aten::mm" for event in theirs.events() or ())


def told(warned: Iterable[warnings.WarningMessage], of: str = "FlopsMonitor") -> int:
    """How many of the warnings are the monitor's."""
    return sum(of in str(each.message) for each in warned)


def no_trace(profile: Profile) -> list[str]:
    """The reasons that are noted."""
    return [note.subject for note in profile.notes if note.code == "no_trace"]


WORKER = f"{platform.node().replace('.', '-')}_0"


def test_active_steps_are_traced_and_as_many_behind_them_hooked(tmp_path: Path) -> None:
    """One trace of three batches, in a folder named as the profile is.

    Each call has the products of one batch.
    """
    monitor = tracing_into(tmp_path)
    fit(Classifier(), monitor)
    (profile,) = monitor.profiles
    assert kinds(profile) == ONE_WINDOW
    assert [f"lflops_traces/train-0-12/{WORKER}.gz", "train-0-12.profile.json"] == files(tmp_path)
    assert profile.trace is not None
    assert {"0": [str(path) for path in tmp_path.glob("*/train-*/*")]} == {
        rank: [path] for rank, path in profile.trace.files.items()
    }
    found = events(profile)
    assert ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"] == batches(found)
    assert annotated(found)
    assert {("body", BODY): 3, ("body.0", BODY): 3, ("head", HEAD): 3} == macs(found)
    assert 3 == profile.trace.batches
    (products,) = [each.calls for each in profile.trace.operators if each.name == "aten::addmm"]
    assert 3 * 2 == products


def test_a_traced_window_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its trace is annotated, which takes what the modules compute from the file.

    Each write of a profile ends with its sync.
    """
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), fsync(file)))
    fit(
        Classifier(),
        tracing_into(tmp_path, schedule=Schedule(wait=3, warmup=1, active=1, repeat=2)),
        batches=60,
    )
    assert 2 == len(list(tmp_path.glob("*.profile.json")))
    assert 2 == len(synced)


class Placed(Recorder):
    """A logger with a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    save_dir = property(lambda self: str(self.folder))  # type: ignore[assignment]


def test_below_the_log_directory_traces_have_a_folder_of_their_own(tmp_path: Path) -> None:
    """Beside that of the profiles, in the run's folder."""
    fit(Classifier(), watching(trace=True), logger=Placed(tmp_path))
    (run,) = (tmp_path / RUNS).iterdir()
    assert ["lflops/train-0-12.profile.json", f"lflops_traces/train-0-12/{WORKER}.gz"] == files(run)
    assert 2 == len(files(tmp_path))


def test_each_window_has_its_folder(tmp_path: Path) -> None:
    """Three steps waited for, one of warm-up, one traced, one hooked, twice.

    What the second would count is known.

    Without the cold ones each has too few clean steps: they are taken from behind, where the first
    one's trace is annotated meanwhile.
    """
    monitor = tracing_into(tmp_path, schedule=Schedule(wait=3, warmup=1, active=1, repeat=2))
    fit(Classifier(), monitor, batches=60)
    assert [0, 1] == [profile.run.window for profile in monitor.profiles]
    assert ["unununcotrmo", "ununununtrmo"] == [kinds(profile)[:12] for profile in monitor.profiles]
    assert [5, 11] == [profile.run.step for profile in monitor.profiles]
    names = ["train-0-5", "train-1-11"]
    assert [
        *(f"lflops_traces/{name}/{WORKER}.gz" for name in names),
        *(f"{name}.profile.json" for name in names),
    ] == files(tmp_path)
    for profile in monitor.profiles:
        assert ["ProfilerStep#0"] == batches(events(profile))
        assert {("body", BODY): 1, ("body.0", BODY): 1, ("head", HEAD): 1} == macs(events(profile))


def test_a_second_monitors_trace_is_beside_the_firsts(tmp_path: Path) -> None:
    """Where their windows do not meet each has its own."""
    first, second = (
        tracing_into(tmp_path, schedule=Schedule(wait=wait, warmup=1, active=1)) for wait in (2, 6)
    )
    fit(Classifier(), first, second)
    names = ["2-train-0-8", "train-0-4"]
    assert sorted(
        [
            *(f"lflops_traces/{name}/{WORKER}.gz" for name in names),
            *(f"{name}.profile.json" for name in names),
        ]
    ) == files(tmp_path)
    assert [[], []] == [no_trace(monitor.profiles[0]) for monitor in (first, second)]


def test_a_trace_holds_whole_steps_of_batches(tmp_path: Path) -> None:
    """Two batches to a step.

    Of warm-up one step, traced and hooked two each, so there are four batches; each call has one
    batch's work.
    """
    monitor = tracing_into(tmp_path)
    fit(Classifier(), monitor, accumulate_grad_batches=2)
    (profile,) = monitor.profiles
    assert ("un" * 3 + "co" + "tr" * 2 + "mo" * 2) == kinds(profile)[:16]
    assert [f"ProfilerStep#{number}" for number in range(4)] == batches(events(profile))
    assert {("body", BODY): 4, ("body.0", BODY): 4, ("head", HEAD): 4} == macs(events(profile))
    assert profile.trace is not None
    assert 4 == profile.trace.batches


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Changing:
    """The one that the monitor reads."""
    clock = Changing()
    use_clock(monkeypatch, clock)
    return clock


MODELS: dict[str, tuple[type[Timed], dict[str, Any], Times]] = {
    "automatic": (Timed, {}, ONCE),
    "manual, two optimizers": (Adversaries, {}, ADVERSARIES),
    "accumulate 2": (Timed, {"accumulate_grad_batches": 2}, times(ONCE, 2)),
}


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_module_times_are_the_same_behind_a_trace(
    name: str, trace: bool, clock: Changing, tmp_path: Path
) -> None:
    """To the second; it is the hooked steps that say how the clean ones divide."""
    model, options, expected = MODELS[name]
    monitor = tracing_into(tmp_path, trace=trace)
    fit(model(clock), monitor, **options)
    (profile,) = monitor.profiles
    assert expected == own(profile)
    assert (1, trace) == (profile.run.observer_ratio, "tr" in kinds(profile))


class Late(Timed):
    """While it is traced everything takes three times as long."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.clock.speed = 3 if 7 <= batch_idx <= 9 else 1


def test_what_tracing_takes_is_in_no_time(clock: Changing, tmp_path: Path) -> None:
    """Neither a module's nor a clean step's; the traced steps say what they took."""
    monitor = tracing_into(tmp_path)
    fit(Late(clock), monitor)
    (profile,) = monitor.profiles
    assert ONCE == own(profile)
    assert {
        ("unprofiled", 63.0),
        ("traced", 189.0),
        ("module_timing", 63.0),
        ("counting", None),
    } == {(step.kind, step.seconds) for step in profile.steps}


def test_a_run_that_is_stopped_in_a_traced_step_has_the_trace_until_then(tmp_path: Path) -> None:
    """Two of three batches."""
    monitor, around = tracing_into(tmp_path), Around()
    fit(Ending(TRACED, stop), around, monitor, limit_val_batches=0)
    assert [] == around.left()
    (profile,) = monitor.profiles
    assert (True, ONE_WINDOW[:18]) == (profile.run.partial, kinds(profile))
    assert [f"lflops_traces/train-0-8/{WORKER}.gz", "train-0-8.profile.json"] == files(tmp_path)
    assert profile.trace is not None
    assert 2 == profile.trace.batches
    assert {("body", BODY): 2, ("body.0", BODY): 2, ("head", HEAD): 2} == macs(events(profile))
    assert nothing_records()


@pytest.mark.parametrize(("error", "comes_out"), ERRORS.values(), ids=ERRORS)
def test_an_exception_in_a_traced_step_leaves_no_trace(
    error: BaseException, comes_out: type[BaseException], tmp_path: Path
) -> None:
    """In either sense: no file, no hook, no profiler; what comes out is the user's."""
    monitor, around = tracing_into(tmp_path), Around()
    with signals_kept(), pytest.raises(comes_out) as raised:
        fit(Ending(TRACED, raises(error)), around, monitor)
    assert error in {raised.value, raised.value.__context__}
    assert [] == around.left()
    assert ["train-0-7.profile.json"] == files(tmp_path)
    assert not (tmp_path / "lflops_traces").exists()
    (profile,) = monitor.profiles
    assert (True, None) == (profile.run.partial, profile.trace)
    assert nothing_records()


def test_a_profiler_that_is_left_running_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above can fail: here nobody tells the tracer that it is over."""
    end = tracing.TracedMode._end
    kept: list[tracing.TracedMode] = []
    monkeypatch.setattr(tracing.TracedMode, "_end", lambda self, **_: kept.append(self))
    around = Around()
    with pytest.raises(ValueError, match="planted"):
        fit(Ending(TRACED, raises(ValueError("planted"))), around, tracing_into(tmp_path))
    seen = nothing_records(), around.left()
    end(kept[0], keep=False)
    assert not seen[0]
    assert {"profiler", "hooks on every module: _global_forward_hooks"} <= set(seen[1])
    assert nothing_records()
    assert [] == around.left()


def test_what_was_recorded_before_an_exception_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a hooked step: nobody waits until it is annotated, but it will be."""
    begun: list[AnnotationProcess] = []

    class Kept(AnnotationProcess):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            begun.append(self)

    monkeypatch.setattr(tracing, "AnnotationProcess", Kept)
    monitor = tracing_into(tmp_path)
    with pytest.raises(ValueError, match="planted"):
        fit(Ending(HOOKED, raises(ValueError("planted"))), monitor)
    (annotation,) = begun
    assert None is annotation.finish()
    (profile,) = monitor.profiles
    assert (True, 3) == (profile.run.partial, len(batches(events(profile))))
    assert [f"lflops_traces/train-0-10/{WORKER}.gz", "train-0-10.profile.json"] == files(tmp_path)


class Slowly:
    """An annotation that takes so many looks at it."""

    looks = 3

    def __init__(self, trace: Path, into: Path, *_: Any, **__: Any) -> None:
        self.into = into
        self.left = self.looks
        trace.unlink()

    @property
    def is_done(self) -> bool:
        self.left -= 1
        return self.left < 0

    def finish(self) -> None:
        """There is nothing to say."""


def test_steps_beside_an_annotation_are_marked_and_are_no_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first window ends with its tenth step, and has five clean ones by then.

    It is seen to be busy three times, and then done.

    Of the second one's steps the four beside that are none, and so a fifth clean one is taken from
    behind.
    """
    monkeypatch.setattr(tracing, "AnnotationProcess", Slowly)
    monitor = tracing_into(tmp_path, schedule=Schedule(wait=7, warmup=1, active=1, repeat=2))
    fit(Classifier(), monitor)
    first, second = monitor.profiles
    assert {()} == {step.marks for step in first.steps if "warmup" not in step.marks}
    marked = [step.index for step in second.steps if "background" in step.marks]
    assert [10, 11, 12, 13] == marked
    assert [14, 15, 16, 17, 20] == [step.index for step in second.steps if step.is_unprofiled]


def test_an_annotation_that_fails_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace is there as torch wrote it."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monitor = tracing_into(tmp_path)
    with pytest.warns(
        UserWarning, match=r"pt\.trace\.json\.gz is a trace without the modules: exit status 1"
    ) as warned:
        fit(Classifier(), monitor)
    assert 1 == told(warned)
    found = events(monitor.profiles[0])
    assert (3, False) == (len(batches(found)), annotated(found))
    assert [f"lflops_traces/train-0-12/{WORKER}.gz", "train-0-12.profile.json"] == files(tmp_path)


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The program that annotates goes on until something is written into this.

    Also after a test that failed.
    """
    program, pipe = tmp_path / "program", tmp_path / "pipe"
    os.mkfifo(pipe)
    program.write_text(f"#!/bin/sh\nread word < {pipe}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    yield pipe
    with (
        contextlib.suppress(OSError),
        open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w", encoding="utf-8") as written,  # noqa: PTH123
    ):
        written.write("enough\n")  # an error where nobody reads any more


def training_fails(folder: Path) -> None:
    """In a hooked step, behind the traced ones."""
    with pytest.raises(ValueError, match="planted"):
        fit(Ending(HOOKED, raises(ValueError("planted"))), tracing_into(folder))


def we_fail(folder: Path) -> None:
    """Long after the window, in the user's function that tells a batch's samples."""
    left = iter(range(20, -1, -1))
    monitor = tracing_into(
        folder, schedule=BRIEF, on_error="warn", units=lambda batch: {"samples": 1 // next(left)}
    )
    with pytest.warns(UserWarning, match="FlopsMonitor has failed .* ZeroDivisionError"):
        fit(Classifier(), monitor)


def time_is_up(folder: Path) -> None:
    """The run ends, and waits long enough."""
    with pytest.warns(UserWarning, match="is a trace without the modules: still running after 0 s"):
        fit(Classifier(), tracing_into(folder, schedule=BRIEF))


@pytest.mark.parametrize("end", [training_fails, we_fail, time_is_up])
def test_a_trace_that_is_still_being_annotated_is_left_to_its_process(
    end: Callable[[Path], None], pipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file stays open, and Python has nothing to warn of.

    When the process ends, nothing is left of it.
    """
    begun: list[int] = []

    class Seen(AnnotationProcess):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            begun.append(self._process.pid)

        def finish(self, seconds: float = 0) -> str | None:
            return super().finish(seconds)

    monkeypatch.setattr(tracing, "AnnotationProcess", Seen)
    gc.collect()  # what another test has left may be closed at any time
    files_before = set(open_files())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        end(tmp_path / "run")
        gc.collect()
    assert [] == [str(each.message) for each in warned if each.category is ResourceWarning]
    assert set() == set(open_files()) - files_before
    (process,) = begun
    os.kill(process, 0)  # it is there
    pipe.write_text("enough\n")
    for thread in threading.enumerate():
        if thread.name.startswith("lflops: "):
            thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


class Named(Classifier):
    """Has a name of the user's in training_step."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with record_function("mine"):
            return super().training_step(batch, batch_idx)


def features(found: list[dict[str, Any]]) -> set[str]:
    """What torch's options add to a trace."""
    adds = {
        "mine": lambda event: event["name"] == "mine" and event.get("cat") == "user_annotation",
        "shapes": lambda event: event["name"] == "aten::addmm" and "Input Dims" in event["args"],
        "memory": lambda event: event["name"] == "[memory]",
        "memory's curve": lambda event: (
            event["name"].startswith("allocated bytes (CPU)") and event["ph"] == "C"
        ),
        "stack": lambda event: event.get("cat") == "python_function",
    }
    return {name for name, is_one in adds.items() if any(map(is_one, found))}


OPTIONS: dict[str, tuple[dict[str, bool], set[str]]] = {
    "none": ({}, set()),
    "record_shapes": ({"record_shapes": True}, {"shapes"}),
    "profile_memory": ({"profile_memory": True}, {"memory", "memory's curve"}),
    "with_stack": ({"with_stack": True}, {"stack"}),
}


@pytest.mark.parametrize(("options", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_torchs_options_do_to_the_trace_what_they_do_to_torchs(
    options: dict[str, bool], expected: set[str], tmp_path: Path
) -> None:
    """Each adds what it adds; names of the user's are there in all."""
    monitor = tracing_into(tmp_path, schedule=BRIEF, **options)
    fit(Named(), monitor)
    assert {"mine"} | expected == features(events(monitor.profiles[0]))
    with profiler.profile(activities=[ProfilerActivity.CPU], **options) as theirs:
        Named().training_step(
            (torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)), 0
        ).backward()
    theirs.export_chrome_trace(str(path := tmp_path / "theirs.json"))
    assert ({"mine"} | expected) - {"memory's curve"} == features(
        json.loads(path.read_bytes())["traceEvents"]
    )


def test_a_rank_that_is_not_asked_to_makes_no_trace(tmp_path: Path) -> None:
    """It keeps step with those that are; nothing else changes, and nobody is warned."""
    monitor = tracing_into(tmp_path, trace_ranks=[1])
    fit(Classifier(), monitor)
    (profile,) = monitor.profiles
    assert ("un" * 6 + "co" + "un" * 3 + "mo" * 3, None, []) == (
        kinds(profile),
        profile.trace,
        no_trace(profile),
    )
    assert ["train-0-12.profile.json"] == files(tmp_path)


@pytest.mark.parametrize("ranks", ["all", [0], [1, 0]])
def test_a_rank_that_is_asked_to_does(ranks: Any, tmp_path: Path) -> None:
    """Whichever way."""
    monitor = tracing_into(tmp_path, trace_ranks=ranks, schedule=BRIEF)
    fit(Classifier(), monitor)
    assert ["ProfilerStep#0"] == batches(events(monitor.profiles[0]))


class Placeless(Recorder):
    """A logger that writes nowhere."""

    save_dir = property(lambda self: None)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"logger": Placeless()}, "un" * 6 + "co" + "mo" * 3 + "un"), ({"fast_dev_run": 3}, "uncomo")],
)
def test_where_there_is_no_place_for_files_there_is_no_trace(
    options: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """Active steps are the hooked ones then, and nobody is warned."""
    monitor = watching(trace=True)
    fit(Classifier(), monitor, default_root_dir=tmp_path, **options)
    (profile,) = monitor.profiles
    assert (expected, None, []) == (kinds(profile), profile.trace, no_trace(profile))
    assert [] == files(tmp_path)


def test_where_nothing_can_be_recorded_it_is_said_once(tmp_path: Path) -> None:
    """The model is on the CPU, so no device is traced; all else is there."""
    monitor = tracing_into(tmp_path, activities=["device"])
    with pytest.warns(
        UserWarning,
        match="FlopsMonitor: there is no trace: torch cannot record any activity here",
    ) as warned:
        fit(Classifier(), monitor)
    (profile,) = monitor.profiles
    assert (1, ["no_activity"], ["train-0-12.profile.json"]) == (
        told(warned),
        no_trace(profile),
        files(tmp_path),
    )
    assert profile.modules["head"].backward.seconds is not None


@pytest.mark.parametrize(
    "name", ["fp32", "bf16-mixed", "accumulated and clipped", "manual", "LBFGS"]
)
def test_a_traced_training_is_the_same_training(name: str, tmp_path: Path) -> None:
    """Losses, weights, buffers, the optimizer's state and the random numbers to come; two windows."""
    monitor = tracing_into(tmp_path, schedule=Schedule(wait=2, warmup=1, active=1, repeat=2))
    assert [] == differences(train(name), train(name, monitor))
    assert [True, True] == [profile.trace is not None for profile in monitor.profiles]


def test_a_traced_training_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    """Files, threads, handlers, warnings; no wrap, hook or mode."""
    fit(Classifier(), tracing_into(tmp_path))  # what is loaded once is loaded
    fit(Classifier())
    settle()
    before = process()
    fit(Classifier())
    plain = differences(before, process())
    settle()
    before, around = process(), Around()
    fit(Classifier(), around, tracing_into(tmp_path))
    assert [] == around.left()
    assert plain == differences(before, process())


def test_an_export_that_fails_leaves_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning, a note, and no file.

    The operators are in the profile, and the next one can trace.
    """

    def full(*_: Any) -> None:
        raise OSError("no space left")

    around = Around()
    with monkeypatch.context() as patched:
        patched.setattr("torch.profiler.profile.export_chrome_trace", full)
        first = tracing_into(tmp_path)
        with pytest.warns(
            UserWarning, match="FlopsMonitor: there is no trace: .*OSError: no space left"
        ) as warned:
            trainer = fit(Classifier(), around, first)
    assert (1, 30, []) == (told(warned), trainer.global_step, around.left())
    (profile,) = first.profiles
    assert (["train-0-12.profile.json"], ["not_written"]) == (files(tmp_path), no_trace(profile))
    assert profile.trace is not None
    assert ({}, True) == (profile.trace.files, bool(profile.trace.operators))
    assert nothing_records()
    monitor = tracing_into(tmp_path, schedule=BRIEF)
    fit(Classifier(), monitor)
    assert ["ProfilerStep#0"] == batches(events(monitor.profiles[0]))


# Beside other profilers, each in a process of its own: they could crash it.


def test_an_error_of_our_own_in_a_traced_step_leaves_nothing_on(tmp_path: Path) -> None:
    """The user's function that tells a batch's samples fails in it."""
    seen = iter(range(100))

    def units(batch: Any) -> dict[str, int]:
        return {"samples": 1 // (TRACED - next(seen))}

    around = Around()
    with pytest.warns(UserWarning, match="FlopsMonitor has failed") as warned:
        trainer = fit(Classifier(), around, tracing_into(tmp_path, on_error="warn", units=units))
    assert (1, 30) == (told(warned), trainer.global_step)
    assert [] == around.left()
    assert nothing_records()


@pytest.mark.parametrize(
    "where",
    [
        "lflops.monitoring.window.traced_steps._PhaseListener",
        "lflops.trace.record.module_log.install_hooks",
    ],
)
def test_an_error_as_the_recording_begins_ends_it(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kineto has been started, and what hooks it has are on."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(where, broken)
    around = Around()
    with pytest.warns(
        UserWarning, match="FlopsMonitor has failed .* ZeroDivisionError: planted"
    ) as warned:
        trainer = fit(Classifier(), around, tracing_into(tmp_path, on_error="warn"))
    assert (1, 30, []) == (told(warned), trainer.global_step, around.left())
    assert nothing_records()


def test_a_stack_is_the_trainings(tmp_path: Path) -> None:
    """What looks for other profilers among a million objects is not in it."""
    monitor = tracing_into(tmp_path, schedule=BRIEF, with_stack=True)
    fit(Classifier(), monitor)
    assert 10_000 > sum("issubclass" in event["name"] for event in events(monitor.profiles[0]))


def test_a_validation_between_traced_steps_is_no_call_of_theirs(tmp_path: Path) -> None:
    """Three batches, three calls of each module, and in the table two products and a product for each gradient of each."""
    monitor = tracing_into(tmp_path)
    fit(Validated(), monitor, val_check_interval=TRACED)
    (profile,) = monitor.profiles
    assert {("body", BODY): 3, ("body.0", BODY): 3, ("head", HEAD): 3} == macs(events(profile))
    assert profile.trace is not None
    assert {"aten::addmm": 6} == {
        each.name: each.calls for each in profile.trace.operators if each.name == "aten::addmm"
    }


def test_a_trace_of_no_batch_is_none(tmp_path: Path) -> None:
    """The training is stopped right behind the counted step."""
    monitor = tracing_into(tmp_path)
    fit(Ending(COUNTED, stop), monitor)
    (profile,) = monitor.profiles
    assert (None, ["train-0-6.profile.json"]) == (profile.trace, files(tmp_path))


def test_the_last_slice_is_a_batch(tmp_path: Path) -> None:
    """What a stopped run does behind its last batch is no ProfilerStep."""
    monitor = tracing_into(tmp_path)
    fit(Ending(TRACED, stop), monitor, limit_val_batches=0)
    assert ["ProfilerStep#0", "ProfilerStep#1"] == batches(events(monitor.profiles[0]))


class Theirs(Callback):
    """A user's own profiler.

    From the batch that it is started in it waits, warms up in one, and records two.
    """

    def __init__(self, begin: int, wait: int = 0) -> None:
        self.begin = begin
        self.profile = profiler.profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=wait, warmup=1, active=2, repeat=1),
        )
        self.goes = False

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.begin:
            self.profile.start()
            self.goes = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.goes:
            self.profile.step()

    def on_train_end(self, *_: Any) -> None:
        if self.goes:
            self.profile.stop()

    def products(self) -> int:
        """How often a layer went backward in what was recorded."""
        return products(self.profile.events())


def products(found: Any) -> int:
    """How often a layer went backward."""
    return sum(event.name == "AddmmBackward0" for event in found)


def fitted(
    folder: Path, *callbacks: Any, monitors: int = 1, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """The Trainer, and what became of the monitors' windows."""
    watchers = [tracing_into(folder) for _ in range(monitors)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer = fit(Classifier(), *watchers, *callbacks, **options)
    profiles = [profile for monitor in watchers for profile in monitor.profiles]
    names = ("body.0", "head")
    return trainer, {
        "warned": told(warned, "FlopsMonitor: there is no trace"),
        "failed": told(warned, "FlopsMonitor has failed"),
        "reasons": [no_trace(profile) for profile in profiles],
        "batches": [
            0 if profile.trace is None else len(batches(events(profile))) for profile in profiles
        ],
        "macs": [[profile.modules[name].forward.macs for name in names] for profile in profiles],
        "timed": all(
            profile.modules[name].work(phase).seconds
            for profile in profiles
            for name in names
            for phase in ("forward", "backward")
        ),
        "kinds": [sorted(set(re.findall("..", kinds(profile)))) for profile in profiles],
        "traces": sum(name.endswith(".gz") for name in files(folder)),
        "other files": [
            name for name in files(folder) if not name.endswith((".gz", ".profile.json"))
        ],
    }


def beside(*, begin: int, wait: int = 0) -> Callable[[Path], dict[str, Any]]:
    """A user's profiler that is started in this batch."""

    def case(folder: Path) -> dict[str, Any]:
        theirs = Theirs(begin, wait)
        _, told = fitted(folder, theirs)
        return told | {"theirs": theirs.products()}

    return case


def beside_lightnings(folder: Path) -> dict[str, Any]:
    """Lightning's own, which does what it does without us."""
    plain = fit(Classifier(), profiler=PyTorchProfiler())
    trainer, told = fitted(folder, profiler="pytorch")
    assert isinstance(trainer.profiler, PyTorchProfiler)
    assert products(plain.profiler.function_events) > 0
    return told | {
        "theirs": products(trainer.profiler.function_events)
        / products(plain.profiler.function_events)
    }


def two_monitors(folder: Path) -> dict[str, Any]:
    """With the same window."""
    return fitted(folder, monitors=2)[1]


class Careless(Callback):
    """A profiler that is got ready when the training begins, and started in its twentieth batch."""

    def on_train_start(self, *_: Any) -> None:
        self.profile = profiler.profile(activities=[ProfilerActivity.CPU])
        self.profile.prepare_trace()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 20:
            self.profile.start_trace()


def two_profilers(folder: Path) -> dict[str, Any]:
    """Neither is ours."""
    theirs = Theirs(7)
    fit(Classifier(), Careless(), theirs)
    return {"theirs": theirs.products()}


ALONE: dict[str, Any] = {
    "warned": 0,
    "failed": 0,
    "reasons": [[]],
    "batches": [3],
    "macs": [[BODY, HEAD]],
    "timed": True,
    "kinds": [["co", "mo", "tr", "un"]],
    "traces": 1,
    "other files": [],
}
NOT_TRACED = [["co", "mo", "un"]]
REFUSED = ALONE | {
    "warned": 1,
    "reasons": [["other_profiler"]],
    "batches": [0],
    "kinds": NOT_TRACED,
    "traces": 0,
    "theirs": 4,
}

CASES: dict[str, tuple[Callable[[Path], dict[str, Any]], dict[str, Any]]] = {
    "nobody": (lambda folder: fitted(folder)[1], ALONE),
    "one that waits": (beside(begin=0, wait=20), REFUSED),
    "one that warms up": (beside(begin=6), REFUSED),
    "one that records": (beside(begin=5), REFUSED),
    "one that begins while ours records": (
        beside(begin=8),
        REFUSED | {"reasons": [["cut_off"]], "kinds": ALONE["kinds"]},
    ),
    "one that comes behind": (beside(begin=12), ALONE | {"theirs": 4}),
    "Lightning's": (beside_lightnings, REFUSED | {"theirs": 1}),
    "another monitor": (
        two_monitors,
        {name: value * 2 if isinstance(value, list) else value for name, value in ALONE.items()}
        | {
            "warned": 1,
            "reasons": [[], ["own_trace"]],
            "batches": [3, 0],
            "kinds": ALONE["kinds"] + NOT_TRACED,
        },
    ),
}
"""Two layers in two batches are four products of theirs."""

CULPRIT = "two profilers"


def fork_all(folder: Path) -> None:
    """Run each case in a process of its own, which begins where Lightning is loaded and nothing was ever recorded, and ends as any does."""
    cases = {name: case for name, (case, _) in CASES.items()} | {CULPRIT: two_profilers}
    gc.freeze()  # else each would copy all that is loaded only to look through it
    children: dict[str, int] = {}
    for number, (name, case) in enumerate(cases.items()):
        (place := folder / str(number)).mkdir()
        children[name] = os.fork()
        if not children[name]:
            (folder / f"{name}.json").write_text(json.dumps(case(place)), "utf-8")
            sys.exit()
    endings = {
        name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children.items()
    }
    (folder / "endings.json").write_text(json.dumps(endings), "utf-8")


@pytest.fixture(scope="module")
def met(
    tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython
) -> tuple[Path, dict[str, int]]:
    """The folder of what became of each case, and its process's exit status."""
    folder = tmp_path_factory.mktemp("met")
    code = "import sys, pathlib; from tests.integrations.lightning.test_traces import fork_all; fork_all(pathlib.Path(sys.argv[1]))"
    ended = warm_python.run(code, folder)
    assert 0 == ended.status, ended.err
    return folder, json.loads((folder / "endings.json").read_text("utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_beside(name: str, met: tuple[Path, dict[str, int]]) -> None:
    """Whoever came first goes on, the other is told of once, and everything but the trace is there.

    The process ends well.
    """
    folder, endings = met
    assert 0 == endings[name]
    assert CASES[name][1] == json.loads((folder / f"{name}.json").read_text("utf-8"))


def test_two_careless_profilers_crash(met: tuple[Path, dict[str, int]]) -> None:
    """What the tests above would see.

    One gets ready, another comes and goes, and the first one starts.
    """
    assert 0 != met[1][CULPRIT]
