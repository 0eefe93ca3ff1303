"""Test the data that Weights & Biases and MLflow receive, read back with their own tools."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

import lflops
from lflops.monitoring.schedule import Schedule
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, ROWS, Classifier, fit, watching

pytestmark = [*LIGHTNINGS_WARNINGS, pytest.mark.filterwarnings("ignore")]

SHORT = Schedule(wait=1, warmup=1, active=2, repeat=1)
FORWARD = ROWS * (8 * 8 + 8 * 3)
"""MACs of the forward pass: each row goes through a layer from 8 to 8 and one from 8 to 3 features.
"""


@pytest.fixture
def wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a Weights & Biases run in offline mode, whose files are in `tmp_path`."""
    wandb = pytest.importorskip("wandb")
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    run = wandb.init(project="lflops", dir=str(tmp_path))
    yield run
    run.finish()


def test_wandb_has_a_table_pictures_the_page_and_totals(wandb_run: Any, tmp_path: Path) -> None:
    """Weights & Biases has a table of modules, pictures, the page and totals.

    The profile and the trace are in artifacts.
    """
    kept: dict[str, list[str]] = {}
    log_artifact = wandb_run.log_artifact

    def keep(artifact: Any) -> Any:
        kept[artifact.type] = sorted(artifact.manifest.entries)
        return log_artifact(artifact)

    wandb_run.log_artifact = keep
    monitor = watching(schedule=SHORT, trace=True, html=True, dirpath=tmp_path / "profiles")
    fit(Classifier(), monitor, logger=WandbLogger(experiment=wandb_run))
    media = Path(wandb_run.dir) / "media"
    (file,) = media.rglob("modules*.table.json")
    table = json.loads(file.read_text())
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["data"]}
    assert FORWARD == rows["(model)"]["forward MACs"]
    assert 8 * 8 + 8 == rows["body.0"]["parameters"]
    assert list(media.rglob("memory*.png"))
    pages = [path.read_text() for path in media.rglob("*.html")]
    assert any("<pre" in page for page in pages)
    assert any("<script" in page for page in pages)
    assert 99 == wandb_run.summary["lflops/train/parameters"]
    # There is also an artifact of another type, for the table.
    assert {"profile", "trace"} <= kept.keys()
    assert [name for name in kept["profile"] if name.endswith(".profile.json")]
    assert [name for name in kept["trace"] if name.endswith(".pt.trace.json.gz")]


def test_a_loop_of_ones_own_logs_to_a_run_of_wandb(wandb_run: Any) -> None:
    """A custom loop can pass a Weights & Biases run to `lflops.monitor` without a wrapper.

    The x-axis of the curves is the step of the training run. Tables and totals are the same as with
    a `WandbLogger`.
    """
    model = Classifier()
    logged: list[dict[str, Any]] = []
    log = wandb_run.log
    wandb_run.log = lambda values: logged.append(values) or log(values)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lflops.monitor(
        model, optimizer, logger=wandb_run, schedule=SHORT, log_every=2, log=str
    ) as monitor:
        for _ in range(8):
            batch = torch.randn(ROWS, 8)
            with monitor.step(batch):
                model(batch).sum().backward()
                optimizer.step()
    curves = {values["lflops_step"] for values in logged if "lflops/train/step_ms" in values}
    # Step 7 is the last of two unprofiled steps.
    assert 7 in curves
    assert list(Path(wandb_run.dir).joinpath("media").rglob("modules*.table.json"))
    assert 99 == wandb_run.summary["lflops/train/parameters"]
    assert list(Path(wandb_run.dir).parent.joinpath("lflops").glob("train-0-*.profile.json"))


def test_mlflow_has_artifacts_and_totals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's client reads artifacts, totals and curves back from a local store."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger("lflops", save_dir=str(tmp_path / "store"))
    fit(Classifier(), watching(schedule=SHORT, trace=True, html=True), logger=logger)
    client = logger.experiment
    run = logger.run_id
    folder = "lflops/train-0"
    names = {Path(each.path).name for each in client.list_artifacts(run, folder)}
    assert {"summary.md", "modules.json", "memory.png"} <= names
    assert {"html", "json"} == {
        name.rpartition(".")[2] for name in names if name.startswith("train-0-")
    }
    downloaded = client.download_artifacts(run, f"{folder}/modules.json", str(tmp_path))
    table = json.loads(Path(downloaded).read_text())
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["data"]}
    assert FORWARD == rows["(model)"]["forward MACs"]
    assert "99" == client.get_run(run).data.params["lflops.train.parameters"].removesuffix(".0")
    assert client.list_artifacts(run, "lflops/traces")
    assert client.get_metric_history(run, "lflops/train/step_ms")
