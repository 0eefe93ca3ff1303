"""Test which of the user's functions is named for a phase, from samples of the Python stack."""

import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

from lflops.profile.records import MainFunction
from lflops.timing.stack_samples import (
    AT_FULL_RATE,
    MOST_FUNCTIONS,
    Call,
    FunctionTimes,
    StackSample,
    StackSampler,
    is_users,
)
from lflops.timing.step_phases import BETWEEN, OTHER

MS = 1_000_000


class Functions:
    """Functions of a user."""

    def collate(self) -> None:
        """Call the function below."""

    def pad(self) -> None:
        """Take the time."""


COLLATE = Functions.collate.__code__
PAD = Functions.pad.__code__


def test_is_in_a_file() -> None:
    """The functions above are in this file."""
    assert __file__ == COLLATE.co_filename


def call(code: CodeType, line: int = 1, *, is_loop: bool = False) -> Call:
    """Return a running call of one of the functions above."""
    return Call(code, line, is_loop)


def samples(*moments: int, calls: tuple[Call, ...], module: str = "") -> list[StackSample]:
    """Return samples at the given milliseconds."""
    return [StackSample(moment * MS, module, calls) for moment in moments]


def named(
    taken: list[StackSample], phases: dict[int, str], end: int, names: dict[str, str] | None = None
) -> list[tuple[str, str, str, int, int, float]]:
    """Return the main functions of one step, whose phases begin at the given milliseconds."""
    times = FunctionTimes(names or {})
    marks = [begin * MS for begin in phases]
    times.add(taken, (marks, list(phases.values()), end * MS))
    found = []
    for each in times.main_functions():
        share = round(each.share, 6)
        found.append((each.phase, each.module, each.name, each.line, each.samples, share))
    return found


def test_samples_are_weighted_by_the_time_since_the_last_sample() -> None:
    """A sample after 5 ms counts five times as much as a sample after 1 ms.

    `pad` has 4 of 12 samples, but 20 of 28 ms. Its line 7 has 15 of these 20 ms.
    """
    taken = samples(1, 2, 3, 4, 5, 6, 7, 8, calls=(call(COLLATE, 3),))
    taken += samples(13, calls=(call(PAD, 9), call(COLLATE, 4)))
    taken += samples(18, 23, 28, calls=(call(PAD, 7), call(COLLATE, 4)))
    assert [("data", "", "Functions.pad", 7, 12, round(20 / 28, 6))] == named(
        taken, {0: "data"}, 30
    )


def test_the_innermost_function_with_half_of_the_time_is_named() -> None:
    """`pad` has 4 of 10 ms, so `collate` is named, which calls it. Then it has 5 of 10 ms."""
    taken = samples(1, 2, 3, 4, calls=(call(PAD), call(COLLATE)))
    taken += samples(5, 6, 7, 8, 9, 10, calls=(call(COLLATE, 2),))
    assert [("data", "", "Functions.collate", 2, 10, 1.0)] == named(taken, {0: "data"}, 10)
    taken[4] = taken[4]._replace(calls=(call(PAD), call(COLLATE)))
    assert [("data", "", "Functions.pad", 1, 10, 0.5)] == named(taken, {0: "data"}, 10)


def test_a_function_needs_four_samples() -> None:
    """Three samples are too few, however long they took."""
    taken = samples(10, 20, 30, calls=(call(PAD),))
    assert [] == named(taken, {0: "data"}, 40)
    taken += samples(40, calls=(call(PAD),))
    assert [("data", "", "Functions.pad", 1, 4, 1.0)] == named(taken, {0: "data"}, 40)


def test_time_without_a_function_of_the_user_counts() -> None:
    """Nothing is named if packages take most of the phase."""
    taken = samples(1, 2, 3, 4, calls=(call(PAD),)) + samples(9, calls=())
    assert [] == named(taken, {0: "data"}, 40)


def test_a_phase_without_time_has_no_main_function() -> None:
    """If the clock stands still, no function takes a share of the time."""
    assert [] == named(samples(1, 1, 1, 1, 1, calls=(call(PAD),)), {1: "data"}, 1)


def test_a_recursion_counts_once() -> None:
    """A function that calls itself is counted once in each sample, with its innermost line."""
    taken = samples(1, 2, 3, 4, calls=(call(PAD, 5), call(PAD, 6)))
    assert [("data", "", "Functions.pad", 5, 4, 1.0)] == named(taken, {0: "data"}, 4)


def test_phases_are_separate() -> None:
    """A sample counts in the phase at its moment, from the beginning of this phase on.

    The first sample of forward comes 9 ms after the last one of the data wait, but only 1 ms of
    this time is in forward. Samples outside the step are ignored.
    """
    taken = samples(0, 11, 12, 13, 14, calls=(call(PAD),))
    taken += samples(23, calls=(call(COLLATE),))
    taken += samples(24, 25, 26, 27, 29, 31, calls=(call(PAD),))
    found = named(taken, {10: "data", 22: "forward"}, 30)
    assert ("data", "", "Functions.pad", 1, 4, 1.0) in found
    assert ("forward", "", "Functions.pad", 1, 6, round(6 / 7, 6)) in found
    assert 2 == len(found)


def test_the_time_before_the_optimizer_has_the_name_of_the_profile() -> None:
    """The two phases that the profile calls `other` are one."""
    taken = samples(1, 2, 5, 6, calls=(call(PAD),))
    phases = {0: OTHER, 3: "backward", 4: OTHER, 7: "optimizer"}
    assert [("other", "", "Functions.pad", 1, 4, 1.0)] == named(taken, phases, 8, {BETWEEN: OTHER})


@pytest.mark.parametrize(
    ("phase", "module", "is_named"),
    [
        ("data", "", False),
        ("optimizer", "", False),
        ("backward", "", False),
        ("forward", "layers.0", False),
        ("forward", "", True),
        ("other", "", True),
    ],
)
def test_the_line_of_the_loop_is_named_only_if_it_is_news(
    phase: str, module: str, *, is_named: bool
) -> None:
    """`for batch in loader` waits for data, `loss.backward()` is backward: no need to say so."""
    taken = samples(1, 2, 3, 4, calls=(call(PAD, is_loop=True),), module=module)
    assert is_named == bool(named(taken, {0: phase}, 4))


def test_modules_are_separate_only_where_modules_run() -> None:
    """In forward, each module has its function. In the data wait, no module runs."""
    taken = samples(1, 2, 3, 4, calls=(call(PAD),), module="a")
    taken += samples(5, 6, 7, 8, calls=(call(COLLATE),), module="b")
    found = named(taken, {0: "forward"}, 8)
    assert {("a", "Functions.pad"), ("b", "Functions.collate")} == {
        (module, name) for _, module, name, *_ in found
    }
    assert [""] == [module for _, module, *_ in named(taken, {0: "data"}, 8)]


def test_a_profile_has_the_functions_of_the_longest_places() -> None:
    """If many modules have a main function, the modules with the most time are kept."""
    taken = []
    moment = 0
    for number in range(MOST_FUNCTIONS + 5):
        for _ in range(4):
            moment += 1 + number
            taken += samples(moment, calls=(call(PAD),), module=f"layers.{number}")
    found = named(taken, {0: "forward"}, moment)
    kept = [f"layers.{number}" for number in range(MOST_FUNCTIONS + 4, 4, -1)]
    assert kept == [module for _, module, *_ in found]


@pytest.mark.parametrize(
    ("file", "is_of_user"),
    [
        (__file__, True),
        ("train.py", True),
        ("/home/me/train.py", True),
        ("<stdin>", True),
        ("<ipython-input-3-0f>", True),
        ("/var/ipykernel_12/3456.py", True),
        ("<string>", False),
        ("<frozen importlib._bootstrap>", False),
        (torch.__file__, False),
        (inspect.__file__, False),
        (sys.modules["lflops.timing.stack_samples"].__file__, False),
    ],
)
def test_which_files_are_the_users(file: str, *, is_of_user: bool) -> None:
    """Files of packages, of Python and of lflops are not."""
    assert is_of_user == is_users(file)


@pytest.mark.parametrize(
    ("name", "file", "place"),
    [
        ("Net.loss", "train.py", "Net.loss (train.py:3)"),
        ("<module>", "train.py", "train.py:3"),
        ("<lambda>", "train.py", "a lambda (train.py:3)"),
    ],
)
def test_the_place_of_a_function(name: str, file: str, place: str) -> None:
    """Code outside functions has only a line. A lambda is called so."""
    found = MainFunction(
        phase="data", module="", name=name, file=file, line=3, samples=4, share=1.0
    )
    assert place == found.place


def test_files_are_named_as_the_user_knows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the working directory, a path is relative; a cell of a notebook has no useful path."""

    def shown(file: str) -> str:
        times = FunctionTimes({})
        code = PAD.replace(co_filename=file)
        times.add(samples(1, 2, 3, 4, calls=(call(code),)), ([0], ["data"], 4 * MS))
        return times.main_functions()[0].file

    monkeypatch.chdir(tmp_path)
    assert "src/train.py" == shown(str(tmp_path / "src" / "train.py"))
    assert "src/train.py" == shown("src/train.py")
    assert "train.py" == shown("../other/train.py")
    assert "train.py" == shown("/elsewhere/train.py")
    assert "notebook" == shown("/var/ipykernel_12/3456.py")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "train.py" == shown("/elsewhere/train.py")


def sampler(module: str = "") -> StackSampler:
    """Return a sampler whose clock counts the samples."""
    moments = iter(range(10**9))
    return StackSampler(lambda: next(moments), lambda: module)


def in_loop(each: Callable[[], Any]) -> None:
    """Call a function, as a training loop does."""
    each()


def run_until(taking: StackSampler, number: int) -> None:
    """Run until the sampler has some samples."""
    while len(taking._samples) < number:
        sum(range(100))


def test_a_thread_samples_the_training_thread() -> None:
    """The samples have the user's running functions, down to the loop, and the module.

    The function that contains the loop has moved on since the start. Its caller has not.
    """
    taking = sampler("net")
    taking.start()
    [in_loop(lambda: run_until(taking, 8)) for _ in range(1)]
    taking.stop()
    taken = taking.take_samples()
    assert 8 <= len(taken)
    assert {"net"} == {sample.module for sample in taken}
    names = [[each.code.co_name for each in sample.calls] for sample in taken]
    assert ["run_until", "<lambda>", "in_loop", sys._getframe().f_code.co_name] in names
    for sample in taken:
        assert sample.calls[-1].is_loop
        assert not any(each.is_loop for each in sample.calls[:-1])
    assert sorted(sample.moment for sample in taken) == [sample.moment for sample in taken]
    assert [] == taking.take_samples()


def test_stopping_ends_the_thread() -> None:
    """Starting twice starts one thread. Stopping twice does nothing."""
    before = threading.enumerate()
    taking = sampler()
    taking.start()
    taking.start()
    assert len(before) + 1 == len(threading.enumerate())
    run_until(taking, 1)
    taking.stop()
    taking.stop()
    assert before == threading.enumerate()


@pytest.mark.parametrize("usual", [0.005, 0.0001])
def test_python_switches_threads_often_only_during_sampling(usual: float) -> None:
    """The switch interval is at most 0.5 ms, and afterwards as long as it was before."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(usual)
    usual = sys.getswitchinterval()
    try:
        taking = sampler()
        taking.start()
        taking.start()
        assert pytest.approx(min(usual, 0.0005), abs=2e-6) == sys.getswitchinterval()
        taking.stop()
        taking.stop()
        assert usual == sys.getswitchinterval()
    finally:
        sys.setswitchinterval(before)


def test_a_sampler_holds_no_frames() -> None:
    """The local variables of the user's functions are freed when the functions return."""

    class Tracked:
        freed = 0

        def __del__(self) -> None:
            Tracked.freed += 1

    def use() -> None:
        kept = Tracked()
        run_until(taking, len(taking._samples) + 3)
        del kept

    taking = sampler()
    taking.start()
    for _ in range(3):
        use()
    taking.stop()
    assert 3 == Tracked.freed


def test_without_threads_there_are_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system allows no further thread, the run goes on without samples."""

    def refuse(self: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    taking = sampler()
    taking.start()
    taking.stop()
    assert [] == taking.take_samples()


def test_a_long_step_has_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval grows with the number of samples, so that their number grows with its root.

    After n seconds of simulated waiting with one sample each interval, there are as many samples as
    an interval of 1 ms x max(1, samples / 1000) gives: a step of 10 minutes has about 35,000.
    """
    waited = 0.0

    class Stopping(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal waited
            waited += timeout or 0.0
            return waited > 600

    taking = sampler()
    taking._home = threading.get_ident()
    taking._run(Stopping())
    taken = len(taking.take_samples())
    # 1 s for the first 1,000 samples, then (n² - 1000²) / 2 ms / 1000 = 599 s
    assert pytest.approx((2 * 599e3 * AT_FULL_RATE + AT_FULL_RATE**2) ** 0.5, rel=0.01) == taken
