"""Run training runs of other packages plain, watched and with planted faults, and judge lflops.

python -m benchmarks.clients [DIR] [--only NAME ...] [--fault NAME ...] [--again] [--judge] [--record]

Finished cells are kept, so that a run that was interrupted goes on. `DIR/results.json` has all rows.
"""

import argparse
import importlib
import pkgutil
import subprocess
from pathlib import Path

from benchmarks.clients import packages
from benchmarks.clients.cells import (
    PLAIN,
    ROOT,
    Cell,
    cells_of,
    folder_of,
    is_finished,
    read,
    run_cell,
)
from benchmarks.clients.client import Client
from benchmarks.clients.judge import as_json, judge, table, wrong_answers


def clients() -> dict[str, Client]:
    """Every client by the name of its file."""
    found = {}
    for module in pkgutil.iter_modules(packages.__path__):
        file = importlib.import_module(f"{packages.__name__}.{module.name}")
        found[module.name] = file.CLIENT
    return found


def main() -> None:
    """Run all cells that are not finished, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path, nargs="?", default=ROOT / "runs" / "clients")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these clients")
    parser.add_argument("--fault", nargs="+", metavar="NAME", help="these cells, such as 'watched'")
    parser.add_argument("--again", action="store_true", help="run finished cells again")
    parser.add_argument("--judge", action="store_true", help="run nothing")
    parser.add_argument("--record", action="store_true", help="write to RESULTS.md")
    given = parser.parse_args()
    results: Path = given.results
    every = clients()
    chosen = {name: every[name] for name in given.only or every}

    for name, client in chosen.items():
        for cell in cells_of(client):
            is_chosen = given.fault is None or cell.name in given.fault
            if given.judge or not is_chosen:
                continue
            if given.again or not is_finished(folder_of(results, name, cell)):
                _run(results, name, client, cell)

    rows = []
    versions = _versions(chosen)
    for name, client in chosen.items():
        if read(results, name, PLAIN):
            rows.append(judge(results, name, client, versions.get(client.package, "")))
    lines = [*table(rows), "", *wrong_answers(rows)]
    (results / "results.json").write_text(as_json(rows))
    if given.record:
        from benchmarks.results import record

        record("clients", "Training runs of other packages", lines)
    else:
        print("\n".join(lines))


def _run(results: Path, name: str, client: Client, cell: Cell) -> None:
    result = run_cell(results, name, client, cell)
    truth = result.get("truth", {})
    print(f"{name}, {cell.name}: {result['status']}, {truth.get('seconds', 0):.0f} s", flush=True)


def _versions(chosen: dict[str, Client]) -> dict[str, str]:
    """The installed version of each package."""
    versions = {}
    for environment in {client.environment for client in chosen.values()}:
        python = ROOT / f".venv-clients-{environment}" / "bin" / "python"
        command = [str(python), "-m", "pip", "freeze"]
        freeze = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
        for line in freeze.splitlines():
            package, _, version = line.partition("==")
            versions.setdefault(package.lower().replace("_", "-"), version)
    return versions


if __name__ == "__main__":
    main()
