"""Raise an error if torch's internals differ from the internals that lflops supports."""

import contextlib
from collections.abc import Iterator

import torch

from lflops.errors import UnknownTorchError


def differs(difference: object) -> UnknownTorchError:
    """Return the error that names torch's version and the difference."""
    return UnknownTorchError(
        f"torch {torch.__version__}: lflops does not support its internals: {difference}"
    )


@contextlib.contextmanager
def known_torch() -> Iterator[None]:
    """Return a context for imports and uses of private names.

    Raises:
        UnknownTorchError: A name is missing, or accepts different arguments.
    """
    try:
        yield
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        raise differs(error) from error
