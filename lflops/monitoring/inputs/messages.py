"""Warnings of this process, which never become errors in a training, errors of single outlets, and the log of a plain loop."""

import contextlib
import logging
import warnings
from collections.abc import Iterator

_names = ["FlopsMonitor"]


def name_monitor(name: str) -> None:
    """Name the object that the user created, at the begin of messages about its run."""
    _names[0] = name


def monitor_name() -> str:
    """The name of the object that the user created last."""
    return _names[0]


def warn(message: str) -> None:
    """Warn on this process, whichever it is. Where warnings are errors, the message is logged."""
    try:
        warnings.warn(message, stacklevel=2)
    except UserWarning:
        logging.getLogger("lflops").warning(message)


def say(message: str) -> None:
    """Log at level INFO by the logger `lflops`; where logging is not set up, print.

    Python's own default is to show warnings alone, which no user chose. So that default does not
    silence the message. What a user has chosen does: `logging.disable`, a level of the logger
    `lflops`, or one above WARNING of the root logger.
    """
    logger = logging.getLogger("lflops")
    is_default = logger.getEffectiveLevel() == logging.WARNING and logger.level == logging.NOTSET
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info("%s", message)
    elif (
        not logger.disabled
        and logger.manager.disable < logging.INFO
        and (is_default or logger.isEnabledFor(logging.INFO))
    ):
        record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, "%s", (message,), None)
        if logger.filter(record):
            print(message)  # noqa: T201 - a script that has not set logging up is to see it


class Failures:
    """The outlets of one monitor that have failed.

    An error is raised in place of the warning if `raised`.
    """

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
                warn(
                    f"{monitor_name()}: {outlet} failed; all else goes on: {type(error).__name__}: {error}"
                )
