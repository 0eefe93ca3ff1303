"""Damage files for every reader of lflops, and print the defects of the readers.

python benchmarks/fuzz.py [--files N] [--seed N] [--keep DIR]

A defect is a traceback, a time above 5 s, or memory above 300 MB plus ten times the file. The
readers run in a child process, so a hang or a crash is detected as well.
"""

import argparse
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.fuzzed_files import INTERESTING, Edit, Reader, damaged, originals, read_all

PATIENCE = 30
"""A child process that reports nothing for this number of seconds is killed."""


def content_of(number: int, seed: int, readers: dict[str, Reader]) -> tuple[str, bytes]:
    """Return the name of a reader, and a damaged file for it."""
    chance = random.Random(f"{seed} {number}")  # noqa: S311 - to be the same each time
    names = list(readers)
    name = names[number % len(names)]
    reader = readers[name]
    edits = []
    for _ in range(chance.choice([1, 1, 2, 3, 8])):
        added = chance.choice([*INTERESTING, chance.randbytes(chance.randint(1, 8))])
        edit = Edit(
            at=chance.random(),
            removed=chance.choice([0, 0, 1, 1, 4, 60, 10_000]),
            added=added,
            repeated=chance.choice([1, 1, 1, 1, 3, 1000, 200_000]),
        )
        edits.append(edit)
    return name, damaged(reader, chance.choice(reader.originals), edits)


def read_in_child(
    numbers: range, seed: int, readers: dict[str, Reader]
) -> Iterator[tuple[int, str]]:
    """Yield the defects, each with the number of its file.

    A child process reads the files in order.
    """
    begin = numbers.start
    while begin < numbers.stop:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _read(range(begin, numbers.stop), seed, readers, writing)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            while select.select([pipe], [], [], PATIENCE)[0]:
                line = pipe.readline()
                if not line:
                    break
                number, _, what = line.rstrip("\n").partition(" ")
                begin = int(number) + 1
                if what:
                    yield int(number), what
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if begin < numbers.stop:
            yield begin, f"hung for {PATIENCE} s, or died"
            begin += 1


def _read(numbers: range, seed: int, readers: dict[str, Reader], writing: int) -> None:
    """Read files, and write a line for each. This function never returns."""
    folder = Path(tempfile.mkdtemp())
    with os.fdopen(writing, "w", buffering=1) as pipe:
        for number in numbers:
            name, content = content_of(number, seed, readers)
            found = [
                f"{each.command}: {each.what[:100]} … {each.what[-100:]}"
                for each in read_all(readers[name], content, folder)
            ]
            pipe.write(f"{number} {'; '.join(found)}".replace("\n", " ") + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main() -> int:
    """Read all files."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--files", type=int, default=20_000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--keep", type=Path, help="folder for the files with a defect")
    given = arguments.parse_args()
    begin = time.monotonic()
    defects: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        readers = originals(Path(folder))
        for number, what in read_in_child(range(given.files), given.seed, readers):
            name, content = content_of(number, given.seed, readers)
            defects[name] += 1
            print(f"file {number}, {name}, {len(content)} bytes: {what}", flush=True)
            if given.keep is not None:
                given.keep.mkdir(parents=True, exist_ok=True)
                (given.keep / f"{number}-{readers[name].file}").write_bytes(content)
    minutes = (time.monotonic() - begin) / 60
    print(
        f"{given.files} files, {len(readers)} readers: {defects.total()} defects, {minutes:.0f} min"
    )
    return min(defects.total(), 1)


if __name__ == "__main__":
    sys.exit(main())
