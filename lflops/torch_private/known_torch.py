"""Raise an error if torch's internals differ from the internals that lflops supports."""

import contextlib
from collections.abc import Iterator

import torch

from lflops.errors import UnknownTorchError


def differs(difference: object) -> UnknownTorchError:
    """Return an error which says that this version of torch differs from what lflops expects.

    Args:
        difference: The difference, as text or as an exception.
    """
    return UnknownTorchError(
        f"lflops does not support the internals of torch {torch.__version__}: {difference}"
    )


@contextlib.contextmanager
def known_torch() -> Iterator[None]:
    """Return a context for code that imports or uses private names of torch.

    Raises:
        UnknownTorchError: A name is missing, or a function accepts different arguments.
    """
    try:
        yield
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        raise differs(error) from error
