"""Test `wrap`, which replaces a method of another package during a training run."""

from collections.abc import Callable
from typing import Any

from lflops.error_guard import CleanupStack, wrap


class Engine:
    """A class of another package."""

    def step(self) -> str:
        """Return a fixed text."""
        return "stepped"


def test_a_wrapper_below_another_one_does_nothing_after_its_end() -> None:
    """After `undo.close()`, the wrapper only calls the method, even if it is still in place.

    Other code wraps the wrapper during the run, so closing cannot remove it. Only the call before
    `close()` reaches `around`.
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
