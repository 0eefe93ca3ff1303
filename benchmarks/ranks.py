"""Check that lflops flags the right rank.

Training runs over gloo have a planted delay on one rank, or no delay. Then runs of many ranks are
simulated.

All processes share the cores of this machine. So delays and most of the model's work are sleep, and
ranks hardly slow each other down. With `--busy`, another process keeps a core busy during the runs.

python benchmarks/ranks.py [--busy] [--ranks 2 4] [--repeat 1] [--sizes 2 5 20 50] [--simulate]
[--minutes 20]

python benchmarks/ranks.py --default [--kinds "training step" none] [--strategies ddp fsdp]

With `--default`, each training run has 120 steps, the default schedule and a delay of 20 ms on rank
1. It runs with and without a trace, and the result in its last file is compared with the log.

Each training run has a line in the log, and runs that are in the log are not repeated. So an
interrupted benchmark continues with the next run.
"""

import argparse
import contextlib
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from results import BUSY, record
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

import lflops
from lflops.integrations.lightning.monitor import FlopsMonitor
from lflops.monitoring.schedule import Schedule
from lflops.profile.records import ModulePhase
from lflops.ranks.merge.rank_comparison import compare_ranks
from lflops.ranks.merge.rank_table import table_of
from lflops.ranks.straggler_search import find_stragglers
from tests.support.ports import free_port
from tests.support.simulated_ranks import (
    DATA,
    OPTIMIZER,
    Plant,
    ddp,
    fsdp,
    patterns,
    tensor_parallel,
)

WIDTH, ROWS, BLOCKS, SLOW_BLOCK = 64, 16, 4, 2
WAIT, HOOKED, AFTER = 5, 15, 14
BASE = 2e-3
"""Seconds that a block's forward sleeps. Its backward sleeps twice as long."""

STRATEGIES = ("ddp", "fsdp", "tensor parallel", "pipeline")
WORK = f"blocks.{SLOW_BLOCK}.work"
KINDS: dict[str, tuple[str, str] | None] = {
    "forward": (WORK, "forward"),
    "backward": (WORK, "backward"),
    "data": ("", "data"),
    "optimizer": ("", "optimizer"),
    "every third step": (WORK, "forward"),
    "10 % everywhere": ("", "all"),
    "none": None,
}
"""Kinds of planted delays, and the module and the phase that must be named."""

SECONDS = 300
"""Time limit of a run in seconds."""


class Case(NamedTuple):
    """One training run."""

    strategy: str
    kind: str
    seconds: float
    ranks: int
    slow_rank: int


STEPS = 120
DELAY = 20e-3
"""Planted seconds in a training run with the default schedule, which has `STEPS` steps."""

LATE = 60
"""The step after which a late-starting delay begins."""

DEFAULT_KINDS: dict[str, tuple[set[str], str, int] | None] = {
    "forward": ({WORK}, "forward", 1),
    "training step": ({""}, "forward", 1),
    "busy loop": ({""}, "forward", 1),
    "backward": ({WORK}, "backward", 1),
    "data": ({""}, "data", 1),
    "optimizer": ({""}, "optimizer", 1),
    "logging": ({""}, "other", 0),
    "every third step": ({WORK, ""}, "forward", 1),
    "from step 60": ({WORK, ""}, "forward", 1),
    "none": None,
}
"""Kinds of delays with the default schedule: the right modules, phase and rank.

In a window without a slow module-timing step, the module cannot be known.
"""


class Report(NamedTuple):
    """The report about ranks at the end of a run.

    Attributes:
        named: Module, phase, rank and cause of each straggler in the last file.
        logged: The sentences about slow ranks in the log.
        own: Issues that report a wait for other ranks, in a run in which no rank is slow.
    """

    named: list[tuple[str, str, int, str | None]]
    logged: list[str]
    own: list[str]


class Outcome(NamedTuple):
    """The first straggler, if there is one, and the data wait of the merged step."""

    named: tuple[str, str, int] | None
    data: float


def nap(seconds: float) -> None:
    """Sleep for at least some seconds."""
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        time.sleep(left)


def compute(seconds: float) -> None:
    """Keep a core busy for some seconds."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class NapsBackward(torch.autograd.Function):
    """An operator that returns its input, and sleeps in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: "Work") -> Tensor:
        ctx.work = work
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        nap(ctx.work.backward_seconds)
        return gradients[0], None


class Work(nn.Module):
    """A linear layer that sleeps in forward and in backward."""

    def __init__(self, seconds: float) -> None:
        """Create a layer that is as fast as on the other ranks."""
        super().__init__()
        self.product = nn.Linear(WIDTH, 2 * WIDTH)
        self.usual = self.forward_seconds = seconds
        self.backward_seconds = 2 * seconds

    def forward(self, x: Tensor) -> Tensor:
        nap(self.forward_seconds)
        return NapsBackward.apply(self.product(x), self)


class Block(nn.Module):
    """A layer that sleeps, and a linear layer that does not."""

    def __init__(self, seconds: float) -> None:
        """Create a block whose forward sleeps for some seconds."""
        super().__init__()
        self.work = Work(seconds)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(torch.relu(self.work(x)))


class Batches(Dataset[Tensor]):
    """Random rows. A function is called at the first row of each batch."""

    def __init__(self, rows: int, begin: Callable[[], None]) -> None:
        """Create the rows."""
        self.x = torch.randn(rows, WIDTH)
        self.begin = begin
        self.fetched = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        if not self.fetched % ROWS:
            self.begin()
        self.fetched += 1
        return self.x[index]


def rank() -> int:
    """Return the rank of this process."""
    return int(os.environ["LOCAL_RANK"])


class Model(LightningModule):
    """Four blocks and a head, with a delay on one rank."""

    def __init__(self, case: Case) -> None:
        """Create the model, and plant the delay."""
        super().__init__()
        everywhere = case.kind == "10 % everywhere"
        self.case, self.is_slow, self.is_spread, self.steps = (
            case,
            rank() == case.slow_rank,
            False,
            0,
        )
        self.blocks = nn.ModuleDict(
            {
                str(n): Block(case.seconds * 10 / (3 * BLOCKS) if everywhere else BASE)
                for n in range(BLOCKS)
            }
        )
        self.head = nn.Linear(WIDTH, 8)
        if self.is_slow:
            slow = self.work(SLOW_BLOCK)
            slow.forward_seconds += case.seconds * (case.kind == "forward")
            slow.backward_seconds += case.seconds * (case.kind == "backward")
            for n in range(BLOCKS if everywhere else 0):
                self.work(n).forward_seconds *= 1.1
                self.work(n).backward_seconds *= 1.1

    def work(self, number: int) -> Work:
        """Return the sleeping layer of a block."""
        work = self.blocks[str(number)].work
        assert isinstance(work, Work)  # noqa: S101
        return work

    def begin_batch(self) -> None:
        """Sleep if the delay is in the data wait. The data set calls this for each batch."""
        if self.is_slow and self.case.kind == "data":
            nap(self.case.seconds)

    def configure_model(self) -> None:
        if self.device_mesh is None or self.is_spread:
            return
        self.is_spread = True
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        for block in self.blocks.values():
            if tensor.size() > 1:
                parallelize_module(
                    block, tensor, {"work.product": ColwiseParallel(), "mix": RowwiseParallel()}
                )
            if data.size() > 1:
                fully_shard(block, mesh=data)
        if data.size() > 1:
            fully_shard(self.head, mesh=data)

    def begin_step(self) -> None:
        """Set the delay of the block for this step, if it varies from step to step."""
        self.steps += 1
        if self.is_slow and self.case.kind == "every third step" and str(SLOW_BLOCK) in self.blocks:
            slow = self.work(SLOW_BLOCK)
            slow.forward_seconds = slow.usual + (0.0 if self.steps % 3 else self.case.seconds)

        if self.is_slow and self.case.kind == "from step 60" and self.steps > LATE:
            slow = self.work(SLOW_BLOCK)
            slow.forward_seconds = slow.usual + self.case.seconds

    def training_step(self, batch: Tensor, _: int) -> Tensor | None:
        self.begin_step()
        if self.is_slow and self.case.kind == "training step":
            nap(self.case.seconds)
        if self.is_slow and self.case.kind == "busy loop":
            compute(self.case.seconds)
        x = batch
        for block in self.blocks.values():
            x = block(x)
        return self.head(x).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if not rank() and self.case.kind == "logging":
            nap(self.case.seconds)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        if self.is_slow and self.case.kind == "optimizer":
            # A hook before the step would run before forward, because Lightning runs forward and
            # backward inside the optimizer's step.
            optimizer.register_step_post_hook(lambda *_: nap(self.case.seconds))
        return optimizer


class Stages(DDPStrategy):
    """A strategy that starts the ranks like DDP, but does not wrap the model."""

    def configure_ddp(self) -> None:
        pass

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}


class Stage(Model):
    """The blocks of one stage of a pipeline. The other stages wait while it works."""

    def __init__(self, case: Case) -> None:
        """Create only the blocks of this rank."""
        super().__init__(case)
        self.automatic_optimization = False
        own = BLOCKS // case.ranks
        self.blocks = nn.ModuleDict(
            {name: block for name, block in self.blocks.items() if int(name) // own == rank()}
        )
        self.is_last = rank() == case.ranks - 1
        if not self.is_last:
            del self.head

    def training_step(self, batch: Tensor, _: int) -> None:
        self.begin_step()
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        x = batch
        if rank():
            x = torch.empty(ROWS, WIDTH)
            distributed.recv(x, rank() - 1)
            x.requires_grad_()
        y = x
        for block in self.blocks.values():
            y = block(y)
        if self.is_last:
            self.manual_backward(self.head(y).square().mean())
        else:
            distributed.send(y.detach(), rank() + 1)
            gradient = torch.empty_like(y)
            distributed.recv(gradient, rank() + 1)
            self.manual_backward(y, gradient=gradient)
        if rank() and x.grad is not None:
            distributed.send(x.grad, rank() - 1)
        optimizer.step()


def stages(each: int) -> dict[str, int]:
    """Return the topology of a pipeline."""
    return {"data": 0, "pipeline": each}


def strategy_of(case: Case) -> Any:
    """Return the strategy for Lightning."""
    if case.strategy in {"ddp", "pipeline"}:
        return DDPStrategy() if case.strategy == "ddp" else Stages()
    data, tensor = (case.ranks, 1) if case.strategy == "fsdp" else (1, case.ranks)
    return ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor)


def train(case: Case) -> Outcome | None:
    """Run a training run. Returns its outcome on rank 0, and `None` on the other ranks."""
    with tempfile.TemporaryDirectory() as directory:
        profile = profiled(case, Path(directory))
    if profile is None:
        return None
    found = lflops.stragglers(profile).rows
    data = [step.phases["data"] for step in profile.steps if step.is_unprofiled]
    first = (found[0].module, found[0].phase, found[0].slow_rank) if found else None
    return Outcome(first, sorted(data)[len(data) // 2])


def profiled(case: Case, folder: Path, *, trace: bool = False) -> lflops.Profile | None:
    """Run a training run. Returns its profile on rank 0, and `None` on the other ranks."""
    torch.manual_seed(0)
    pipeline = case.strategy == "pipeline"
    module = (Stage if pipeline else Model)(case)
    batches = WAIT + 1 + (2 if trace else 1) * HOOKED + AFTER
    rows = batches * ROWS * (case.ranks if case.strategy in {"ddp", "fsdp"} else 1)
    monitor = FlopsMonitor(
        Schedule(wait=WAIT, warmup=1, active=HOOKED),
        trace=trace,
        trace_ranks="all",
        html=False,
        module_scalars=0,
        on_error="raise",
        topology=stages if pipeline else None,
        dirpath=folder,
    )
    trainer = Trainer(
        max_epochs=1,
        callbacks=[monitor],
        accelerator="cpu",
        strategy=strategy_of(case),
        devices=case.ranks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(Batches(rows, module.begin_batch), batch_size=ROWS))
    return next(iter(monitor.profiles), None)


class Said(logging.Handler):
    """A log handler that stores the sentences about slow ranks."""

    def __init__(self) -> None:
        """Create an empty list of lines."""
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        lines = record.getMessage().splitlines()
        self.lines += [line.strip() for line in lines if " than the other rank" in line]


def default(case: Case, traced: bool) -> Report | None:  # noqa: FBT001 - an argument of another process
    """Train with the default schedule.

    Returns the report on rank 0, and `None` on the other ranks.
    """
    torch.manual_seed(0)
    said = Said()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as directory:
        monitor = FlopsMonitor(trace=traced, html=False, on_error="raise", dirpath=directory)
        trainer = Trainer(
            max_epochs=1,
            callbacks=[monitor],
            accelerator="cpu",
            strategy=strategy_of(case),
            devices=case.ranks,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=directory,
        )
        rows = STEPS * ROWS * (case.ranks if case.strategy in {"ddp", "fsdp"} else 1)
        module = Model(case)
        trainer.fit(module, DataLoader(Batches(rows, module.begin_batch), batch_size=ROWS))
        logger.removeHandler(said)
        files = sorted(Path(directory).rglob("train-*.profile.json"))
        if rank():
            return None
        profile = lflops.load(files[-1])
    found = lflops.stragglers(profile).rows
    waits = [
        f"{finding.cause}: {finding.sentence}"
        for finding in lflops.explain(profile).findings
        if finding.cause in {"sync", "communication"} and finding.is_issue
    ]
    return Report(
        [(row.module, row.phase, row.slow_rank, row.cause) for row in found],
        said.lines,
        waits if DEFAULT_KINDS[case.kind] is None else [],
    )


NO_SLOW_RANK = "none: no rank is slower"
"""Part of the line in the log that says that no rank is slow."""


def is_report_right(case: Case, report: Report) -> bool:
    """Return whether the first straggler has the right rank, module and phase.

    If nothing was planted, return whether there is no straggler and no wait.
    """
    expected = DEFAULT_KINDS[case.kind]
    if expected is None:
        accusations = [line for line in report.logged if NO_SLOW_RANK not in line]
        return not report.named and not accusations and not report.own
    if not report.named:
        return False
    modules, phase, slow_rank = expected
    module, named_phase, named_rank, cause = report.named[0]
    return (module in modules, named_phase, named_rank, cause) == (True, phase, slow_rank, None)


def run_default(
    kinds: Sequence[str], strategies: Sequence[str], repeat: int, until: float
) -> Iterator[str]:
    """Train each kind with each strategy, with and without a trace; yield a table."""
    yield "| strategy | planted | trace | right | rows of the last file | log |"
    yield "|---|---|---|---|---|---|"
    right = Counter[bool]()
    group = Ranks(2)
    try:
        for _, strategy, kind, traced in itertools.product(
            range(repeat), strategies, kinds, (False, True)
        ):
            if time.monotonic() >= until:
                continue
            slow_rank = 0 if kind == "logging" else 1
            case = Case(strategy, kind, DELAY, 2, slow_rank)
            try:
                report = group.run(default, case, traced)[0]
            except Exception as error:  # noqa: BLE001 - of a process that ended, or of the training
                yield f"| {strategy} | {kind} | {traced} | failed | {type(error).__name__}: {error} | |"
                group.end()
                group = Ranks(2)
                continue
            is_right = is_report_right(case, report)
            right[is_right] += 1
            rows = "; ".join(map(str, [*report.named, *report.own])) or "none"
            logged = report.logged[-1] if report.logged else "nothing"
            verdict = "right" if is_right else "WRONG"
            line = f"| {strategy} | {kind} | {traced} | {verdict} | {rows} | {logged} |"
            print(line, flush=True)
            yield line
    finally:
        group.end()
    yield ""
    yield f"{right[True]} of {right.total()} are right."


class Ranks:
    """Processes that stay in one group for several training runs."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__"])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
        self._ranks = [
            ProcessPoolExecutor(
                1,
                mp_context=context,
                initializer=stand,
                initargs=(place | {"LOCAL_RANK": str(each)},),
            )
            for each in range(world)
        ]

    def train(self, case: Case) -> Outcome:
        """Run a training run, and return its outcome on rank 0."""
        outcome, *_ = self.run(train, case)
        assert outcome is not None  # noqa: S101
        return outcome

    def run(self, function: Callable[..., Any], *given: Any) -> list[Any]:
        """Run a function on each rank, and return all results."""
        running = [each.submit(function, *given) for each in self._ranks]
        return [each.result(SECONDS) for each in running]

    def end(self) -> None:
        """Kill the processes, because they need no orderly exit."""
        for each in self._ranks:
            for process in list(each._processes.values()):  # noqa: SLF001 - there is no other way to end one
                process.kill()
            each.shutdown()


def stand(place: dict[str, str]) -> None:
    """Set up this process as a rank, as a launcher would do."""
    os.environ.update(place)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def grid(ranks: int, sizes: Sequence[float], repeat: int) -> Iterator[Case]:
    """Yield each kind with each size and strategy, in random order.

    Runs without a delay are repeated six times. Because of the order, a part of the runs represents
    all of them.
    """
    draw = random.Random(ranks)  # noqa: S311 - nothing is secret
    cases = list(_cases(ranks, sizes, repeat, draw))
    draw.shuffle(cases)
    yield from cases


def _cases(ranks: int, sizes: Sequence[float], repeat: int, draw: random.Random) -> Iterator[Case]:
    for _, strategy, kind in itertools.product(range(repeat), STRATEGIES, KINDS):
        for seconds in sizes if kind != "none" else [BASE] * 6:
            in_block = strategy == "pipeline" and KINDS[kind] in {
                (WORK, "forward"),
                (WORK, "backward"),
            }
            yield Case(
                strategy,
                kind,
                seconds,
                ranks,
                SLOW_BLOCK * ranks // BLOCKS if in_block else draw.randrange(ranks),
            )


def is_right(case: Case, outcome: Outcome) -> bool:
    """Return whether the first straggler has the right rank, phase and module.

    If nothing was planted, return whether there is no straggler.
    """
    place = KINDS[case.kind]
    return outcome.named == (None if place is None else (*place, case.slow_rank))


def run_grid(
    ranks: int, sizes: Sequence[float], repeat: int, log: Path, until: float
) -> list[tuple[Case, Outcome]]:
    """Run all training runs, and write a line for each to the log.

    A run that fails is printed, and left out.
    """
    known = logged(log)
    found, group = [], Ranks(ranks)
    try:
        with log.open("a") as file:
            for case in grid(ranks, sizes, repeat):
                if known[case]:
                    found.append((case, known[case].pop()))
                    continue
                if time.monotonic() >= until:
                    continue
                try:
                    outcome = group.train(case)
                except Exception as error:  # noqa: BLE001 - of a process that ended, or of the training
                    print(f"failed: {case}: {type(error).__name__}: {error}", flush=True)
                    group.end()
                    group = Ranks(ranks)
                    continue
                found.append((case, outcome))
                file.write(json.dumps([case, outcome, is_right(case, outcome)]) + "\n")
                file.flush()
    finally:
        group.end()
    return found


def logged(log: Path) -> defaultdict[Case, list[Outcome]]:
    """Return the training runs that are already in the log."""
    found = defaultdict(list)
    for line in log.read_text().splitlines() if log.exists() else ():
        case, (named, data), _ = json.loads(line)
        found[Case(*case)].append(Outcome(None if named is None else tuple(named), data))
    return found


@contextlib.contextmanager
def busy_core(*, busy: bool) -> Iterator[None]:
    """Run another process that keeps a core busy during the block."""
    process = subprocess.Popen([sys.executable, "-c", BUSY]) if busy else None  # noqa: S603
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def table(results: Sequence[tuple[Case, Outcome]]) -> Iterator[str]:
    """Yield a table with the number of right runs, by strategy and size."""
    sizes = sorted({case.seconds for case, _ in results if case.kind != "none"})
    right: dict[tuple[str, object], Counter[bool]] = defaultdict(Counter)
    for case, outcome in results:
        column = "none" if case.kind == "none" else case.seconds
        for row in (case.strategy, case.kind, "all"):
            right[row, column][is_right(case, outcome)] += 1

    def cell(row: str, column: object) -> str:
        counts = right[row, column]
        return f"{counts[True]} of {counts.total()}" if counts else ""

    yield f"| | {' | '.join(f'{1e3 * size:.0f} ms' for size in sizes)} | nothing planted |"
    yield f"|---|{'--:|' * (len(sizes) + 1)}"
    for row in (*STRATEGIES, *(kind for kind in KINDS if kind != "none"), "all"):
        yield f"| {row} | {' | '.join(cell(row, column) for column in (*sizes, 'none'))} |"


def simulated(ranks: int, seeds: int) -> Iterator[str]:
    """Yield a line for each strategy, with results of simulated runs.

    It contains how often a planted delay is the first straggler, and how often a run without a
    delay has no straggler.
    """
    plants = {
        (place.fqn, place.phase): Plant(rank=ranks // 3, place=place, seconds=5e-3)
        for place in (
            ModulePhase("layers.3.mlp", "forward"),
            ModulePhase("layers.5.attention", "backward"),
            DATA,
            OPTIMIZER,
        )
    } | {("", "all"): Plant(rank=ranks // 3, factor=1.1)}
    for name, simulation in {
        "ddp": ddp(),
        "fsdp": fsdp(),
        "tensor parallel": tensor_parallel(),
    }.items():
        named, clean = Counter[bool](), Counter[bool]()
        for seed in range(seeds):
            for place, plant in [*plants.items(), (None, None)]:
                times = simulation.run(ranks, 10, seed, [] if plant is None else [plant])
                compared = compare_ranks(table_of(times, simulation.waits, patterns=patterns()))
                rows = (
                    []
                    if compared is None
                    else [
                        ((row.module, row.phase), row.slow_rank)
                        for row in find_stragglers(compared, ranks)
                    ]
                )
                if plant is None:
                    clean[not rows] += 1
                else:
                    named[rows[:1] == [(place, plant.rank)]] += 1
        yield f"| {ranks:,} | {name} | {named[True]} of {named.total()} | {clean[True]} of {clean.total()} |"


def main() -> None:
    """Train, simulate, and write the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--busy", action="store_true", help="beside a process that keeps a core busy"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[2, 5, 20, 50], help="milliseconds"
    )
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--simulate", type=int, nargs="*", default=[256, 1024], help="numbers of ranks"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="after which no further training begins"
    )
    parser.add_argument("--log", type=Path, help="of the trainings, one a line")
    parser.add_argument("--default", action="store_true", help="with the default schedule")
    parser.add_argument("--kinds", nargs="+", default=list(DEFAULT_KINDS))
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp", "tensor parallel"])
    given = parser.parse_args()
    if given.default:
        until = time.monotonic() + 60 * given.minutes
        with busy_core(busy=given.busy):
            lines = [*run_default(given.kinds, given.strategies, given.repeat, until)]
        record("ranks.py --default", "A slow rank, traced and not", lines)
        return
    busy = " --busy" if given.busy else ""
    log = given.log or Path(tempfile.gettempdir()) / f"lflops-ranks{busy.replace(' --', '-')}.jsonl"
    until = time.monotonic() + 60 * given.minutes
    lines = [
        "DDP, FSDP2, tensor parallel and pipeline trainings over gloo, all processes on this machine, whose cores other programs used too.",
        f"The model has {BLOCKS} blocks of {3e3 * BASE:.0f} ms, most of it sleep; one rank sleeps longer. {HOOKED} steps are hooked.",
        "A run is right if its first row names rank, phase and module, and where nothing is planted, if there is no row.",
        "",
    ]
    with busy_core(busy=given.busy):
        for ranks in given.ranks:
            results = run_grid(
                ranks, [each / 1e3 for each in given.sizes], given.repeat, log, until
            )
            lines += [
                f"{ranks} ranks{', beside a process that keeps a core busy' if given.busy else ''}:",
                "",
                *table(results),
                "",
            ]
    if given.simulate:
        lines += [
            "Simulated: steps of about 100 ms that jitter by 2 %, ranks that drift, heavy tails; 5 ms planted, or 10 % everywhere.",
            "",
        ]
        lines += [
            "| ranks | strategy | the culprit comes first | nobody is accused without one |",
            "|--:|---|--:|--:|",
        ]
        lines += [line for ranks in given.simulate for line in simulated(ranks, seeds=2)]
    record(f"ranks.py{busy}", f"A slow rank{', on a busy machine' if given.busy else ''}", lines)


if __name__ == "__main__":
    main()
