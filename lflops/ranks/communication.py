"""Summarize the collectives of a step by kind and process group: sizes, times and bandwidths."""

from collections.abc import Sequence

from msgspec import Struct

from lflops.hardware.chips import Hardware
from lflops.profile.collective_names import bus_factor, collective_kind
from lflops.profile.profile import Communication, Profile
from lflops.profile.series import grouped, ratio, sum_known, sums


class Collective(Struct, frozen=True, kw_only=True):
    """All calls of one kind of collective in one group during a step.

    A field is `None` if the value is unknown.

    Attributes:
        kind: Kind of collective, such as `all_reduce`.
        bytes: Total size of all messages. The size of a message is the number of bytes that a rank
            sends or receives, whichever is larger.
        seconds: Time on one rank, including the wait for other ranks, summed over the calls.
        exposed_seconds: The part of `seconds` during which nothing was computed.
        transfer_seconds: Time of the transfers without waiting. It is the shortest time of each
            collective on any traced rank, summed over the collectives. `None` if fewer than two
            ranks were traced.
        bus_bytes_per_second: Bus bandwidth in bytes per second, as defined by nccl-tests. Computed
            from `transfer_seconds`, or from `seconds` if `transfer_seconds` is unknown.
        link_share: `bus_bytes_per_second` as a share of the link bandwidth between the chips of a
            host; `None` if the ranks are on several hosts.
    """

    kind: str
    group: str
    group_size: int | None
    calls: int
    bytes: int
    seconds: float | None
    exposed_seconds: float | None
    transfer_seconds: float | None
    bus_bytes_per_second: float | None
    link_share: float | None

    @property
    def includes_waiting(self) -> bool:
        """Return whether `bus_bytes_per_second` was computed from a time that includes waiting."""
        return self.bus_bytes_per_second is not None and self.transfer_seconds is None


def communication(profile: Profile, chip: Hardware | None) -> tuple[Collective, ...]:
    """Return the collectives of one rank, sorted by time in descending order.

    If no times are known, they are sorted by size in bytes.
    """

    def key(each: Communication) -> tuple[str, str, int | None]:
        return collective_kind(each.collective), each.group, each.group_size

    link = _link_bytes_per_second(profile, chip)
    collectives = []
    for (kind, group, size), calls in grouped(profile.communication, key).items():
        collectives.append(_collective(kind, group, size, calls, link))
    return tuple(sorted(collectives, key=lambda each: (-(each.seconds or 0.0), -each.bytes)))


def _link_bytes_per_second(profile: Profile, chip: Hardware | None) -> float | None:
    """Return the bandwidth between the chips of a host, if all ranks are on one host."""
    hosts = {rank.host for rank in profile.ranks}
    if chip is None or len(hosts) != 1 or None in hosts:
        return None
    return chip.link_bytes_per_second


def _collective(
    kind: str, group: str, size: int | None, calls: Sequence[Communication], link: float | None
) -> Collective:
    counts = sums(calls, "calls", "bytes")
    seconds = sum_known(each.seconds for each in calls)
    transfer = sum_known(each.least_seconds for each in calls)
    factor = bus_factor(kind, size)
    divisor = transfer if transfer is not None else seconds
    bandwidth = None
    if factor is not None and divisor:
        bandwidth = counts["bytes"] * factor / divisor
    return Collective(
        kind=kind,
        group=group,
        group_size=size,
        calls=counts["calls"],
        bytes=counts["bytes"],
        seconds=seconds,
        exposed_seconds=sum_known(each.exposed_seconds for each in calls),
        transfer_seconds=transfer,
        bus_bytes_per_second=bandwidth,
        link_share=ratio(bandwidth, link),
    )
