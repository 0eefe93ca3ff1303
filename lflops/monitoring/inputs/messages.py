"""Log messages, issue warnings that never become errors, and record failed outputs."""

import contextlib
import logging
import warnings
from collections.abc import Iterator

_names = ["FlopsMonitor"]


def name_monitor(name: str) -> None:
    """Set the name that messages of this process begin with, such as `FlopsMonitor`."""
    _names[0] = name


def monitor_name() -> str:
    """Return the name that messages begin with: the name of the monitor that was created last."""
    return _names[0]


def warn(message: str) -> None:
    """Issue a warning. If warnings are errors, log the message instead.

    The warning is issued on this process, whatever its rank.
    """
    try:
        warnings.warn(message, stacklevel=2)
    except UserWarning:
        logging.getLogger("lflops").warning(message)


def say(message: str) -> None:
    """Log at level INFO with the logger `lflops`; if logging is not set up, print.

    Python's default level is WARNING. This default does not silence the message, because the user
    did not choose it. To silence the message, the user can call `logging.disable`, set a level for
    the logger `lflops`, or set a level above WARNING for the root logger.
    """
    logger = logging.getLogger("lflops")
    is_enabled = logger.isEnabledFor(logging.INFO)
    if is_enabled and logger.hasHandlers():
        logger.info("%s", message)
        return
    if logger.disabled or logger.manager.disable >= logging.INFO:
        return
    has_default_level = (
        logger.getEffectiveLevel() == logging.WARNING and logger.level == logging.NOTSET
    )
    if not is_enabled and not has_default_level:
        return
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, "%s", (message,), None)
    if logger.filter(record):
        print(message)  # noqa: T201 - scripts without logging must show it


class Failures:
    """Records the outputs of one monitor that have failed.

    An output is a name such as "the summary" or "the MLflow output of a window". If `raised` is
    true, errors are raised instead of being logged as warnings.
    """

    def __init__(self, *, raised: bool) -> None:
        self._raised = raised
        self._outputs: set[str] = set()

    def __contains__(self, output: str) -> bool:
        return output in self._outputs

    @contextlib.contextmanager
    def contained(self, output: str) -> Iterator[None]:
        """Return a context manager for writing to an output: an error ends only the `with` block.

        The first error of each output becomes a warning that names the output.
        """
        try:
            yield
        except Exception as error:
            if self._raised:
                raise
            if output not in self._outputs:
                self._outputs.add(output)
                reason = f"{type(error).__name__}: {error}"
                warn(
                    f"{monitor_name()}: {output} could not be written, but training and all other "
                    f"outputs continue: {reason}"
                )
