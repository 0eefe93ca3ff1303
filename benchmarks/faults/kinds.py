"""Define the kinds of faults: each has a label, and a change to a training run without faults.

A kind receives the parts of a training run, a source of random numbers, and the seconds that it
must cost per step, if it can choose them. Planted times are real: they use the processor or the
wall clock, never the clock of a test.
"""

import functools
import gc
import io
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.faults.parts import Parts
from benchmarks.results import BUSY

Change = Callable[[Parts, random.Random, float], None]


class Label(NamedTuple):
    """What is wrong, in a word; and the module that it is in, if it is in one."""

    word: str
    module: str = ""


class Kind(NamedTuple):
    """A fault.

    Attributes:
        label: What a verdict has to say.
        change: Plants it.
        loops: Those that it can be planted in.
        ranks: So many processes train.
        can_choose: Whether it costs what it is asked to; else what it costs is its nature.
    """

    label: Label
    change: Change
    loops: tuple[str, ...] = ("plain", "lightning")
    ranks: int = 1
    can_choose: bool = True


KINDS: dict[str, Kind] = {}


def kind(word: str, module: str = "", **facts: Any) -> Callable[[Change], Change]:
    """Take a function as the kind of its name."""

    def taken(change: Change) -> Change:
        KINDS[change.__name__] = Kind(Label(word, module), change, **facts)
        return change

    return taken


def spin(seconds: float) -> None:
    """Compute on this core for so long."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(200))


def before(owner: Any, name: str, work: Callable[..., None]) -> None:
    """Do something before a method of this one object."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def both(*args: Any, **kwargs: Any) -> Any:
        work(*args)
        return method(*args, **kwargs)

    setattr(owner, name, both)


# The loader.


@kind("data")
def loader_waits(parts: Parts, _: random.Random, seconds: float) -> None:
    """A sample comes from a slow disk."""
    parts.data.first_of_batch = lambda _batch: time.sleep(seconds)


@kind("data")
def transform_is_slow(parts: Parts, _: random.Random, seconds: float) -> None:
    """A sample is computed."""
    parts.data.first_of_batch = lambda _batch: spin(seconds)


@kind("data")
def loader_spikes(parts: Parts, draw: random.Random, seconds: float) -> None:
    """Every so manieth batch takes long."""
    every = draw.randint(4, 9)
    parts.data.first_of_batch = lambda batch: (
        time.sleep(seconds * every) if batch % every == 0 else None
    )


@kind("data", can_choose=False)
def too_few_workers(parts: Parts, _: random.Random, seconds: float) -> None:
    """One process makes batches, and each takes longer than a step of the watched training."""
    parts.workers = 1
    parts.data.first_of_batch = lambda _batch: time.sleep(2 * parts.usual_seconds + seconds)


@kind("data")
def collates_in_python(parts: Parts, _: random.Random, seconds: float) -> None:
    """Samples are put together by a loop."""
    parts.collating = lambda: spin(seconds)


# The step outside of the layers.


@kind("outside")
def reads_numbers_one_by_one(parts: Parts, _: random.Random, seconds: float) -> None:
    """Values of an output are taken by `.item()`."""

    def read() -> None:
        values, until = torch.rand(64), time.perf_counter() + seconds
        while time.perf_counter() < until:
            sum(value.item() for value in values)

    parts.in_step = read


@kind("outside")
def metric_in_the_step(parts: Parts, _: random.Random, seconds: float) -> None:
    """A metric is computed from the outputs of all steps so far."""

    def compute() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            torch.rand(4000).sort().values.cumsum(0)

    parts.in_step = compute


@kind("outside")
def saves_inputs_in_the_step(parts: Parts, _: random.Random, seconds: float) -> None:
    """Batches are serialized, to look at later."""

    def save() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            torch.save(torch.rand(2000), io.BytesIO())

    parts.in_step = save


@kind("outside")
def augments_in_the_step(parts: Parts, _: random.Random, seconds: float) -> None:
    """Noise is made for each row by a loop."""

    def augment() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            torch.stack([torch.randn(16) for _ in range(16)])

    parts.in_step = augment


# Layers.


def in_block(parts: Parts, work: Callable[[], None]) -> None:
    """Work in the forward of one of the equal blocks."""
    parts.blocks[parts.slow_block].before = work


@kind("slow module", "block")
def block_sleeps(parts: Parts, _: random.Random, seconds: float) -> None:
    """A layer waits for something, as for a lock."""
    in_block(parts, lambda: time.sleep(seconds))


@kind("slow module", "block")
def block_prints(parts: Parts, _: random.Random, seconds: float) -> None:
    """A layer computes statistics of what goes through it, in Python."""
    in_block(parts, lambda: spin(seconds))


@kind("tiny operators", "block")
def block_has_tiny_operators(parts: Parts, _: random.Random, seconds: float) -> None:
    """A loop over rows where one operator would do."""
    x, took = torch.rand(8), time.perf_counter()
    for _each in range(1000):
        x * 1.0
    each = (time.perf_counter() - took) / 1000

    def loop() -> None:
        for _each in range(max(int(seconds / each), 1)):
            x * 1.0

    in_block(parts, loop)


@kind("wide dtype", "block", can_choose=False)
def block_in_float64(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """A constant of NumPy has made a layer double."""
    parts.blocks[parts.slow_block].widen()


@kind("wide dtype", can_choose=False)
def all_in_float64(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """The whole model is double."""
    parts.widen()


@kind("recompute", can_choose=False)
def checkpoints_without_need(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """All blocks are run again in backward, though there is room."""
    for block in parts.blocks:
        block.around = functools.partial(checkpoint, use_reentrant=False)


@kind("unused work", can_choose=False)
def output_is_not_used(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """A second head, as large as the blocks, that no loss reads."""
    parts.add_unused_branch()


@kind("frozen", can_choose=False)
def frozen_by_mistake(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """All parameters but the last layer's are without gradient."""
    for block in parts.blocks:
        block.requires_grad_(requires_grad=False)


@kind("eval mode", can_choose=False)
def left_in_eval_mode(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """After a validation of the user's own the model was never set back."""
    parts.in_step = lambda: parts.model.eval() and None


@kind("padding", can_choose=False)
def batch_is_mostly_padding(parts: Parts, draw: random.Random, _seconds: float) -> None:
    """Rows are filled up to the longest that there can be, with a mask that says so."""
    parts.pad(draw.uniform(2.0, 3.0))


@kind("hooks")
def anomaly_detection(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """It was switched on to find a NaN."""
    parts.contexts.append(lambda: torch.autograd.set_detect_anomaly(mode=True, check_nan=True))


KINDS["anomaly_detection"] = KINDS["anomaly_detection"]._replace(can_choose=False)


@kind("hooks")
def hooks_on_all_layers(parts: Parts, _: random.Random, seconds: float) -> None:
    """Statistics of activations are taken by hooks."""
    layers = [each for block in parts.blocks for each in block.modules() if not [*each.children()]]
    for layer in layers:
        layer.register_forward_hook(lambda *_each: spin(seconds / len(layers)))


# Backward and the optimizer.


@kind("backward twice", can_choose=False)
def backward_twice(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """The graph is kept, and gone through again for a part of the loss."""

    def twice(loss: Tensor) -> None:
        (0.5 * loss).backward(retain_graph=True)
        (0.5 * loss).backward()

    parts.backward = twice


@kind("clip", loops=("plain", "lightning"))
def clips_by_a_loop(parts: Parts, _: random.Random, seconds: float) -> None:
    """Each parameter's norm is taken by itself, and read."""

    def clip() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for parameter in parts.model.parameters():
                if parameter.grad is not None:
                    float(parameter.grad.norm())

    parts.clip = clip


@kind("optimizer")
def optimizer_by_hand(parts: Parts, _: random.Random, seconds: float) -> None:
    """An optimizer that was written for a paper."""

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = base.step(self, *args, **kwargs)
        spin(seconds)
        return result

    base: Any = type(parts.optimizer)
    parts.optimizer = type("OfAPaper", (base,), {"step": slow})(parts.model.parameters(), lr=1e-4)


@kind("outside all phases")
def averages_weights_by_a_loop(parts: Parts, _: random.Random, seconds: float) -> None:
    """An exponential average of the weights, in every step."""
    copies = [parameter.detach().clone() for parameter in parts.model.parameters()]

    def average() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for copy, parameter in zip(copies, parts.model.parameters(), strict=True):
                copy.mul_(0.999).add_(parameter.detach(), alpha=0.001)

    parts.after_step = lambda _step: average()


@kind("outside all phases")
def logs_norms_of_gradients(parts: Parts, _: random.Random, seconds: float) -> None:
    """Of every parameter, in every step."""

    def norms() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            [float(parameter.detach().norm()) for parameter in parts.model.parameters()]

    parts.after_step = lambda _step: norms()


# Logging, checkpoints, validation.


@kind("logging")
def logs_histograms(parts: Parts, draw: random.Random, seconds: float) -> None:
    """To TensorBoard, every few steps."""
    every = draw.choice((1, 2, 5))
    parts.log_every, parts.logging = every, lambda: parts.write_histograms(seconds * every)


@kind("logging")
def logs_images(parts: Parts, draw: random.Random, seconds: float) -> None:
    """To TensorBoard, every tenth step or so."""
    every = draw.randint(8, 12)
    parts.log_every, parts.logging = every, lambda: parts.write_images(seconds * every)


@kind("checkpoint")
def saves_too_often(parts: Parts, draw: random.Random, seconds: float) -> None:
    """Every few steps."""
    parts.save_every = every = draw.randint(4, 8)
    parts.saving = lambda: time.sleep(seconds * every)


@kind("validation")
def validates_too_often(parts: Parts, draw: random.Random, seconds: float) -> None:
    """Every few steps."""
    parts.validate_every = every = draw.randint(8, 16)
    parts.validating = lambda: spin(seconds * every)


# The process and the machine.


@kind("garbage collection")
def collects_garbage(parts: Parts, draw: random.Random, seconds: float) -> None:
    """By hand, every so manieth step, with many objects that live."""
    every = draw.randint(2, 6)
    parts.keep = [[] for _ in range(50_000)]
    took = time.perf_counter()
    gc.collect()
    once = time.perf_counter() - took
    parts.keep += [[] for _ in range(int(50_000 * max(seconds * every / once - 1, 0)))]
    parts.after_step = lambda step: None if step % every else gc.collect() and None


@kind("compilation", loops=("plain",), can_choose=False)
def recompiles_for_each_shape(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """Lengths differ, and shapes are static."""
    parts.compile(dynamic=False)
    parts.vary_rows()


@kind("graph breaks", loops=("plain",), can_choose=False)
def breaks_the_graph(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """A print in each block."""
    for block in parts.blocks:
        block.before = torch._dynamo.graph_break  # noqa: SLF001 - what a print does
    parts.compile(dynamic=True)


@kind("threads", can_choose=False)
def more_threads_than_cores(_parts: Parts, draw: random.Random, _seconds: float) -> None:
    """Computing takes turns."""
    torch.set_num_threads((os.cpu_count() or 1) * draw.choice((2, 4)))


@kind("busy machine", can_choose=False)
def core_is_shared(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """As many other processes as cores compute."""
    for _each in range(os.cpu_count() or 1):
        parts.others.append(subprocess.Popen([sys.executable, "-c", BUSY]))  # noqa: S603


@kind("another thread", can_choose=False)
def thread_computes(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """A thread of Python's holds the interpreter lock half of the time."""

    def compute() -> None:
        while not parts.is_over:
            spin(5e-3)
            time.sleep(5e-3)

    threading.Thread(target=compute, daemon=True).start()


@kind("memory grows", can_choose=False)
def memory_creeps(parts: Parts, draw: random.Random, _seconds: float) -> None:
    """Losses are kept with their graphs, or outputs for a metric."""
    kept: list[Tensor] = []
    parts.data.batches = 4000  # of a minute or more, in which the ledger sees it
    size = draw.randint(3, 6) << 15
    parts.after_step = lambda _step: kept.append(torch.ones(size))


# Several ranks. One of them is slow, or all have something in common.


def on_one(plant: Change) -> Change:
    """On the last rank alone."""

    @functools.wraps(plant)
    def planted(parts: Parts, draw: random.Random, seconds: float) -> None:
        if parts.rank == parts.ranks - 1:
            plant(parts, draw, seconds)

    return planted


@kind("slow rank: forward", "block", loops=("plain",), ranks=2)
@on_one
def rank_slow_in_forward(parts: Parts, _: random.Random, seconds: float) -> None:
    """In one block."""
    in_block(parts, lambda: time.sleep(seconds))


@kind("slow rank: data", loops=("plain",), ranks=2)
@on_one
def rank_slow_in_data(parts: Parts, _: random.Random, seconds: float) -> None:
    """In each batch."""
    parts.data.first_of_batch = lambda _batch: time.sleep(seconds)


@kind("slow rank: optimizer", loops=("plain",), ranks=2)
@on_one
def rank_slow_in_optimizer(parts: Parts, _: random.Random, seconds: float) -> None:
    """In each step."""
    step = parts.optimizer.step

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return step(*args, **kwargs)

    parts.optimizer.step = slow  # type: ignore[method-assign]


@kind("slow rank: logging", loops=("plain",), ranks=2)
@on_one
def rank_logs(parts: Parts, _: random.Random, seconds: float) -> None:
    """In every fifth step."""
    parts.log_every, parts.logging = 5, lambda: time.sleep(seconds * 5)


@kind("slow rank: more work", loops=("plain",), ranks=2, can_choose=False)
@on_one
def rank_has_longer_data(parts: Parts, draw: random.Random, _seconds: float) -> None:
    """Its batches have more rows."""
    parts.data.more_rows(draw.uniform(2.0, 3.0))


@kind("ranks take turns", loops=("plain",), ranks=2)
def ranks_take_turns(parts: Parts, _: random.Random, seconds: float) -> None:
    """Each is slow in the steps that are its own."""
    parts.data.first_of_batch = lambda batch: (
        time.sleep(2 * seconds) if batch % parts.ranks == parts.rank else None
    )


@kind("small buckets", loops=("plain",), ranks=2, can_choose=False)
def small_buckets(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """Gradients are exchanged one by one."""
    parts.ddp["bucket_cap_mb"] = 1e-4


@kind("find unused parameters", loops=("plain",), ranks=2, can_choose=False)
def looks_for_unused_parameters(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """All are used."""
    parts.ddp["find_unused_parameters"] = True


@kind("communication", loops=("plain",), ranks=2, can_choose=False)
def exchanges_after_backward(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """Gradients are averaged by hand, when all of backward is over."""
    parts.average_by_hand()


# Trainings in which nothing is wrong, though some of it may seem so.


@kind("")
def nothing(_parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """As it should be."""


@kind("", loops=("plain",), ranks=2)
def nothing_on_two_ranks(_parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """As it should be."""


@kind("")
def validates_and_saves_seldom(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """Every 80th step, quickly."""
    parts.validate_every = parts.save_every = 80
    parts.validating = parts.saving = lambda: spin(1e-3)


@kind("")
def lengths_differ(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """Batches have more rows or fewer."""
    parts.vary_rows()


@kind("", loops=("plain",))
def compiled(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """With a backend that generates no code.

    Of a recurrent model dynamo leaves its graphs, unless it is told not to.
    """
    torch._dynamo.config.allow_rnn = True  # noqa: SLF001 - a setting that users make
    parts.compile(dynamic=True)


@kind("")
def workers_are_enough(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """A process makes batches faster than they are used."""
    parts.workers = 1
