"""Test that Kineto has only one owner in a process, because two owners would crash it.

Each test combines the tracer of lflops ("ours") with another torch profiler ("theirs") in a
different way, in a separate process.
"""

from pathlib import Path

import pytest
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from tests.support.warm_python import WarmPython

BEGIN = """
import sys
from pathlib import Path
import torch
from torch.profiler import ProfilerActivity, profile, schedule
from lflops.model.module_tree import ModuleTree
from lflops.trace.record.tracer import UNANNOTATED, Tracer

model = torch.nn.Linear(2, 2)
tracer = Tracer(ModuleTree({"": model}))

def work():
    model(torch.ones(2, 2)).sum().backward()

def another(wait=0):
    return profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=wait, warmup=1, active=2, repeat=1))

def go_on(theirs, steps):
    for _ in range(steps):
        work()
        theirs.step()

def finish(theirs, steps):
    go_on(theirs, steps)
    theirs.stop()
    print("theirs", sum(event.name == "AddmmBackward0" for event in theirs.events()))

def stop():
    recording = tracer.stop(Path(sys.argv[1]), "host_0")
    UNANNOTATED.clear()  # as if another process had it
    print("ours", tracer.refusal if recording is None else recording.trace.batches)

theirs = another()
"""


def tells_of_its_end() -> bool:
    """Return whether this torch version shows if a profiler was stopped or is only waiting.

    A profiler with a schedule waits at its end, so it is stopped while it waits.
    """
    waits = profile(activities=[ProfilerActivity.CPU], schedule=lambda _: ProfilerAction.NONE)
    waits.start()
    waits.stop()
    return waits.step_rec_fn is None


REFUSED = "False other_profiler\ntheirs 2"
CUT_OFF = "ours cut_off\ntheirs 2"
BOTH = "theirs 2\nours 1"
BOTH_IF_IT_TELLS = BOTH if tells_of_its_end() else "theirs 2\nours other_profiler"
"""The output if the other profiler has ended before ours starts.

On torch 2.8 and 2.11, the tracer cannot know that the other profiler has ended, and refuses to
start. Starting while another profiler waits could crash.
"""

CASES = {
    "gets ready": (
        "theirs.start(); print(tracer.begin(), tracer.refusal); finish(theirs, 3)",
        REFUSED,
    ),
    "gets ready, before ours warms up": (
        "theirs.start(); print(tracer.warm_up(), tracer.refusal); finish(theirs, 3)",
        REFUSED,
    ),
    "records": (
        (
            "theirs.start(); go_on(theirs, 1); print(tracer.begin(), tracer.refusal); "
            "finish(theirs, 2)"
        ),
        REFUSED,
    ),
    "waits": (
        (
            "theirs = another(wait=1); theirs.start(); print(tracer.begin(), tracer.refusal); "
            "finish(theirs, 4)"
        ),
        REFUSED,
    ),
    "is torch's older one": (
        (
            "with torch.autograd.profiler.profile(): print(tracer.begin(), tracer.refusal)\n"
            "theirs.start(); finish(theirs, 3)"
        ),
        REFUSED,
    ),
    "is ours": (
        (
            "ours = Tracer(tracer._tree); ours.begin(); print(tracer.begin(), tracer.refusal)\n"
            "ours.abandon(); theirs.start(); finish(theirs, 3)"
        ),
        REFUSED.replace("other_profiler", "own_trace"),
    ),
    "was there before": (
        "theirs.start(); finish(theirs, 3); tracer.begin(); work(); stop()",
        BOTH_IF_IT_TELLS,
    ),
    "comes between": (
        "tracer.warm_up(); theirs.start(); finish(theirs, 3); tracer.begin(); work(); stop()",
        BOTH_IF_IT_TELLS,
    ),
    "was there before, stopped as it recorded": (
        (
            "theirs = profile(activities=[ProfilerActivity.CPU]); theirs.start(); work(); "
            "finish(theirs, 1); tracer.begin(); work(); stop()"
        ),
        BOTH,
    ),
    "gets ready while ours records": (
        "tracer.begin(); work(); theirs.start(); work(); stop(); finish(theirs, 3)",
        CUT_OFF,
    ),
    "records while ours does": (
        "tracer.begin(); theirs.start(); go_on(theirs, 1); stop(); finish(theirs, 2)",
        CUT_OFF,
    ),
    "outlives ours": (
        (
            "tracer.begin(); theirs.start(); tracer.abandon(); print('ours', tracer.refusal); "
            "finish(theirs, 3)"
        ),
        CUT_OFF,
    ),
    "comes and goes while ours records": (
        "tracer.begin(); theirs.start(); finish(theirs, 3); stop()",
        "theirs 2\nours cut_off",
    ),
    "comes afterwards": (
        "tracer.begin(); work(); stop(); theirs.start(); finish(theirs, 3)",
        "ours 1\ntheirs 2",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_beside_a_profiler_that(case: str, tmp_path: Path, warm_python: WarmPython) -> None:
    """The other profiler always records both of its steps, and the process does not crash.

    The output shows whether our tracer recorded a batch, or why it did not.
    """
    script, expected = CASES[case]
    ended = warm_python.run(BEGIN + script, tmp_path, destroys_objects=True)
    assert (0, expected) == (ended.status, ended.out.strip()), ended.err
    assert ("ours 1" in expected) == any(tmp_path.iterdir())


def test_ours_has_torch_warn_of_nothing(tmp_path: Path, warm_python: WarmPython) -> None:
    """The tracer causes no warning of torch about the arguments of the profiler.

    The user has not chosen these arguments.
    """
    ended = warm_python.run(
        BEGIN + "import warnings; warnings.simplefilter('error'); tracer.begin(); work(); stop()",
        tmp_path,
    )
    assert (0, "ours 1") == (ended.status, ended.out.strip()), ended.err


def test_two_profilers_do_crash(tmp_path: Path, warm_python: WarmPython) -> None:
    """Two profilers crash a process, so the tests above can fail.

    The first profiler prepares, the second records and ends, and then the first starts.
    """
    script = (
        "first = another(); first.prepare_trace(); theirs.start(); finish(theirs, 3); "
        "first.start_trace()"
    )
    assert 0 != warm_python.run(BEGIN + script, tmp_path, destroys_objects=True).status


def test_ours_ends_before_theirs_gets_ready(tmp_path: Path, warm_python: WarmPython) -> None:
    """Our recording ends before the other profiler prepares, because preparing sometimes crashed.

    The method of torch's class that lflops replaced is restored. No step of ours is open at that
    time either: if it ended during the other recording, it would be written into memory that was
    already freed.
    """
    script = """
kind, seen = torch.autograd.profiler.profile, []
prepare = kind._prepare_trace
kind._prepare_trace = looks = lambda self: (seen.append((torch.autograd._profiler_enabled(), tracer._step)), prepare(self))
tracer.begin(); work(); theirs.start(); finish(theirs, 3); stop()
print(seen, kind._prepare_trace is looks)
"""
    ended = warm_python.run(BEGIN + script, tmp_path, destroys_objects=True)
    assert (0, f"theirs 2\nours cut_off\n{[(False, None)] * 2} True") == (
        ended.status,
        ended.out.strip(),
    ), ended.err
