"""The generators that a model may draw from, put back after a pass."""

import contextlib
import random
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["same_random_numbers"]


@dataclass
class _States:
    """Of torch's generators on the CPU and on devices, of Python's and of NumPy's."""

    python: Any
    numpy: Any
    cpu: Tensor
    devices: dict[torch.device, Tensor]

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> Self:
        numpy: Any = sys.modules.get("numpy")
        of_devices = {device: _generators_of(device).get_rng_state(device) for device in devices}
        return cls(random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state(), of_devices)

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            numpy: Any = sys.modules["numpy"]
            numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            _generators_of(device).set_rng_state(state, device)


class _Pass:
    """A pass that is running, and what it will put back."""

    def __init__(self, states: _States) -> None:
        self.states = states


_lock = threading.Lock()
_running: list[_Pass] = []


@contextlib.contextmanager
def same_random_numbers(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put the generators back at the end, those of the tensors' devices too.

    They are the process's: of two passes in two threads the first to begin may be the first to end, and then leaves it to the other to put
    back what was there before both.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    with _lock:
        mine = _Pass(_States.now(devices))
        _running.append(mine)
    try:
        yield
    finally:
        with _lock:
            later = _running[_running.index(mine) + 1 :]
            _running.remove(mine)
            if later:
                later[0].states = mine.states
            else:
                mine.states.restore()


def _generators_of(device: torch.device) -> Any:
    return getattr(torch, device.type)
