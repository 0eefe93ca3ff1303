"""Test ranks that cannot send their profiles, because their process group has an unusual store.

Each rank then keeps its own profile.
"""

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
"""MACs of the forward of a batch."""


def test_a_refused_connection_keeps_the_training_waiting_for_the_gathers_timeout_alone() -> None:
    """If a connection is refused, training waits for `gather_timeout`, not the group's timeout.

    The former is six seconds, and the latter an hour. Afterwards the store has the group's timeout
    again. Rank 1 is missing in the profile, and both ranks run all their steps.
    """
    with Ranks(2) as ranks:
        (profiles, *first), (nothing, *second) = ranks.run(on_a_refused_connection)
    (profile,) = profiles
    assert ["ok", "missing"] == [each.status for each in profile.ranks]
    assert [timedelta(hours=1), BATCHES] == first
    assert [timedelta(hours=1), BATCHES] == second
    assert [] == nothing


def test_where_ranks_cannot_reach_each_other_each_keeps_what_it_has(tmp_path: Path) -> None:
    """If the store allows no second connection, each rank saves its profile, and rank 0 warns once.

    The profile of rank 0 is partial. `lflops.merge` makes the complete profile from the files.
    """
    with Ranks(2) as ranks:
        (profiles, warned), (nothing, silence) = ranks.run(without_a_store, tmp_path)
    (first,) = profiles
    assert ["ok", "missing"] == [each.status for each in first.ranks]
    assert first.run.partial
    (line,) = warned
    advice = f"Each rank saves its own profile in {tmp_path}: merge the profiles with lflops.merge"
    assert advice in line
    assert [] == nothing
    assert [] == silence
    window = f"train-0-{first.run.step}"
    assert [f"{window}.{name}.json" for name in ("profile", "rank0", "rank1")] == sorted(
        path.name for path in tmp_path.iterdir()
    )
    whole = lflops.merge(lflops.load(tmp_path / f"{window}.rank{rank}.json") for rank in range(2))
    assert ["ok", "ok"] == [each.status for each in whole.ranks]
    assert WHOLE == macs(whole, "forward")


def test_of_a_window_that_nobody_took_the_rank_keeps_a_file(tmp_path: Path) -> None:
    """If rank 0 is killed, and the store with it, rank 1 saves its partial profile with two notes.

    Training on rank 1 ends with the usual error of a failed reduction.
    """
    with Ranks(2) as ranks:
        killed, left_by = ranks.outcomes(without_the_first, tmp_path)
    assert isinstance(killed, BrokenProcessPool)
    assert "RuntimeError" == left_by
    # The folder also contains the marker of the killed rank.
    (path,) = tmp_path.glob("*.json")
    kept = lflops.load(path)
    assert f"train-0-{kept.run.step}.rank1.json" == path.name
    assert WHOLE == macs(kept, "forward")
    assert kept.run.partial
    assert ["ended_early", "gather_failed"] == [
        note.code for note in kept.notes if note.code in {"ended_early", "gather_failed"}
    ]
