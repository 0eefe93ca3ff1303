"""Find the kind of a collective from the name of an operator, a kernel or a trace event.

Kinds are, for example, `all_reduce` and `all_gather`.
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
# In these collectives, a rank sends the whole message except for the share that belongs to itself.
_WITHOUT_OWN_SHARE = frozenset({"all_gather", "reduce_scatter", "all_to_all"})


@functools.lru_cache(1 << 12)
def is_collective_kernel(name: str) -> bool:
    """Return whether a kernel with this name belongs to a collective."""
    return _KERNEL.search(name) is not None


@functools.lru_cache(1 << 12)
def collective_kind(name: str) -> str:
    """Return the kind of a collective, such as `all_reduce`, or `"other"` for an unknown name.

    NCCL runs an all-to-all as `send_recv` kernels, so the result `send_recv` can also mean an
    all-to-all.
    """
    plain = re.sub(r"[^a-z]", "", name.lower())
    for part, kind in _KINDS.items():
        if part in plain:
            return kind
    return "other"


def bus_factor(kind: str, size: int | None) -> float | None:
    """Return how many bytes a rank sends for each byte of a collective's message.

    The factors are the same as in nccl-tests. Returns `None` if the factor depends on the number of
    ranks and this number is unknown.

    Args:
        kind: Kind of the collective, such as `all_reduce`.
        size: Number of ranks in the group.
    """
    if kind not in _WITHOUT_OWN_SHARE and kind != "all_reduce":
        return 1.0
    if not size:
        return None
    share_of_others = (size - 1) / size
    if kind == "all_reduce":
        return 2 * share_of_others
    return share_of_others
