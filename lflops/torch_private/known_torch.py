"""The error about a torch whose internals differ from those that lflops was written for."""

import contextlib
from collections.abc import Iterator

import torch

from lflops.errors import UnknownTorchError


def differs(difference: object) -> UnknownTorchError:
    """The error that names this torch's version and the difference."""
    return UnknownTorchError(
        f"torch {torch.__version__}: its internals are not as lflops knows them: {difference}"
    )


@contextlib.contextmanager
def known_torch() -> Iterator[None]:
    """Imports and uses of private names.

    One that is missing, or takes other arguments, is an `UnknownTorchError`.
    """
    try:
        yield
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        raise differs(error) from error
