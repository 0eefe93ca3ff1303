"""Test which windows of a run are kept, and that hanging outputs do not block the run's end."""

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lflops
from lflops import Schedule
from lflops.monitoring import window_publisher as results
from lflops.report import html
from tests.support.warm_python import WarmPython


@pytest.mark.parametrize(("kept", "expected"), [(2, [3, 4]), (32, [0, 1, 2, 3, 4])])
def test_the_last_windows_are_kept(
    kept: int, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last windows are kept in memory, because a schedule may repeat without end.

    All windows have their files. The messages of the first window and of the end of the run say
    where to see more.
    """
    monkeypatch.setattr(results, "MOST_PROFILES", kept)
    model = nn.Linear(2, 2)
    said = list[str]()
    optimizer = torch.optim.SGD(model.parameters())
    settings: dict[str, Any] = {
        "trace": False,
        "html": False,
        "hardware": None,
        "on_error": "raise",
        "log": said.append,
    }
    with lflops.monitor(
        model,
        optimizer,
        schedule=Schedule(wait=0, warmup=1, active=1, repeat=5),
        dirpath=tmp_path,
        **settings,
    ) as monitor:
        for _ in range(40):
            with monitor.step():
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    assert expected == [profile.run.window for profile in monitor.profiles]
    assert 5 == len(list(tmp_path.rglob("*.profile.json")))
    # The first window and the end of the run.
    assert 2 == sum("to see more" in message for message in said)


WRITES_FOR_EVER = """
import threading
from concurrent.futures import wait

from lflops.monitoring.window_publisher import in_background
call = in_background(threading.Event().wait, "hangs")
print(bool(wait([call], 0.01).done))
"""


def test_a_file_system_that_hangs_does_not_hold_the_exit(warm_python: WarmPython) -> None:
    """The process exits although a background thread still writes."""
    assert (0, "False\n", "") == warm_python.run(WRITES_FOR_EVER)


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_training_waits_for_no_page_that_hangs(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a run does not wait for a page that hangs, and the window is still logged.

    At a normal end, the run waits for `LONGEST` seconds, and then a warning names the file. After
    an error of the training run, it does not wait, and there is no warning.
    """
    monkeypatch.setattr(results, "LARGE", 0)
    monkeypatch.setattr(results, "LONGEST", 0.01)
    goes_on = threading.Event()
    written = list[Path]()

    def hang(_: Any, path: Path) -> None:
        goes_on.wait()
        written.append(path)

    monkeypatch.setattr(html, "save", hang)
    model = nn.Linear(2, 2)
    said = list[str]()
    settings: dict[str, Any] = {
        "trace": False,
        "hardware": None,
        "on_error": "raise",
        "log": said.append,
        "dirpath": tmp_path,
    }

    def train() -> None:
        with lflops.monitor(
            model, schedule=Schedule(wait=0, warmup=1, active=1, repeat=1), **settings
        ) as monitor:
            for _ in range(8):
                with monitor.step():
                    model(torch.ones(1, 2)).sum().backward()
            if fails:
                raise UserError

    try:
        if fails:
            with warnings.catch_warnings(action="error"), pytest.raises(UserError):
                train()
        else:
            with pytest.warns(
                UserWarning,
                match=r"the page in .*\.profile\.html and the summary of a window are left out, because they were not finished in 0\.01 s",
            ):
                train()
        assert not written
        assert 1 == sum("window 0 closed" in message for message in said)
    finally:
        goes_on.set()


class UserError(Exception):
    """An error of the user's training code."""
