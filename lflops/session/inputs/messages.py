"""Warnings of this process, which never become errors in somebody's training."""

import logging
import warnings

__all__ = ["warn"]


def warn(message: str) -> None:
    """Warn on this process, whichever it is. Where warnings are errors, the message is logged."""
    try:
        warnings.warn(message, stacklevel=2)
    except UserWarning:
        logging.getLogger("lflops").warning(message)
