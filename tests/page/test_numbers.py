"""Test that each number of a run is the same on the page, in the terminal and in `lflops why`.

The page is read in a browser. Parts must add up to their whole.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from lflops.cli.main import main
from tests.support.browser import Seen
from tests.support.random_runs import write_random_run
from tests.support.run_claims import Page, labelled, read_page, wrong_claims

RUNS = 20


class Drawn(NamedTuple):
    """What lflops shows of a run: the page, and the output of `lflops show` and `lflops why`."""

    page: Page
    terminal: str
    why: str


@pytest.fixture
def drawn(
    opening: Callable[..., Seen],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[int], Drawn]:
    """Return a function that writes the random run of a seed, and reads what lflops shows of it."""
    monkeypatch.setenv("COLUMNS", "400")

    def draw(seed: int) -> Drawn:
        folder = tmp_path / str(seed)
        folder.mkdir()
        write_random_run(folder, seed)
        page = tmp_path / f"{seed}.html"
        assert 0 == main(["html", str(folder), "-o", str(page)])
        capsys.readouterr()
        assert 0 == main(["show", str(folder)])
        terminal = capsys.readouterr().out
        assert 0 == main(["why", str(folder)])
        why = capsys.readouterr().out
        return Drawn(read_page(opening(page.as_uri()).page), terminal, why)

    return draw


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_word_has_one_value_and_parts_add_up(seed: int, drawn: Callable[[int], Drawn]) -> None:
    """No figure, fact, phase, account or card of a random run contradicts another."""
    run = drawn(seed)
    assert [] == list(wrong_claims(*run))
    # The test would also pass if it read nothing.
    labels = labelled(run.page, run.terminal).keys()
    assert {"step", "time trained", "step of the window", "forward"} <= labels
    assert len(run.page.phases) >= 4
    assert len(run.page.account) >= 3


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        (lambda run: run._replace(terminal=run.terminal.replace(" step ", " step 9")), "step has"),
        (
            lambda run: run._replace(page=run.page._replace(phases=run.page.phases[1:])),
            "phases add up",
        ),
        (
            lambda run: run._replace(page=run.page._replace(account=run.page.account[1:])),
            "shares of account",
        ),
        (lambda run: run._replace(why=""), "lflops why does not say"),
        (
            lambda run: run._replace(
                page=run.page._replace(cards=[["−77 ms", *run.page.cards[0][1:]]])
            ),
            "−77 ms beside",
        ),
    ],
)
def test_a_planted_number_is_found(
    planted: Callable[[Drawn], Drawn], expected: str, drawn: Callable[[int], Drawn]
) -> None:
    """Each planted contradiction is reported: another value, a missing part, a missing sentence."""
    wrong = list(wrong_claims(*planted(drawn(0))))
    assert [each for each in wrong if expected in each], wrong
