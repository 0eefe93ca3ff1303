"""The errors that lflops raises on purpose: all of them are a `LflopsError`."""

from collections.abc import Iterator
from contextlib import contextmanager


class LflopsError(Exception):
    """The base of every error that lflops raises on purpose."""


class ProfileError(LflopsError):
    """A profile cannot be read, written or merged.

    The message names the file or the rank, the module and the field.
    """


class ScheduleError(LflopsError):
    """A schedule cannot be; the message names the argument, its value and what is taken."""


class CountError(LflopsError):
    """A count cannot be made, or one of its arguments is wrong.

    The message names it and what is taken.
    """


class UnknownTorchError(CountError):
    """This torch's internals are not those that lflops knows.

    The message names its version and the difference.
    """


class HardwareError(LflopsError):
    """A chip cannot be described or measured."""


class MissingPackageError(LflopsError, ImportError):
    """A package is not installed; the message names it, and the feature that needs it."""


@contextmanager
def needed_by(feature: str) -> Iterator[None]:
    """A context for imports that only one feature needs.

    A `MissingPackageError` names the module that is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise MissingPackageError(
            f"{feature} needs {package}, which is not installed: pip install {package}"
        ) from error
