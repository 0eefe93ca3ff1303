"""Test the allocator peaks of a GPU run, with stand-ins for functions of `torch.cuda`."""

from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.inputs.run_info import with_allocator_peaks
from lflops.profile.profile import Profile
from lflops.ranks.merge.merge import merge
from lflops.report.summary_facts import report_of
from tests.support.profile_builders import run, small_profile

STATS = {
    "allocated_bytes.all.peak": 3 << 30,
    "reserved_bytes.all.peak": 4 << 30,
    "allocated_bytes.all.current": 5,
}


def test_the_allocators_peaks_are_read_without_waiting_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The allocator's statistics are on the host, so a synchronization would only cost time."""

    def refuse(*_: object) -> None:
        raise AssertionError("reading the allocator's peaks synchronized the device")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: STATS)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    found = with_allocator_peaks(run(), torch.device("cuda", 0))
    assert (3 << 30, 4 << 30) == (found.allocated_bytes, found.reserved_bytes)


@pytest.mark.parametrize(("device", "initialized"), [("cpu", True), ("cuda", False)])
def test_elsewhere_they_are_unknown(
    monkeypatch: pytest.MonkeyPatch, device: str, initialized: object
) -> None:
    """On a CPU, and if CUDA is not initialized: reading the statistics would initialize it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    found = with_allocator_peaks(run(), torch.device(device))
    assert (None, None) == (found.allocated_bytes, found.reserved_bytes)


def ranks(peaks: Sequence[int | None]) -> list[Profile]:
    """Return one profile for each allocated peak; the reserved peak is twice as large."""
    given = replace(small_profile(), ranks=(), rank_stats=())
    profiles = []
    for peak in peaks:
        reserved = None if peak is None else 2 * peak
        facts = replace(given.run, allocated_bytes=peak, reserved_bytes=reserved)
        profiles.append(replace(given, run=facts))
    return profiles


def test_of_several_ranks_the_largest_is_kept() -> None:
    """A rank with an unknown peak does not count."""
    found = merge(ranks([5, 7])).run
    assert (7, 14) == (found.allocated_bytes, found.reserved_bytes)
    assert 5 == merge(ranks([5, None])).run.allocated_bytes


def test_the_report_has_them_where_they_are_known() -> None:
    """The remarks of the report state the peaks if they are known, and leave them out otherwise."""
    (given,) = ranks([3 << 30])
    remarks = {fact.label: fact.text for fact in report_of(analyze(given)).remarks}
    assert "3.00 GiB allocated, 6.00 GiB reserved" == remarks["allocator's peak"]
    assert "allocator's peak" not in {
        fact.label for fact in report_of(analyze(small_profile())).remarks
    }
