"""Test that the extras are optional: lflops works if the extras and their lines are removed.

The tests remove extras from a copy of the package.
"""

import re
import shutil
from pathlib import Path

import pytest

from lflops.extras import EXTRAS
from tests.support.repository import ROOT
from tests.support.warm_python import Script, WarmPython
from tests.test_layout import MAY_IMPORT

# The script runs in a folder that contains the reduced package. Its arguments are this folder and
# the names of the removed extras.
USED = """
import sys
from pathlib import Path
import torch
import lflops

folder, removed = Path(sys.argv[1]), sys.argv[2:]
assert Path(lflops.__file__).parent == folder / "lflops"
from lflops.cli.main import main

model, x = torch.nn.Linear(4, 5), torch.zeros(2, 4)
lflops.measure(model, x, repeats=1).save(folder / "measured.json")
assert [0, 0] == [main(["--help"]), main(["show", f"{folder}/measured.json"])]

import lightning
from lightning.pytorch.loggers import TensorBoardLogger

class Fit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 5)

    def training_step(self, batch, _):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

logger = TensorBoardLogger(folder / "runs")
monitor = lflops.FlopsMonitor(schedule=lflops.Schedule(wait=2, warmup=1, active=1), trace=False)
batches = torch.utils.data.DataLoader(torch.zeros(16, 4), batch_size=2)
lightning.Trainer(
    accelerator="cpu", max_epochs=1, logger=logger, callbacks=[monitor], enable_progress_bar=False, enable_checkpointing=False
).fit(Fit(), batches)
print("MACs of a step:", monitor.profiles[0].modules["layer"].forward.macs)
assert not any(name.startswith(f"lflops.{extra}.") for name in sys.modules for extra in removed)
"""


def reduced(folder: Path, *names: str) -> Script:
    """Copy the package without some extras and their lines in `extras.py`.

    Return a script that uses the copy.
    """
    shutil.copytree(
        ROOT / "lflops", folder / "lflops", ignore=shutil.ignore_patterns("__pycache__")
    )
    table = folder / "lflops" / "extras.py"
    text = table.read_text("utf-8")
    for name in names:
        shutil.rmtree(folder / "lflops" / Path(*name.split(".")))
        entry = rf'(?ms)^    "{re.escape(name)}": \(.*?\),\n(?=    "|}})'
        text, removed = re.subn(entry, "", text)
        assert 1 == removed
    table.write_text(text, "utf-8")
    return Script(USED, (folder, *names), folder)


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_extras_can_be_removed_with_their_lines(warm_python: WarmPython, tmp_path: Path) -> None:
    """Without the extras, measuring, the command line and a Lightning run with TensorBoard work.

    All extras are removed at once. So this also shows that each of them can be removed alone,
    because no extra imports another one.

    The model is a linear layer from 4 to 5 features, and a batch has 2 rows, so a step has 2 * 4 *
    5 = 40 MACs.
    """
    (ended,) = warm_python.together([reduced(tmp_path, *EXTRAS)])
    assert 0 == ended.status, ended.err
    assert "MACs of a step: 40" in ended.out
    assert "all other outputs continue" not in ended.err


def test_no_extra_imports_another_one() -> None:
    """The table of the layout allows an extra no import of another extra."""
    found = set()
    for row, allowed in MAY_IMPORT.items():
        extra = extra_of(row)
        if extra is not None:
            found |= {(row, name) for name in allowed if extra_of(name) not in (None, extra)}
    assert set() == found


def test_an_extra_that_the_rest_imports_would_be_seen(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """The check above can fail: if `lflops.measure` imports an extra, its removal is an error."""
    script = reduced(tmp_path, "report.figures")
    with (tmp_path / "lflops" / "timing" / "measure.py").open("a", encoding="utf-8") as file:
        file.write("from lflops.report.figures.pictures import pictures\n")
    ended = warm_python.together([script])[0]
    assert 0 != ended.status
    assert "No module named 'lflops.report.figures'" in ended.err


def test_only_extras_may_import_extras() -> None:
    """The table of the layout allows only extras to import extras.

    This includes imports in code that the tests above do not run. `lflops/__init__.pyi` may import
    extras, because only type checkers read it.
    """
    found = set()
    for row, allowed in MAY_IMPORT.items():
        if extra_of(row) is None and row != "__init__":
            found |= {(row, name) for name in allowed if extra_of(name) is not None}
    assert set() == found


def extra_of(row: str) -> str | None:
    """Return the extra whose folder contains a row of the layout's table, or `None`."""
    for extra in EXTRAS:
        if row == extra or row.startswith(f"{extra}."):
            return extra
    return None
