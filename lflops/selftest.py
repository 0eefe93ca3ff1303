"""Test lflops on one device, in a few seconds.

Checks which features torch has on the device, and whether lflops measures times, work and memory
correctly.
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
from lflops.profile.profile import Profile
from lflops.profile.records import Phase
from lflops.timing.clock import StreamClock, WaitingClock, clock_of, seconds_of
from lflops.timing.measure import measure

WIDTH = 512
ROWS = 256
TIMES = 9

LEAST_RATIO = 0.5
MOST_RATIO = 1.25
"""Maximum accepted ratio of the measured forward time to the forward time on the host's clock.

`LEAST_RATIO` is the minimum. The time on the host's clock ends when the host has waited for the
device, so it includes the launch latency.
"""

COMPARED_PHASES: tuple[Phase, ...] = ("forward", "backward", "recompute")


class Check(Struct, frozen=True, kw_only=True):
    """The result of one check.

    Attributes:
        name: Name of the check.
        passed: Whether the check passed; `None` if the device lacks the checked feature.
        found: The result of the measurement, in words.
    """

    name: str
    passed: bool | None
    found: str


class SelfTest(Struct, frozen=True, kw_only=True):
    """The results of all checks on one device."""

    device: str
    device_name: str
    torch: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Return whether no check failed."""
        return all(check.passed is not False for check in self.checks)


class Layers(nn.Module):
    """Three identical layers: one normal, one checkpointed, and one in a nested checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.again, torch.relu(self.first(x)), use_reentrant=True)  # type: ignore[no-any-return]

    def again(self, x: Tensor) -> Tensor:
        """Run the layers that are recomputed in backward."""
        return checkpoint(self.third, torch.tanh(self.second(x)), use_reentrant=False)  # type: ignore[no-any-return]


def self_test(device: torch.device | str | None = None) -> SelfTest:
    """Run all checks on a device.

    Args:
        device: The device. By default, the accelerator, or the CPU if there is none.

    Raises:
        CountError: torch has no such device.
    """
    try:
        default = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        where = torch.device(device or default)
        model = Layers().to(where)
        x = torch.rand(ROWS, WIDTH).to(where).requires_grad_()
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        raise CountError(
            f"device={device!r}: torch cannot use this device on this machine: {error}"
        ) from error
    profile = measure(model, x, backward=True, warmup=3, repeats=TIMES, hardware=None)
    checks = [
        *_check_support(x.device),
        *_check_forward_time(profile, model, x),
        _check_work(profile),
        _check_peak(model, x),
    ]
    return SelfTest(
        device=str(x.device),
        device_name=device_name(x.device),
        torch=str(torch.__version__),
        checks=tuple(checks),
    )


def _check_support(device: torch.device) -> Iterator[Check]:
    """Check which features torch has on the device."""
    has_events = isinstance(clock_of(device), StreamClock)
    yield Check(
        name="clock",
        passed=device.type == "cpu" or has_events or None,
        found="the device's timing events" if has_events else "the host's clock",
    )
    stats = allocator_stats(device)
    yield Check(
        name="allocator",
        passed="allocated_bytes.all.peak" in stats or None,
        found=f"torch reports {len(stats)} statistics",
    )
    memory = memory_of(device)
    yield Check(
        name="memory",
        passed=memory is not None or None,
        found=units.size(None if memory is None else memory[1]),
    )
    activity = profiler_activity(device)
    yield Check(
        name="traces",
        passed=activity is not None or None,
        found="none" if activity is None else activity.name,
    )


def _check_forward_time(profile: Profile, model: Layers, x: Tensor) -> Iterator[Check]:
    """Compare the measured forward time with the time on the host's clock. Skip this on a CPU."""
    if x.device.type == "cpu":
        return
    measured = min(step.phases["forward"] for step in profile.steps if step.kind == "unprofiled")
    clock = WaitingClock(x.device)
    waited = min(seconds_of(clock, lambda: model(x)) for _ in range(TIMES))
    ratio = measured / max(waited, 1e-9)
    yield Check(
        name="forward",
        passed=LEAST_RATIO <= ratio <= MOST_RATIO,
        found=f"the measured time is {ratio:.2f} times the time on the host's clock",
    )


def _check_work(profile: Profile) -> Check:
    """Compare the MACs of each module with the MACs on the CPU."""
    on_cpu = count(Layers(), torch.rand(ROWS, WIDTH, requires_grad=True), backward=True)
    number = 0
    different = 0
    for name in on_cpu.modules:
        for phase in COMPARED_PHASES:
            number += 1
            different += profile.total(name, phase) != on_cpu.total(name, phase)
    return Check(
        name="work by module",
        passed=not different,
        found=f"{different} of {number} MAC counts differ from the counts on the CPU",
    )


def _check_peak(model: Layers, x: Tensor) -> Check:
    """Check that the allocator's peak memory includes the gradients and an activation."""
    device = x.device
    general_reset = getattr(torch.accelerator, "reset_peak_memory_stats", None)
    reset = getattr(torch.get_device_module(device), "reset_peak_memory_stats", general_reset)
    before = allocator_stats(device).get("allocated_bytes.all.current")
    if before is None or reset is None:
        return Check(name="peak of a step", passed=None, found="unknown")
    reset(device)
    model(x).sum().backward()
    runtime(device).synchronize(device)
    grown = allocator_stats(device)["allocated_bytes.all.peak"] - before
    elements = x.numel() + sum(map(Tensor.numel, model.parameters()))
    least = 4 * elements
    return Check(
        name="peak of a step",
        passed=grown >= least,
        found=(
            f"{units.size(grown)}; the gradients and one activation tensor need at least "
            f"{units.size(least)}"
        ),
    )
