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
    """The fault in one or two words, and the module that contains it, if any."""

    word: str
    module: str = ""


class Kind(NamedTuple):
    """A kind of fault.

    Attributes:
        label: The label that a verdict must have.
        change: Function that plants the fault.
        loops: Loops in which the fault can be planted.
        ranks: Number of ranks.
        can_choose: Whether the fault costs the requested seconds. Otherwise, its cost is fixed.
    """

    label: Label
    change: Change
    loops: tuple[str, ...] = ("plain", "lightning")
    ranks: int = 1
    can_choose: bool = True


KINDS: dict[str, Kind] = {}


def kind(word: str, module: str = "", **facts: Any) -> Callable[[Change], Change]:
    """Register a function as a kind of fault, under the name of the function."""

    def taken(change: Change) -> Change:
        KINDS[change.__name__] = Kind(Label(word, module), change, **facts)
        return change

    return taken


def spin(seconds: float) -> None:
    """Compute on this core for some seconds."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(200))


def before(owner: Any, name: str, work: Callable[..., None]) -> None:
    """Run a function before a method of one object."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def both(*args: Any, **kwargs: Any) -> Any:
        work(*args)
        return method(*args, **kwargs)

    setattr(owner, name, both)


# Faults of the data loader.


@kind("data")
def loader_waits(parts: Parts, _: random.Random, seconds: float) -> None:
    """A sample comes from a slow disk."""
    parts.data.first_of_batch = lambda _batch: time.sleep(seconds)


@kind("data")
def transform_is_slow(parts: Parts, _: random.Random, seconds: float) -> None:
    """A sample is computed slowly."""
    parts.data.first_of_batch = lambda _batch: spin(seconds)


@kind("data")
def loader_spikes(parts: Parts, draw: random.Random, seconds: float) -> None:
    """One batch in several takes long."""
    every = draw.randint(4, 9)
    parts.data.first_of_batch = lambda batch: (
        time.sleep(seconds * every) if batch % every == 0 else None
    )


@kind("data", can_choose=False)
def too_few_workers(parts: Parts, _: random.Random, seconds: float) -> None:
    """One process loads batches, and each batch takes longer than a step."""
    parts.workers = 1
    parts.data.first_of_batch = lambda _batch: time.sleep(2 * parts.usual_seconds + seconds)


@kind("data")
def collates_in_python(parts: Parts, _: random.Random, seconds: float) -> None:
    """A Python loop collates samples."""
    parts.collating = lambda: spin(seconds)


# Faults in the step, outside the layers.


@kind("outside")
def reads_numbers_one_by_one(parts: Parts, _: random.Random, seconds: float) -> None:
    """The step reads values of an output with `.item()`."""

    def read() -> None:
        values, until = torch.rand(64), time.perf_counter() + seconds
        while time.perf_counter() < until:
            sum(value.item() for value in values)

    parts.in_step = read


@kind("outside")
def metric_in_the_step(parts: Parts, _: random.Random, seconds: float) -> None:
    """The step computes a metric from the outputs of all steps so far."""

    def compute() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            torch.rand(4000).sort().values.cumsum(0)

    parts.in_step = compute


@kind("outside")
def saves_inputs_in_the_step(parts: Parts, _: random.Random, seconds: float) -> None:
    """The step serializes batches, in order to look at them later."""

    def save() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            torch.save(torch.rand(2000), io.BytesIO())

    parts.in_step = save


@kind("outside")
def augments_in_the_step(parts: Parts, _: random.Random, seconds: float) -> None:
    """A Python loop creates noise for each row."""

    def augment() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            torch.stack([torch.randn(16) for _ in range(16)])

    parts.in_step = augment


# Faults in layers.


def in_block(parts: Parts, work: Callable[[], None]) -> None:
    """Run a function in the forward of one of the equal blocks."""
    parts.blocks[parts.slow_block].before = work


@kind("slow module", "block")
def block_sleeps(parts: Parts, _: random.Random, seconds: float) -> None:
    """A layer waits for something, such as a lock."""
    in_block(parts, lambda: time.sleep(seconds))


@kind("slow module", "block")
def block_prints(parts: Parts, _: random.Random, seconds: float) -> None:
    """A layer computes statistics of its input in Python."""
    in_block(parts, lambda: spin(seconds))


@kind("tiny operators", "block")
def block_has_tiny_operators(parts: Parts, _: random.Random, seconds: float) -> None:
    """A layer uses a loop over rows instead of one operator."""
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
    """A NumPy constant has turned a layer into float64."""
    parts.blocks[parts.slow_block].widen()


@kind("wide dtype", can_choose=False)
def all_in_float64(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """The whole model is in float64."""
    parts.widen()


@kind("recompute", can_choose=False)
def checkpoints_without_need(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """All blocks are recomputed in backward, although there is enough memory."""
    for block in parts.blocks:
        block.around = functools.partial(checkpoint, use_reentrant=False)


@kind("unused work", can_choose=False)
def output_is_not_used(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """A second branch, as large as the blocks, is not used by the loss."""
    parts.add_unused_branch()


@kind("frozen", can_choose=False)
def frozen_by_mistake(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """All parameters are frozen, except the parameters of the last layer."""
    for block in parts.blocks:
        block.requires_grad_(requires_grad=False)


@kind("eval mode", can_choose=False)
def left_in_eval_mode(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """After a custom validation, the model was never set back to training mode."""
    parts.in_step = lambda: parts.model.eval() and None


@kind("padding", can_choose=False)
def batch_is_mostly_padding(parts: Parts, draw: random.Random, _seconds: float) -> None:
    """Rows are padded to the largest possible length, with a mask."""
    parts.pad(draw.uniform(2.0, 3.0))


@kind("hooks")
def anomaly_detection(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """Anomaly detection is still on, after a search for a NaN."""
    parts.contexts.append(lambda: torch.autograd.set_detect_anomaly(mode=True, check_nan=True))


KINDS["anomaly_detection"] = KINDS["anomaly_detection"]._replace(can_choose=False)


@kind("hooks")
def hooks_on_all_layers(parts: Parts, _: random.Random, seconds: float) -> None:
    """Hooks on all layers compute statistics of activations."""
    layers = [each for block in parts.blocks for each in block.modules() if not [*each.children()]]
    for layer in layers:
        layer.register_forward_hook(lambda *_each: spin(seconds / len(layers)))


# Faults in backward and in the optimizer.


@kind("backward twice", can_choose=False)
def backward_twice(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """The graph is retained, and backward runs again for a part of the loss."""

    def twice(loss: Tensor) -> None:
        (0.5 * loss).backward(retain_graph=True)
        (0.5 * loss).backward()

    parts.backward = twice


@kind("clip", loops=("plain", "lightning"))
def clips_by_a_loop(parts: Parts, _: random.Random, seconds: float) -> None:
    """A loop computes and reads the norm of each parameter separately."""

    def clip() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for parameter in parts.model.parameters():
                if parameter.grad is not None:
                    float(parameter.grad.norm())

    parts.clip = clip


@kind("optimizer")
def optimizer_by_hand(parts: Parts, _: random.Random, seconds: float) -> None:
    """The optimizer is a slow implementation from a paper."""

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = base.step(self, *args, **kwargs)
        spin(seconds)
        return result

    base: Any = type(parts.optimizer)
    parts.optimizer = type("OfAPaper", (base,), {"step": slow})(parts.model.parameters(), lr=1e-4)


@kind("outside all phases")
def averages_weights_by_a_loop(parts: Parts, _: random.Random, seconds: float) -> None:
    """Every step updates an exponential average of the weights in a loop."""
    copies = [parameter.detach().clone() for parameter in parts.model.parameters()]

    def average() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for copy, parameter in zip(copies, parts.model.parameters(), strict=True):
                copy.mul_(0.999).add_(parameter.detach(), alpha=0.001)

    parts.after_step = lambda _step: average()


@kind("outside all phases")
def logs_norms_of_gradients(parts: Parts, _: random.Random, seconds: float) -> None:
    """Every step computes the norm of every parameter."""

    def norms() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            [float(parameter.detach().norm()) for parameter in parts.model.parameters()]

    parts.after_step = lambda _step: norms()


# Faults in logging, checkpoints and validation.


@kind("logging")
def logs_histograms(parts: Parts, draw: random.Random, seconds: float) -> None:
    """Histograms are written to TensorBoard every few steps."""
    every = draw.choice((1, 2, 5))
    parts.log_every, parts.logging = every, lambda: parts.write_histograms(seconds * every)


@kind("logging")
def logs_images(parts: Parts, draw: random.Random, seconds: float) -> None:
    """Images are written to TensorBoard about every tenth step."""
    every = draw.randint(8, 12)
    parts.log_every, parts.logging = every, lambda: parts.write_images(seconds * every)


@kind("checkpoint")
def saves_too_often(parts: Parts, draw: random.Random, seconds: float) -> None:
    """A checkpoint is saved every few steps."""
    parts.save_every = every = draw.randint(4, 8)
    parts.saving = lambda: time.sleep(seconds * every)


@kind("validation")
def validates_too_often(parts: Parts, draw: random.Random, seconds: float) -> None:
    """Validation runs every few steps."""
    parts.validate_every = every = draw.randint(8, 16)
    parts.validating = lambda: spin(seconds * every)


# Faults of the process and of the machine.


@kind("garbage collection")
def collects_garbage(parts: Parts, draw: random.Random, seconds: float) -> None:
    """The loop calls the garbage collector every few steps, with many live objects."""
    every = draw.randint(2, 6)
    parts.keep = [[] for _ in range(50_000)]
    took = time.perf_counter()
    gc.collect()
    once = time.perf_counter() - took
    parts.keep += [[] for _ in range(int(50_000 * max(seconds * every / once - 1, 0)))]
    parts.after_step = lambda step: None if step % every else gc.collect() and None


@kind("compilation", loops=("plain",), can_choose=False)
def recompiles_for_each_shape(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """Lengths differ between batches, but the model is compiled for static shapes."""
    parts.compile(dynamic=False)
    parts.vary_rows()


@kind("graph breaks", loops=("plain",), can_choose=False)
def breaks_the_graph(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """Each block has a print, which breaks the graph."""
    for block in parts.blocks:
        block.before = torch._dynamo.graph_break  # noqa: SLF001 - has the effect of a print
    parts.compile(dynamic=True)


@kind("threads", can_choose=False)
def more_threads_than_cores(_parts: Parts, draw: random.Random, _seconds: float) -> None:
    """More threads compute than there are cores."""
    torch.set_num_threads((os.cpu_count() or 1) * draw.choice((2, 4)))


@kind("busy machine", can_choose=False)
def core_is_shared(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """As many other processes compute as there are cores."""
    for _each in range(os.cpu_count() or 1):
        parts.others.append(subprocess.Popen([sys.executable, "-c", BUSY]))  # noqa: S603


@kind("another thread", can_choose=False)
def thread_computes(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """Another Python thread holds the interpreter lock for half of the time."""

    def compute() -> None:
        while not parts.is_over:
            spin(5e-3)
            time.sleep(5e-3)

    threading.Thread(target=compute, daemon=True).start()


@kind("memory grows", can_choose=False)
def memory_creeps(parts: Parts, draw: random.Random, _seconds: float) -> None:
    """Tensors are kept after each step, such as losses or outputs for a metric."""
    kept: list[Tensor] = []
    # The run takes a minute or more, so that the ledger can detect the growth.
    parts.data.batches = 4000
    size = draw.randint(3, 6) << 15
    parts.after_step = lambda _step: kept.append(torch.ones(size))


# Faults of runs with several ranks. One rank is slow, or all ranks have the same fault.


def on_one(plant: Change) -> Change:
    """Plant a fault only on the last rank."""

    @functools.wraps(plant)
    def planted(parts: Parts, draw: random.Random, seconds: float) -> None:
        if parts.rank == parts.ranks - 1:
            plant(parts, draw, seconds)

    return planted


@kind("slow rank: forward", "block", loops=("plain",), ranks=2)
@on_one
def rank_slow_in_forward(parts: Parts, _: random.Random, seconds: float) -> None:
    """One rank is slow in a block."""
    in_block(parts, lambda: time.sleep(seconds))


@kind("slow rank: data", loops=("plain",), ranks=2)
@on_one
def rank_slow_in_data(parts: Parts, _: random.Random, seconds: float) -> None:
    """One rank is slow in each batch."""
    parts.data.first_of_batch = lambda _batch: time.sleep(seconds)


@kind("slow rank: optimizer", loops=("plain",), ranks=2)
@on_one
def rank_slow_in_optimizer(parts: Parts, _: random.Random, seconds: float) -> None:
    """One rank is slow in each optimizer step."""
    step = parts.optimizer.step

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return step(*args, **kwargs)

    parts.optimizer.step = slow  # type: ignore[method-assign]


@kind("slow rank: logging", loops=("plain",), ranks=2)
@on_one
def rank_logs(parts: Parts, _: random.Random, seconds: float) -> None:
    """One rank logs every fifth step."""
    parts.log_every, parts.logging = 5, lambda: time.sleep(seconds * 5)


@kind("slow rank: more work", loops=("plain",), ranks=2, can_choose=False)
@on_one
def rank_has_longer_data(parts: Parts, draw: random.Random, _seconds: float) -> None:
    """The batches of one rank have more rows."""
    parts.data.more_rows(draw.uniform(2.0, 3.0))


@kind("ranks take turns", loops=("plain",), ranks=2)
def ranks_take_turns(parts: Parts, _: random.Random, seconds: float) -> None:
    """The ranks are slow alternately."""
    parts.data.first_of_batch = lambda batch: (
        time.sleep(2 * seconds) if batch % parts.ranks == parts.rank else None
    )


@kind("small buckets", loops=("plain",), ranks=2, can_choose=False)
def small_buckets(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """Gradients are communicated one by one."""
    parts.ddp["bucket_cap_mb"] = 1e-4


@kind("find unused parameters", loops=("plain",), ranks=2, can_choose=False)
def looks_for_unused_parameters(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """DDP searches for unused parameters, although all are used."""
    parts.ddp["find_unused_parameters"] = True


@kind("communication", loops=("plain",), ranks=2, can_choose=False)
def exchanges_after_backward(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """A loop averages the gradients after the whole of backward."""
    parts.average_by_hand()


# Runs without faults, although some of them may look faulty.


@kind("")
def nothing(_parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """The run has no fault."""


@kind("", loops=("plain",), ranks=2)
def nothing_on_two_ranks(_parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """The run has two ranks and no fault."""


@kind("")
def validates_and_saves_seldom(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """Validation and checkpoints are quick, and happen every 80 steps."""
    parts.validate_every = parts.save_every = 80
    parts.validating = parts.saving = lambda: spin(1e-3)


@kind("")
def lengths_differ(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """The number of rows differs between batches."""
    parts.vary_rows()


@kind("", loops=("plain",))
def compiled(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """The model is compiled with a backend that generates no code.

    By default, torch.compile does not compile recurrent models, so a setting allows it.
    """
    torch._dynamo.config.allow_rnn = True  # noqa: SLF001 - a setting that users make
    parts.compile(dynamic=True)


@kind("")
def workers_are_enough(parts: Parts, _draw: random.Random, _seconds: float) -> None:
    """One process loads batches faster than they are used."""
    parts.workers = 1
