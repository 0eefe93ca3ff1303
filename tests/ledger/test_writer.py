"""Test when the ledger's thread records that the process did not run for some time (a freeze)."""

from types import SimpleNamespace

import pytest

from lflops.ledger import writer
from lflops.ledger.writer import LedgerWriter
from lflops.phase_log import PhaseLog

MS = 1_000_000


@pytest.mark.parametrize(
    ("late", "hearing", "freezes"),
    [(0, 300, []), (300, 0, [(110, 410)])],
    ids=["a slow disk", "a stopped process"],
)
def test_a_freeze_is_a_wait_that_ends_late(
    late: int, hearing: int, freezes: list[tuple[int, int]]
) -> None:
    """A freeze is recorded if a wait of 100 ms ends much too late.

    The check for a requested window runs between two waits. However long it takes, it is no freeze:
    it takes `hearing` milliseconds. In the case with a freeze, the wait begins at 10 ms, should end
    at 110 ms, and ends at 410 ms.
    """
    clock = SimpleNamespace(now=10 * MS)
    watched = LedgerWriter(
        PhaseLog(lambda: clock.now),
        look_for_request=lambda: setattr(clock, "now", clock.now + hearing * MS),
    )
    waits = iter([100 + late, 100, None])

    def wait(seconds: float) -> bool:
        assert seconds == writer.REQUEST_PERIOD
        took = next(waits)
        if took is None:
            return True
        clock.now += took * MS
        return False

    # The thread uses only these two methods of the event.
    watched._is_over = SimpleNamespace(wait=wait, set=lambda: None)  # type: ignore[assignment]
    watched._run()
    assert [(begin * MS, end * MS) for begin, end in freezes] == list(watched._accountant.freezes)
