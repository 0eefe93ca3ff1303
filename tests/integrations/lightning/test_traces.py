"""Test the monitor's traces: which steps they have, what they contain, and errors on the way.

Tracing must not change a training run. The kinds of the steps in a window are written as one
string, with two letters for each step: "un" for unprofiled, "co" for counting, "tr" for traced,
"mo" for module-timing.
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
from lflops.monitoring.schedule import Schedule
from lflops.monitoring.window import traced_steps as tracing
from lflops.profile.profile import Profile
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
from tests.support import stack_sampling
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

BODY = ROWS * WIDTH * WIDTH
"""MACs of the layer in `body`, in the forward of a batch."""
HEAD = ROWS * WIDTH * CLASSES
"""MACs of the layer `head`, in the forward of a batch."""

# steps of the default schedule
COUNTED = 6
TRACED = 8
HOOKED = 11

ONE_WINDOW = "un" * 6 + "co" + "tr" * 3 + "mo" * 3 + "un"
"""The steps of a window with the default schedule and a trace.

5 steps of waiting and 2 of warm-up, of which the last one counts, 3 traced and 3 module-timing
steps. Two of the unprofiled steps belong to the warm-up of the run, so the window takes another one
after it.
"""

BRIEF = Schedule(wait=3, warmup=1, active=1)


def tracing_into(folder: Path, **options: Any) -> FlopsMonitor:
    """Return a monitor that traces, with the folder as its `dirpath`."""
    return watching(**{"trace": True, "dirpath": folder, **options})


def kinds(profile: Profile) -> str:
    """Return the kinds of all steps, two letters for each step."""
    return "".join(step.kind[:2] for step in profile.steps)


def events(profile: Profile) -> list[dict[str, Any]]:
    """Return the events in the only trace of a window."""
    assert profile.trace is not None
    (path,) = profile.trace.files.values()
    trace = json.loads(gzip.decompress(Path(path).read_bytes()))
    found: list[dict[str, Any]] = trace["traceEvents"]
    return found


def annotated(found: list[dict[str, Any]]) -> bool:
    """Return whether the trace has the rows of modules that lflops adds."""
    return PROCESS in {event["args"].get("name") for event in found if event["ph"] == "M"}


def macs(found: list[dict[str, Any]]) -> Counter[tuple[str, int]]:
    """Return the number of forward calls by module and MACs of a call, if it has any MACs."""
    calls = Counter[tuple[str, int]]()
    for event in found:
        if event.get("cat") == "lflops_module" and event["args"].get("MACs"):
            calls[event["args"]["module"], event["args"]["MACs"]] += 1
    return calls


def batches(found: list[dict[str, Any]]) -> list[str]:
    """Return the names of the steps in a trace. A trace of a device has each of them twice."""
    return sorted({event["name"] for event in found if event["name"].startswith("ProfilerStep#")})


def files(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, without the time in the names of traces.

    If torch-tb-profiler is installed, there are also copies of traces, which are left out.
    """
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.parent.name.startswith("compat-"):
            name = str(path.relative_to(folder))
            found.append(re.sub(r"\.\d+\.pt\.trace\.json\.gz$", ".gz", name))
    return sorted(found)


def nothing_records() -> bool:
    """Return whether no torch.profiler is running, and a new one works."""
    if other_profiler_runs():
        return False
    with profiler.profile(activities=[ProfilerActivity.CPU]) as theirs:
        torch.ones(2, 2) @ torch.ones(2, 2)
    return any(event.name == "aten::mm" for event in theirs.events() or ())


def told(warned: Iterable[warnings.WarningMessage], of: str = "FlopsMonitor") -> int:
    """Return the number of warnings that contain a text, by default those of the monitor."""
    return sum(of in str(each.message) for each in warned)


def no_trace(profile: Profile) -> list[str]:
    """Return the noted reasons why there is no trace."""
    return [note.subject for note in profile.notes if note.code == "no_trace"]


WORKER = f"{platform.node().replace('.', '-')}_0"
"""The name of rank 0 on this machine in the names of trace files."""


def test_active_steps_are_traced_and_as_many_behind_them_hooked(tmp_path: Path) -> None:
    """A window has as many module-timing steps after its traced steps as there are traced steps.

    There is one trace of three batches, in a folder with the name of the profile. Each call of a
    module has the MACs of one batch.
    """
    monitor = tracing_into(tmp_path)
    fit(Classifier(), monitor)
    (profile,) = monitor.profiles
    assert kinds(profile) == ONE_WINDOW
    assert [f"lflops_traces/train-0-12/{WORKER}.gz", "train-0-12.profile.json"] == files(tmp_path)
    assert profile.trace is not None
    (path,) = tmp_path.glob("*/train-*/*")
    assert {"0": str(path)} == profile.trace.files
    found = events(profile)
    assert ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"] == batches(found)
    assert annotated(found)
    assert {("body", BODY): 3, ("body.0", BODY): 3, ("head", HEAD): 3} == macs(found)
    assert 3 == profile.trace.batches
    (products,) = [each.calls for each in profile.trace.operators if each.name == "aten::addmm"]
    assert 3 * 2 == products


def test_a_traced_window_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile of each traced window is written once, before its trace is annotated.

    The annotation reads the MACs of modules from this file. Each write of a profile calls
    `os.fsync`.
    """
    synced: list[int] = []
    fsync = os.fsync

    def noting(file: int) -> None:
        synced.append(file)
        fsync(file)

    monkeypatch.setattr(os, "fsync", noting)
    schedule = Schedule(wait=3, warmup=1, active=1, repeat=2)
    fit(Classifier(), tracing_into(tmp_path, schedule=schedule), batches=60)
    assert 2 == len(list(tmp_path.glob("*.profile.json")))
    assert 2 == len(synced)


class Placed(Recorder):
    """A logger with a `save_dir`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    save_dir = property(lambda self: str(self.folder))  # type: ignore[assignment]


def test_below_the_log_directory_traces_have_a_folder_of_their_own(tmp_path: Path) -> None:
    """In the folder of a run, traces and profiles have separate folders."""
    fit(Classifier(), watching(trace=True), logger=Placed(tmp_path))
    (run,) = (tmp_path / RUNS).iterdir()
    assert ["lflops/train-0-12.profile.json", f"lflops_traces/train-0-12/{WORKER}.gz"] == files(run)
    assert 2 == len(files(tmp_path))


def test_each_window_has_its_folder(tmp_path: Path) -> None:
    """Two windows have a profile and a folder for traces each.

    A window has 3 steps of waiting, 1 of warm-up, 1 traced and 1 module-timing step. The second one
    needs no counting step, because the counts are known. Both have too few unprofiled steps and
    take more after their last step, so only the first 6 steps are compared.
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
    """Two monitors both get a trace if their windows do not overlap."""
    first = tracing_into(tmp_path, schedule=Schedule(wait=2, warmup=1, active=1))
    second = tracing_into(tmp_path, schedule=Schedule(wait=6, warmup=1, active=1))
    fit(Classifier(), first, second)
    expected = [
        "2-train-0-8.profile.json",
        f"lflops_traces/2-train-0-8/{WORKER}.gz",
        f"lflops_traces/train-0-4/{WORKER}.gz",
        "train-0-4.profile.json",
    ]
    assert expected == files(tmp_path)
    assert [] == no_trace(first.profiles[0])
    assert [] == no_trace(second.profiles[0])


def test_a_trace_holds_whole_steps_of_batches(tmp_path: Path) -> None:
    """With gradient accumulation, a trace contains all batches of its steps.

    A step has two batches. The default schedule becomes 1 step of warm-up, 2 traced and 2
    module-timing steps, so the trace has 4 batches. Each call of a module has the MACs of one
    batch.
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
    """Return the clock that the monitor reads."""
    clock = Changing()
    use_clock(monkeypatch, clock)
    return clock


MODELS: dict[str, tuple[type[Timed], dict[str, Any], Times]] = {
    "automatic": (Timed, {}, ONCE),
    "manual, two optimizers": (Adversaries, {}, ADVERSARIES),
    "accumulate 2": (Timed, {"accumulate_grad_batches": 2}, times(ONCE, 2)),
}
"""The model, the options of the Trainer, and the expected self times of modules."""


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_module_times_are_the_same_behind_a_trace(
    name: str, trace: bool, clock: Changing, tmp_path: Path
) -> None:
    """Module times are exactly the same with and without a trace, and not scaled."""
    model, options, expected = MODELS[name]
    monitor = tracing_into(tmp_path, trace=trace)
    fit(model(clock), monitor, **options)
    (profile,) = monitor.profiles
    assert expected == own(profile)
    assert 1 == profile.run.observer_ratio
    assert trace == ("tr" in kinds(profile))


class Late(Timed):
    """A model that takes three times as long in traced steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        is_traced = 7 <= batch_idx <= 9
        self.clock.speed = 3 if is_traced else 1


def test_what_tracing_takes_is_in_no_time(clock: Changing, tmp_path: Path) -> None:
    """Slow traced steps change neither the module times nor the times of other steps."""
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
    """If a run is stopped in the second of three traced steps, its trace has two batches."""
    monitor = tracing_into(tmp_path)
    around = Around()
    fit(Ending(TRACED, stop), around, monitor, limit_val_batches=0)
    assert [] == around.left()
    (profile,) = monitor.profiles
    assert profile.run.partial
    assert ONE_WINDOW[:18] == kinds(profile)
    assert [f"lflops_traces/train-0-8/{WORKER}.gz", "train-0-8.profile.json"] == files(tmp_path)
    assert profile.trace is not None
    assert 2 == profile.trace.batches
    assert {("body", BODY): 2, ("body.0", BODY): 2, ("head", HEAD): 2} == macs(events(profile))
    assert nothing_records()


@pytest.mark.parametrize(("error", "comes_out"), ERRORS.values(), ids=ERRORS)
def test_an_exception_in_a_traced_step_leaves_no_trace(
    error: BaseException, comes_out: type[BaseException], tmp_path: Path
) -> None:
    """After an exception in a traced step, no trace file, hook or running profiler is left.

    The caller receives the user's error.
    """
    monitor = tracing_into(tmp_path)
    around = Around()
    with signals_kept(), pytest.raises(comes_out) as raised:
        fit(Ending(TRACED, raises(error)), around, monitor)
    assert error in {raised.value, raised.value.__context__}
    assert [] == around.left()
    assert ["train-0-7.profile.json"] == files(tmp_path)
    assert not (tmp_path / "lflops_traces").exists()
    (profile,) = monitor.profiles
    assert profile.run.partial
    assert profile.trace is None
    assert nothing_records()


def test_a_profiler_that_is_left_running_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If tracing is never ended, its profiler and hooks are found, so the test above can fail."""
    end = tracing.TracedMode._end
    kept: list[tracing.TracedMode] = []
    monkeypatch.setattr(tracing.TracedMode, "_end", lambda self, **_: kept.append(self))
    around = Around()
    with pytest.raises(ValueError, match="planted"):
        fit(Ending(TRACED, raises(ValueError("planted"))), around, tracing_into(tmp_path))
    recorded_nothing = nothing_records()
    left = set(around.left())
    end(kept[0], keep=False)
    assert not recorded_nothing
    assert {"profiler", "hooks on every module: _global_forward_hooks"} <= left
    assert nothing_records()
    assert [] == around.left()


def test_what_was_recorded_before_an_exception_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the run fails in a module-timing step, the trace of the steps before it is kept.

    The run does not wait for the annotation of the trace, but the annotation succeeds.
    """
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
    assert profile.run.partial
    assert 3 == len(batches(events(profile)))
    assert [f"lflops_traces/train-0-10/{WORKER}.gz", "train-0-10.profile.json"] == files(tmp_path)


class Slowly:
    """An annotation that is done when `is_done` has been read more than `looks` times."""

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
        """Report no error."""


def test_steps_beside_an_annotation_are_marked_and_are_no_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps during an annotation have the mark "background" and do not count as unprofiled.

    The first window ends with step 9 and has enough unprofiled steps. Its annotation is found to be
    running three times and then done, so the 4 steps 10 to 13 of the second window are marked. This
    window therefore takes a fifth unprofiled step after it.
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
    """If the annotation fails, lflops warns once, and the trace is as torch.profiler wrote it."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monitor = tracing_into(tmp_path)
    message = r"pt\.trace\.json\.gz lacks the modules: exit status 1"
    with pytest.warns(UserWarning, match=message) as warned:
        fit(Classifier(), monitor)
    assert 1 == told(warned)
    found = events(monitor.profiles[0])
    assert 3 == len(batches(found))
    assert not annotated(found)
    assert [f"lflops_traces/train-0-12/{WORKER}.gz", "train-0-12.profile.json"] == files(tmp_path)


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Replace the program that annotates by one that runs until something is written to this pipe.

    After the test, even if it failed, something is written.
    """
    program = tmp_path / "program"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program.write_text(f"#!/bin/sh\nread word < {pipe}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    yield pipe
    # If no process reads the pipe any more, opening it raises an error.
    with (
        contextlib.suppress(OSError),
        open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w", encoding="utf-8") as written,  # noqa: PTH123
    ):
        written.write("enough\n")


def training_fails(folder: Path) -> None:
    """Raise in a module-timing step, which follows the traced ones."""
    with pytest.raises(ValueError, match="planted"):
        fit(Ending(HOOKED, raises(ValueError("planted"))), tracing_into(folder))


def we_fail(folder: Path) -> None:
    """Raise in the user's `units` long after the window, which ends the monitor with a warning."""
    left = iter(range(20, -1, -1))

    def units(_batch: Any) -> dict[str, int]:
        return {"samples": 1 // next(left)}

    monitor = tracing_into(folder, schedule=BRIEF, on_error="warn", units=units)
    with pytest.warns(UserWarning, match="FlopsMonitor has failed .* ZeroDivisionError"):
        fit(Classifier(), monitor)


def time_is_up(folder: Path) -> None:
    """End the run as usual: it waits for the annotation until its time is up, and warns."""
    with pytest.warns(
        UserWarning, match="lacks the modules: the background process is still running"
    ):
        fit(Classifier(), tracing_into(folder, schedule=BRIEF))


@pytest.mark.parametrize("end", [training_fails, we_fail, time_is_up])
def test_a_trace_that_is_still_being_annotated_is_left_to_its_process(
    end: Callable[[Path], None], pipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a run ends during an annotation, the process that annotates continues on its own.

    No file stays open, there is no `ResourceWarning`, and when the process ends, it is reaped.
    """
    begun: list[int] = []

    class Seen(AnnotationProcess):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            begun.append(self._process.pid)

        def finish(self, seconds: float = 0) -> str | None:
            return super().finish(seconds)

    monkeypatch.setattr(tracing, "AnnotationProcess", Seen)
    # Otherwise files that another test has left open may be closed at any time.
    gc.collect()
    files_before = set(open_files())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        end(tmp_path / "run")
        gc.collect()
    assert [] == [str(each.message) for each in warned if each.category is ResourceWarning]
    assert set() == set(open_files()) - files_before
    (process,) = begun
    # raises if the process does not exist
    os.kill(process, 0)
    pipe.write_text("enough\n")
    for thread in threading.enumerate():
        if thread.name.startswith("lflops: "):
            thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


class Named(Classifier):
    """Uses `record_function` in `training_step`."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with record_function("mine"):
            return super().training_step(batch, batch_idx)


def features(found: list[dict[str, Any]]) -> set[str]:
    """Return the kinds of events in a trace that options and annotations add."""
    kinds = set()
    for event in found:
        name = event["name"]
        category = event.get("cat")
        if name == "mine" and category == "user_annotation":
            kinds.add("mine")
        if name == "aten::addmm" and "Input Dims" in event["args"]:
            kinds.add("shapes")
        if name == "[memory]":
            kinds.add("memory")
        if name.startswith("allocated bytes (CPU)") and event["ph"] == "C":
            kinds.add("memory's curve")
        if category == "python_function":
            kinds.add("stack")
    return kinds


OPTIONS: dict[str, tuple[dict[str, bool], set[str]]] = {
    "none": ({}, set()),
    "record_shapes": ({"record_shapes": True}, {"shapes"}),
    "profile_memory": ({"profile_memory": True}, {"memory", "memory's curve"}),
    "with_stack": ({"with_stack": True}, {"stack"}),
}
"""Options of torch.profiler, and the kinds of events that they add."""


@pytest.mark.parametrize(("options", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_torchs_options_do_to_the_trace_what_they_do_to_torchs(
    options: dict[str, bool], expected: set[str], tmp_path: Path
) -> None:
    """Each option adds the same events as in torch.profiler. All traces have the user's annotation.

    Only the curve of the memory is added by lflops.
    """
    monitor = tracing_into(tmp_path, schedule=BRIEF, **options)
    fit(Named(), monitor)
    assert {"mine"} | expected == features(events(monitor.profiles[0]))
    batch = (torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long))
    with profiler.profile(activities=[ProfilerActivity.CPU], **options) as theirs:
        Named().training_step(batch, 0).backward()
    path = tmp_path / "theirs.json"
    theirs.export_chrome_trace(str(path))
    of_torch = features(json.loads(path.read_bytes())["traceEvents"])
    assert ({"mine"} | expected) - {"memory's curve"} == of_torch


def test_a_rank_that_is_not_asked_to_makes_no_trace(tmp_path: Path) -> None:
    """A rank that does not trace has unprofiled steps while other ranks trace, and no warning."""
    monitor = tracing_into(tmp_path, trace_ranks=[1])
    fit(Classifier(), monitor)
    (profile,) = monitor.profiles
    assert "un" * 6 + "co" + "un" * 3 + "mo" * 3 == kinds(profile)
    assert profile.trace is None
    assert [] == no_trace(profile)
    assert ["train-0-12.profile.json"] == files(tmp_path)


@pytest.mark.parametrize("ranks", ["all", [0], [1, 0]])
def test_a_rank_that_is_asked_to_does(ranks: Any, tmp_path: Path) -> None:
    """Rank 0 traces if `trace_ranks` includes it."""
    monitor = tracing_into(tmp_path, trace_ranks=ranks, schedule=BRIEF)
    fit(Classifier(), monitor)
    assert ["ProfilerStep#0"] == batches(events(monitor.profiles[0]))


class Placeless(Recorder):
    """A logger without a folder."""

    save_dir = property(lambda self: None)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"logger": Placeless()}, "un" * 6 + "co" + "mo" * 3 + "un"), ({"fast_dev_run": 3}, "uncomo")],
)
def test_where_there_is_no_place_for_files_there_is_no_trace(
    options: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """If no folder is known for files, there is no trace: the active steps time modules.

    There is no warning and no note.
    """
    monitor = watching(trace=True)
    fit(Classifier(), monitor, default_root_dir=tmp_path, **options)
    (profile,) = monitor.profiles
    assert expected == kinds(profile)
    assert profile.trace is None
    assert [] == no_trace(profile)
    assert [] == files(tmp_path)


def test_where_nothing_can_be_recorded_it_is_said_once(tmp_path: Path) -> None:
    """If only a device is traced, but the model is on the CPU, there is one warning and a note.

    The rest of the profile is complete.
    """
    monitor = tracing_into(tmp_path, activities=["device"])
    message = "FlopsMonitor: there is no trace: torch cannot record any activity on this machine"
    with pytest.warns(UserWarning, match=message) as warned:
        fit(Classifier(), monitor)
    (profile,) = monitor.profiles
    assert 1 == told(warned)
    assert ["no_activity"] == no_trace(profile)
    assert ["train-0-12.profile.json"] == files(tmp_path)
    assert profile.modules["head"].backward.seconds is not None


@pytest.mark.parametrize(
    "name", ["fp32", "bf16-mixed", "accumulated and clipped", "manual", "LBFGS"]
)
def test_a_traced_training_is_the_same_training(name: str, tmp_path: Path) -> None:
    """Tracing changes no losses, weights, buffers, optimizer states or later random numbers.

    The run has two windows.
    """
    monitor = tracing_into(tmp_path, schedule=Schedule(wait=2, warmup=1, active=1, repeat=2))
    assert [] == differences(train(name), train(name, monitor))
    assert [True, True] == [profile.trace is not None for profile in monitor.profiles]


def test_a_traced_training_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    """A run with a trace leaves no more files, threads, handlers and warnings than one without.

    It also leaves no wrappers, hooks or modes.
    """
    # The first fits load modules, which stay loaded.
    fit(Classifier(), tracing_into(tmp_path))
    fit(Classifier())
    settle()
    before = process()
    fit(Classifier())
    plain = differences(before, process())
    settle()
    before = process()
    around = Around()
    fit(Classifier(), around, tracing_into(tmp_path))
    assert [] == around.left()
    assert plain == differences(before, process())


def test_an_export_that_fails_leaves_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the trace cannot be written, there is one warning, a note and no file.

    The profile still has the operators of the trace, and another monitor can trace.
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
    assert 1 == told(warned)
    assert 30 == trainer.global_step
    assert [] == around.left()
    (profile,) = first.profiles
    assert ["train-0-12.profile.json"] == files(tmp_path)
    assert ["not_written"] == no_trace(profile)
    assert profile.trace is not None
    assert {} == profile.trace.files
    assert profile.trace.operators
    assert nothing_records()
    monitor = tracing_into(tmp_path, schedule=BRIEF)
    fit(Classifier(), monitor)
    assert ["ProfilerStep#0"] == batches(events(monitor.profiles[0]))


def test_an_error_of_our_own_in_a_traced_step_leaves_nothing_on(tmp_path: Path) -> None:
    """If the user's `units` fails in a traced step, lflops warns once, and nothing is left."""
    seen = iter(range(100))

    def units(batch: Any) -> dict[str, int]:
        # divides by zero in step `TRACED`
        return {"samples": 1 // (TRACED - next(seen))}

    around = Around()
    with pytest.warns(UserWarning, match="FlopsMonitor has failed") as warned:
        trainer = fit(Classifier(), around, tracing_into(tmp_path, on_error="warn", units=units))
    assert 1 == told(warned)
    assert 30 == trainer.global_step
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
    """After an error when Kineto is already recording, lflops warns once, and nothing is left."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(where, broken)
    around = Around()
    with pytest.warns(
        UserWarning, match="FlopsMonitor has failed .* ZeroDivisionError: planted"
    ) as warned:
        trainer = fit(Classifier(), around, tracing_into(tmp_path, on_error="warn"))
    assert 1 == told(warned)
    assert 30 == trainer.global_step
    assert [] == around.left()
    assert nothing_records()


def test_a_stack_is_the_trainings(tmp_path: Path) -> None:
    """With stacks, a trace does not contain lflops' search for other profilers.

    This search calls `issubclass` for about a million objects.
    """
    monitor = tracing_into(tmp_path, schedule=BRIEF, with_stack=True)
    fit(Classifier(), monitor)
    assert 10_000 > sum("issubclass" in event["name"] for event in events(monitor.profiles[0]))


def test_a_validation_between_traced_steps_is_no_call_of_theirs(tmp_path: Path) -> None:
    """A validation between traced steps is neither in the trace nor in its table of operators.

    For three batches, each module has three calls, and `aten::addmm` has two calls in each forward.
    """
    monitor = tracing_into(tmp_path)
    fit(Validated(), monitor, val_check_interval=TRACED)
    (profile,) = monitor.profiles
    assert {("body", BODY): 3, ("body.0", BODY): 3, ("head", HEAD): 3} == macs(events(profile))
    assert profile.trace is not None
    (addmm,) = [each for each in profile.trace.operators if each.name == "aten::addmm"]
    assert 6 == addmm.calls


def test_a_trace_of_no_batch_is_none(tmp_path: Path) -> None:
    """If a run is stopped after the counting step, before any traced step, there is no trace."""
    monitor = tracing_into(tmp_path)
    fit(Ending(COUNTED, stop), monitor)
    (profile,) = monitor.profiles
    assert profile.trace is None
    assert ["train-0-6.profile.json"] == files(tmp_path)


def test_the_last_slice_is_a_batch(tmp_path: Path) -> None:
    """If a run is stopped, its work after the last batch is not a step in the trace."""
    monitor = tracing_into(tmp_path)
    fit(Ending(TRACED, stop), monitor, limit_val_batches=0)
    assert ["ProfilerStep#0", "ProfilerStep#1"] == batches(events(monitor.profiles[0]))


# The following cases run together with other profilers. Each case has a separate process, because
# the profilers could crash it.


class Theirs(Callback):
    """A profiler of the user, which starts in batch `begin`.

    It waits for `wait` batches, warms up in one batch, and records two.
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
        """Return the number of backward passes of layers that were recorded."""
        return products(self.profile.events())


def products(found: Any) -> int:
    """Return the number of backward passes of layers in events."""
    return sum(event.name == "AddmmBackward0" for event in found)


def fitted(
    folder: Path, *callbacks: Any, monitors: int = 1, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Train with monitors that trace, and return the Trainer and facts about their windows.

    The facts can be written to JSON. All but the numbers of warnings and files are lists with an
    entry for each profile.
    """
    watchers = [tracing_into(folder) for _ in range(monitors)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer = fit(Classifier(), *watchers, *callbacks, **options)
    facts: dict[str, Any] = {
        "warned": told(warned, "FlopsMonitor: there is no trace"),
        "failed": told(warned, "FlopsMonitor has failed"),
        "reasons": [],
        "batches": [],
        "macs": [],
        "timed": True,
        "kinds": [],
    }
    for monitor in watchers:
        for profile in monitor.profiles:
            facts["reasons"].append(no_trace(profile))
            number = 0
            if profile.trace is not None:
                number = len(batches(events(profile)))
            facts["batches"].append(number)
            layers = [profile.modules[name] for name in ("body.0", "head")]
            facts["macs"].append([layer.forward.macs for layer in layers])
            for layer in layers:
                if not layer.forward.seconds or not layer.backward.seconds:
                    facts["timed"] = False
            facts["kinds"].append(sorted(set(re.findall("..", kinds(profile)))))
    names = files(folder)
    facts["traces"] = sum(name.endswith(".gz") for name in names)
    facts["other files"] = [name for name in names if not name.endswith((".gz", ".profile.json"))]
    return trainer, facts


def beside(*, begin: int, wait: int = 0) -> Callable[[Path], dict[str, Any]]:
    """Return a case with a user's profiler that starts in batch `begin`."""

    def case(folder: Path) -> dict[str, Any]:
        theirs = Theirs(begin, wait)
        _, told = fitted(folder, theirs)
        return told | {"theirs": theirs.products()}

    return case


def beside_lightnings(folder: Path) -> dict[str, Any]:
    """Train with Lightning's `PyTorchProfiler`.

    `theirs` is its number of recorded backward passes, relative to a run without lflops.
    """
    plain = fit(Classifier(), profiler=PyTorchProfiler())
    trainer, told = fitted(folder, profiler="pytorch")
    assert isinstance(trainer.profiler, PyTorchProfiler)
    usual = products(plain.profiler.function_events)
    assert usual > 0
    return told | {"theirs": products(trainer.profiler.function_events) / usual}


def two_monitors(folder: Path) -> dict[str, Any]:
    """Train with two monitors that have the same window."""
    return fitted(folder, monitors=2)[1]


class Careless(Callback):
    """Prepares a profiler when training begins, and starts it in batch 20."""

    def on_train_start(self, *_: Any) -> None:
        self.profile = profiler.profile(activities=[ProfilerActivity.CPU])
        self.profile.prepare_trace()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 20:
            self.profile.start_trace()


def two_profilers(folder: Path) -> dict[str, Any]:
    """Train with two profilers of the user, without lflops."""
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
"""The facts of a run in which a monitor is the only profiler."""
NOT_TRACED = [["co", "mo", "un"]]
REFUSED = ALONE | {
    "warned": 1,
    "reasons": [["other_profiler"]],
    "batches": [0],
    "kinds": NOT_TRACED,
    "traces": 0,
    "theirs": 4,
}
"""The facts if another profiler runs, so lflops does not trace.

The other profiler records 4 backward passes: two layers in two batches.
"""
BOTH = {
    "warned": 1,
    "failed": 0,
    "reasons": [[], ["own_trace"]],
    "batches": [3, 0],
    "macs": [[BODY, HEAD]] * 2,
    "timed": True,
    "kinds": ALONE["kinds"] + NOT_TRACED,
    "traces": 1,
    "other files": [],
}
"""The facts of two monitors with the same window, of which only the first one traces."""

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
    "another monitor": (two_monitors, BOTH),
}
"""Functions that train with another profiler and return facts, and the expected facts."""

CULPRIT = "two profilers"
"""The name of a case that crashes."""


def fork_all(folder: Path) -> None:
    """Run each case in a separate process, and write its facts and its exit status to the folder.

    The processes are forked when Lightning is loaded and nothing has been recorded. They end like
    any program.
    """
    stack_sampling.turn_off()
    cases = {name: case for name, (case, _) in CASES.items()} | {CULPRIT: two_profilers}
    # Otherwise, the garbage collector of each process would copy the memory of all loaded objects.
    gc.freeze()
    children: dict[str, int] = {}
    for number, (name, case) in enumerate(cases.items()):
        place = folder / str(number)
        place.mkdir()
        children[name] = os.fork()
        if not children[name]:
            (folder / f"{name}.json").write_text(json.dumps(case(place)), "utf-8")
            sys.exit()
    endings = {}
    for name, child in children.items():
        _, status = os.waitpid(child, 0)
        endings[name] = os.waitstatus_to_exitcode(status)
    (folder / "endings.json").write_text(json.dumps(endings), "utf-8")


@pytest.fixture(scope="module")
def met(
    tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython
) -> tuple[Path, dict[str, int]]:
    """Run all cases, and return the folder with their facts, and their exit statuses."""
    folder = tmp_path_factory.mktemp("met")
    code = (
        "import sys, pathlib; from tests.integrations.lightning.test_traces import fork_all; "
        "fork_all(pathlib.Path(sys.argv[1]))"
    )
    ended = warm_python.run(code, folder)
    assert 0 == ended.status, ended.err
    return folder, json.loads((folder / "endings.json").read_text("utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_beside(name: str, met: tuple[Path, dict[str, int]]) -> None:
    """If lflops and another profiler meet, the user's profiler records everything.

    lflops warns once, its profile has everything but the trace, and the process does not crash. Of
    two monitors, the first one traces.
    """
    folder, endings = met
    assert 0 == endings[name]
    assert CASES[name][1] == json.loads((folder / f"{name}.json").read_text("utf-8"))


def test_two_careless_profilers_crash(met: tuple[Path, dict[str, int]]) -> None:
    """Two profilers of the user crash the process, so the test above can fail.

    One is prepared, another one starts and stops, and then the first one starts.
    """
    assert 0 != met[1][CULPRIT]
