"""Ranks whose group has a store of another kind than usual: each keeps what it has."""

from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from pathlib import Path

import lflops
from tests.support.lightning_runs import CLASSES, LIGHTNINGS_WARNINGS, ROWS, WIDTH
from tests.support.profile_checks import macs
from tests.support.trainer_ranks import BATCHES, WIDE, Ranks
from tests.support.trainer_stores import on_a_refused_connection, without_a_store, without_the_first

pytestmark = LIGHTNINGS_WARNINGS

WHOLE = {
    "net.up": ROWS * WIDTH * WIDE,
    "net.down": ROWS * WIDTH * WIDE,
    "net.head": ROWS * WIDTH * CLASSES,
}


def test_a_refused_connection_keeps_the_training_waiting_for_the_gathers_timeout_alone() -> None:
    """Six seconds, and not the hour of the group, which is its store's again afterwards.

    The second rank is missing in the profile.
    """
    with Ranks(2) as ranks:
        (profiles, *first), (nothing, *second) = ranks.run(on_a_refused_connection)
    assert [["ok", "missing"]] == [[each.status for each in profile.ranks] for profile in profiles]
    assert ([timedelta(hours=1), BATCHES], [timedelta(hours=1), BATCHES], []) == (
        first,
        second,
        nothing,
    )


def test_where_ranks_cannot_reach_each_other_each_keeps_what_it_has(tmp_path: Path) -> None:
    """The first says so once, and tells of its own part; their files make the profile of all."""
    with Ranks(2) as ranks:
        (profiles, warned), (nothing, silence) = ranks.run(without_a_store, tmp_path)
    (first,) = profiles
    assert (["ok", "missing"], True) == ([each.status for each in first.ranks], first.run.partial)
    (line,) = warned
    assert (
        f"each rank keeps its own profile in {tmp_path}; lflops.merge merges such profiles" in line
    )
    assert ([], []) == (nothing, silence)
    window = f"train-0-{first.run.step}"
    assert [f"{window}.{name}.json" for name in ("profile", "rank0", "rank1")] == sorted(
        path.name for path in tmp_path.iterdir()
    )
    whole = lflops.merge(lflops.load(tmp_path / f"{window}.rank{rank}.json") for rank in range(2))
    assert ["ok", "ok"] == [each.status for each in whole.ranks]
    assert WHOLE == macs(whole, "forward")


def test_of_a_window_that_nobody_took_the_rank_keeps_a_file(tmp_path: Path) -> None:
    """The first rank was killed, and the store with it.

    The second's training ends as it would have.
    """
    with Ranks(2) as ranks:
        killed, left_by = ranks.outcomes(without_the_first, tmp_path)
    assert isinstance(killed, BrokenProcessPool)
    assert "RuntimeError" == left_by
    (path,) = tmp_path.glob("*.json")  # beside what the killed one had claimed the folder by
    kept = lflops.load(path)
    assert f"train-0-{kept.run.step}.rank1.json" == path.name
    assert (WHOLE, True) == (macs(kept, "forward"), kept.run.partial)
    assert ["ended_early", "gather_failed"] == [
        note.code for note in kept.notes if note.code in {"ended_early", "gather_failed"}
    ]
