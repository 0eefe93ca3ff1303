"""Define the cells of the table: each cell is one training run of a client in a separate process."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clients.client import Client, Fault
from benchmarks.clients.stopwatch import EACH_CALL
from benchmarks.clients.warm import TIME_LIMIT

ROOT = Path(__file__).resolve().parents[2]

PLANTED_STEPS = 1.5
"""The time that a fault costs in a step, in steps of the run without it."""

LEAST_SECONDS = 0.006
MOST_SECONDS = 0.25

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
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
    """Return all cells of a client. A cell comes after the cells that it needs."""
    faulty = [Cell(fault, is_watched=True, fault=fault) for fault in client.faults]
    return [PLAIN, REPEATED, WATCHED, *faulty]


def folder_of(results: Path, name: str, cell: Cell) -> Path:
    """The folder of a cell."""
    return results / name / cell.name.replace(", ", "-").replace(" ", "-")


def is_finished(folder: Path) -> bool:
    """Return whether a cell has run, successfully or not."""
    return (folder / "cell.json").exists()


class Workers:
    """Runs cells of one client, each in a process of its own.

    Args:
        results: The folder of all results.
        name: The name of the client.
        client: The client.
    """

    def __init__(self, results: Path, name: str, client: Client) -> None:
        self._results = results
        self._name = name
        self._client = client
        self._programs = ROOT / f".venv-clients-{client.environment}" / "bin"
        self._environment = os.environ | ENVIRONMENT
        if client.watch == "window":
            self._environment["LFLOPS"] = "wait=5"
        self._is_forked = client.watch not in {"run", "window"}
        self._warm: subprocess.Popen[str] | None = None

    def run(self, cell: Cell) -> dict[str, Any]:
        """Run a cell, and keep what happened in its folder as `cell.json`."""
        folder = folder_of(self._results, self._name, cell).absolute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        arguments = [self._name, str(folder)]
        if cell.has_phases:
            arguments.append("--phases")
        if cell.fault is not None:
            seconds = _planted_seconds(read(self._results, self._name, PLAIN), cell.fault)
            arguments += ["--fault", cell.fault, "--seconds", str(seconds)]

        output = folder / "output.txt"
        if self._is_forked:
            arguments += ["--watched"] if cell.is_watched else []
            status = self._fork(arguments, output)
        else:
            status = self._start(arguments, output, cell, folder)
        result: dict[str, Any] = {"cell": cell.name, "status": status, "load": os.getloadavg()[0]}
        if (folder / "truth.json").exists():
            result["truth"] = json.loads((folder / "truth.json").read_text())
        if cell.is_watched:
            result["why"] = self._explanation(folder)
            result["units"] = _units(folder)
        (folder / "cell.json").write_text(json.dumps(result, indent=2))
        return result

    def _fork(self, arguments: list[str], output: Path) -> int | str:
        """Let the warm process fork a worker."""
        if self._warm is None:
            python = str(self._programs / "python")
            self._warm = subprocess.Popen(  # noqa: S603 - the clients are our own files
                [python, "-m", "benchmarks.clients.warm", *self._client.imports],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._warm.stdin is not None  # noqa: S101
        assert self._warm.stdout is not None  # noqa: S101
        request = {"arguments": arguments, "output": str(output)}
        self._warm.stdin.write(json.dumps(request) + "\n")
        self._warm.stdin.flush()
        answer = self._warm.stdout.readline()
        status: int | str = json.loads(answer) if answer else "the imports failed"
        return status

    def _start(self, arguments: list[str], output: Path, cell: Cell, folder: Path) -> int | str:
        """Start a worker as a program, under `lflops run` if it is watched."""
        command = ["-m", "benchmarks.clients.worker", *arguments]
        environment = dict(self._environment)
        if cell.is_watched:
            lflops = str(self._programs / "lflops")
            command = [lflops, "run", "--dir", str(folder / "lflops"), *command]
        else:
            environment.pop("LFLOPS", None)
            command = [str(self._programs / "python"), *command]
        with output.open("w") as file:
            try:
                return subprocess.run(  # noqa: S603
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=TIME_LIMIT,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return f"stopped after {TIME_LIMIT} s"

    def _explanation(self, folder: Path) -> dict[str, Any]:
        """The answer of `lflops why` as JSON, or the error that it ended with."""
        lflops = str(self._programs / "lflops")
        done = subprocess.run(  # noqa: S603
            [lflops, "why", str(folder / "lflops"), "--format", "json"],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return {"status": "failed", "error": done.stderr.strip()[-500:], "findings": []}
        explanation: dict[str, Any] = json.loads(done.stdout)
        return explanation

    def close(self) -> None:
        """End the warm process."""
        if self._warm is not None:
            self._warm.communicate()
            self._warm = None


def read(results: Path, name: str, cell: Cell) -> dict[str, Any]:
    """Return the result of a finished cell, or an empty dictionary."""
    file = folder_of(results, name, cell) / "cell.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _planted_seconds(plain: dict[str, Any], fault: Fault) -> float:
    """Return the seconds that each call of the fault's code takes."""
    truth = plain.get("truth", {})
    step = truth.get("median step") or LEAST_SECONDS
    per_step = min(max(PLANTED_STEPS * step, LEAST_SECONDS), MOST_SECONDS)
    if fault not in EACH_CALL:
        return per_step
    calls = truth.get("calls", {}).get(fault) or 1
    return per_step * truth.get("steps", 1) / calls


def _units(folder: Path) -> dict[str, Any] | None:
    """Samples and tokens per step of the last profile, or `None` without a profile."""
    profiles = sorted((folder / "lflops").rglob("train*.profile.json"))
    if not profiles:
        return None
    run = json.loads(profiles[-1].read_text())["run"]
    return {"samples": run.get("samples_per_step"), "tokens": run.get("tokens_per_step")}
