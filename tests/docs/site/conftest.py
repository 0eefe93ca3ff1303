"""The browser, for this folder alone.

While it runs, no other test could have an event loop of its own.
"""

from tests.support.browser import browser, opening, tabs

__all__ = ["browser", "opening", "tabs"]
