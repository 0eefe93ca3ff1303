"""The whole way on a simulated device.

A Trainer with the callback, its trace, the page's payload, `measure` and `calibrate`.
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
    """The window of a Trainer's fit."""
    monitor = watching(
        schedule=Schedule(wait=6, warmup=2, active=3, repeat=1), hardware=None, **options
    )
    batches = DataLoader(TensorDataset(torch.randn(20 * ROWS, WIDTH)), batch_size=ROWS)
    fit(Training(), monitor, data=batches, strategy=on(device), accelerator="auto")
    (profile,) = monitor.profiles
    return profile


@pytest.fixture
def _simulated_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's clock is the simulated one, and a product takes 0.839 ms."""
    monkeypatch.setattr(HostClock, "mark", staticmethod(simulated.nanoseconds))
    simulated.plan(macs_per_second=RATE)


@pytest.fixture
def _real_clock() -> Iterator[None]:
    """As Kineto has it."""
    simulated.plan(macs_per_second=RATE)
    simulated.follow_real_clock(follows=True)
    yield
    torch.accelerator.synchronize()
    simulated.follow_real_clock(follows=False)


@pytest.mark.usefixtures("_simulated_clock")
@pytest.mark.parametrize("device", [FIRST, SECOND], ids=["first", "second"])
def test_a_trainer_s_window_has_the_planted_times(device: torch.device) -> None:
    """By module and phase, in the profile and in what the page draws, with the device's name and memory."""
    profile = trained(device)
    forward, backward = (
        getattr(profile.modules["layers.down"], phase).seconds for phase in ("forward", "backward")
    )
    assert forward.median == pytest.approx(PRODUCT, rel=0.02)
    assert backward.median == pytest.approx(2 * PRODUCT, rel=0.02)
    clean = median(
        step.seconds
        for step in profile.steps
        if step.kind == "unprofiled" and not step.marks and step.seconds is not None
    )
    run = profile.run
    assert ("Simulated Accelerator", "simulated", ()) == (
        run.device_name,
        run.device_type,
        profile.notes,
    )
    assert torch.accelerator.max_memory_reserved(device) == run.reserved_bytes
    head = payload(analyze(profile)).head
    assert ("Simulated Accelerator", clean) == (head.device, pytest.approx(head.figures["step"]))


@pytest.mark.usefixtures("_real_clock")
def test_a_trace_has_the_kernels_by_module(tmp_path: Path) -> None:
    """Kernels take what is planted also by the real clock.

    The file is there, and the device's time of a layer is that of its products.
    """
    profile = trained(FIRST, trace=True, dirpath=tmp_path)
    assert profile.trace is not None
    assert 1 == len(profile.trace.files)
    for phase, products in (("forward", 1), ("backward", 2)):
        work = getattr(profile.modules["layers.down"], phase)
        assert work.device_seconds.median == pytest.approx(products * PRODUCT, rel=0.02)
        assert (
            work.self_seconds.median >= 0.98 * products * PRODUCT
        )  # hooks make the host slower, and no kernel
    busy = profile.trace.device_compute_seconds
    assert busy is not None
    assert 3 * 5 * PRODUCT == pytest.approx(busy, rel=0.05)


@pytest.mark.usefixtures("_real_clock")
@pytest.mark.parametrize(
    ("slower", "ahead"), [(20, True), (0.001, False)], ids=["host far ahead", "host behind"]
)
def test_idle_time_tells_whether_the_host_keeps_up(
    tmp_path: Path, slower: float, ahead: bool
) -> None:
    """Five products of 17 ms each keep the device busy, however busy the machine is.

    Those of 0.8 µs wait for their launches.
    """
    simulated.plan(macs_per_second=RATE / slower)
    profile = trained(FIRST, trace=True, dirpath=tmp_path)
    assert profile.trace is not None
    idle, busy = profile.trace.device_idle_seconds, profile.trace.device_compute_seconds
    assert idle is not None
    assert busy is not None
    assert idle < 0.2 * (idle + busy) if ahead else idle > 0.9 * (idle + busy)
    breakdown = lflops.utilization(
        profile, lflops.Hardware("simulated", {"fp32": 2 * RATE / slower})
    ).breakdown
    assert breakdown is not None
    assert ahead or {"forward", "backward"} == set(breakdown.idle)
    computing = sum(breakdown.parts.get(name, 0.0) for name in IN_MODULES)
    assert (
        breakdown.parts.get("idle", 0.0) < computing / 2
        if ahead
        else breakdown.parts["idle"] > 5 * computing
    )


def test_the_device_has_an_activity_and_others_have_none() -> None:
    """As XPU, whose device is not here, and MPS, which torch.profiler does not know."""
    assert ProfilerActivity.PrivateUse1 == profiler_activity(FIRST)
    assert (None, None) == (
        profiler_activity(torch.device("xpu")),
        profiler_activity(torch.device("mps")),
    )


@pytest.mark.usefixtures("_simulated_clock")
def test_measure_waits_for_the_device_and_counts_its_own_time() -> None:
    """Forward and backward of two layers: the data wants no gradient."""
    profile = lflops.measure(
        Layers().to(FIRST), torch.randn(ROWS, WIDTH, device=FIRST), backward=True, hardware=None
    )
    for phase, products in (("forward", 2), ("backward", 3)):
        spread = getattr(profile.modules[""], phase).seconds
        assert spread.median == pytest.approx(products * PRODUCT, rel=0.02)


@pytest.mark.usefixtures("_simulated_clock")
def test_calibrate_finds_the_planted_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 FLOPs for each MAC at 10^7 MACs a second, and the bytes of a copy at 10^8.

    Of the second device, which is not the current one.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("lflops.hardware.calibrate.UNKNOWN_CACHE", 1 << 20)
    simulated.plan(macs_per_second=1e7, bytes_per_second=1e8)
    found = lflops.calibrate("simulated:1", dtypes=["fp32"])
    assert found.peak_flops_per_second["fp32"] == pytest.approx(2e7, rel=0.02)
    assert found.bandwidth_bytes_per_second == pytest.approx(1e8, rel=0.02)
    assert "Simulated Accelerator" == found.name
    with pytest.raises(
        HardwareError, match="device='simulated:9': this machine has 2 devices of that kind"
    ):
        lflops.calibrate("simulated:9")
    with pytest.raises(
        HardwareError, match=r"device='cuda': pass 'cpu', or a device of .*: 'simulated'"
    ):
        lflops.calibrate("cuda")
