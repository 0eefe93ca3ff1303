"""Which collective a name means: an operator's of torch, a kernel's of NCCL or RCCL, or what a trace calls one.

What it has to move.
"""

import functools
import re
from pathlib import Path

import msgspec

_KERNEL = re.compile(
    r"nccl|rccl|msccl|mscclpp|oneccl|deepep|nvshmem|all_?reduce_?kernel|cross_device_reduce",
    re.IGNORECASE,
)
_KINDS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, str])
_SHARE = frozenset(
    {"all_gather", "reduce_scatter", "all_to_all"}
    # of these a rank keeps its own share
)


@functools.lru_cache(1 << 12)
def is_collective_kernel(name: str) -> bool:
    return _KERNEL.search(name) is not None


@functools.lru_cache(1 << 12)
def collective_kind(name: str) -> str:
    """The kind, as `all_reduce`.

    `send_recv` is a kernel of NCCL's, of which all-to-all is made too.
    """
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((kind for part, kind in _KINDS.items() if part in plain), "other")


def bus_factor(kind: str, size: int | None) -> float | None:
    """Bytes that a rank sends for each byte of the message, as in NVIDIA's nccl-tests.

    `None` where the size of the group is needed.
    """
    if kind not in _SHARE and kind != "all_reduce":
        return 1.0
    if not size:
        return None
    return (size - 1) / size * (2 if kind == "all_reduce" else 1)
