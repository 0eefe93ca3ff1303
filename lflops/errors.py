"""The errors that lflops raises on purpose: all of them are a `LflopsError`."""

__all__ = ["CountError", "HardwareError", "LflopsError", "ProfileError", "ScheduleError"]


class LflopsError(Exception):
    """The base of every error that lflops raises on purpose."""


class ProfileError(LflopsError):
    """A profile cannot be read, written or merged; the message names the file or the rank, the module and the field."""


class ScheduleError(LflopsError):
    """A schedule cannot be; the message names the argument, its value and what is taken."""


class CountError(LflopsError):
    """A count cannot be made, or one of its arguments is wrong; the message names it and what is taken."""


class HardwareError(LflopsError):
    """A chip cannot be described or measured."""
