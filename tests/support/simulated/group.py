"""A process group over simulated devices.

Gloo sends the tensors, and on the simulated clock every rank waits for the last rank.

Collectives run on a stream of the group. As with NCCL, a wait for a collective makes the current
stream wait, while the host continues.
"""

import datetime as dt
from typing import Any

import torch
from torch import Tensor, distributed as _distributed

from tests.support import simulated

distributed: Any = _distributed  # of its C++ classes little has a type


class SimulatedGroup(distributed.ProcessGroup):  # type: ignore[misc]
    """What DistributedDataParallel needs.

    A collective is a kernel, which ends when the last rank's would.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: dt.timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = distributed.ProcessGroupGloo(store, rank, size, timeout)
        self._streams: dict[torch.device, torch.Stream] = {}

    def getBackendName(self) -> str:  # noqa: N802 - as torch names it
        """As it is registered."""
        return simulated.NAME

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        """Sum over ranks."""
        return self._carried(
            "all_reduce",
            tensors,
            lambda given: self._gloo.allreduce(given, options or distributed.AllreduceOptions()),
        )

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        """From one rank to all."""
        return self._carried(
            "broadcast",
            tensors,
            lambda given: self._gloo.broadcast(given, options or distributed.BroadcastOptions()),
        )

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None
    ) -> Any:
        """From all ranks to all."""
        there = [each.cpu() for each in inputs]
        found = [[torch.empty_like(each, device="cpu") for each in row] for row in outputs]
        self._gloo.allgather(found, there, options or distributed.AllgatherOptions()).wait()
        for row, given in zip(outputs, found, strict=True):
            for output, value in zip(row, given, strict=True):
                output.copy_(value)
        return _done([each for row in outputs for each in row])

    def barrier(self, options: Any = None) -> Any:
        """Nothing is on a device."""
        return self._gloo.barrier(options or distributed.BarrierOptions())

    def _carried(self, name: str, tensors: list[Tensor], collective: Any) -> Any:
        if tensors[0].device.type == "cpu":
            return collective(tensors)
        device = tensors[0].device
        stream = self._streams.setdefault(device, torch.Stream(device))
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            with simulated.aside():
                there = [each.detach().cpu() for each in tensors]
                collective(there).wait()
                for tensor, value in zip(tensors, there, strict=True):
                    tensor.detach().copy_(value)
                mine = torch.tensor([simulated.busy_until(device.index)], dtype=torch.int64)
                last = [torch.zeros_like(mine) for _ in range(self.size())]
                self._gloo.allgather([last], [mine]).wait()
            simulated.launch(name, device.index, max(int(each) for each in last) - int(mine))
            return _done(tensors)


def _done(result: list[Tensor]) -> Any:
    future: Any = torch.futures.Future(
        devices=[each for each in {tensor.device for tensor in result} if each.type != "cpu"]
    )
    future.set_result(result)  # who waits for it waits for the stream that is the current one here
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future)


def register() -> None:
    """Let `init_process_group` make it, by the name of the devices."""
    distributed.Backend.register_backend(
        simulated.NAME, SimulatedGroup, devices=[simulated.NAME, "cpu"]
    )
