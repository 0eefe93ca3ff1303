"""Handmade snapshots of CUDA memory, in the structure of `torch.cuda.memory._snapshot`."""

from collections.abc import Iterable, Sequence
from typing import Any

Stack = Sequence[tuple[str, int, str]]
"""A Python stack: file, line and function of each frame, with the innermost frame first."""

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
"""The stack of an optimizer that Lightning calls, with fewer frames than in reality."""
IN_CLOSURE: Stack = [
    (f"{PACKAGES}/lightning/pytorch/loops/optimization/automatic.py", 131, "closure"),
    (f"{TORCH}/utils/_contextlib.py", 124, "decorate_context"),
    (f"{PACKAGES}/lightning/pytorch/loops/optimization/automatic.py", 146, "__call__"),
    (f"{PACKAGES}/lightning/pytorch/plugins/precision/precision.py", 109, "_wrap_closure"),
    *LIGHTNING_STEP,
]
"""The stack below `training_step` and backward.

Lightning runs them in a closure, which the step of the optimizer calls.
"""
BACKWARD: Stack = []
"""The stack of backward is empty, because backward runs in a thread without Python."""


def forward(line: int, caller: str = "training_step") -> Stack:
    """Return the stack of a line in the model's forward, which `caller` in train.py calls."""
    return [("/app/model.py", line, "forward"), CALL, ("/app/train.py", 12, caller)]


def loss(line: int) -> Stack:
    """Return the stack of a line in train.py that computes the loss."""
    return [
        (f"{TORCH}/nn/functional.py", 3462, "cross_entropy"),
        ("/app/train.py", line, "training_step"),
    ]


class Recorder:
    """A simulated allocator that records its actions. Each allocation has a separate segment.

    Attributes:
        trace: The recorded actions.
        alive: Size and stack of each allocation that is not freed, keyed by address.
        segments: Further segments, with several blocks.
    """

    def __init__(self) -> None:
        """Begin without allocations."""
        self.trace: list[dict[str, Any]] = []
        self.alive: dict[int, tuple[int, Stack]] = {}
        self.segments: list[dict[str, Any]] = []
        self._next = 0x7F0000000000

    def allocate(self, nbytes: int, stack: Stack, times: int = 1) -> list[int]:
        """Allocate `nbytes` from a stack, `times` times, and return the addresses."""
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
        """Free allocations and their segments.

        The recorded stack is `by`, the stack that frees them. By default it is the stack that
        allocated them.
        """
        for address in addresses:
            nbytes, stack = self.alive.pop(address)
            for action in ("free_requested", "free_completed", "segment_free"):
                self._record(action, address, nbytes, stack if by is None else by)

    def forget(self) -> None:
        """Clear the trace and all stacks, as if the recording began now."""
        self.trace.clear()
        self.alive = {address: (nbytes, ()) for address, (nbytes, _) in self.alive.items()}

    def cache(self, nbytes: int, pieces: int) -> None:
        """Reserve a segment in which a tensor of the model uses every other block.

        Args:
            nbytes: Size of the segment.
            pieces: Number of used blocks.
        """
        address = self._next
        self._next += nbytes + 4096
        piece = nbytes // (2 * pieces)
        blocks = []
        for place in range(2 * pieces):
            is_used = place % 2 == 0
            blocks.append(_block(address + place * piece, piece, forward(30) if is_used else None))
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
        """Record a request that runs out of memory."""
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
        """Return the snapshot in the form of `torch.cuda.memory._snapshot`."""
        segments = []
        for address, (nbytes, stack) in self.alive.items():
            segment = {
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
            segments.append(segment)
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
    """Return a block that a stack has allocated, or an unused block if there is no stack."""
    is_used = stack is not None
    return {
        "address": address,
        "size": size,
        "requested_size": size if is_used else 0,
        "state": "active_allocated" if is_used else "inactive",
        "frames": _frames(stack or ()),
    }
