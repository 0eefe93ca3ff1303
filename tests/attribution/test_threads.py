"""Test counts when several threads run.

One model may run on several threads, or several threads may each run a model.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

import lflops
from lflops import Profile
from tests.support.processes import anywhere
from tests.support.profile_checks import calls, flops, macs
from tests.support.small_models import (
    Block,
    Projections,
    Towers,
    between_linears,
    down,
    hidden,
    sequence,
    square,
    tokens,
    up,
    wide,
)

PATIENCE = 300
"""Seconds for which a thread waits for another thread before the test fails."""


class TowersOnThreads(Towers):
    """A model that runs each tower on its own thread, both at the same time.

    The inputs of the towers are computed on the main thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(hidden, hidden)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        both = threading.Barrier(2, timeout=PATIENCE)

        def run(tower: nn.Module, x: Tensor) -> Tensor:
            both.wait()
            return tower(x)

        stems = [self.stem(a), self.stem(b)]
        with ThreadPoolExecutor(2) as workers:
            outputs = list(workers.map(run, [self.a, self.b], stems))
        return self.head(outputs[0] * outputs[1])


def towers_on_threads() -> Profile:
    """Count one pass."""
    return lflops.count(TowersOnThreads(), (sequence(), sequence()), backward=True)


def steps_of_towers_on_threads() -> Profile:
    """Count two forward passes, followed by their backward passes."""
    model = TowersOnThreads()
    with lflops.counting(model) as counted:
        losses = [model(sequence(), sequence()).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
    return counted.profile


@anywhere
def test_towers_on_two_threads_keep_their_rows(run: Any) -> None:
    """The work of each tower belongs to that tower, in forward and in backward.

    Both threads give their autograd nodes the same numbers. Backward runs on the main thread, and
    still distinguishes them.
    """
    profile = run(towers_on_threads)
    towers = {"a.up": up, "a.down": down, "b.up": up, "b.down": down}
    assert {"stem": 2 * square, **towers, "head": square} == macs(profile, "forward")
    assert {
        "stem": 2 * square,
        **{row: 2 * cost for row, cost in towers.items()},
        "head": 2 * square,
    } == macs(profile, "backward")
    assert {
        "": 1,
        "stem": 2,
        "a": 1,
        "a.up": 1,
        "a.down": 1,
        "b": 1,
        "b.up": 1,
        "b.down": 1,
        "head": 1,
    } == calls(profile)
    assert () == profile.notes


@anywhere
def test_two_graphs_of_towers_on_threads_keep_their_rows(run: Any) -> None:
    """The work still belongs to the right tower if two graphs exist at once.

    Both backward passes run after both forward passes.
    """
    profile = run(steps_of_towers_on_threads)
    towers = {"a.up": 2 * up, "a.down": 2 * down, "b.up": 2 * up, "b.down": 2 * down}
    assert {"stem": 4 * square, **towers, "head": 2 * square} == macs(profile, "forward")
    assert {
        "stem": 4 * square,
        **{row: 2 * cost for row, cost in towers.items()},
        "head": 4 * square,
    } == macs(profile, "backward")
    assert () == profile.notes


class Meeting(nn.Module):
    """A module that waits in forward and in backward until the other thread is there, too."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def forward(self, x: Tensor) -> Tensor:
        self.barrier.wait()
        x.register_hook(lambda _: self.barrier.wait() * 0 or None)
        return x


def test_two_threads_each_count_their_own_model() -> None:
    """Two threads each count their own model at the same time, and do not count each other's work.

    The module `Meeting` makes both threads be in forward and in backward at the same time.
    """
    barrier = threading.Barrier(2, timeout=PATIENCE)

    def count(body: nn.Module) -> Profile:
        return lflops.count(
            between_linears(nn.Sequential(Meeting(barrier), body)), sequence(), backward=True
        )

    with ThreadPoolExecutor(2) as workers:
        block, projections = workers.map(count, [Block(), Projections()])
    assert {"0": square, "1.1.up": up, "1.1.down": down, "2": square} == macs(block, "forward")
    assert {"0": square, "1.1.up": 2 * up, "1.1.down": 2 * down, "2": 2 * square} == macs(
        block, "backward"
    )
    names = ("1.1.stem", "1.1.q", "1.1.k", "1.1.v")
    assert dict.fromkeys(("0", *names, "2"), square) == macs(projections, "forward")
    assert {"0": square, **dict.fromkeys((*names, "2"), 2 * square)} == macs(
        projections, "backward"
    )


def test_a_scope_on_a_thread_is_of_that_threads_count() -> None:
    """A scope belongs to the count of the thread that enters it.

    Two threads each open a count and a scope, and both scopes are open at the same time.
    """
    barrier = threading.Barrier(2, timeout=PATIENCE)

    def count(name: str) -> Profile:
        model = nn.Linear(hidden, hidden)
        with lflops.counting(model) as counted:
            y = model(sequence())
            barrier.wait()
            with lflops.scope(name):
                barrier.wait()
                loss = y.square().sum()
                barrier.wait()
            loss.backward()
        return counted.profile

    with ThreadPoolExecutor(2) as workers:
        profiles = dict(zip(("a", "b"), workers.map(count, ["a", "b"]), strict=True))
    for name, profile in profiles.items():
        assert {"": 2 * square + tokens * hidden, name: 2 * tokens * hidden} == flops(
            profile, "forward"
        )
        assert {"": 1, name: 1} == calls(profile)


def test_a_model_on_another_thread_that_nobody_counts_is_not_counted() -> None:
    """Work on another thread that is not part of the model is not counted."""
    counted_model = Block()
    other = Block()
    with lflops.counting(counted_model) as counted, ThreadPoolExecutor(1) as worker:
        loss = counted_model(sequence()).sum()
        worker.submit(lambda: other(sequence()).sum().backward()).result()
        loss.backward()
    assert {"up": up, "down": down} == macs(counted.profile, "forward")
    assert {"up": up, "down": 2 * down} == macs(counted.profile, "backward")


def test_an_optimizer_that_steps_on_another_thread_is_not_ours() -> None:
    """An optimizer's step on another thread does not change the phase of this thread.

    While the step runs, this thread computes the loss, which is still counted as forward.
    """
    model = Block()
    other = Block()
    other(sequence()).sum().backward()
    optimizer = torch.optim.SGD(other.parameters())
    inside = threading.Event()
    done = threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        done.wait(PATIENCE)

    optimizer.register_step_pre_hook(wait)
    with lflops.counting(model) as counted, ThreadPoolExecutor(1) as worker:
        y = model(sequence())
        step = worker.submit(optimizer.step)
        inside.wait(PATIENCE)
        loss = y.square().sum()
        done.set()
        step.result()
        loss.backward()
    relu = tokens * wide
    loss_of_outputs = 2 * tokens * hidden
    assert {} == flops(counted.profile, "optimizer")
    assert relu + loss_of_outputs == flops(counted.profile, "forward")[""]
