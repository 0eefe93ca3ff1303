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

# Most of its C++ classes have no types.
distributed: Any = _distributed


class SimulatedGroup(distributed.ProcessGroup):  # type: ignore[misc]
    """A process group with the collectives that DistributedDataParallel needs.

    On the simulated clock, a collective is a kernel that ends at the same time on all ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: dt.timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = distributed.ProcessGroupGloo(store, rank, size, timeout)
        self._streams: dict[torch.device, torch.Stream] = {}

    def getBackendName(self) -> str:  # noqa: N802 - torch defines this name
        """Return the name under which the group is registered."""
        return simulated.NAME

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        """Sum tensors over all ranks."""
        options = options or distributed.AllreduceOptions()
        return self._carried(
            "all_reduce", tensors, lambda given: self._gloo.allreduce(given, options)
        )

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        """Send tensors from one rank to all ranks."""
        options = options or distributed.BroadcastOptions()
        return self._carried(
            "broadcast", tensors, lambda given: self._gloo.broadcast(given, options)
        )

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None
    ) -> Any:
        """Send the tensors of all ranks to all ranks."""
        on_host = [each.cpu() for each in inputs]
        received: list[list[Tensor]] = []
        for row in outputs:
            received.append([torch.empty_like(each, device="cpu") for each in row])
        self._gloo.allgather(received, on_host, options or distributed.AllgatherOptions()).wait()
        all_outputs = []
        for row, values in zip(outputs, received, strict=True):
            for output, value in zip(row, values, strict=True):
                output.copy_(value)
                all_outputs.append(output)
        return _done(all_outputs)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks. This uses no device."""
        return self._gloo.barrier(opts or distributed.BarrierOptions())

    def _carried(self, name: str, tensors: list[Tensor], collective: Any) -> Any:
        """Run a collective of gloo on copies on the host, and plan its kernel on a device."""
        if tensors[0].device.type == "cpu":
            return collective(tensors)
        device = tensors[0].device
        stream = self._streams.setdefault(device, torch.Stream(device))
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            with simulated.aside():
                on_host = [each.detach().cpu() for each in tensors]
                collective(on_host).wait()
                for tensor, value in zip(tensors, on_host, strict=True):
                    tensor.detach().copy_(value)
                own_end = torch.tensor([simulated.busy_until(device.index)], dtype=torch.int64)
                ends = [torch.zeros_like(own_end) for _ in range(self.size())]
                self._gloo.allgather([ends], [own_end]).wait()
            # The kernel lasts until the streams of all ranks have reached the collective.
            last_end = max(int(each) for each in ends)
            simulated.launch(name, device.index, last_end - int(own_end))
            return _done(tensors)


def _done(result: list[Tensor]) -> Any:
    """Return the work of a collective that gloo has already finished."""
    devices = {tensor.device for tensor in result if tensor.device.type != "cpu"}
    future: Any = torch.futures.Future(devices=list(devices))
    # A wait for the future waits for the stream that is the current stream now.
    future.set_result(result)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future)


def register() -> None:
    """Register the group with torch, as the backend "simulated" of `init_process_group`."""
    distributed.Backend.register_backend(
        simulated.NAME, SimulatedGroup, devices=[simulated.NAME, "cpu"]
    )
