"""The code in `docs/loops.md` runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lightning.fabric import Fabric
from torch import nn

import lflops
from tests.support.repository import ROOT

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "loops.md").read_text("utf-8"), re.DOTALL)


def names(folder: Path) -> dict[str, Any]:
    """What a reader has of their own."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    batches = [(torch.randn(4, 8), torch.arange(4) % 3) for _ in range(12)]
    return {
        "torch": torch,
        "lflops": lflops,
        "transformers": transformers,
        "Fabric": lambda: Fabric(accelerator="cpu", devices=1),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "loader": batches,
        "validation_loader": batches[:2],
        "batch": batches[0],
        "writer": None,
        "dataset": [{"x": x} for x, _ in batches],
        "args": transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[]),
    }


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_a_block_runs(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, or inside of the monitor that it is shown in."""
    monkeypatch.chdir(tmp_path)
    code, known = BLOCKS[index], names(tmp_path)
    if "monitor" in code and "lflops.monitor" not in code:
        with lflops.monitor(known["model"], known["optimizer"], log=lambda _: None, on_error="raise") as known["monitor"]:
            exec(code, known)  # noqa: S102 - the guide's own
    else:
        exec(code, known)  # noqa: S102
    assert code.strip()
