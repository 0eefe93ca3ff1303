"""Errors of single outlets, as of one logger or one file: each is warned of once, and the others go on."""

import contextlib
from collections.abc import Iterator

from lflops.session.inputs.messages import warn

__all__ = ["Failures"]


class Failures:
    """The outlets of one monitor that have failed. An error is raised in place of the warning if `raised`."""

    def __init__(self, *, raised: bool) -> None:
        self._raised = raised
        self._outlets: set[str] = set()

    def __contains__(self, outlet: str) -> bool:
        return outlet in self._outlets

    @contextlib.contextmanager
    def contained(self, outlet: str) -> Iterator[None]:
        """Write to an outlet, by its name in the warning: an error ends the block, and no more."""
        try:
            yield
        except Exception as error:
            if self._raised:
                raise
            if outlet not in self._outlets:
                self._outlets.add(outlet)
                warn(f"FlopsMonitor: {outlet} failed; all else goes on: {type(error).__name__}: {error}")
