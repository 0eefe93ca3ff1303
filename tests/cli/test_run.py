"""Test `lflops run`, which monitors a script without changes to the script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lflops.cli import run
from lflops.cli.main import main
from lflops.ledger.ledger_file import load_run
from lflops.monitoring.inputs.settings import settings_of
from tests.support.wheel import unpacked_wheel

SCRIPT = """
import sys
import helper
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(__name__, __file__, sys.argv, sys.path[0], helper.__name__)
if sys.argv[-1] == "--fail":
    raise ValueError("the script's own")
sys.exit(3)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which lflops is installed."""
    return unpacked_wheel(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize("last", ["--fail", "--dir"])
def test_a_script_runs_as_python_runs_it(last: str, site: Path, tmp_path: Path) -> None:
    """`lflops run` does not change the script's name, arguments, path, output or exit status.

    Only the lines about the end of the run are added; they name the folder. The ledger has the
    reason why the run ended. The second script has an argument that is also an option of
    `lflops run`.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").touch()
    environment = os.environ | {"PYTHONPATH": str(site)}
    environment.pop("LFLOPS", None)

    def ran(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command, "train.py", "--lr", "2", last],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    plain = ran()
    watched = ran("-m", "lflops", "run", "--dir", "runs/1")
    assert plain.returncode == watched.returncode
    assert plain.stdout == watched.stdout
    before, end_of_run, about_run = watched.stderr.partition("lflops: the run has ended")
    added = end_of_run + about_run
    assert plain.stderr == before or (plain.stderr and added.endswith(plain.stderr))
    assert str(tmp_path / "runs" / "1") in about_run

    status, ended = (1, "ValueError") if last == "--fail" else (3, "finished")
    assert status == plain.returncode
    ledger = load_run(tmp_path / "runs" / "1")
    assert (10, ended) == (ledger.steps, ledger.starts[0].ended)


def test_a_wrong_setting_is_an_error_before_the_script_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong name in the variable LFLOPS is an error that lists the settings."""
    monkeypatch.setenv("LFLOPS", "wiat=2")
    assert 2 == main(["run", "train.py"])
    assert "'wiat' is not a setting: use one of wait, warmup," in capsys.readouterr().err


def test_where_torch_would_not_load_lflops_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If torch does not load lflops, the command is an error instead of a run without a monitor."""
    monkeypatch.setattr(run, "entry_points", lambda **_: ())
    assert 2 == main(["run", "train.py"])
    assert "so the processes that it starts cannot import lflops" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "is_python"),
    [
        (b"import sys\n", True),
        (b"#!/usr/bin/env python3\nimport sys\n", True),
        (b"#!/bin/sh\nexec python train.py\n", False),
        (b"\x7fELF\x02\x01", False),
    ],
    ids=["script", "script of Python", "script of a shell", "program"],
)
def test_only_what_python_can_run_is_started_with_python(
    content: bytes,
    is_python: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`lflops run .venv/bin/python train.py` starts this Python, not a script of that name."""
    started: list[list[str]] = []
    monkeypatch.setattr(run, "entry_points", lambda **_: ("ours",))
    monkeypatch.setattr(os, "execvp", lambda _, arguments: started.append(arguments))
    monkeypatch.setenv("LFLOPS", "1")
    path = tmp_path / "command"
    path.write_bytes(content)
    assert 0 == main(["run", str(path), "train.py"])
    expected = [str(path), "train.py"]
    assert [[sys.executable, *expected] if is_python else expected] == started


def test_a_command_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that does not exist is an error. For a script, Python itself prints the error."""
    monkeypatch.setattr(run, "entry_points", lambda **_: ("ours",))
    monkeypatch.setenv("LFLOPS", "trace=false")
    assert 2 == main(["run", "--dir", "there", "no-such-command", "-x"])
    assert f"trace=false,dirpath={Path('there').absolute()}" == os.environ["LFLOPS"]
    assert (
        "no-such-command: No such file or directory: pass a Python script or a command"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "name",
    ["a,b=c d", "100%2C", " spaces ", "☃", os.fsdecode(b"no\xffutf8"), 'quo"te', "two\nlines"],
)
def test_a_folder_may_have_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's name is escaped in the variable LFLOPS.

    Commas and equals signs separate settings in this variable.
    """
    monkeypatch.setenv("LFLOPS", "module_scalars=7")
    line = run._settings(tmp_path / name)
    assert line is not None
    given = settings_of(line)
    assert (str(tmp_path / name), 7) == (given["dirpath"], given["module_scalars"])


def test_a_folder_with_the_name_of_a_command_is_no_script(tmp_path: Path) -> None:
    """`lflops run deepspeed` starts the command, although there is a folder of this name."""
    (tmp_path / "deepspeed").mkdir()
    assert not run._is_script(tmp_path / "deepspeed")
    (tmp_path / "deepspeed" / "__main__.py").touch()
    assert run._is_script(tmp_path / "deepspeed")
