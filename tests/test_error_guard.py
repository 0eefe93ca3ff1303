"""Methods that are wrapped for the time of a training run."""

from collections.abc import Callable
from typing import Any

from lflops.error_guard import CleanupStack, wrap


class Engine:
    """Something of another package."""

    def step(self) -> str:
        """Return what the method returns."""
        return "stepped"


def test_a_wrapper_below_another_one_does_nothing_after_its_end() -> None:
    """Other code wraps the wrapper while it is in place, so it cannot be removed.

    The twin is the call before the end, which `around` sees.
    """
    seen: list[str] = []

    def around(method: Callable[..., Any], *args: Any) -> Any:
        seen.append("around")
        return method(*args)

    engine = Engine()
    undo = CleanupStack()
    wrap(undo, engine, "step", around)
    ours = engine.step
    engine.step = lambda: f"{ours()} twice"  # type: ignore[method-assign]
    assert engine.step() == "stepped twice"
    undo.close()
    assert engine.step() == "stepped twice"
    assert seen == ["around"]
