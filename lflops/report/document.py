"""The HTML file around what a page shows: it makes no request to any network, and no script runs but the one it is given."""

import base64
import hashlib
import html
from pathlib import Path

__all__ = ["document"]

_STYLE = Path(__file__).parents[1] / "page" / "shell" / "style.css"

_DOCUMENT = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';{scripts} img-src data:">
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def document(title: str, body: str, *, script: str = "", style: str = "") -> str:
    """The file's text.

    Args:
        title: As text; it is escaped here.
        body: As HTML.
        script: A module that draws the page. No other script runs, for any data.
        style: What the page adds to the style sheet of all pages.
    """
    scripts = ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        scripts = f" script-src 'sha256-{digest}';"
        body = f'{body}\n<script type="module">{script}</script>'
    return _DOCUMENT.format(scripts=scripts, title=html.escape(title), style=_STYLE.read_text("utf-8") + style, body=body)
