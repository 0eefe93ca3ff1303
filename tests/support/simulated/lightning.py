"""A Lightning accelerator for the simulated devices."""

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests.support import simulated


class SimulatedAccelerator(Accelerator):
    """An accelerator with both simulated devices. They must be loaded before it is used."""

    def setup_device(self, device: torch.device) -> None:
        """Make a device the current device."""
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        """Make the first device the current device again."""
        torch.accelerator.set_device_index(0)

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return no statistics."""
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """Return the devices unchanged."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Return both devices."""
        return simulated.DEVICES

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of devices."""
        return len(simulated.DEVICES)

    @staticmethod
    def is_available() -> bool:
        """Return True."""
        return True

    @staticmethod
    def name() -> str:
        """Return the name that torch uses for the devices."""
        return simulated.NAME


def on(device: torch.device) -> SingleDeviceStrategy:
    """Return the `strategy` of a Trainer that trains on one device. Its `accelerator` is "auto"."""
    return SingleDeviceStrategy(device=device, accelerator=SimulatedAccelerator())
