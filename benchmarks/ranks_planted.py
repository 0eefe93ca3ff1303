"""Check that lflops flags the right rank and cause with the default schedule.

Delays of many kinds are planted in five loops over gloo.

python benchmarks/ranks_planted.py [--ranks 2 4] [--loops plain lightning] [--kinds forward data]
[--repeat 1] [--minutes 20]

All processes share this machine's cores. Most of the model's work is sleep, as in `ranks.py`, and
so are most delays. Each training run has a line in the log, and runs that are in the log are not
repeated.
"""

import argparse
import gc
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from msgspec import msgpack
from msgspec.structs import replace
from ranks import Batches, NapsBackward, Ranks, nap, rank
from results import BUSY, record
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import lflops
from lflops.inputs.batch import BatchReader
from lflops.monitoring.inputs.phases import Phases
from lflops.monitoring.window.step_timer import StepTimer
from lflops.ranks.merge.unprofiled_steps import UnprofiledSteps
from lflops.timing.clock import HostClock, seconds_of
from lflops.timing.step_phases import LoggedPhases

WIDTH, ROWS, BLOCKS, SLOW_BLOCK = 64, 16, 3, 1
NAP, DELAY, RARE = 1e-3, 10e-3, 50e-3
"""Seconds of sleep.

`NAP` is for the forward of a block; its backward sleeps twice as long. `DELAY` is planted. `RARE`
is planted if the delay is in few steps.
"""

LATE = 200
"""The step at which a late-starting delay begins."""

STEPS = 120
LONGER = {"50th": 310, "late": 300, "validation": 200}
"""Steps of a training run, by words in its kind. Other kinds have `STEPS` steps."""

PLACES = ("forward", "backward", "data", "clip", "optimizer", "outside")
EVERY = {"": 1, " every 3rd": 3, " every 10th": 10, " every 50th": 50}
STEADY = {
    f"{place}{often}": (place, every)
    for place in PLACES
    for often, every in EVERY.items()
    if not often or place in ("forward", "data")
}
EVENTS = {"validation": ("validation", 20), "logging": ("logging", 10)}
"""Events between batches, each with its place and the number of steps between two of them.

Rank 0, or the slow rank, takes longer for the event.
"""

KINDS = (
    *STEADY,
    "forward late",
    *EVENTS,
    "two",
    "contention",
    "thread",
    "gc",
    "longer",
    "expert",
    "stages",
    "turns",
    "lengths",
    "none",
)


COMPUTING = frozenset({"contention", "thread", "longer", "lengths"})
"""Kinds whose model computes instead of only sleeping."""

ALIKE = frozenset({"turns", "lengths", "none"})
"""Kinds in which no rank is slower than the others."""


class Case(NamedTuple):
    """One training run."""

    loop: str
    kind: str
    ranks: int
    slow_rank: int
    repeat: int = 0


class Outcome(NamedTuple):
    """The result of a run.

    Attributes:
        named: Module, phase and rank of the first straggler, if any.
        cause: The cause of the first straggler.
        turns: The reason why no rank is named.
        second: Module, phase and rank of the second straggler, if any.
    """

    named: tuple[str, str, int] | None
    cause: str | None
    turns: str | None
    second: tuple[str, str, int] | None = None


class Block(nn.Module):
    """A linear layer that sleeps in forward and in backward."""

    def __init__(self, plant: "Plant | None") -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)
        self.plant = plant
        self.backward_seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.backward_seconds = 2 * NAP
        nap(NAP)
        if self.plant is not None:
            self.plant.at("forward")
            self.backward_seconds += self.plant.seconds("backward")
        return x + NapsBackward.apply(self.product(x), self)


class Plant:
    """The additional work of one rank.

    Args:
        case: The training run. On all other ranks, nothing is planted.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.step = case, 0
        self.is_slow = rank() == case.slow_rank
        self.place, self.every = (STEADY | EVENTS).get(case.kind, ("forward", 1))
        self.first = LATE if case.kind == "forward late" else 0
        self.garbage: list[Any] = []
        self.saving: threading.Thread | None = None
        self.busy: subprocess.Popen[bytes] | None = None

    def seconds(self, place: str) -> float:
        """Return the seconds of sleep at a place in the current step."""
        kind = self.case.kind
        if kind == "turns" and place == "forward":
            return DELAY if self.step % self.case.ranks == rank() else 0.0
        if kind == "two" and place == "data":
            return (
                RARE
                if (rank() - 1) % self.case.ranks == self.case.slow_rank and not self.step % 10
                else 0.0
            )
        if kind == "validation":
            return RARE if self.is_slow and place == kind else 0.0
        if kind == "logging":
            return RARE if not rank() and place == kind and not self.step % self.every else 0.0
        planted = kind in STEADY or kind in {"forward late", "two"}
        here = planted and self.is_slow and place == self.place and self.step >= self.first
        return (
            (RARE if self.every == EVERY[" every 50th"] else DELAY)
            if here and not self.step % self.every
            else 0.0
        )

    def at(self, place: str) -> None:
        """Sleep at a place of the training loop, if a delay is planted there."""
        if seconds := self.seconds(place):
            nap(seconds)

    def begin(self) -> None:
        """Begin a step."""
        self.step += 1
        if not self.is_slow:
            return
        if self.case.kind == "gc" and not self.step % 10:
            self.garbage = [[[]] for _ in range(300_000)]
            gc.collect()
        if self.case.kind == "thread" and (self.saving is None or not self.saving.is_alive()):
            self.saving = threading.Thread(target=save, daemon=True)
            self.saving.start()

    def rows(self, rows: int) -> int:
        """Return the number of rows of a batch in this step."""
        kind = self.case.kind
        if kind == "longer":
            return rows * 3 if self.is_slow else rows
        return rows


def save() -> None:
    """Serialize a large object in a Python thread."""
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        json.dumps(list(range(20_000)))


class Model(nn.Module):
    """Some blocks and a head. Kinds in `COMPUTING` have additional layers."""

    def __init__(self, plant: Plant) -> None:
        super().__init__()
        self.plant = plant
        self.blocks = nn.ModuleList(
            [Block(plant if number == SLOW_BLOCK else None) for number in range(BLOCKS)]
        )
        self.head = nn.Linear(WIDTH, 8)
        self.computes = plant.case.kind in COMPUTING
        self.expert = nn.Linear(WIDTH, WIDTH) if plant.case.kind == "expert" else None
        self.wide = nn.Linear(WIDTH, 2048) if self.computes else None
        self.narrow = nn.Linear(2048, WIDTH) if self.computes else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if self.wide is not None and self.narrow is not None:
            x = self.narrow(torch.tanh(self.wide(x)))
        # The slow rank receives more tokens than the others.
        if self.expert is not None:
            load = 3 if self.plant.is_slow else 1
            for _ in range(3):
                nap(NAP * load)
                x = x + self.expert(x.repeat(32 * load, 1))[: len(x)]
        return self.head(x)


def lengths_of(case: Case) -> Callable[[Any], Any]:
    """Return a function that collates rows into a batch.

    For some kinds, the length of the batch differs between steps or ranks.
    """
    draw = torch.Generator().manual_seed(rank())
    computes = case.kind in COMPUTING

    def collated(rows: list[Tensor]) -> Tensor:
        batch = torch.stack(rows)
        length = 8 if computes else 1
        if case.kind == "lengths":
            length = 4 + 4 * int(torch.randint(0, 6, (), generator=draw))
        if case.kind == "longer" and rank() == case.slow_rank:
            length *= 3
        return batch[:, None].expand(-1, length, -1).contiguous() if computes else batch

    return collated


def loader_of(case: Case, plant: Plant, steps: int) -> DataLoader[Tensor]:
    """Return a loader for the batches of this rank."""
    data = Batches(steps * ROWS * case.ranks, lambda: plant.at("data"))
    sampler = DistributedSampler(data, num_replicas=case.ranks, rank=rank(), shuffle=False)
    return DataLoader(data, batch_size=ROWS, sampler=sampler, collate_fn=lengths_of(case))


class Napping(torch.optim.SGD):
    """An optimizer that sleeps if a delay is planted in it."""

    plant: Plant

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.plant.at("optimizer")
        return result


def optimizer_of(model: nn.Module, plant: Plant) -> torch.optim.Optimizer:
    """Create the optimizer of a model."""
    optimizer = Napping(model.parameters(), lr=1e-3)
    optimizer.plant = plant
    return optimizer


def plain(case: Case, plant: Plant, steps: int, said: list[str]) -> Any:
    """Run the loop of the documentation, with another model."""
    model = DistributedDataParallel(Model(plant))
    optimizer = optimizer_of(model, plant)
    loader = loader_of(case, plant, steps)
    with watched(model, optimizer, said) as monitor:
        for batch in monitor.data(loader):
            with monitor.step(batch):
                plant.begin()
                loss = model(batch).square().mean()
                plant.at("outside")
                loss.backward()
                plant.at("clip")
                optimizer.step()
                optimizer.zero_grad()
                plant.at("logging")
            validate(case, plant, monitor, model, batch)
    return monitor


def validate(case: Case, plant: Plant, monitor: Any, model: nn.Module, batch: Tensor) -> None:
    """Validate, if this is planted and due."""
    if case.kind == "validation" and not plant.step % plant.every:
        with monitor.stage("validate"), torch.no_grad():
            plant.at("validation")
            (model.module if isinstance(model, DistributedDataParallel) else model)(batch)


def engines(case: Case, plant: Plant, steps: int, said: list[str]) -> Any:
    """Run a loop with Fabric or Accelerate."""
    inner = Model(plant)
    if case.loop == "fabric":
        from lightning.fabric import Fabric

        engine: Any = Fabric(accelerator="cpu", devices=case.ranks, strategy="ddp")
        engine.launch()
        model, optimizer = engine.setup(inner, optimizer_of(inner, plant))
    else:
        from accelerate import Accelerator

        engine = Accelerator(cpu=True)
        model, optimizer = engine.prepare(inner, optimizer_of(inner, plant))
    loader = loader_of(case, plant, steps)
    with watched(model, optimizer, said, engine=engine) as monitor:
        for batch in monitor.data(loader):
            with monitor.step(batch):
                plant.begin()
                loss = model(batch).square().mean()
                plant.at("outside")
                engine.backward(loss)
                with monitor.phase("clip"):
                    plant.at("clip")
                optimizer.step()
                optimizer.zero_grad()
                plant.at("logging")
            validate(case, plant, monitor, inner, batch)
    return monitor


def units(batch: Tensor | dict[str, Tensor]) -> dict[str, int]:
    """Return the samples and tokens of a batch."""
    batch = batch["x"] if isinstance(batch, dict) else batch
    return {"samples": len(batch), "tokens": batch.numel() // WIDTH}


def watched(model: nn.Module, optimizer: Any, said: list[str], **more: Any) -> Any:
    """Create a monitor with the default schedule and a trace."""
    return lflops.monitor(
        model,
        optimizer,
        log=said.append,
        on_error="raise",
        html=False,
        dirpath=tempfile.mkdtemp(),
        units=units,
        **more,
    )


def lightning(case: Case, plant: Plant, steps: int, said: list[str]) -> Any:
    """Run a Trainer of Lightning."""
    from lightning.pytorch import LightningModule, Trainer

    from lflops.integrations.lightning.monitor import FlopsMonitor

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model(plant)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            plant.begin()
            loss = self.net(batch).square().mean()
            plant.at("outside")
            return loss

        def validation_step(self, batch: Tensor, _: int) -> None:
            plant.at("validation")
            self.net(batch)

        def on_train_batch_end(self, *_: Any) -> None:
            plant.at("logging")

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            plant.at("clip")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self, plant)

    monitor = FlopsMonitor(
        html=False, on_error="raise", units=units, dirpath=Path(tempfile.mkdtemp())
    )
    handler, logger = Said(said), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    trainer = Trainer(
        max_epochs=1,
        callbacks=[monitor],
        accelerator="cpu",
        strategy="ddp",
        devices=case.ranks,
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **(
            {"val_check_interval": plant.every, "num_sanity_val_steps": 0}
            if case.kind == "validation"
            else {}
        ),
    )
    to_validate = (
        DataLoader(torch.zeros(ROWS, WIDTH), batch_size=ROWS) if case.kind == "validation" else None
    )
    trainer.fit(Module(), loader_of(case, plant, steps), to_validate)
    logger.removeHandler(handler)
    return monitor


def pipeline(case: Case, plant: Plant, steps: int, said: list[str]) -> Any:
    """Run a pipeline of two stages. The stage of the slow rank has three times as many blocks."""
    model = nn.Sequential(*(Block(None) for _ in range(6 if plant.is_slow else 2)))
    optimizer = optimizer_of(model, plant)
    loader = loader_of(case, plant, steps)
    with watched(
        model, optimizer, said, topology=lambda each: {"data": 0, "pipeline": each}
    ) as monitor:
        for batch in monitor.data(loader):
            with monitor.step(batch):
                hidden = torch.empty(ROWS, WIDTH) if rank() else model(batch)
                if rank():
                    distributed.recv(hidden, 0)
                    loss = model(hidden.requires_grad_()).square().mean()
                    with monitor.phase("backward"):
                        loss.backward()
                    distributed.send(hidden.grad, 0)
                else:
                    distributed.send(hidden.detach(), 1)
                    gradient = torch.empty_like(hidden)
                    distributed.recv(gradient, 1)
                    with monitor.phase("backward"):
                        hidden.backward(gradient)
                optimizer.step()
                optimizer.zero_grad()
    return monitor


def hugging_face(case: Case, plant: Plant, steps: int, said: list[str]) -> Any:
    """Run the Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    from lflops.integrations.huggingface import FlopsCallback

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Model(plant)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            plant.begin()
            return {"loss": self.net(x).square().mean()}

    class Planted(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            plant.at("outside")
            return loss

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            plant.at("validation")
            return super().evaluation_loop(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            plant.at("logging")
            return loss

    model, collated = WithLoss(), lengths_of(case)
    data = Batches(steps * ROWS * case.ranks, lambda: plant.at("data"))
    callback = FlopsCallback(
        log=said.append, on_error="raise", html=False, dirpath=tempfile.mkdtemp(), units=units
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        max_steps=steps,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        **(
            {"eval_strategy": "steps", "eval_steps": plant.every}
            if case.kind == "validation"
            else {}
        ),
    )
    trainer = Planted(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=torch.zeros(ROWS * case.ranks, WIDTH) if case.kind == "validation" else None,
        data_collator=lambda rows: {"x": collated(rows)},
        optimizers=(optimizer_of(model, plant), None),
        callbacks=[callback],
    )
    clip = trainer.accelerator.clip_grad_norm_

    def clipped(*args: Any, **kwargs: Any) -> Any:
        plant.at("clip")
        return clip(*args, **kwargs)

    trainer.accelerator.clip_grad_norm_ = clipped
    trainer.train()
    return callback


class Said(logging.Handler):
    """A log handler that stores all messages."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


LOOPS: dict[str, Callable[..., Any]] = {
    "plain": plain,
    "fabric": engines,
    "accelerate": engines,
    "lightning": lightning,
    "transformers": hugging_face,
}


def train(case: Case) -> Outcome | None:
    """Run a training run. Returns its outcome on rank 0, and `None` on the other ranks."""
    torch.manual_seed(0)
    if not distributed.is_initialized():
        os.environ.update(RANK=str(rank()), WORLD_SIZE=str(case.ranks))
        distributed.init_process_group("gloo")
    plant, said = Plant(case), list[str]()
    steps = next((steps for kind, steps in LONGER.items() if kind in case.kind), STEPS)
    cores = os.sched_getaffinity(0)
    busy = contended(case) if case.kind == "contention" else None
    try:
        monitor = (pipeline if case.kind == "stages" else LOOPS[case.loop])(
            case, plant, steps, said
        )
    finally:
        os.sched_setaffinity(0, cores)
        if busy is not None:
            busy.kill()
    if not monitor.profiles:
        return None
    found = lflops.stragglers(monitor.profiles[-1])
    turns = (
        "lengths"
        if found.lengths_differ
        else "turns"
        if found.is_alternating
        else "busy"
        if found.busy_machine
        else None
    )
    if not found.rows:
        return Outcome(None, None, turns)
    first, *others = found.rows
    second = (others[0].module, others[0].phase, others[0].slow_rank) if others else None
    return Outcome((first.module, first.phase, first.slow_rank), first.cause, turns, second)


def is_right(case: Case, outcome: Outcome) -> bool:
    """Return whether the first straggler has the right rank, phase and cause.

    It must name no wrong module. If all ranks are alike, return whether no rank is named.
    """
    if case.kind in ALIKE:
        expected = {
            "none": {None, "busy"},
            "turns": {"turns"},
            "lengths": {"lengths", "busy", None},
        }[case.kind]
        return outcome.named is None and outcome.turns in expected
    slow = 0 if case.kind == "logging" else case.slow_rank
    if outcome.named is None or outcome.named[2] != slow:
        return False
    if case.kind == "two" and (
        outcome.second is None or outcome.second[1:] != ("data", (case.slow_rank + 1) % case.ranks)
    ):
        return False
    if case.kind in CAUSES:
        return outcome.cause == CAUSES[case.kind]
    place = (STEADY | EVENTS).get(case.kind, ("forward", 1))[0]
    if outcome.named[0] and (
        place not in {"forward", "backward"} or f"blocks.{SLOW_BLOCK}" not in outcome.named[0]
    ):
        return False
    return (
        outcome.named[1] in PHASES_OF.get(case.kind, PHASES_OF.get(place, {place}))
        and outcome.cause is None
    )


CAUSES = {
    "contention": "preempted",
    "thread": "thread",
    "longer": "work",
    "expert": "work",
    "stages": "work",
}
PHASES_OF = {
    "outside": {"forward"},
    "clip": {"clip", "other"},
    "gc": {"forward", "other"},
    "logging": {"other"},
}
"""Phases that are right for some kinds and places.

If a loop has no hook at a place, its time is in the phase before it, or in no phase.
"""


def contended(case: Case) -> subprocess.Popen[bytes] | None:
    """Give each rank its own core, and run another process on the core of the slow rank."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank() % len(cores)]})
    if rank() != case.slow_rank:
        return None
    return subprocess.Popen([sys.executable, "-c", BUSY])  # noqa: S603


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """Yield every kind with every loop, beginning with the fewest ranks."""
    for ranks in given.ranks:
        for number in range(given.repeat):
            for kind in given.kinds:
                for index, loop in enumerate(given.loops):
                    if kind == "stages" and (loop, ranks) != ("plain", 2):
                        continue
                    # With fewer cores than ranks, the other process would slow down several ranks.
                    if kind == "contention" and ranks > (os.cpu_count() or 1):
                        continue
                    yield Case(loop, kind, ranks, (number + index + 1) % ranks, number)


def costs() -> Iterator[str]:
    """Measure the cost of unprofiled steps that are compared between ranks.

    Yields lines with the time of a step's end, and the memory for its numbers.
    """
    batch, taken = torch.zeros(4, 3), {}
    for on_ranks in (False, True):
        run = Phases()
        phases = LoggedPhases(run.log, "train", HostClock())
        phases.connect()
        shapes = BatchReader().shapes(batch)
        clock = StepTimer(
            phases, None, None, 0, updating=frozenset(), scaled=False, on_ranks=on_ranks
        )
        for step in range(4):
            clock.batch(batch)
            clock.end(step)
        clock.allow_fast_path(math.inf)
        ends = []
        for _ in range(200):
            for phase in ("data", "transfer", "forward", "backward", "clip", "optimizer"):
                run.enter(phase, "train")
                run.leave(0)
            ends.append(seconds_of(HostClock(), partial(clock.fast_path.note, shapes)))
        clock.flush_fast_path(204)
        steps = [*clock.read()]
        read = [seconds_of(HostClock(), partial(clock.step, step)) for step in steps]
        taken[on_ranks] = median(ends), median(read)
    values = [clock.step(step) for step in steps]
    clean = UnprofiledSteps()
    sizes = []
    for number in (100, 100_000):
        clean.add(0, (replace(values[-1], index=index) for index in range(number)), ranks=2)
        sizes.append(sum(len(row) for rows in clean._rows.values() for _, row in rows))  # noqa: SLF001 - what it holds
    (alone, _), (end, value), sent = taken[False], taken[True], len(msgpack.encode(values[-50:]))
    yield f"The end of a clean step takes {end * 1e6:.1f} µs, in a run of one rank {alone * 1e6:.1f}. To make a value of the step takes"
    yield f"{value * 1e6:.0f} µs, every 50 steps for all of them; a thread sends these as {sent / 1e3:.0f} kB."
    yield f"Of each rank {sizes[0] / 1e3:.1f} kB of numbers are kept after 100 steps, {sizes[1] / 1e3:.1f} kB after 100,000."


def results(given: argparse.Namespace, log: Path) -> list[tuple[Case, Outcome]]:
    """Return the runs in the log, and run missing runs while there is time left."""
    lines = log.read_text().splitlines() if log.exists() else []
    known: dict[Case, tuple[Case, Outcome]] = {}
    for of_case, (named, cause, turns, *rest) in map(json.loads, lines):
        outcome = Outcome(
            named and tuple(named), cause, turns, *(each and tuple(each) for each in rest)
        )
        known[Case(*of_case)._replace(slow_rank=0)] = Case(*of_case), outcome
    until, group, members, found = time.monotonic() + 60 * given.minutes, None, 0, []
    with log.open("a") as file:
        for case in cases(given):
            key = case._replace(slow_rank=0)
            if key not in known and time.monotonic() < until:
                if group is not None and members != case.ranks:
                    group.end()
                    group = None
                group, members = group or Ranks(case.ranks), case.ranks
                try:
                    known[key] = case, (outcome := group.run(train, case)[0])
                except Exception as error:  # noqa: BLE001 - of a process that ended, or of the training
                    print(f"failed: {case}: {type(error).__name__}: {error}", flush=True)
                    group.end()
                    group = None
                    continue
                file.write(json.dumps([case, outcome]) + "\n")
                file.flush()
                print("right" if is_right(case, outcome) else "WRONG", case, outcome, flush=True)
            if key in known:
                found.append(known[key])
    if group is not None:
        group.end()
    return found


def main() -> None:
    """Train, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--loops", nargs="+", default=list(LOOPS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--log", type=Path, help="of the trainings, one a line")
    given = parser.parse_args()
    busy = os.getloadavg()[0]
    found = results(given, given.log or Path(tempfile.gettempdir()) / "lflops-ranks-planted.jsonl")
    columns = [(ranks, loop) for ranks in given.ranks for loop in given.loops]
    lines = [
        f"{' and '.join(map(str, given.ranks))} gloo ranks, default schedule. Blocks of {3e3 * NAP:.0f} ms, most of it sleep.",
        f"{DELAY * 1e3:.0f} ms are planted, {RARE * 1e3:.0f} in every 50th step.",
        f"All processes share this machine's cores with other programs: its load was {busy:.0f} when the table was made.",
        "A training is right if its first row has the rank and the phase or the cause, and where ranks are alike, if no rank is named.",
        "`busy`: no rank is named, and the report says `cannot tell`, because all ranks waited for their cores.",
        "",
        f"| planted | {' | '.join(f'{loop}, {ranks}' for ranks, loop in columns)} |",
        f"|---|{'--:|' * len(columns)}",
    ]
    for kind in given.kinds:
        cells = []
        for column in columns:
            of_cell = [
                is_right(case, outcome)
                for case, outcome in found
                if (case.ranks, case.loop) == column and case.kind == kind
            ]
            cells.append(f"{sum(of_cell)} of {len(of_cell)}" if of_cell else "–")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    planted, alike = (
        [is_right(*each) for each in found if (each[0].kind in ALIKE) == are]
        for are in (False, True)
    )
    lines += [
        "",
        f"{sum(planted)} of {len(planted)} planted ranks are right; {sum(alike)} of {len(alike)} trainings of equal ranks. Missed:",
        "",
    ]
    for case, outcome in found:
        if not is_right(case, outcome):
            named = outcome.named or outcome.turns or "nobody"
            lines.append(
                f"- {case.loop}, {case.kind}, rank {case.slow_rank} of {case.ranks}: {named}, {outcome.cause}"
            )
    lines += ["", *costs()]
    record("ranks_planted.py", "A slow rank, with the default schedule", lines)


if __name__ == "__main__":
    main()
