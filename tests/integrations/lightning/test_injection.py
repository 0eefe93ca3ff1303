"""Test `LFLOPS=1 python train.py`: Lightning Trainers get a monitor, although no script adds one.

Lightning finds the function `monitors` through an entry point of the package. Its monitors are
`InjectedMonitor`s.
"""

import copy
import importlib
import os
import pickle
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning

import lflops
from lflops import CountError, FlopsMonitor, Schedule
from lflops.integrations.auto_detect.entry import monitors
from lflops.integrations.lightning.monitor import InjectedMonitor
from lflops.monitoring.inputs.settings import settings_of
from tests.support.lightning_runs import (
    LIGHTNINGS_WARNINGS,
    QUIET,
    Classifier,
    fit,
    loader,
    watching,
)
from tests.support.repository import ROOT
from tests.support.warm_python import Script, WarmPython
from tests.support.wheel import unpacked_wheel

pytestmark = LIGHTNINGS_WARNINGS

NAMESPACES = [lightning.pytorch, pytorch_lightning]
ENTRY = [
    "lflops",
    "lflops.integrations",
    "lflops.integrations.auto_detect",
    "lflops.integrations.auto_detect.entry",
]
"""The modules that are loaded if the variable does not request lflops."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make both Lightning packages find the entry points in pyproject.toml.

    The installed package may be older than this file.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def entry_points(group: str) -> list[EntryPoint]:
        named = project["entry-points"][group]
        return [EntryPoint(name, value, group) for name, value in named.items()]

    for name in ("lightning.fabric", "lightning_fabric"):
        registry = importlib.import_module(f"{name}.utilities.registry")
        monkeypatch.setattr(registry, "entry_points", entry_points)


def of(trainer: Any) -> list[FlopsMonitor]:
    """Return the monitors of a Trainer."""
    return [each for each in trainer.callbacks if isinstance(each, FlopsMonitor)]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("package", NAMESPACES)
def test_a_trainer_gets_a_monitor_as_it_is_asked_for(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Trainer of either Lightning package gets a monitor with the settings in the variable."""
    monkeypatch.setenv("LFLOPS", "wait=2,active=5,track=false,hardware=NVIDIA H200")
    (monitor,) = of(package.Trainer(logger=False, **QUIET))
    settings = monitor._settings
    assert Schedule(wait=2, active=5) == settings.schedule
    assert settings.track is False
    assert "NVIDIA H200" == settings.hardware


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("value", ["1", "true", " True ", "yes", "ON"])
def test_one_asks_for_a_monitor_as_it_is(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Trainer gets a monitor with the settings of `FlopsMonitor(stages=())`.

    No window opens, but each monitor keeps a ledger.
    """
    monkeypatch.setenv("LFLOPS", value)
    for _ in range(2):
        (monitor,) = of(fit(Classifier()))
        assert FlopsMonitor(stages=())._settings == monitor._settings
        assert 0 == len(monitor.profiles)
        assert monitor.ledger is not None
        assert monitor.ledger.steps


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("value", [None, "", " ", "0", "false", "no", "OFF"])
def test_without_the_variable_there_is_none(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Trainer gets no monitor if the variable is unset, empty, or a word for "off"."""
    if value is None:
        monkeypatch.delenv("LFLOPS", raising=False)
    else:
        monkeypatch.setenv("LFLOPS", value)
    assert [] == of(lightning.pytorch.Trainer(logger=False, **QUIET))


WRONG = {
    "activ=5": "LFLOPS='activ=5': 'activ' is not a setting: use one of wait, warmup, active, "
    "repeat, skip_first, ",
    "maybe": "LFLOPS='maybe': 'maybe' is not a setting: use one of wait",
    "wait=2,active=many": "LFLOPS='wait=2,active=many': active='many': pass a whole number",
    "active=0": "LFLOPS='active=0': active=0: pass a whole number, 1 or more",
    "warmup=0": "LFLOPS='warmup=0': warmup=0 leaves no step for counting",
    "track": "LFLOPS='track': the setting 'track' has no value: pass true or false, as in track=…",
    "track=maybe": "LFLOPS='track=maybe': track='maybe': pass true or false",
    "hardware=H2000": "LFLOPS='hardware=H2000': hardware='H2000': 'H2000' is not in the table of chips",
    "on_error=ignore": "LFLOPS='on_error=ignore': on_error='ignore': pass 'warn' or 'raise'",
    "schedule=5": "LFLOPS='schedule=5': 'schedule' is not a setting",
    "units=len": "LFLOPS='units=len': 'units' is not a setting",
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("package", NAMESPACES)
@pytest.mark.parametrize("value", WRONG)
def test_what_cannot_be_is_a_misconfiguration(
    value: str, package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong setting raises the exception of the Lightning package when a Trainer is created.

    The message has the variable, the setting and the accepted values.
    """
    monkeypatch.setenv("LFLOPS", value)
    exceptions = importlib.import_module(f"{package.__name__}.utilities.exceptions")
    with pytest.raises(exceptions.MisconfigurationException, match=re.escape(WRONG[value])):
        package.Trainer(logger=False, **QUIET)


class WithItsOwn(Classifier):
    """A model that adds a monitor in `configure_callbacks`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def configure_callbacks(self) -> list[Any]:
        return [watching(dirpath=self.folder)]


@pytest.mark.usefixtures("installed")
def test_it_steps_back_where_the_script_has_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the script has a monitor, the injected one is removed, so there is only one summary.

    The callbacks after it are still set up once.
    """
    monkeypatch.setenv("LFLOPS", "1")
    mine = watching()
    behind = Behind()
    trainer = fit(Classifier(), mine, behind)
    assert [mine] == of(trainer)
    assert 1 == behind.setups
    assert 1 == len(closings(caplog))


@pytest.mark.usefixtures("installed")
def test_it_steps_back_where_the_model_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the model adds a monitor, only this one writes a summary, and one profile file."""
    monkeypatch.setenv("LFLOPS", "1")
    fit(WithItsOwn(tmp_path))
    assert 1 == len(closings(caplog))
    (path,) = tmp_path.iterdir()
    assert "train-0" == re.sub(r"-\d+\.profile.json$", "", path.name)


@pytest.mark.usefixtures("installed")
def test_of_several_the_first_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of several injected monitors, only the first stays, so each fit writes one summary.

    The list of callbacks already contains one, and each Trainer adds another one to the same list.
    """
    monkeypatch.setenv("LFLOPS", "stages=train")
    callbacks = [*monitors(), Behind()]
    for number in (1, 2):
        trainer = lightning.pytorch.Trainer(
            callbacks=callbacks, max_epochs=1, logger=False, default_root_dir=tmp_path, **QUIET
        )
        assert number + 1 == len(of(trainer))
        trainer.fit(Classifier(), loader(30))
        assert [callbacks[0]] == of(trainer)
        assert number == len(closings(caplog))


def test_two_of_a_script_both_stay(caplog: pytest.LogCaptureFixture) -> None:
    """Two monitors that the script adds both stay and write summaries.

    So the tests above would fail if an injected monitor stayed as well.
    """
    fit(Classifier(), watching(), watching())
    assert 2 == len(closings(caplog))


class Behind(lightning.pytorch.Callback):
    """A callback after the monitor. Counts how often it is set up."""

    setups = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.setups += 1


def closings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages that a window was closed."""
    return [message for message in caplog.messages if "lflops: train window 0 closed" in message]


@pytest.mark.usefixtures("installed")
def test_it_can_be_copied_and_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and pickles of an injected monitor keep the settings without the variable."""
    monkeypatch.setenv("LFLOPS", "active=4")
    (monitor,) = monitors()
    monkeypatch.delenv("LFLOPS")
    copied = copy.deepcopy(monitor)
    unpickled = pickle.loads(pickle.dumps(monitor))  # noqa: S301 - the test made this pickle
    for each in (copied, unpickled):
        assert isinstance(each, InjectedMonitor)
        fit(Classifier(), each)
        assert 4 == sum(step.kind == "module_timing" for step in each.profiles[0].steps)


ON_REQUEST: dict[str, Any] = {"stages": ()}
"""The settings without a schedule and stages: windows open only on request."""

SAID: dict[str, dict[str, Any]] = {
    "trace=false": ON_REQUEST | {"trace": False},
    "trace=1": ON_REQUEST | {"trace": True},
    "gather_timeout=.5": ON_REQUEST | {"gather_timeout": 0.5},
    "ignore_modules=a": ON_REQUEST | {"ignore_modules": ("a",)},
    "ignore_modules=a, b ,trace=True": ON_REQUEST | {"ignore_modules": ("a", "b"), "trace": True},
    "trace_ranks=zero": ON_REQUEST | {"trace_ranks": "zero"},
    "trace_ranks=0,3": ON_REQUEST | {"trace_ranks": [0, 3]},
    "trace_ranks=2": ON_REQUEST | {"trace_ranks": [2]},
    "stages=train,test,top_modules=2": {"stages": ("train", "test"), "top_modules": 2},
    "hardware=none": ON_REQUEST | {"hardware": None},
    "module_depth=-1": ON_REQUEST | {"module_depth": -1},
    "dirpath=None,top_modules=1": ON_REQUEST | {"dirpath": None, "top_modules": 1},
    "dirpath=/a, b/c": ON_REQUEST | {"dirpath": "/a, b/c"},
    "dirpath=2026": ON_REQUEST | {"dirpath": "2026"},
    "wait=1, repeat = 2 ": {"schedule": Schedule(wait=1, repeat=2)},
    "": ON_REQUEST,
}
"""Values of the variable, and the settings that they stand for."""


@pytest.mark.parametrize("line", SAID)
def test_a_line_is_read_by_what_the_defaults_are(line: str) -> None:
    """Each value is converted to the type of the setting.

    A comma begins a new setting if a name and `=` follow it. Otherwise, it is part of the value.
    """
    assert SAID[line] == settings_of(line)


NOT_SAID = {
    "trace_ranks=first": "trace_ranks='first': pass 'zero', 'all', or a list of ranks",
    "trace_ranks=0,one": "trace_ranks='0,one': pass 'zero', 'all', or a list of ranks",
    "stages=train,fit": "stages=('train', 'fit'): pass a tuple or a list with some of "
    "'train', 'validate', 'test', 'predict'",
    "top_modules=1.5": "top_modules='1.5': pass a whole number",
    "gather_timeout=much": "gather_timeout='much': pass a number",
    "trace=none": "trace='none': pass true or false",
}


@pytest.mark.parametrize("line", NOT_SAID)
def test_a_value_of_another_kind_is_refused(line: str) -> None:
    """The error for a value of the wrong type has the setting and the accepted values."""
    with pytest.raises(CountError, match=f"^{re.escape(NOT_SAID[line])}$"):
        settings_of(line)


TRAIN = """
import sys
from {package} import Trainer
from {package}.demos.boring_classes import BoringModel

quiet = dict(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
options = dict(max_epochs=1, limit_train_batches=20, limit_val_batches=0, accelerator="cpu", default_root_dir=sys.argv[1])
Trainer(**options, **quiet).fit(BoringModel())
print(*sorted(name for name in sys.modules if name.partition(".")[0] == "lflops"))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that pip would install from the wheel."""
    return unpacked_wheel(tmp_path_factory.mktemp("site"))


def trained(package: str, site: Path, folder: Path, python: WarmPython) -> list[str]:
    """Run a training script, and return the modules of lflops that are loaded at its end."""
    (ended,) = python.together([Script(TRAIN.format(package=package), (folder,), site)])
    assert 0 == ended.status, ended.err
    return ended.out.split()


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_an_installed_lflops_watches_a_script_that_does_not_know_of_it(
    package: str,
    site: Path,
    tmp_path: Path,
    warm_python: WarmPython,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With lflops installed and `LFLOPS` set, a script without lflops writes a complete profile.

    The model multiplies one row of 32 with a 32 × 2 weight: 64 MACs in forward, and 64 for the
    gradient of the weight. The fourth step counts, and five steps are traced.
    """
    monkeypatch.setenv("LFLOPS", "wait=2,active=5")
    loaded = trained(package, site, tmp_path, warm_python)
    assert "lflops.integrations.lightning.monitor" in loaded
    (path,) = tmp_path.rglob("*.profile.json")
    profile = lflops.load(path)
    assert 32 * 2 == profile.total()
    assert 32 * 2 == profile.total(phase="backward")
    kinds = [step.kind for step in profile.steps[:9]]
    assert ["unprofiled"] * 3 + ["counting"] + ["traced"] * 5 == kinds


def test_an_installed_lflops_that_was_not_asked_stays_away(
    site: Path, tmp_path: Path, warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the variable, a script loads only the entry point, and nothing is written."""
    monkeypatch.delenv("LFLOPS", raising=False)
    loaded = trained("lightning.pytorch", site, tmp_path, warm_python)
    assert ENTRY == loaded
    assert [] == list(tmp_path.rglob("*lflops*"))


LOADED = """
import sys
from lflops.integrations.auto_detect.entry import monitors
monitors()
print(*sorted(name for name in sys.modules if name in {'torch', 'lightning', 'pytorch_lightning'} or name.startswith('lflops')))
"""


@pytest.mark.parametrize("value", ["", "0"])
def test_to_say_no_loads_nothing(value: str) -> None:
    """If the variable disables lflops, `monitors` loads neither torch nor Lightning."""
    environment = os.environ | {"LFLOPS": value, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOADED]
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert ENTRY == ended.stdout.split()


def test_to_say_yes_would_be_seen(warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `LFLOPS=1`, the same script loads torch, Lightning and the monitor.

    So the test above can fail. In this process, torch is loaded before the script begins.
    """
    monkeypatch.setenv("LFLOPS", "1")
    loaded = set(warm_python.run(LOADED).out.split())
    assert {"torch", "lightning", "lflops.integrations.lightning.monitor"} <= loaded
