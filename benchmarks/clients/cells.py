"""The cells of the table: each is one training run of a client, in a process of its own."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clients.client import Client, Fault
from benchmarks.clients.stopwatch import EACH_CALL

ROOT = Path(__file__).resolve().parents[2]

PLANTED_STEPS = 1.5
"""The time that a fault costs in a step, in steps of the run without it."""

LEAST_SECONDS = 0.006
MOST_SECONDS = 0.25

TIME_LIMIT = 180
"""Seconds after which a process is stopped."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "KINETO_LOG_LEVEL": "6",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONHASHSEED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


@dataclass(frozen=True)
class Cell:
    """One training run of a client: plain, watched, or watched with a fault."""

    name: str
    is_watched: bool = False
    fault: Fault | None = None
    has_phases: bool = False


PLAIN = Cell("plain")
REPEATED = Cell("plain, repeated", has_phases=True)
WATCHED = Cell("watched", is_watched=True)


def cells_of(client: Client) -> list[Cell]:
    """All cells of a client, those first that others need."""
    faulty = [Cell(fault, is_watched=True, fault=fault) for fault in client.faults]
    return [PLAIN, REPEATED, WATCHED, *faulty]


def folder_of(results: Path, name: str, cell: Cell) -> Path:
    """The folder of a cell."""
    return results / name / cell.name.replace(", ", "-").replace(" ", "-")


def is_finished(folder: Path) -> bool:
    """Whether a cell has run, successfully or not."""
    return (folder / "cell.json").exists()


def run_cell(results: Path, name: str, client: Client, cell: Cell) -> dict[str, Any]:
    """Run a cell, and keep what happened in its folder as `cell.json`."""
    folder = folder_of(results, name, cell).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = ["-m", "benchmarks.clients.worker", name, str(folder)]
    if cell.has_phases:
        command.append("--phases")
    if cell.fault is not None:
        seconds = _planted_seconds(read(results, name, PLAIN), cell.fault)
        command += ["--fault", cell.fault, "--seconds", str(seconds)]
    environment = os.environ | ENVIRONMENT
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

    programs = ROOT / f".venv-clients-{client.environment}" / "bin"
    if cell.is_watched and client.watch in {"run", "window"}:
        if client.watch == "window":
            environment["LFLOPS"] = "wait=5"
        command = [str(programs / "lflops"), "run", "--dir", str(folder / "lflops"), *command]
    else:
        command = [str(programs / "python"), *command]
        command += ["--watched"] if cell.is_watched else []

    with (folder / "output.txt").open("w") as output:
        try:
            status: int | str = subprocess.run(  # noqa: S603 - the clients are our own files
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIME_LIMIT,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"stopped after {TIME_LIMIT} s"
    result: dict[str, Any] = {"cell": cell.name, "status": status, "load": os.getloadavg()[0]}
    if (folder / "truth.json").exists():
        result["truth"] = json.loads((folder / "truth.json").read_text())
    if cell.is_watched:
        result["why"] = _explanation(programs, folder, environment)
        result["units"] = _units(folder)
    (folder / "cell.json").write_text(json.dumps(result, indent=2))
    return result


def read(results: Path, name: str, cell: Cell) -> dict[str, Any]:
    """The finished cell, or an empty one."""
    file = folder_of(results, name, cell) / "cell.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _planted_seconds(plain: dict[str, Any], fault: Fault) -> float:
    """The seconds that each call of the fault's code spends."""
    truth = plain.get("truth", {})
    step = truth.get("median step") or LEAST_SECONDS
    per_step = min(max(PLANTED_STEPS * step, LEAST_SECONDS), MOST_SECONDS)
    if fault not in EACH_CALL:
        return per_step
    calls = truth.get("calls", {}).get(fault) or 1
    return per_step * truth.get("steps", 1) / calls


def _explanation(programs: Path, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """The answer of `lflops why` as JSON, or the error that it ended with."""
    command = [str(programs / "lflops"), "why", str(folder / "lflops"), "--format", "json"]
    done = subprocess.run(  # noqa: S603
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"status": "failed", "error": done.stderr.strip()[-500:], "findings": []}
    explanation: dict[str, Any] = json.loads(done.stdout)
    return explanation


def _units(folder: Path) -> dict[str, Any] | None:
    """Samples and tokens per step of the last profile, or `None` without a profile."""
    profiles = sorted((folder / "lflops").rglob("train*.profile.json"))
    if not profiles:
        return None
    run = json.loads(profiles[-1].read_text())["run"]
    return {"samples": run.get("samples_per_step"), "tokens": run.get("tokens_per_step")}
