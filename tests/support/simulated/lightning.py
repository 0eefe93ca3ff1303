"""An accelerator of Lightning for the simulated devices."""

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests.support import simulated


class SimulatedAccelerator(Accelerator):
    """Both devices, which are always there."""

    def setup_device(self, device: torch.device) -> None:
        """Make it the current one."""
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        """Make the first one the current one again."""
        torch.accelerator.set_device_index(0)

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """None."""
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """As they are given."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Both."""
        return simulated.DEVICES

    @staticmethod
    def auto_device_count() -> int:
        """Two."""
        return len(simulated.DEVICES)

    @staticmethod
    def is_available() -> bool:
        """Once they are loaded."""
        return True

    @staticmethod
    def name() -> str:
        """As torch has it."""
        return simulated.NAME


def on(device: torch.device) -> SingleDeviceStrategy:
    """What a Trainer needs to train on one of them; its `accelerator` is "auto" then."""
    return SingleDeviceStrategy(device=device, accelerator=SimulatedAccelerator())
