"""One HTML file that shows a profile, or compares several profiles.

It opens from disk and makes no network request.
"""

import base64
import hashlib
import html
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import json

from lflops.analysis.analysis import Analysis
from lflops.files import open_device, write_whole
from lflops.profile.profile import Profile
from lflops.report.payload.compare import compared_pairs
from lflops.report.payload.memory import timeline
from lflops.report.payload.page_script import page_script
from lflops.report.payload.payload import payload
from lflops.report.text import joined

_ROOT = '<div id="root"><noscript>This page draws itself with JavaScript.</noscript></div>'


def page(*analyses: Analysis, names: Sequence[str] = ()) -> str:
    """The text of the file.

    Args:
        analyses: One profile, or several. Of several, the last one is shown first, compared with
            the one before it.
        names: The names of the files of several profiles.
    """
    data = []
    timelines = []
    title = " → ".join(names)
    for index, analysis in enumerate(analyses):
        shown = payload(analysis)
        title = title or joined(shown.title, shown.head.when)
        number = str(index or "")
        head = html.escape(json.encode(shown.head).decode())
        window = _window(analysis.profile, names[index]) if len(analyses) > 1 else ""
        data.append(_data(f"data{number}", shown, f'{window} data-head="{head}"'))
        steps = timeline(analysis, shown.memory)
        if steps is not None:
            timelines.append(_data(f"timeline{number}", steps))
    for before, after, comparison in compared_pairs(analyses):
        timelines.append(_data(f"comparison-{before}-{after}", comparison))
    script = page_script("entry/offline")
    return document(title, "\n".join([_ROOT, *data, *timelines]), script=script)


def page_of_data(title: str, value: Any, entry: str) -> str:
    """The text of a file for any value that a script of `page/entry/` draws."""
    return document(title, "\n".join([_ROOT, _data("data", value)]), script=page_script(entry))


def save(analysis: Analysis, path: Path) -> None:
    """Write the file of one profile, atomically, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page(analysis).encode())


def write(text: str, path: Path) -> None:
    """Write a file that the user named, atomically, and the folders above it.

    A device or a pipe is written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file() and not path.is_dir():
        with open_device(path) as file:
            file.write(text.encode())
    else:
        write_whole(path, text.encode())


def _data(name: str, value: Any, attributes: str = "") -> str:
    packed = base64.b64encode(zlib.compress(json.encode(value), 9)).decode()
    return f'<script type="text/plain" id="{name}"{attributes}>{packed}</script>'


def _window(profile: Profile, name: str) -> str:
    """The attributes by which one of several windows is chosen."""
    run = profile.run
    step = run.step
    if step is None:
        step = run.window or 0
    tag = html.escape(run.stage or run.kind)
    return f' data-run="{html.escape(name)}" data-tag="{tag}" data-step="{step}"'


_STYLE = Path(__file__).parents[1] / "page" / "shell" / "style.css"
_DOCUMENT = _STYLE.with_name("document.html")


def document(title: str, body: str, *, script: str = "", style: str = "") -> str:
    """An HTML document.

    Args:
        title: The title as text.
        body: The body as HTML.
        script: The module that draws the page. No other script can run, whatever the data is.
        style: CSS that follows the style sheet of all pages.
    """
    scripts = ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        scripts = f" script-src 'sha256-{digest}';"
        body = f'{body}\n<script type="module">{script}</script>'
    style = _STYLE.read_text("utf-8") + style
    return _DOCUMENT.read_text("utf-8").format(
        scripts=scripts, title=html.escape(title), style=style, body=body
    )
