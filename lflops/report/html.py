"""One HTML file that shows a profile, or compares several.

It opens from disk, and makes no request to any network.
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
from lflops.files import write_whole
from lflops.profile.profile import Profile
from lflops.report.payload.compare import compared_pairs
from lflops.report.payload.memory import timeline
from lflops.report.payload.page_script import page_script
from lflops.report.payload.payload import payload

_ROOT = '<div id="root"><noscript>This page draws itself with JavaScript.</noscript></div>'


def page(*analyses: Analysis, names: Sequence[str] = ()) -> str:
    """The file's text.

    Of several analyses, with their files' names, the last is shown first, compared with the one
    before it.
    """
    shown = [payload(each) for each in analyses]
    chosen = (
        [""]
        if len(analyses) == 1
        else [_window(each.profile, name) for each, name in zip(analyses, names, strict=True)]
    )
    heads = [html.escape(json.encode(each.head).decode()) for each in shown]
    windows = [f'{window} data-head="{head}"' for window, head in zip(chosen, heads, strict=True)]
    data = [
        _data(f"data{i or ''}", each, window)
        for i, (window, each) in enumerate(zip(windows, shown, strict=True))
    ]
    timelines = (
        timeline(analysis, each.memory) for analysis, each in zip(analyses, shown, strict=True)
    )
    data += [
        _data(f"timeline{i or ''}", each) for i, each in enumerate(timelines) if each is not None
    ]
    data += [
        _data(f"comparison-{i}-{j}", comparison) for i, j, comparison in compared_pairs(analyses)
    ]
    script = page_script("entry/offline")
    title = " → ".join(names) or ", ".join(filter(None, (shown[0].title, shown[0].head.when)))
    return document(title, "\n".join([_ROOT, *data]), script=script)


def page_of_data(title: str, value: Any, entry: str) -> str:
    """The file's text for any value that a script of `page/entry/` draws."""
    return document(title, "\n".join([_ROOT, _data("data", value)]), script=page_script(entry))


def save(analysis: Analysis, path: Path) -> None:
    """Write the file of one profile and the folders above it."""
    write(page(analysis), path)


def write(text: str, path: Path) -> None:
    """Write a file and the folders above it.

    It has its name when it is whole; a device or a pipe is written to.
    """
    path.resolve().parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
    else:
        write_whole(path, text.encode())


def _data(name: str, value: Any, attributes: str = "") -> str:
    packed = base64.b64encode(zlib.compress(json.encode(value), 9)).decode()
    return f'<script type="text/plain" id="{name}"{attributes}>{packed}</script>'


def _window(profile: Profile, name: str) -> str:
    """The attributes that one of several windows is chosen by."""
    run = profile.run
    step = next((at for at in (run.step, run.window) if at is not None), 0)
    return f' data-run="{html.escape(name)}" data-tag="{html.escape(run.stage or run.kind)}" data-step="{step}"'


_STYLE = Path(__file__).parents[1] / "page" / "shell" / "style.css"
_DOCUMENT = _STYLE.with_name("document.html")


def document(title: str, body: str, *, script: str = "", style: str = "") -> str:
    # The title is text and escaped here; the body is HTML. The script is a module that draws the
    # page: no other runs, for any data. The style comes after the style sheet of all pages.
    scripts = ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        scripts = f" script-src 'sha256-{digest}';"
        body = f'{body}\n<script type="module">{script}</script>'
    style = _STYLE.read_text("utf-8") + style
    return _DOCUMENT.read_text("utf-8").format(
        scripts=scripts, title=html.escape(title), style=style, body=body
    )
