"""A real browser, Chromium with playwright, for tests of the page and of the TensorBoard tab."""

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
"""Path of the browser, or `None` if there is none.

The headless shell is preferred: it draws no window, and opens a page in a quarter of the CPU time.
"""

PARTS = ROOT / "lflops" / "page"
PATIENCE = 180_000
"""Timeout of each browser action in milliseconds."""
WITHIN = {"Operators": "Modules", "Roofline": "Modules", "All runs": "Compare"}
"""The views inside another view, and the tab at the top that leads to them."""
SIZE = {"width": 1280, "height": 800}
"""Size of a tab's viewport in CSS pixels."""
GRID = "[role=treegrid]"
ROW = f"{GRID} .grid-body [role=row]"


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Yield one browser for all tests of a folder, or skip them if there is none."""
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
    """An open page, and its side effects.

    Attributes:
        page: The page of playwright.
        asked: The addresses that the page has requested.
        wrong: Messages of dialogs and errors. A page must have none.
    """

    page: Any
    asked: list[str]
    wrong: list[str]

    def labels(self) -> list[str]:
        """Return the labels of the modules on the screen, from top to bottom."""
        return self.page.locator(f"{ROW} .name .label").all_inner_texts()

    def shown(self, column: str) -> dict[str, str]:
        """Return the exact values of a column of the module table, keyed by the module's full name.

        The exact value is in the tooltip of a cell; the cell itself shows a rounded value.
        """
        found = {}
        for row in self.page.locator(ROW).all():
            name = row.locator(".name").get_attribute("title")
            cell = row.locator(f'.number[title^="{column}: "]')
            tooltip = cell.get_attribute("title")
            found[name] = tooltip.removeprefix(f"{column}: ").split("\n")[0]
        return found

    def view(self, name: str) -> None:
        """Go to a view. If the view is inside another view, that view's tab is opened first."""
        if name in WITHIN:
            self.page.get_by_role("tab", name=WITHIN[name], exact=True).click()
        self.page.get_by_role("tab", name=name, exact=True).click()

    def modules(self) -> None:
        """Go to the Modules view and wait for its rows."""
        self.view("Modules")
        self.page.locator(ROW).first.wait_for()


class Tabs:
    """The tabs of a browser. A closed tab is cleaned and used again.

    A new tab starts a process, and this takes longer than most tests.
    """

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._closed: dict[frozenset[tuple[str, Any]], list[Any]] = {}

    @contextmanager
    def opened(self, **options: Any) -> Iterator[Any]:
        """Yield an empty tab of a browser context with these options.

        Afterwards the tab is reset, so that the next test cannot see anything of this one.
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
    """Return the reusable tabs of the browser."""
    return Tabs(browser)


@pytest.fixture
def opening(tabs: Tabs) -> Iterator[Callable[..., Seen]]:
    """Return a function that opens an address in a separate tab.

    At the end of the test, the fixture checks that no page had an error or a dialog.
    """
    seen: list[Seen] = []
    with ExitStack() as undo:

        def go(address: str, **options: Any) -> Seen:
            page = undo.enter_context(tabs.opened(**options))
            found = Seen(page, asked=[], wrong=[])
            seen.append(found)
            listeners: tuple[tuple[str, Callable[[Any], object]], ...] = (
                ("request", lambda request: found.asked.append(request.url)),
                ("pageerror", lambda error: found.wrong.append(str(error))),
                ("dialog", lambda dialog: found.wrong.append(dialog.message)),
                ("dialog", lambda dialog: dialog.dismiss()),
            )
            for event, listener in listeners:
                page.on(event, listener)
                undo.callback(page.remove_listener, event, listener)
            page.goto(address)
            return found

        yield go
        all_wrong: list[str] = []
        for each in seen:
            all_wrong += each.wrong
        assert [] == all_wrong


@pytest.fixture
def page_of(opening: Callable[..., Seen], tmp_path: Path) -> Callable[..., Seen]:
    """Return a function that saves the page of a profile and opens the file."""

    def go(given: Profile, **options: Any) -> Seen:
        save(analyze(given), tmp_path / "page.html")
        found = opening((tmp_path / "page.html").as_uri(), **options)
        # Wait for the element itself, not until it is visible: it is empty for a profile without
        # times.
        found.page.locator(".figures").first.wait_for(state="attached")
        return found

    return go


@contextmanager
def bench(browser: Any) -> Iterator[Any]:
    """Yield an empty page that can import the JavaScript modules of `lflops/page`."""
    page = browser.new_page()
    site = "http://page.test/"

    def serve_module(route: Any) -> None:
        path = PARTS / route.request.url.removeprefix(site)
        route.fulfill(path=path, content_type="text/javascript")

    page.route("**/*.js", serve_module)
    page.route("**/here", lambda route: route.fulfill(body="", content_type="text/html"))
    page.goto(f"{site}here")
    yield page
    page.close()


@contextmanager
def tab(
    opening: Callable[..., Seen], logdir: Path, *, expected: int
) -> Iterator[tuple[Seen, Any, Board]]:
    """Open the LFLOPS tab of a TensorBoard that has read `expected` windows.

    Yields the page, the frame of the tab inside it, and the server. At the end, checks that the
    page has sent requests only to this server.
    """
    with board(logdir, "--load_fast=false") as server:
        server.windows(expected=expected)
        seen = opening(f"{server.address}#lflops")
        frame = seen.page.frame_locator("iframe")
        frame.locator(".figures").first.wait_for()
        yield seen, frame, server
        own_host = server.address.split("//")[1].rstrip("/")
        with_host = [address for address in seen.asked if "//" in address]
        hosts = {address.split("//")[1].split("/")[0] for address in with_host}
        assert {own_host} == hosts
