"""A real browser for tests of the page and of the tab: Debian's Chromium, through playwright."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lflops.analysis.analysis import analyze
from lflops.profile.profile import Profile
from lflops.report.html import save
from tests.support.repository import ROOT
from tests.support.tensorboard_server import Board, board

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser"))),
    None,
)
"""The first takes a quarter of the CPU time to open a page: it has no window of its own around it."""

PARTS = ROOT / "lflops" / "page"
PATIENCE = 180_000
"""Milliseconds that the browser may take for anything."""
WITHIN = {"Operators": "Modules", "Roofline": "Modules", "All runs": "Compare"}
"""The views without a tab at the top, and the tab that they are in."""
SIZE = {"width": 1280, "height": 800}
"""Of a tab's viewport."""
GRID = "[role=treegrid]"
ROW = f"{GRID} .grid-body [role=row]"


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """One for all of a folder's tests, which are skipped where there is none, and say so."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright, of the dev extra"
    )
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE
        )
        yield opened
        opened.close()


class Seen(NamedTuple):
    """A page, and what it did beside being drawn.

    Addresses it asked, and what must never come: dialogs and errors.
    """

    page: Any
    asked: list[str]
    wrong: list[str]

    def labels(self) -> list[str]:
        """The modules on the screen, from top to bottom."""
        return self.page.locator(f"{ROW} .name .label").all_inner_texts()

    def shown(self, column: str) -> dict[str, str]:
        """Of each module on the screen, by its whole name, the exact value in a column."""
        found = {}
        for row in self.page.locator(ROW).all():
            cell = row.locator(f'.number[title^="{column}: "]')
            found[row.locator(".name").get_attribute("title")] = (
                cell.get_attribute("title").removeprefix(f"{column}: ").split("\n")[0]
            )
        return found

    def view(self, name: str) -> None:
        """Go to a view; some are within the tab of another one."""
        if name in WITHIN:
            self.page.get_by_role("tab", name=WITHIN[name], exact=True).click()
        self.page.get_by_role("tab", name=name, exact=True).click()

    def modules(self) -> None:
        """Go to that view, and wait for its rows."""
        self.view("Modules")
        self.page.locator(ROW).first.wait_for()


class Tabs:
    """The tabs of a browser, each of which is used again when it is closed.

    A new tab starts a process, which takes longer than most of what tests do in it.
    """

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._closed: dict[frozenset[tuple[str, Any]], list[Any]] = {}

    @contextmanager
    def opened(self, **options: Any) -> Iterator[Any]:
        """An empty tab of a context with these options.

        Nothing is left in it afterwards that the next test could see.
        """
        closed = self._closed.setdefault(frozenset(options.items()), [])
        page = closed.pop() if closed else self._new(options)
        yield page
        page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
        page.unroute_all()
        page.mouse.up()
        page.mouse.move(0, 0)
        page.goto("about:blank")
        page.set_viewport_size(SIZE)
        closed.append(page)

    def _new(self, options: dict[str, Any]) -> Any:
        context = self._browser.new_context(viewport=SIZE, **options)
        context.set_default_timeout(PATIENCE)
        return context.new_page()


@pytest.fixture(scope="package")
def tabs(browser: Any) -> Tabs:
    """The tabs of the browser."""
    return Tabs(browser)


@pytest.fixture
def opening(tabs: Tabs) -> Iterator[Callable[..., Seen]]:
    """Opens an address in a tab of its own; nothing may have gone wrong in it at the end."""
    seen: list[Seen] = []
    with ExitStack() as undo:

        def go(address: str, **options: Any) -> Seen:
            found = Seen(undo.enter_context(tabs.opened(**options)), [], [])
            seen.append(found)
            listeners: tuple[tuple[str, Callable[[Any], object]], ...] = (
                ("request", lambda request: found.asked.append(request.url)),
                ("pageerror", lambda error: found.wrong.append(str(error))),
                ("dialog", lambda dialog: found.wrong.append(dialog.message)),
                ("dialog", lambda dialog: dialog.dismiss()),
            )
            for event, listener in listeners:
                found.page.on(event, listener)
                undo.callback(found.page.remove_listener, event, listener)
            found.page.goto(address)
            return found

        yield go
        assert [] == [wrong for each in seen for wrong in each.wrong]


@pytest.fixture
def page_of(opening: Callable[..., Seen], tmp_path: Path) -> Callable[..., Seen]:
    """Opens a profile's page from disk."""

    def go(given: Profile, **options: Any) -> Seen:
        save(analyze(given), tmp_path / "page.html")
        found = opening((tmp_path / "page.html").as_uri(), **options)
        # A profile without times has no figures.
        found.page.locator(".figures").first.wait_for(state="attached")
        return found

    return go


@contextmanager
def bench(browser: Any) -> Iterator[Any]:
    """An empty page that can import the page's modules, to try what is in them."""
    page, site = browser.new_page(), "http://page.test/"
    page.route(
        "**/*.js",
        lambda route: route.fulfill(
            path=PARTS / route.request.url.removeprefix(site), content_type="text/javascript"
        ),
    )
    page.route("**/here", lambda route: route.fulfill(body="", content_type="text/html"))
    page.goto(f"{site}here")
    yield page
    page.close()


@contextmanager
def tab(
    opening: Callable[..., Seen], logdir: Path, *, expected: int
) -> Iterator[tuple[Seen, Any, Board]]:
    """The tab in a TensorBoard that has read so much; the frame that it is in; and its server."""
    with board(logdir, "--load_fast=false") as server:
        server.windows(expected=expected)
        seen = opening(f"{server.address}#lflops")
        frame = seen.page.frame_locator("iframe")
        frame.locator(".figures").first.wait_for()
        yield seen, frame, server
        assert {server.address.split("//")[1].rstrip("/")} == {
            address.split("//")[1].split("/")[0] for address in seen.asked if "//" in address
        }
