"""The browser, for the tests of this folder alone.

While it runs, no other test could have an event loop of its own.
"""

from tests.support.browser import browser, opening, page_of, tabs

__all__ = ["browser", "opening", "page_of", "tabs"]
