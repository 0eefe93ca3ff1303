"""One owner of Kineto in a process, which two would crash: every way in which a profiler of torch's can meet ours, in a process each."""

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.profiler import ProfilerAction, ProfilerActivity, profile

BEGIN = """
import sys
from pathlib import Path
import torch
from torch.profiler import ProfilerActivity, profile, schedule
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.kineto.tracer import Tracer

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
    print("ours", tracer.refusal if recording is None else recording.batches)

theirs = another()
"""


def tells_of_its_end() -> bool:
    """Whether one that is stopped while it waits, as those of a schedule are in the end, differs from one that waits."""
    waits = profile(activities=[ProfilerActivity.CPU], schedule=lambda _: ProfilerAction.NONE)
    waits.start()
    waits.stop()
    return waits.step_rec_fn is None


REFUSED = "False other_profiler\ntheirs 2"
CUT_OFF = "ours cut_off\ntheirs 2"
BOTH = "theirs 2\nours 1"
BOTH_IF_IT_TELLS = BOTH if tells_of_its_end() else "theirs 2\nours other_profiler"
"""On torch 2.8 and 2.11 ours waits in vain for the end of one that has ended: to start beside one that waits could crash."""

CASES = {
    "gets ready": ("theirs.start(); print(tracer.begin(), tracer.refusal); finish(theirs, 3)", REFUSED),
    "gets ready, before ours warms up": ("theirs.start(); print(tracer.warm_up(), tracer.refusal); finish(theirs, 3)", REFUSED),
    "records": ("theirs.start(); go_on(theirs, 1); print(tracer.begin(), tracer.refusal); finish(theirs, 2)", REFUSED),
    "waits": ("theirs = another(wait=1); theirs.start(); print(tracer.begin(), tracer.refusal); finish(theirs, 4)", REFUSED),
    "is torch's older one": (
        "with torch.autograd.profiler.profile(): print(tracer.begin(), tracer.refusal)\ntheirs.start(); finish(theirs, 3)",
        REFUSED,
    ),
    "is ours": (
        (
            "ours = Tracer(tracer._tree); ours.begin(); print(tracer.begin(), tracer.refusal)\n"
            "ours.abandon(); theirs.start(); finish(theirs, 3)"
        ),
        REFUSED.replace("other_profiler", "own_trace"),
    ),
    "was there before": ("theirs.start(); finish(theirs, 3); tracer.begin(); work(); stop()", BOTH_IF_IT_TELLS),
    "comes between": ("tracer.warm_up(); theirs.start(); finish(theirs, 3); tracer.begin(); work(); stop()", BOTH_IF_IT_TELLS),
    "was there before, stopped as it recorded": (
        "theirs = profile(activities=[ProfilerActivity.CPU]); theirs.start(); work(); finish(theirs, 1); tracer.begin(); work(); stop()",
        BOTH,
    ),
    "gets ready while ours records": ("tracer.begin(); work(); theirs.start(); work(); stop(); finish(theirs, 3)", CUT_OFF),
    "records while ours does": ("tracer.begin(); theirs.start(); go_on(theirs, 1); stop(); finish(theirs, 2)", CUT_OFF),
    "outlives ours": ("tracer.begin(); theirs.start(); tracer.abandon(); print('ours', tracer.refusal); finish(theirs, 3)", CUT_OFF),
    "comes and goes while ours records": ("tracer.begin(); theirs.start(); finish(theirs, 3); stop()", "theirs 2\nours cut_off"),
    "comes afterwards": ("tracer.begin(); work(); stop(); theirs.start(); finish(theirs, 3)", "ours 1\ntheirs 2"),
}


EVERY_CASE = {name: script for name, (script, _) in CASES.items()} | {
    "warns of nothing": "import warnings; warnings.simplefilter('error'); tracer.begin(); work(); stop()",
    "two careless ones": "first = another(); first.prepare_trace(); theirs.start(); finish(theirs, 3); first.start_trace()",
}


def fork_each(folder: Path) -> None:
    """Run each case in a process of its own, which begins where torch is loaded and nothing was ever recorded, and ends as any does."""
    importlib.import_module("lflops.collect.kineto.tracer")  # once for all of them
    gc.freeze()  # else each would copy all that is loaded only to look through it
    for number, script in enumerate(EVERY_CASE.values()):
        (place := folder / str(number)).mkdir()
        child = os.fork()
        if not child:
            for descriptor, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(folder / f"{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
            sys.argv[1] = str(place)
            exec(compile(BEGIN + script, f"case {number}", "exec"), {})  # noqa: S102 - our own
            sys.exit()
        (folder / f"{number}.status").write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), "utf-8")


class Ended(NamedTuple):
    """How a case ended, what it printed, and whether it left a trace."""

    status: int
    stdout: str
    stderr: str
    is_traced: bool


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Every case, by its name."""
    folder = tmp_path_factory.mktemp("cases")
    code = "import sys, pathlib; from tests.collect.kineto.test_module_owner import fork_each; fork_each(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=Path(__file__).parents[3], check=True)

    def read(number: int) -> Ended:
        status, stdout, stderr = ((folder / f"{number}.{name}").read_text("utf-8").strip() for name in ("status", "stdout", "stderr"))
        return Ended(int(status), stdout, stderr, any((folder / str(number)).iterdir()))

    return {name: read(number) for number, name in enumerate(EVERY_CASE)}


@pytest.mark.parametrize("case", CASES)
def test_beside_a_profiler_that(case: str, ended: dict[str, Ended]) -> None:
    """Whatever ours does, theirs records both of the steps that it was asked for, and the process ends well."""
    result, expected = ended[case], CASES[case][1]
    assert (0, expected) == (result.status, result.stdout), result.stderr
    assert ("ours 1" in expected) == result.is_traced


def test_ours_has_torch_warn_of_nothing(ended: dict[str, Ended]) -> None:
    """Of how a profiler was made, which is not the user's doing."""
    result = ended["warns of nothing"]
    assert (0, "ours 1") == (result.status, result.stdout), result.stderr


def test_two_profilers_do_crash(ended: dict[str, Ended]) -> None:
    """What the tests above would see: one gets ready, another comes and goes, and the first one starts."""
    assert 0 != ended["two careless ones"].status
