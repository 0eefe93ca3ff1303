"""Provide the browser fixtures to the tests of this folder only.

While the browser runs, no other test can use an event loop of its own.
"""

from tests.support.browser import browser, opening, page_of, tabs

__all__ = ["browser", "opening", "page_of", "tabs"]
