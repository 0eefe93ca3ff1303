"""Define the errors that lflops raises on purpose. All of them derive from `LflopsError`."""

from collections.abc import Iterator
from contextlib import contextmanager


class LflopsError(Exception):
    """Base class of all errors that lflops raises on purpose."""


class ProfileError(LflopsError):
    """A profile cannot be read, written or merged.

    The message names the file or the rank and, where possible, the module and the field.
    """


class ScheduleError(LflopsError):
    """A schedule is invalid.

    The message names the argument, its value and the accepted values.
    """


class CountError(LflopsError):
    """Operators cannot be counted or measured, or an argument is invalid.

    The message names the argument and the accepted values.
    """


class UnknownTorchError(CountError):
    """torch's internals differ from the internals of the versions that lflops supports.

    The message names torch's version and the difference.
    """


class HardwareError(LflopsError):
    """A chip is unknown, its description is invalid, or it cannot be measured."""


class MissingPackageError(LflopsError, ImportError):
    """A package is not installed.

    The message names the package and the feature that needs it.
    """


@contextmanager
def needed_by(feature: str) -> Iterator[None]:
    """Return a context for imports that only one feature needs, so that an error names the feature.

    Raises:
        MissingPackageError: A module is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise MissingPackageError(
            f"{feature} needs {package}, which is not installed: pip install {package}"
        ) from error
