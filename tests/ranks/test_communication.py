"""Test the collectives of a step: their time, exposed time, bandwidth, and the report's lines."""

from typing import Any

import pytest

from lflops.analysis.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.profile.profile import Communication, Profile
from lflops.profile.records import Rank
from lflops.report.ranks import ranks
from tests.support.profile_builders import profile, run, weights

CHIP = Hardware("eight on a board", {"bf16": 1.0}, link_bytes_per_second=400e9)


def call(module: str, collective: str = "allreduce_", **fields: Any) -> Communication:
    """Return a collective over eight ranks with a message of 1 GB."""
    usual = {"phase": "backward", "group": "0", "group_size": 8, "calls": 1, "bytes": 10**9}
    return Communication(module=module, collective=collective, **(usual | fields))


def of(*calls: Communication, hosts: tuple[str, ...] = ("a", "a")) -> Profile:
    """Return a profile with these collectives and one rank for each of `hosts`."""
    each = tuple(
        Rank(rank=n, node=None, host=host, device=None, coordinates={}, status="ok")
        for n, host in enumerate(hosts)
    )
    rows = {name: weights(0) for name in ("", "up", "down")}
    return profile(
        rows,
        [],
        run=run(world_size=len(hosts)),
        ranks=each if len(each) > 1 else (),
        communication=calls,
    )


def test_a_kind_is_summed_over_its_calls() -> None:
    """The calls of a kind are added up: 2 GB in 12 ms, of which 4 ms are exposed.

    An all-reduce over eight ranks sends 7/4 of its message. So it sends 3.5 GB in 10 ms, which is
    the least time of both calls together, without waiting.
    """
    up = call("up", seconds=7e-3, exposed_seconds=1e-3, least_seconds=6e-3)
    down = call("down", seconds=5e-3, exposed_seconds=3e-3, least_seconds=4e-3)
    (found,) = analyze(of(up, down), CHIP).communication
    assert ("all_reduce", 8) == (found.kind, found.group_size)
    assert (2, 2 * 10**9) == (found.calls, found.bytes)
    assert 12e-3 == pytest.approx(found.seconds)
    assert 4e-3 == pytest.approx(found.exposed_seconds)
    assert (pytest.approx(350e9), pytest.approx(0.875)) == (
        found.bus_bytes_per_second,
        found.link_share,
    )


@pytest.mark.parametrize(
    ("collective", "size", "sent"),
    [
        ("allreduce_", 4, 1.5),
        ("_allgather_base_", 4, 0.75),
        ("reduce_scatter_tensor", 2, 0.5),
        ("alltoall_base_", 8, 0.875),
        ("broadcast_", 4, 1.0),
        ("allreduce_", None, None),
    ],
)
def test_the_bus_carries_what_the_kind_has_to_send(
    collective: str, size: int | None, sent: float | None
) -> None:
    """The bus bandwidth depends on the share of the message that each rank sends.

    The message of 1 GB takes 10 ms. `sent` is the share for this kind of collective and group size;
    with an unknown group size, the bandwidth is unknown.
    """
    timed = call("up", collective, group_size=size, seconds=10e-3)
    (found,) = analyze(of(timed), CHIP).communication
    expected = None
    if sent is not None:
        expected = pytest.approx(sent * 100e9)
    assert expected == found.bus_bytes_per_second


def test_what_is_unknown_of_one_call_is_unknown_of_the_kind() -> None:
    """If the time of one call is unknown, the time and the bandwidth of its kind are unknown.

    The share of the link is known only if all ranks are on one host and the chip is known.
    """
    unknown = analyze(of(call("up", seconds=1e-3), call("down")), CHIP).communication[0]
    assert (None, None, None) == (unknown.seconds, unknown.bus_bytes_per_second, unknown.link_share)
    timed = call("up", seconds=10e-3)
    for hosts, chip in ((("a", "b"), CHIP), (("a",), CHIP), (("a", "a"), None)):
        (found,) = analyze(of(timed, hosts=hosts), chip).communication
        assert (175e9, None) == (pytest.approx(found.bus_bytes_per_second), found.link_share)


def test_the_kind_that_takes_longest_comes_first() -> None:
    """The kind that takes longest comes first; without times, the kind with the most bytes."""
    gathers = call("up", "_allgather_base_", seconds=3e-3)
    assert ["all_reduce", "all_gather"] == [
        each.kind for each in analyze(of(gathers, call("up", seconds=4e-3))).communication
    ]
    small = call("up", bytes=1)
    large = call("up", "_allgather_base_")
    assert ["all_gather", "all_reduce"] == [
        each.kind for each in analyze(of(small, large)).communication
    ]


def said(given: Profile, chip: Hardware | None = CHIP) -> list[str]:
    """Return the texts of the lines about communication.

    The first of these lines has the label `communication`, and the lines after it have no label.
    """
    lines = list(ranks(analyze(given, chip)))
    start = [label for label, _ in lines].index("communication")
    texts = [lines[start][1]]
    for label, text in lines[start + 1 :]:
        if label:
            break
        texts.append(text)
    return texts


def test_each_kind_is_a_sentence() -> None:
    """Each kind of collective has a sentence with the values that are known.

    With one trace, only a lower limit of the bandwidth is known, because the time includes waiting.
    """
    both = call("up", seconds=12e-3, exposed_seconds=4e-3, least_seconds=5e-3)
    one = call("up", "_allgather_base_", seconds=10e-3, exposed_seconds=0.0)
    moved = "over 8 ranks: 1 call and 953.67 MiB per step"
    assert [
        (
            f"all-reduce {moved}, taking 12.0 ms (4.00 ms exposed), bus bandwidth 350 GB/s, "
            "87.5 % of the link's bandwidth"
        ),
        (
            f"all-gather {moved}, taking 10.0 ms (0 s exposed), bus bandwidth at least 87.5 GB/s, "
            "21.9 % of the link's bandwidth"
        ),
        f"reduce-scatter {moved}",
    ] == said(of(both, one, call("up", "reduce_scatter_tensor")))


def test_groups_of_one_size_are_told_apart() -> None:
    """Groups of the same size have separate lines with their names, even if one rank reports."""
    assert [
        "all-reduce over 8 ranks (group data): 1 call and 953.67 MiB per step",
        "all-reduce over 8 ranks (group tensor): 1 call and 953.67 MiB per step",
    ] == said(of(call("up", group="data"), call("up", group="tensor"), hosts=("a",)))
