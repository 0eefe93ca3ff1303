"""When the thread of the ledger notices that the process did not run."""

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
    """The thread waits for 100 ms.

    To look whether a window was asked for may take as long as it likes.
    """
    clock = SimpleNamespace(now=0)
    clock.now = 10 * MS
    watched = LedgerWriter(
        PhaseLog(lambda: clock.now),
        look_for_request=lambda: setattr(clock, "now", clock.now + hearing * MS),
    )
    waits = iter([100 + late, 100, None])

    def wait(seconds: float) -> bool:
        assert seconds == writer.REQUEST_PERIOD
        clock.now += (took := next(waits) or 0) * MS
        return not took

    watched._is_over = SimpleNamespace(wait=wait, set=lambda: None)  # type: ignore[assignment] - of the event only this is asked
    watched._run()
    assert [(begin * MS, end * MS) for begin, end in freezes] == list(watched._accountant.freezes)
