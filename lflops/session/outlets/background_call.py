"""A call in a thread, whose result or error is taken up by the thread that asked for it."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["BackgroundCall"]

Result = TypeVar("Result")


class BackgroundCall(Generic[Result]):
    """One call. Its thread ends with the interpreter: a file system that hangs must not hold the exit.

    So what it calls writes files under temporary names, and renames them.
    """

    def __init__(self, function: Callable[[], Result], name: str) -> None:
        self._function = function
        self._returned: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._call, name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has returned, or failed."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait for it, so long at most. Returns whether it is done."""
        self._thread.join(max(seconds, 0.0))
        return self.is_done

    def result(self) -> Result:
        """What it returned, once it is done; what it raised is raised."""
        if self._error is not None:
            raise self._error
        return self._returned[0]

    def _call(self) -> None:
        try:
            self._returned.append(self._function())
        except BaseException as error:  # noqa: BLE001 - the other thread raises it
            self._error = error
