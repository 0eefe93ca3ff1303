"""Write one HTML file that shows a profile or a whole run, or compares several profiles.

The file opens from disk and makes no network request. A window is a few consecutive steps of a run
that lflops profiles, and each profile is the result of one window.
"""

import base64
import hashlib
import html
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import json
from msgspec.structs import replace

from lflops.analysis.analysis import Analysis, analyze
from lflops.errors import ProfileError
from lflops.files import open_device, write_whole
from lflops.ledger.account import Ledger
from lflops.profile.profile import Profile
from lflops.report.payload.compare import compared_pairs
from lflops.report.payload.memory import timeline
from lflops.report.payload.page_script import page_script
from lflops.report.payload.payload import ledger_in, ledger_shown, payload, run_shown
from lflops.report.text import joined

_ROOT = '<div id="root"><noscript>This page needs JavaScript.</noscript></div>'


def page(*analyses: Analysis, names: Sequence[str] = (), ledger: Ledger | None = None) -> str:
    """Return the HTML of a file that shows one or several profiles.

    Args:
        analyses: One or several profiles. The last profile is shown first.
        names: The file names of the profiles, if profiles of different runs are compared. Without
            names, all profiles are windows of one run.
        ledger: The ledger (time account) of this run, or `None` to leave it out.
    """
    data = []
    parts = []
    title = " → ".join(names)
    for index, analysis in enumerate(analyses):
        shown = payload(analysis)
        title = title or joined(shown.title, shown.head.when)
        number = str(index or "")
        head = html.escape(json.encode(shown.head).decode())
        attributes = f' data-head="{head}"'
        if len(analyses) > 1:
            name = names[index] if names else ""
            attributes = _window(analysis.profile, name) + attributes
        if names:
            attributes += " data-compare"
        data.append(_data(f"data{number}", shown, attributes))
        run = run_shown(shown.window, ledger)
        parts.append(_data(f"run{number}", replace(run, ledger=None)))
        steps = timeline(analysis, shown.memory)
        if steps is not None:
            parts.append(_data(f"timeline{number}", steps))
    if ledger is not None:
        parts.append(_data("ledger", ledger_shown(ledger)))
    for before, after, comparison in compared_pairs(analyses, all_pairs=bool(names)):
        parts.append(_data(f"comparison-{before}-{after}", comparison))
    script = page_script("entry/offline")
    return document(title, "\n".join([_ROOT, *data, *parts]), script=script)


MOST_WINDOWS = 12
"""Maximum number of windows of a run in one HTML file."""

MOST_ROWS = 20_000
"""Maximum number of modules and operators in one HTML file, summed over its windows.

At least one window is always included, even if it has more modules and operators.
"""


def rows_of(profile: Profile) -> int:
    """Return how many modules and operators the page of a profile lists."""
    return len(profile.modules) + len(profile.op_counts)


def page_of_run(profiles: Sequence[Profile], ledger: Ledger | None) -> str:
    """Return the HTML of a file with the last windows of a run and its ledger.

    Earlier windows are left out if the file would become too large.
    """
    kept: list[Profile] = []
    rows = 0
    for profile in reversed(profiles):
        rows += rows_of(profile)
        if kept and (rows > MOST_ROWS or len(kept) == MOST_WINDOWS):
            break
        kept.insert(0, profile)
    return page(*map(analyze, kept), ledger=ledger)


def page_of_data(title: str, value: Any, entry: str) -> str:
    """Return the HTML of a file that shows any value.

    Args:
        title: The title of the page.
        value: The value, which is stored in the file as JSON.
        entry: The script that draws the value, such as `entry/offline`.
    """
    return document(title, "\n".join([_ROOT, _data("data", value)]), script=page_script(entry))


def save(analysis: Analysis, path: Path) -> None:
    """Write the HTML file of one profile atomically, and create missing folders.

    The page includes the ledger of the run if it is in the same folder and can be read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    ledger = None
    with suppress(ProfileError):
        ledger = ledger_in(path.parent)
    write_whole(path, page(analysis, ledger=ledger).encode())


def write(text: str, path: Path, *, is_named: bool = True) -> None:
    """Write a file atomically, and create missing folders.

    If the user chose the path (`is_named`) and it is a device or a pipe, the text is written into
    it. If the path is a default, a pipe at this path is replaced by a file. Another user may have
    created the pipe, and writing into a pipe that no process reads from would block.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_named and path.exists() and not path.is_file() and not path.is_dir():
        with open_device(path) as file:
            file.write(text.encode())
    else:
        write_whole(path, text.encode())


def _data(name: str, value: Any, attributes: str = "") -> str:
    packed = base64.b64encode(zlib.compress(json.encode(value), 9)).decode()
    return f'<script type="text/plain" id="{name}"{attributes}>{packed}</script>'


def _window(profile: Profile, name: str) -> str:
    """Return HTML attributes that identify one of several windows in a file.

    The page uses them to let the user choose a window. `name` is the file name of the profile if
    several runs are compared. It is empty if all windows belong to one run.
    """
    run = profile.run
    step = run.step
    if step is None:
        step = run.window or 0
    tag = html.escape(run.stage or run.kind)
    return f' data-run="{html.escape(name)}" data-tag="{tag}" data-step="{step}"'


_STYLE = Path(__file__).parents[1] / "page" / "shell" / "style.css"
_DOCUMENT = _STYLE.with_name("document.html")


def document(title: str, body: str, *, script: str = "", style: str = "") -> str:
    """Build an HTML document.

    Args:
        title: The title as text.
        body: The body as HTML.
        script: The JavaScript module that draws the page. The browser runs no other script, so
            scripts that are hidden in the data cannot run.
        style: CSS that is added after the style sheet of all pages.
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
