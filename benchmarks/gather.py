"""What gathering costs rank 0: its seconds and its memory, from 8 to 1,024 ranks of 5,000 modules, all on one machine.

The ranks are simulated: one further process hands in a report for each, with times of its own. The store is a TCPStore that rank 0 hosts,
so all that waits in it counts as rank 0's memory.
"""

import json
import random
import resource
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from msgspec import msgpack
from msgspec.structs import replace
from results import record
from torch.distributed import PrefixStore, TCPStore

from lflops.collect.ranks import report as rank_report
from lflops.collect.ranks.gather import Gather
from lflops.collect.ranks.report import Packed, RankHeader, RankReport, pack, unpacked
from lflops.collect.ranks.store import RankStore
from lflops.collect.ranks.topology import Topology
from lflops.collect.ranks.window_reports import RankWindow
from lflops.profile.model import Profile
from lflops.profile.records import ModulePhase
from lflops.profile.steps import Step
from tests.support.profile_builders import profile_of, run

MODULES, STEPS, WORLDS = 5_000, 3, (8, 64, 256, 1_024)


def report(rank: int) -> tuple[Profile, tuple[dict[ModulePhase, float], ...]]:
    """A rank's window: a time forward and backward of each module in three hooked steps, beside ten clean ones."""
    steps = [Step(index=n, kind="clean", seconds=0.1, phases={"data": 1e-3, "forward": 0.03, "backward": 0.06}) for n in range(10)]
    steps += [Step(index=10 + n, kind="hooked", seconds=0.11, phases={}) for n in range(STEPS)]
    profile = replace(profile_of(MODULES), run=run(kind="training", stage="train", window=0), steps=tuple(steps))
    places = [ModulePhase(row, phase) for row in profile.modules for phase in ("forward", "backward")]
    draw = random.Random(rank)  # noqa: S311 - nothing is secret
    return profile, tuple({place: draw.uniform(1e-6, 1e-5) for place in places} for _ in range(STEPS))


def others(port: int, world: int) -> None:
    """Hand in for all ranks but the first: one report, each time with another rank and other times."""
    window = RankWindow(RankStore(PrefixStore("lflops", TCPStore("127.0.0.1", port))), "train/0", topology(world))
    profile, steps = report(1)
    packed = pack(RankReport(1, profile, steps))
    head = unpacked(packed.head, RankHeader)
    times = array("f", packed.times)
    for rank in range(1, world):
        mine = rank_report.compress_head(replace(head, brief=replace(head.brief, rank=rank)))
        own = len(times) * STEPS // (STEPS + 1)  # the last row has factors
        shifted = array("f", (*times[rank:own], *times[:rank], *times[own:]))
        window.deliver(rank, Packed(mine, packed.shared, shifted.tobytes()))


def topology(world: int) -> Topology:
    """So many ranks."""
    return Topology(world_size=world, coordinates={}, sizes={"data": world})


def first(world: int) -> None:
    """Be rank 0: wait until all have handed in, then collect. Prints seconds and memory."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, "others", str(store.port), str(world)]
    before = megabytes()
    with subprocess.Popen(command) as simulated:  # noqa: S603 - this script
        profile, steps = report(0)
        own = megabytes()
        simulated.wait()
    held = megabytes()
    gather = Gather(PrefixStore("lflops", store.clone()), 0, topology(world), timeout=600.0)
    pushed, used = time.perf_counter(), time.process_time()
    gather.push(profile, steps)
    returned = time.perf_counter()
    longest = 0.0
    while not (found := gather.ready()):  # what the training thread does meanwhile, to see how long it is held up
        begin = time.perf_counter()
        sum(range(1000))
        threading.Event().wait(0.001)
        longest = max(longest, time.perf_counter() - begin)
    seconds, used = time.perf_counter() - pushed, time.process_time() - used
    (whole,) = found
    gather.finish()
    assert world == sum(rank.status == "ok" for rank in whole.ranks)  # noqa: S101 - else the figures would be of something else
    assert whole.rank_comparison is not None  # noqa: S101
    size = len(msgpack.encode(whole)) / 1e6
    figures = {"push": returned - pushed, "seconds": seconds, "used": used, "longest": longest, "size": size}
    print(json.dumps(figures | {"own": own - before, "held": held - own, "collecting": megabytes() - held, "peak": megabytes()}))


def megabytes() -> float:
    """The most that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    """Measure, and write the table."""
    rows = []
    for world in WORLDS:
        command = [sys.executable, __file__, "first", str(world)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 - this script
        found = json.loads(output)
        in_all = found["held"] + found["collecting"]
        times = f"{found['seconds']:.2f} | {found['used']:.2f} | {1e6 * found['push']:.0f} | {1e3 * found['longest']:.0f}"
        rows.append(f"| {world:,} | {times} | {found['held']:.0f} | {found['collecting']:.0f} | {in_all:.0f} | {found['size']:.1f} |")
    columns = (
        "ranks",
        "s on a thread of its own",
        "of it CPU",
        "µs on the training's",
        "ms that was held up",
        "MB in the store",
        "MB to collect",
        "MB in all",
    )
    lines = [
        f"{MODULES:,} modules, each with a time forward and backward in {STEPS} steps on every rank; rank 0 hosts the store.",
        "MB are what its resident memory grew by at most: while the others handed in, and while it collected; the last is the profile's",
        "own size. Held up is the longest that Python's lock was not to be had beside it.",
        "",
        f"| {' | '.join(columns)} | MB of the profile |",
        f"|{'--:|' * (len(columns) + 1)}",
        *rows,
    ]
    record("gather.py", "Gathering the ranks", lines)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "others":
        others(int(sys.argv[2]), int(sys.argv[3]))
    else:
        first(int(sys.argv[2]))
