"""Measure the cost of collecting reports on rank 0, in seconds and memory.

There are 8 to 16,384 ranks with 5,000 modules, all on one machine. The ranks are simulated: another
process hands in a report with different times for each of them. Rank 0 hosts the TCPStore, so
everything in the store counts as memory of rank 0. One rank is slow in a module.

python benchmarks/gather.py [first RANKS [LOST]] one size alone, with this number of lost ranks
"""

import gc
import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from msgspec import msgpack
from msgspec.structs import replace
from results import record
from torch.distributed import PrefixStore, TCPStore

import lflops
from lflops.profile.profile import Profile
from lflops.profile.records import ModulePhase
from lflops.profile.steps import Step
from lflops.ranks.collect.collector import WHILE_TRAINING, RankCollector
from lflops.ranks.collect.report import (
    MOST_BYTES,
    Packed,
    PlacesOfTable,
    RankHeader,
    RankReport,
    pack,
    ranks_with_times,
    unpacked,
)
from lflops.ranks.collect.store import RankStore
from lflops.ranks.collect.topology import Topology
from lflops.ranks.collect.window_reports import RankWindow
from tests.support.profile_builders import profile_of, run

MODULES, STEPS, WORLDS, LOST = 5_000, 3, (8, 64, 256, 1_024, 4_096, 16_384), 8
# The module and phase in which one rank is slow, and its delay in seconds.
SLOW_PLACE, DELAY = ModulePhase("blocks.7.layers.3", "forward"), 0.02


def slow_rank(world: int) -> int:
    """Return the slow rank."""
    return world * 5 // 8


def lost_ranks(world: int, lost: int) -> range:
    """Return the ranks of the host that is lost."""
    return range(world // 2, world // 2 + lost)


def report(rank: int) -> tuple[Profile, tuple[dict[ModulePhase, float], ...]]:
    """Create the report of one rank.

    It has ten unprofiled steps, and three module-timing steps with forward and backward times of
    each module.
    """
    steps = [
        Step(
            index=n,
            kind="unprofiled",
            seconds=0.1,
            phases={"data": 1e-3, "forward": 0.03, "backward": 0.06},
        )
        for n in range(10)
    ]
    steps += [
        Step(index=10 + n, kind="module_timing", seconds=0.11, phases={}) for n in range(STEPS)
    ]
    profile = replace(
        profile_of(MODULES), run=run(kind="training", stage="train", window=0), steps=tuple(steps)
    )
    places = [
        ModulePhase(row, phase) for row in profile.modules for phase in ("forward", "backward")
    ]
    draw = random.Random(rank)  # noqa: S311 - nothing is secret
    return profile, tuple(
        {place: draw.uniform(1e-6, 1e-5) for place in places} for _ in range(STEPS)
    )


def slower(steps: tuple[Step, ...], seconds: float) -> tuple[Step, ...]:
    """Return the steps, with a longer forward in the unprofiled steps."""
    return tuple(
        replace(
            step,
            seconds=(step.seconds or 0.0) + seconds,
            phases=step.phases | {"forward": 0.03 + seconds},
        )
        if step.phases
        else step
        for step in steps
    )


def others(port: int, world: int, lost: int) -> None:
    """Deliver the reports of all ranks except rank 0 and the lost ranks.

    It is the same report each time, with another rank and other times.
    """
    store = RankStore(PrefixStore("lflops", TCPStore("127.0.0.1", port)))
    window = RankWindow(store, "train/0", topology(world))
    profile, steps = report(1)
    profile = replace(profile, run=replace(profile.run, world_size=world, data_parallel_size=world))
    packed = pack(RankReport(1, profile, steps))
    head = unpacked(packed.head, RankHeader)
    places = unpacked(next(iter(packed.shared.values())), PlacesOfTable).places
    base = torch.frombuffer(bytearray(packed.times), dtype=torch.float32).view(STEPS + 1, -1)
    column = places.index(SLOW_PLACE)

    def times(rank: int) -> bytes:
        own = base.clone()
        own[:-1] *= random.Random(rank).gauss(1.0, 0.01)  # noqa: S311 - nothing is secret
        if rank == slow_rank(world):
            own[:-1, column] += DELAY
        return own.numpy().tobytes()

    gone = lost_ranks(world, lost)
    timed = ranks_with_times(world, len(packed.times))
    for rank in range(1, world):
        if rank in gone:
            continue
        summary = replace(head.summary, rank=rank)
        if rank == slow_rank(world):
            summary = replace(summary, steps=slower(summary.steps, DELAY))
        own = replace(head, summary=summary, at=head.at if rank in timed else ())
        packed_head = zlib.compress(msgpack.encode(own), 1)
        sent = times(rank) if rank in timed else b""
        window.deliver(rank, Packed(packed_head, packed.shared, sent))
    print("delivered", flush=True)


def topology(world: int) -> Topology:
    """Return a topology with only data-parallel ranks."""
    return Topology(world_size=world, coordinates={}, sizes={"data": world})


def first(world: int, lost: int) -> None:
    """Run rank 0: wait until all ranks have delivered, then collect.

    Prints seconds and memory.
    """
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, "others", str(store.port), str(world), str(lost)]
    before = megabytes()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as simulated:  # noqa: S603 - this script
        profile, steps = report(0)
        own = megabytes()
        assert simulated.stdout is not None  # noqa: S101
        simulated.stdout.readline()
        held = megabytes()
        # If ranks are lost, rank 0 waits for them for one second.
        gather = RankCollector(
            PrefixStore("lflops", store.clone()),
            0,
            topology(world),
            timeout=1.0 / WHILE_TRAINING if lost else 600.0,
        )
        pushed, used = time.perf_counter(), time.process_time()
        gather.push(profile, steps)
        returned = time.perf_counter()
        gaps, passes = [], _Passes()
        # During the wait, this loop works like a training thread, and measures how long it is
        # blocked.
        while not (found := gather.ready()):
            begin = time.process_time()
            sum(range(1000))
            threading.Event().wait(0.001)
            gaps.append((begin, time.process_time()))
        seconds, used = time.perf_counter() - pushed, time.process_time() - used
    (whole,) = found
    gather.finish()
    # Otherwise, the figures would be wrong.
    assert world - lost == sum(rank.status == "ok" for rank in whole.ranks)  # noqa: S101
    named = [note.subject for note in whole.notes if note.code == "ranks_missing"]
    gone = lost_ranks(world, lost)
    assert named == ([f"{gone[0]}-{gone[-1]}"] if lost else []), named  # noqa: S101
    rows = lflops.stragglers(whole).rows
    # If the slow rank has not sent times, its slow module is unknown.
    timed = ranks_with_times(world, 4 * (STEPS + 1) * sum(map(len, steps)) // STEPS)
    place = SLOW_PLACE if slow_rank(world) in timed else ModulePhase("", "forward")
    assert [(*place, slow_rank(world))] == [  # noqa: S101
        (row.module, row.phase, row.slow_rank) for row in rows
    ], rows
    size = len(msgpack.encode(whole)) / 1e6
    figures = {"push": returned - pushed, "seconds": seconds, "used": used, "size": size}
    figures["longest"] = max(end - begin - passes.within(begin, end) for begin, end in gaps)
    whole_passes = [end - begin for generation, begin, end in passes.all if generation == 2]
    figures |= {"passes": len(whole_passes), "longest_pass": max(whole_passes, default=0.0)}
    print(
        json.dumps(
            figures
            | {
                "own": own - before,
                "held": held - own,
                "collecting": megabytes() - held,
                "peak": megabytes(),
            }
        )
    )


class _Passes:
    """The passes of Python's garbage collector.

    Attributes:
        all: The generation, begin and end of each pass, in CPU time of the process.
    """

    def __init__(self) -> None:
        self.all: list[tuple[int, float, float]] = []
        self._begin = 0.0
        gc.callbacks.append(self)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begin = time.process_time()
        else:
            self.all.append((info["generation"], self._begin, time.process_time()))

    def within(self, begin: float, end: float) -> float:
        """Return the seconds of all passes between two moments."""
        return sum(max(0.0, min(end, last) - max(begin, first)) for _, first, last in self.all)


def megabytes() -> float:
    """Return the peak of this process's resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    """Measure, and write the table."""
    load, rows = os.getloadavg()[0], []
    for world, lost in [*((world, 0) for world in WORLDS), (WORLDS[-1], LOST)]:
        command = [sys.executable, __file__, "first", str(world), str(lost)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - this script
        found = json.loads(output)
        times = f"{found['seconds']:.2f} | {found['used']:.2f} | {1e6 * found['push']:.0f} | {1e3 * found['longest']:.0f}"
        passes = f"{found['passes']} | {1e3 * found['longest_pass']:.0f}"
        memory = f"{found['held']:.0f} | {found['collecting']:.0f} | {found['peak']:.0f}"
        rows.append(
            f"| {world:,}{f', {lost} lost' if lost else ''} | {times} | {passes} | {memory} | {found['size']:.1f} |"
        )
    columns = (
        "ranks",
        "s in a separate thread",
        "s of CPU in this thread",
        "µs in the training thread",
        "ms blocked",
        "garbage collections",
        "ms of the longest collection",
        "MB while ranks send",
        "MB while rank 0 collects",
        "MB of the process",
    )
    lines = [
        f"Every rank reports the forward and backward times of {MODULES:,} modules in {STEPS} steps, and rank 0 collects the reports.",
        "Rank 0 also hosts the store. One process plays all other ranks. The load of the machine by other programs was",
        f"{load:.0f} at the start.",
        "",
        "* Memory: the growth of rank 0's resident memory while the other ranks send their reports, and while rank 0 collects them; the",
        "  memory of the whole process with torch; and the size of the profile.",
        "* Blocked: the longest time for which another Python thread could not get the interpreter lock, in CPU time of the process,",
        "  without the garbage collector. The garbage collector also holds the lock. It runs when the process has a quarter more objects,",
        "  most of which belong to torch. The table has the number of its runs, and the longest run.",
        f"* If the times need at most {MOST_BYTES >> 20} MiB, all ranks send them. Otherwise, a sample of the ranks sends them.",
        f"* One rank is {DELAY * 1e3:.0f} ms slower than the others in one module. In every row, lflops names this rank and no other rank, and",
        "  names the module if the rank sends times. lflops also names the lost ranks, after it has waited one second for them.",
        "",
        f"| {' | '.join(columns)} | MB of the profile |",
        f"|{'--:|' * (len(columns) + 1)}",
        *rows,
    ]
    record("gather.py", "Gathering the ranks", lines)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        {"others": others, "first": first}[sys.argv[1]](*map(int, sys.argv[2:]))
