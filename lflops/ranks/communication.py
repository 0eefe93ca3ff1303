"""Collectives of a step by kind and group.

Calls, bytes, time, and the bandwidth that they reach, against what the link gives.
"""

from collections.abc import Sequence

from msgspec import Struct

from lflops.hardware.chips import Hardware
from lflops.profile.collective_names import bus_factor, collective_kind
from lflops.profile.profile import Communication, Profile
from lflops.profile.series import grouped, sum_known


class Collective(Struct, frozen=True, kw_only=True):
    """All calls of one kind in one group, a step. `None` is unknown."""

    # as `all_reduce`
    kind: str
    group: str
    group_size: int | None
    calls: int
    # of all messages, each the larger of what a rank sends and receives
    bytes: int
    # of one rank, and the waiting for other ranks is part of them
    seconds: float | None
    # of these, in which nothing was computed
    exposed_seconds: float | None
    transfer_seconds: (
        float | None
        # the least of the ranks that traced, call by call of a module; `None` where fewer than two
        # traced
    )
    bus_bytes_per_second: (
        float | None
        # what a link carries, as in nccl-tests, by `transfer_seconds` or else by `seconds`
    )
    link_share: (
        float | None
        # that over what the link between the chips of a host gives; `None` where ranks are on several
        # hosts too
    )

    @property
    def holds_waiting(self) -> bool:
        """Whether the bandwidth rests on a time that waiting for other ranks is part of."""
        return self.bus_bytes_per_second is not None and self.transfer_seconds is None


def communication(profile: Profile, chip: Hardware | None) -> tuple[Collective, ...]:
    """The collectives of one rank, those that take longest first.

    Where times are unknown, those with the most bytes.
    """
    groups = grouped(
        profile.communication,
        lambda each: (collective_kind(each.collective), each.group, each.group_size),
    )
    hosts = {rank.host for rank in profile.ranks}
    link = (
        chip.link_bytes_per_second
        if chip is not None and len(hosts) == 1 and None not in hosts
        else None
    )
    rows = [_collective(*key, calls, link) for key, calls in groups.items()]
    return tuple(sorted(rows, key=lambda row: (-(row.seconds or 0.0), -row.bytes)))


def _collective(
    kind: str, group: str, size: int | None, calls: Sequence[Communication], link: float | None
) -> Collective:
    moved = sum(each.bytes for each in calls)
    seconds = sum_known(each.seconds for each in calls)
    transfer = sum_known(each.least_seconds for each in calls)
    factor, took = bus_factor(kind, size), transfer if transfer is not None else seconds
    rate = moved * factor / took if factor is not None and took else None
    return Collective(
        kind=kind,
        group=group,
        group_size=size,
        calls=sum(each.calls for each in calls),
        bytes=moved,
        seconds=seconds,
        exposed_seconds=sum_known(each.exposed_seconds for each in calls),
        transfer_seconds=transfer,
        bus_bytes_per_second=rate,
        link_share=None if rate is None or link is None else rate / link,
    )
