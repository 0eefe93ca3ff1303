"""Run training runs of other packages plain, watched and with planted faults, and judge lflops.

python -m benchmarks.clients [DIR] [--only NAME ...] [--fault NAME ...] [--again] [--beside N]
    [--judge] [--record]

A cell is "plain", "plain, repeated", "watched", or the name of a planted fault. Finished cells are
kept, so an interrupted benchmark continues. `DIR/results.json` has the rows of all clients.
"""

import argparse
import contextlib
import importlib
import pkgutil
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.clients import packages
from benchmarks.clients.cells import (
    PLAIN,
    ROOT,
    Cell,
    Workers,
    cells_of,
    folder_of,
    is_finished,
    read,
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
    parser.add_argument("--beside", type=int, default=0, metavar="N", help="busy processes")
    parser.add_argument("--judge", action="store_true", help="run nothing")
    parser.add_argument("--record", action="store_true", help="write to RESULTS.md")
    given = parser.parse_args()
    results: Path = given.results
    every = clients()
    chosen = {name: every[name] for name in given.only or every}

    with contextlib.ExitStack() as others:
        if given.beside:
            from benchmarks.results import beside

            others.enter_context(beside(given.beside))
        for name, client in chosen.items():
            cells = [] if given.judge else list(_asked(given, name, client))
            workers = Workers(results, name, client)
            for cell in cells:
                result = workers.run(cell)
                seconds = result.get("truth", {}).get("seconds", 0.0)
                print(f"{name}, {cell.name}: {result['status']}, {seconds:.0f} s", flush=True)
            workers.close()

    rows = []
    versions = _versions(every)
    for name, client in every.items():
        if read(results, name, PLAIN):
            rows.append(
                judge(results, name, client, versions.get((client.environment, client.package), ""))
            )
    (results / "results.json").write_text(as_json(rows))
    shown = [row for row in rows if row.name in chosen]
    lines = [*table(shown), _load(results, every)]
    if given.record:
        from benchmarks.results import record

        record("clients", "Training runs of other packages", lines)
    else:
        print("\n".join([*lines, "", *wrong_answers(shown)]))


def _asked(given: argparse.Namespace, name: str, client: Client) -> Iterator[Cell]:
    """Yield the cells of a client that must be run."""
    for cell in cells_of(client):
        is_chosen = given.fault is None or cell.name in given.fault
        is_new = given.again or not is_finished(folder_of(given.results, name, cell))
        if is_chosen and is_new:
            yield cell


def _load(results: Path, every: dict[str, Client]) -> str:
    """Return a line with the load of the machine after each cell."""
    loads = []
    for name, client in every.items():
        for cell in cells_of(client):
            loads.append(read(results, name, cell).get("load"))
    known = sorted(load for load in loads if load is not None)
    middle = statistics.median(known)
    return f"- The load of the machine after a run was {known[0]:.1f} to {known[-1]:.1f}, with a median of {middle:.1f}."


def _versions(every: dict[str, Client]) -> dict[tuple[str, str], str]:
    """The installed version of each package, by environment and package."""
    versions = {}
    for environment in {client.environment for client in every.values()}:
        python = ROOT / f".venv-clients-{environment}" / "bin" / "python"
        command = [str(python), "-m", "pip", "freeze"]
        freeze = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
        for line in freeze.splitlines():
            package, _, version = line.partition("==")
            versions[environment, package.lower().replace("_", "-")] = version
    return versions


if __name__ == "__main__":
    main()
