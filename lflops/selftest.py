"""Tries lflops on one device, in some seconds.

What torch offers there, and whether times, work and memory are right.
"""

from collections.abc import Iterator

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lflops import units
from lflops.errors import CountError
from lflops.flop_counter.count import count
from lflops.inputs.devices import allocator_stats, memory_of, profiler_activity, runtime
from lflops.inputs.run_info import device_name
from lflops.timing.clock import StreamClock, WaitingClock, clock_of, seconds_of
from lflops.timing.measure import measure

WIDTH, ROWS, TIMES = 512, 256, 9
NEAR = (
    0.5,
    1.25,
    # what lflops' shortest time may be of the shortest with the device waited for, which has the
    # latency of launches in it
)


class Check(Struct, frozen=True, kw_only=True):
    """One thing that was tried."""

    name: str
    # `None` where this device does not offer what it takes
    passed: bool | None
    found: str


class SelfTest(Struct, frozen=True, kw_only=True):
    """What was tried on one device."""

    device: str
    device_name: str
    torch: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(check.passed is not False for check in self.checks)


class Layers(nn.Module):
    """Three equal layers. A checkpoint computes the second again, and one within it the third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.again, torch.relu(self.first(x)), use_reentrant=True)  # type: ignore[no-any-return]

    def again(self, x: Tensor) -> Tensor:
        """What is computed twice."""
        return checkpoint(self.third, torch.tanh(self.second(x)), use_reentrant=False)  # type: ignore[no-any-return]


def self_test(device: torch.device | str | None = None) -> SelfTest:
    """Try all checks on a device.

    `None` is the accelerator, or else the CPU. A `CountError` where there is no such device.
    """
    try:
        where = torch.device(
            device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
        )
        model, x = Layers().to(where), torch.rand(ROWS, WIDTH).to(where).requires_grad_()
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        raise CountError(f"device={device!r}: torch has no such device here: {error}") from error
    checks = [*_offered(x.device), *_right(model, x)]
    return SelfTest(
        device=str(x.device),
        device_name=device_name(x.device),
        torch=str(torch.__version__),
        checks=tuple(checks),
    )


def _offered(device: torch.device) -> Iterator[Check]:
    """List what torch has for the device."""
    clock, stats, memory, activity = (
        clock_of(device),
        allocator_stats(device),
        memory_of(device),
        profiler_activity(device),
    )
    is_timed = isinstance(clock, StreamClock)
    yield Check(
        name="clock",
        passed=device.type == "cpu" or is_timed or None,
        found="events with times" if is_timed else "the host's clock",
    )
    yield Check(
        name="allocator",
        passed="allocated_bytes.all.peak" in stats or None,
        found=f"{len(stats)} figures",
    )
    yield Check(
        name="memory",
        passed=memory is not None or None,
        found=units.size(None if memory is None else memory[1]),
    )
    yield Check(
        name="traces",
        passed=activity is not None or None,
        found="none" if activity is None else activity.name,
    )


def _right(model: Layers, x: Tensor) -> Iterator[Check]:
    """Whether what lflops says of a model there is right."""
    device = x.device
    profile = measure(model, x, backward=True, warmup=3, repeats=TIMES, hardware=None)
    # there both would be the host's clock
    if device.type != "cpu":
        took = min(seconds_of(WaitingClock(device), lambda: model(x)) for _ in range(TIMES))
        share = min(
            step.phases["forward"] for step in profile.steps if step.kind == "unprofiled"
        ) / max(took, 1e-9)
        yield Check(
            name="forward",
            passed=NEAR[0] <= share <= NEAR[1],
            found=f"{share:.2f} of the time with the device waited for",
        )
    work = [
        {
            (name, phase): each.total(name, phase)
            for name in each.modules
            for phase in ("forward", "backward", "recompute")
        }
        for each in (
            profile,
            count(Layers(), torch.rand(ROWS, WIDTH, requires_grad=True), backward=True),
        )
    ]
    different = sum(work[0][key] != macs for key, macs in work[1].items())
    yield Check(
        name="work by module",
        passed=not different,
        found=f"{different} of {len(work[1])} differ from the CPU's",
    )
    reset = getattr(
        torch.get_device_module(device),
        "reset_peak_memory_stats",
        getattr(torch.accelerator, "reset_peak_memory_stats", None),
    )
    before = allocator_stats(device).get("allocated_bytes.all.current")
    if before is None or reset is None:
        yield Check(name="peak of a step", passed=None, found="unknown")
        return
    reset(device)
    model(x).sum().backward()
    runtime(device).synchronize(device)
    grown = allocator_stats(device)["allocated_bytes.all.peak"] - before
    least = 4 * (sum(map(Tensor.numel, model.parameters())) + x.numel())
    yield Check(
        name="peak of a step",
        passed=grown >= least,
        found=f"{units.size(grown)}; gradients and one activation {units.size(least)}",
    )
