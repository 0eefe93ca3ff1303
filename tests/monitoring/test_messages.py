"""Test `say`: it prints if logging is not set up, logs if it is, and respects silenced logging."""

import logging
from collections.abc import Callable, Iterator

import pytest

from lflops.monitoring.inputs.messages import say

LOGGER = logging.getLogger("lflops")
ROOT = logging.getLogger()


@pytest.fixture(autouse=True)
def fresh_logging() -> Iterator[None]:
    """Set the default levels of a script that has not set up logging; restore them afterwards."""
    levels = {logger: logger.level for logger in (LOGGER, ROOT)}
    LOGGER.setLevel(logging.NOTSET)
    ROOT.setLevel(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    LOGGER.filters.clear()
    LOGGER.handlers.clear()
    LOGGER.disabled = False
    for logger, level in levels.items():
        logger.setLevel(level)


SILENCED: dict[str, Callable[[], object]] = {
    "all is disabled": lambda: logging.disable(logging.CRITICAL),
    "INFO is disabled": lambda: logging.disable(logging.INFO),
    "the logger's level": lambda: LOGGER.setLevel(logging.WARNING),
    "the root's level": lambda: ROOT.setLevel(logging.ERROR),
    "the logger is disabled": lambda: setattr(LOGGER, "disabled", True),
    "a filter": lambda: LOGGER.addFilter(lambda _: False),
}
SHOWN: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "DEBUG is disabled": lambda: logging.disable(logging.DEBUG),
    "the logger's level": lambda: LOGGER.setLevel(logging.INFO),
    "a handler for warnings": lambda: LOGGER.addHandler(logging.NullHandler()),
}


@pytest.mark.parametrize("choice", SILENCED)
def test_who_silences_logging_sees_nothing(
    choice: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is printed if the user has silenced logging in any of these ways."""
    # pytest adds a handler to the root logger.
    monkeypatch.setattr(ROOT, "handlers", [])
    SILENCED[choice]()
    say("a summary")
    assert ("", "") == capsys.readouterr()


@pytest.mark.parametrize("choice", SHOWN)
def test_who_does_not_sees_it(
    choice: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is printed once on the standard output if the user has not silenced it."""
    monkeypatch.setattr(ROOT, "handlers", [])
    monkeypatch.setattr(LOGGER, "handlers", [])
    SHOWN[choice]()
    say("a summary of 100 %")
    assert ("a summary of 100 %\n", "") == capsys.readouterr()


def test_who_has_set_logging_up_has_it_there(capsys: pytest.CaptureFixture[str]) -> None:
    """If the user has set up logging, the message is logged and not printed."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    ROOT.setLevel(logging.INFO)
    say("a summary of 100 %")
    assert [("lflops", "INFO", "a summary of 100 %")] == [
        (each.name, each.levelname, each.getMessage()) for each in records
    ]
    assert ("", "") == capsys.readouterr()
