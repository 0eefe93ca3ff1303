"""Who has not set logging up sees the summary; who silences logging does not."""

import logging
from collections.abc import Callable, Iterator

import pytest

from lflops.monitoring.inputs.messages import say

LOGGER, ROOT = logging.getLogger("lflops"), logging.getLogger()


@pytest.fixture(autouse=True)
def fresh_logging() -> Iterator[None]:
    """As in a script that has not set it up: no handler, and Python's levels."""
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
    """By whichever of logging's ways."""
    monkeypatch.setattr(ROOT, "handlers", [])  # pytest has one there
    SILENCED[choice]()
    say("a summary")
    assert ("", "") == capsys.readouterr()


@pytest.mark.parametrize("choice", SHOWN)
def test_who_does_not_sees_it(
    choice: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the standard output, once."""
    monkeypatch.setattr(ROOT, "handlers", [])
    monkeypatch.setattr(LOGGER, "handlers", [])
    SHOWN[choice]()
    say("a summary of 100 %")
    assert ("a summary of 100 %\n", "") == capsys.readouterr()


def test_who_has_set_logging_up_has_it_there(capsys: pytest.CaptureFixture[str]) -> None:
    """In the log, and not printed as well."""
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
