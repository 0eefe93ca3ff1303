"""Handmade snapshots of CUDA memory, in the structure of `torch.cuda.memory._snapshot`."""

from collections.abc import Iterable, Sequence
from typing import Any

Stack = Sequence[tuple[str, int, str]]

TORCH = "/venv/lib/python3.11/site-packages/torch"
CALL = (f"{TORCH}/nn/modules/module.py", 1775, "_call_impl")
BUILD: Stack = [
    (f"{TORCH}/nn/modules/module.py", 1329, "convert"),
    (f"{TORCH}/nn/modules/module.py", 915, "_apply"),
]
STEP = [(f"{TORCH}/optim/adamw.py", 200, "step"), ("/app/train.py", 50, "train")]
STATE: Stack = [(f"{TORCH}/optim/adamw.py", 120, "_init_group"), *STEP]
UPDATE: Stack = [(f"{TORCH}/optim/adamw.py", 600, "_multi_tensor_adamw"), *STEP]
PACKAGES = TORCH.rpartition("/")[0]
LIGHTNING_STEP: Stack = [
    (f"{TORCH}/optim/adam.py", 227, "step"),
    (f"{TORCH}/optim/optimizer.py", 80, "_use_grad"),
    (f"{TORCH}/optim/optimizer.py", 530, "wrapper"),
    (f"{PACKAGES}/lightning/pytorch/plugins/precision/precision.py", 123, "optimizer_step"),
    (f"{PACKAGES}/lightning/pytorch/strategies/strategy.py", 239, "optimizer_step"),
    (f"{PACKAGES}/lightning/pytorch/core/optimizer.py", 154, "step"),
    (f"{PACKAGES}/lightning/pytorch/loops/optimization/automatic.py", 270, "_optimizer_step"),
    (f"{PACKAGES}/lightning/pytorch/trainer/trainer.py", 584, "fit"),
]
"""How Lightning calls an optimizer, shortened."""
IN_CLOSURE: Stack = [
    (f"{PACKAGES}/lightning/pytorch/loops/optimization/automatic.py", 131, "closure"),
    (f"{TORCH}/utils/_contextlib.py", 124, "decorate_context"),
    (f"{PACKAGES}/lightning/pytorch/loops/optimization/automatic.py", 146, "__call__"),
    (f"{PACKAGES}/lightning/pytorch/plugins/precision/precision.py", 109, "_wrap_closure"),
    *LIGHTNING_STEP,
]
"""Where it runs `training_step` and backward: in a closure that the optimizer's step calls."""
BACKWARD: Stack = []
"""Backward runs in a thread without a Python stack."""


def forward(line: int, caller: str = "training_step") -> Stack:
    """A line of the model's forward, called by a function of the training."""
    return [("/app/model.py", line, "forward"), CALL, ("/app/train.py", 12, caller)]


def loss(line: int) -> Stack:
    """A line that computes the loss."""
    return [
        (f"{TORCH}/nn/functional.py", 3462, "cross_entropy"),
        ("/app/train.py", line, "training_step"),
    ]


class Recorder:
    """An allocator that gives every allocation a segment of its own, and records what it does."""

    def __init__(self) -> None:
        """Begin empty."""
        self.trace: list[dict[str, Any]] = []
        self.alive: dict[int, tuple[int, Stack]] = {}
        self.segments: list[dict[str, Any]] = []
        self._next = 0x7F0000000000

    def allocate(self, nbytes: int, stack: Stack, times: int = 1) -> list[int]:
        """Allocations of a size by one stack; returns their addresses."""
        addresses = []
        for _ in range(times):
            address = self._next
            self._next += nbytes + 4096
            self.alive[address] = (nbytes, stack)
            self._record("segment_alloc", address, nbytes, stack)
            self._record("alloc", address, nbytes, stack)
            addresses.append(address)
        return addresses

    def free(self, addresses: Iterable[int], by: Stack | None = None) -> None:
        """Free them, and give their segments back.

        A recording has the stack `by` that freed them, or the one that allocated them.
        """
        for address in addresses:
            nbytes, stack = self.alive.pop(address)
            for action in ("free_requested", "free_completed", "segment_free"):
                self._record(action, address, nbytes, stack if by is None else by)

    def forget(self) -> None:
        """Begin the recording here: what is alive has no stack, and the trace is empty."""
        self.trace.clear()
        self.alive = {address: (nbytes, ()) for address, (nbytes, _) in self.alive.items()}

    def cache(self, nbytes: int, pieces: int) -> None:
        """Reserved memory of which every other piece is in use, by a tensor of the model's."""
        address, piece = self._next, nbytes // (2 * pieces)
        self._next += nbytes + 4096
        blocks = [
            _block(address + place * piece, piece, forward(30) if place % 2 == 0 else None)
            for place in range(2 * pieces)
        ]
        self.segments.append(
            {
                "device": 0,
                "address": address,
                "total_size": 2 * pieces * piece,
                "stream": 0,
                "blocks": blocks,
            }
        )

    def fail(self, nbytes: int, stack: Stack, device_free: int = 0) -> None:
        """A request that there is no memory for."""
        self.trace.append(
            {
                "action": "oom",
                "size": nbytes,
                "stream": 0,
                "device_free": device_free,
                "frames": _frames(stack),
            }
        )

    def snapshot(self) -> dict[str, Any]:
        """In torch's form."""
        segments = [
            {
                "device": 0,
                "address": address,
                "total_size": nbytes,
                "allocated_size": nbytes,
                "active_size": nbytes,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": [_block(address, nbytes, stack)],
            }
            for address, (nbytes, stack) in self.alive.items()
        ]
        return {
            "segments": segments + self.segments,
            "device_traces": [self.trace],
            "allocator_settings": {"PYTORCH_ALLOC_CONF": "", "expandable_segments": False},
            "external_annotations": [],
        }

    def _record(self, action: str, address: int, nbytes: int, stack: Stack) -> None:
        self.trace.append(
            {
                "action": action,
                "addr": address,
                "size": nbytes,
                "stream": 0,
                "time_us": len(self.trace),
                "frames": _frames(stack),
                "pool_id": (0, 0),
            }
        )


def _frames(stack: Stack) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in stack]


def _block(address: int, size: int, stack: Stack | None) -> dict[str, Any]:
    """A block that a stack allocated; of none an unused one."""
    requested, state = (0, "inactive") if stack is None else (size, "active_allocated")
    return {
        "address": address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": _frames(stack or ()),
    }
