"""Warnings of this process, which never become errors in a training, and the log of a plain loop."""

import logging
import warnings

__all__ = ["say", "warn"]


def warn(message: str) -> None:
    """Warn on this process, whichever it is. Where warnings are errors, the message is logged."""
    try:
        warnings.warn(message, stacklevel=2)
    except UserWarning:
        logging.getLogger("lflops").warning(message)


def say(message: str) -> None:
    """Log at level INFO by the logger `lflops`; where logging is not set up, print.

    Python's own default is to show warnings alone, which no user chose. So that default does not silence the message. What a user
    has chosen does: `logging.disable`, a level of the logger `lflops`, or one above WARNING of the root logger.
    """
    logger = logging.getLogger("lflops")
    is_default = logger.getEffectiveLevel() == logging.WARNING and logger.level == logging.NOTSET
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info("%s", message)
    elif not logger.disabled and logger.manager.disable < logging.INFO and (is_default or logger.isEnabledFor(logging.INFO)):
        record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, "%s", (message,), None)
        if logger.filter(record):
            print(message)  # noqa: T201 - a script that has not set logging up is to see it
