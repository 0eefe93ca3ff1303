"""Public snapshots of CUDA memory.

The five largest holders that `lflops memory` names, and those of a replay that shares no code with
it.

Give the files. They are other people's, so none of them is in the repository. The section says
where each is from.
"""

import argparse
import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from results import record

from lflops.memory.snapshots.explain import explain
from lflops.memory.snapshots.read import read_snapshot

MIB = 2**20


class Plain(pickle.Unpickler):
    """Refuses all that is no container, text or number."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Nothing is looked up."""
        raise pickle.UnpicklingError(f"{module}.{name}")


def line_of(frames: list[dict[str, Any]]) -> str:
    """The first frame of a file of Python that no package manager installed.

    Else the node of backward.
    """
    for frame in frames:
        file = frame["filename"]
        if file.endswith(".py") and "/site-packages/" not in file and "/torchinductor_" not in file:
            return f"{Path(file).name}:{frame['line']} {frame['name']}"
    nodes = [
        found[1]
        for frame in frames
        if (found := re.search(r"(\w+)::apply\(std::vector", frame["name"]))
    ]
    in_engine = any("Engine::thread_main" in frame["name"] for frame in frames)
    return nodes[0] if nodes else "backward" if in_engine else "no stack" if not frames else "?"


def replayed(file: Path) -> tuple[int, Counter[str]]:
    """The trace forward, from what must have been alive before it.

    The most bytes, and what each line has of them.
    """
    with file.open("rb") as opened:
        content = Plain(opened).load()
    trace = content["device_traces"][0]
    begun: set[int] = set()
    alive: dict[int, tuple[int, str]] = {}
    blocks = [
        (b["address"], b["requested_size"], b["frames"])
        for s in content["segments"]
        for b in s["blocks"]
        if "allocated" in b["state"]
    ]
    freed = [(e["addr"], e["size"], []) for e in trace if e["action"] == "free_requested"]
    first = {
        e["addr"]: e["action"]
        for e in reversed(trace)
        if e["action"] in ("alloc", "free_requested")
    }
    for address, size, frames in [*freed, *blocks]:
        if first.get(address, "none") in ("none", "free_requested") and address not in begun:
            begun.add(address)
            alive[address] = (size, line_of(frames))
    live = most = sum(size for size, _ in alive.values())
    at_peak = dict(alive)
    for entry in trace:
        if entry["action"] == "alloc":
            live += entry["size"]
            alive[entry["addr"]] = (entry["size"], line_of(entry["frames"]))
        elif entry["action"] == "free_requested":
            live -= entry["size"]
            del alive[entry["addr"]]
        if live >= most:
            most, at_peak = live, dict(alive)
    lines: Counter[str] = Counter()
    for size, line in at_peak.values():
        lines[line] += size
    return most, lines


def explained(file: Path) -> tuple[int, Counter[str], dict[str, str]]:
    """The same as lflops says it, and what each line's largest part is."""
    found = explain(read_snapshot(file))
    lines: Counter[str] = Counter()
    categories: dict[str, str] = {}
    for holder in found.holders:
        line = holder.line or "no stack"
        lines[line] += holder.bytes
        categories.setdefault(line, holder.category.replace("_", " "))
    return found.requested_bytes, lines, categories


def main() -> None:
    """Compare, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="+", type=Path)
    files = parser.parse_args().file
    rows, agreed, users = [], 0, 0
    for file in files:
        peak, lines, categories = explained(file)
        expected_peak, expected = replayed(file)
        five = sorted(lines.items(), key=lambda item: (-item[1], item[0]))[:5]
        same = (
            peak == expected_peak
            and five == sorted(expected.items(), key=lambda item: (-item[1], item[0]))[:5]
        )
        agreed += same
        users += sum(".py:" in line for line, _ in five)
        named = "<br>".join(
            f"{nbytes / MIB:,.2f} {categories[line]}, `{line}`" for line, nbytes in five
        )
        rows.append(f"| {file.name} | {peak / MIB:,.1f} | {named} | {'yes' if same else 'NO'} |")
    record(
        "snapshots.py",
        "Public snapshots",
        [
            "Snapshots that two authors published, recorded with C++ frames: `memory_*.pickle` of kkaitlyn111/cs336-a2-systems",
            "at c1272e1, `snapshot.pickle` of JasperSolt/EoR_NN at 10cd0b4. A replay of the trace, of 40 lines and without code of",
            f"lflops, finds the same peak and the same five largest holders in {agreed} of {len(files)}. {users} of these",
            f"{5 * len(files)} holders are lines of the authors' Python. For the others the file has no such line: backward runs in a",
            "thread without Python, so its node is named. *No stack* is what was allocated before the recording began.",
            "",
            "| file | peak, MiB | the five largest, MiB | as the replay |",
            "|---|--:|---|---|",
            *rows,
        ],
    )


if __name__ == "__main__":
    main()
