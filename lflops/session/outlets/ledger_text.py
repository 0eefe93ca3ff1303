"""What the log says of a run's ledger at its end."""

from collections.abc import Callable

from lflops.ledger.account import Ledger
from lflops.report.lines.ledger import end_lines
from lflops.session.outlets.paths import OutputPaths


def log_ledger(ledger: Ledger, paths: OutputPaths | None, say: Callable[[str], None]) -> None:
    """Say where the run's time went, if anything in it is worth saying."""
    if lines := end_lines(ledger, None if paths is None else str(paths.profiles)):
        say("\n".join(lines))
