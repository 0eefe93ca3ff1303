"""Test all of lflops on a simulated device.

A Trainer with the callback, its trace, the payload of the page, `lflops.measure` and
`lflops.calibrate` must report the planned times.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.utils.data import DataLoader, TensorDataset

import lflops
from lflops import HardwareError, Profile, Schedule
from lflops.analysis.analysis import analyze
from lflops.analysis.step_breakdown import IN_MODULES
from lflops.inputs.devices import profiler_activity
from lflops.ledger.ledger_file import load_run
from lflops.report.payload.payload import payload
from lflops.timing.clock import HostClock
from tests.simulated.trainings import PRODUCT, RATE, ROWS, WIDTH, Layers
from tests.support import simulated
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS, fit, watching
from tests.support.simulated import FIRST, SECOND
from tests.support.simulated.lightning import on

pytestmark = LIGHTNINGS_WARNINGS


class Training(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.layers(batch[0]) - batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trained(device: torch.device, **options: Any) -> Profile:
    """Train with a Trainer on a device, and return the profile of the window."""
    monitor = watching(
        schedule=Schedule(wait=6, warmup=2, active=3, repeat=1), hardware=None, **options
    )
    batches = DataLoader(TensorDataset(torch.randn(20 * ROWS, WIDTH)), batch_size=ROWS)
    fit(Training(), monitor, data=batches, strategy=on(device), accelerator="auto")
    (profile,) = monitor.profiles
    return profile


@pytest.fixture
def _simulated_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the host's clock by the simulated one, and let a matmul take 0.839 ms."""
    monkeypatch.setattr(HostClock, "mark", staticmethod(simulated.nanoseconds))
    simulated.plan(macs_per_second=RATE)


@pytest.fixture
def _real_clock() -> Iterator[None]:
    """Let the device follow the real clock, because Kineto uses it, and a matmul take 0.839 ms."""
    simulated.plan(macs_per_second=RATE)
    simulated.follow_real_clock(follows=True)
    yield
    torch.accelerator.synchronize()
    simulated.follow_real_clock(follows=False)


@pytest.mark.usefixtures("_simulated_clock")
@pytest.mark.parametrize("device", [FIRST, SECOND], ids=["first", "second"])
def test_a_trainer_s_window_has_the_planted_times(device: torch.device) -> None:
    """The profile has the planned times of modules, and the device's name and memory.

    The page has the same device and the median step time. There are no notes.
    """
    profile = trained(device)
    down = profile.modules["layers.down"]
    assert down.forward.seconds is not None
    assert down.forward.seconds.median == pytest.approx(PRODUCT, rel=0.02)
    assert down.backward.seconds is not None
    assert down.backward.seconds.median == pytest.approx(2 * PRODUCT, rel=0.02)
    seconds = []
    for step in profile.steps:
        if step.kind == "unprofiled" and not step.marks and step.seconds is not None:
            seconds.append(step.seconds)
    run = profile.run
    assert "Simulated Accelerator" == run.device_name
    assert "simulated" == run.device_type
    assert () == profile.notes
    assert torch.accelerator.max_memory_reserved(device) == run.reserved_bytes
    head = payload(analyze(profile)).head
    assert "Simulated Accelerator" == head.device
    assert median(seconds) == pytest.approx(head.figures["step"])


@pytest.mark.usefixtures("_real_clock")
def test_a_trace_has_the_kernels_by_module(tmp_path: Path) -> None:
    """With the real clock, the trace has the planned kernel times of modules and of the device.

    `layers.down` has one matmul in forward and two in backward. Three steps with 5 matmuls were
    traced.
    """
    profile = trained(FIRST, trace=True, dirpath=tmp_path)
    assert profile.trace is not None
    assert 1 == len(profile.trace.files)
    for phase, products in (("forward", 1), ("backward", 2)):
        work = getattr(profile.modules["layers.down"], phase)
        assert work.device_seconds.median == pytest.approx(products * PRODUCT, rel=0.02)
        # Hooks slow down the host, but no kernel, so the module time may be longer.
        assert work.self_seconds.median >= 0.98 * products * PRODUCT
    busy = profile.trace.device_compute_seconds
    assert busy is not None
    assert 3 * 5 * PRODUCT == pytest.approx(busy, rel=0.05)


@pytest.mark.usefixtures("_real_clock")
@pytest.mark.parametrize(
    ("slower", "ahead"), [(100, True), (0.001, False)], ids=["host far ahead", "host behind"]
)
def test_idle_time_tells_whether_the_host_keeps_up(
    tmp_path: Path, slower: float, ahead: bool
) -> None:
    """The device is idle for less than half of the time, or for more than 90 % of it.

    A step has five matmuls. If they take 84 ms each, the device is still busy when the next one is
    launched, even if other processes stop this one for tenths of a second. If they take 0.8 µs, the
    device waits for their launches. The step breakdown reflects this in its part "idle".
    """
    simulated.plan(macs_per_second=RATE / slower)
    profile = trained(FIRST, trace=True, dirpath=tmp_path)
    assert profile.trace is not None
    idle, busy = profile.trace.device_idle_seconds, profile.trace.device_compute_seconds
    assert idle is not None
    assert busy is not None
    hardware = lflops.Hardware("simulated", {"fp32": 2 * RATE / slower})
    breakdown = lflops.utilization(profile, hardware).breakdown
    assert breakdown is not None
    computing = sum(breakdown.parts.get(name, 0.0) for name in IN_MODULES)
    if ahead:
        assert idle < 0.5 * (idle + busy)
        assert breakdown.parts.get("idle", 0.0) < computing
    else:
        assert idle > 0.9 * (idle + busy)
        assert {"forward", "backward"} == set(breakdown.idle)
        assert breakdown.parts["idle"] > 5 * computing


def test_the_ledger_names_the_device(tmp_path: Path) -> None:
    """The times of a ledger are those of the host, so a reader must know that there is a device."""
    batches = DataLoader(TensorDataset(torch.randn(6 * ROWS, WIDTH)), batch_size=ROWS)
    monitor = watching(hardware=None, ledger=True, dirpath=tmp_path)
    fit(Training(), monitor, data=batches, strategy=on(FIRST), accelerator="auto")
    assert "simulated" == load_run(tmp_path).device


def test_the_device_has_an_activity_and_others_have_none() -> None:
    """`profiler_activity` returns the activity of the device, or `None`.

    It is `None` for XPU, because there is no such device here, and for MPS, which torch.profiler
    does not support.
    """
    assert ProfilerActivity.PrivateUse1 == profiler_activity(FIRST)
    assert profiler_activity(torch.device("xpu")) is None
    assert profiler_activity(torch.device("mps")) is None


@pytest.mark.usefixtures("_simulated_clock")
def test_measure_waits_for_the_device_and_counts_its_own_time() -> None:
    """`lflops.measure` returns the time of the device: forward has 2 matmuls, and backward has 3.

    The input needs no gradient.
    """
    profile = lflops.measure(
        Layers().to(FIRST), torch.randn(ROWS, WIDTH, device=FIRST), backward=True, hardware=None
    )
    for phase, products in (("forward", 2), ("backward", 3)):
        spread = getattr(profile.modules[""], phase).seconds
        assert spread.median == pytest.approx(products * PRODUCT, rel=0.02)


@pytest.mark.usefixtures("_simulated_clock")
def test_calibrate_finds_the_planted_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lflops.calibrate` measures the planned peak and bandwidth of the device that is passed.

    10⁷ MACs per second are 2 × 10⁷ FLOP/s, and the bandwidth is 10⁸ bytes per second. The device is
    the second one, which is not the current one. For an unknown device, an error names the possible
    ones.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("lflops.hardware.calibrate.UNKNOWN_CACHE", 1 << 20)
    simulated.plan(macs_per_second=1e7, bytes_per_second=1e8)
    found = lflops.calibrate("simulated:1", dtypes=["fp32"])
    assert found.peak_flops_per_second["fp32"] == pytest.approx(2e7, rel=0.02)
    assert found.bandwidth_bytes_per_second == pytest.approx(1e8, rel=0.02)
    assert "Simulated Accelerator" == found.name
    message = "device='simulated:9': this machine has only 2 simulated devices"
    with pytest.raises(HardwareError, match=message):
        lflops.calibrate("simulated:9")
    message = "device='cuda': pass 'cpu' or 'simulated'"
    with pytest.raises(HardwareError, match=message):
        lflops.calibrate("cuda")
