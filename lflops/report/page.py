"""One HTML file that shows a profile: it opens from disk, and asks nothing of any network."""

import base64
import hashlib
import html
import re
import zlib
from pathlib import Path

from msgspec import json

from lflops.profile import Profile
from lflops.report.payload import payload

__all__ = ["page", "save"]

_PARTS = Path(__file__).parents[1] / "page"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.MULTILINE)

_DOCUMENT = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; img-src data:">
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<div id="root"><noscript>This page draws itself with JavaScript.</noscript></div>
<script type="text/plain" id="data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def page(profile: Profile) -> str:
    """The file's text."""
    shown = payload(profile)
    script = _joined("file.js", [])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _DOCUMENT.format(
        allowed=f"'sha256-{digest}'",  # no other script runs, whatever the data hold
        title=html.escape(shown.title),
        style=(_PARTS / "style.css").read_text("utf-8"),
        data=base64.b64encode(zlib.compress(json.encode(shown), 9)).decode(),
        script=script,
    )


def save(profile: Profile, path: Path) -> None:
    """Write the file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(profile), encoding="utf-8")


def _joined(name: str, taken: list[str]) -> str:
    """A module and all that it imports as one, what is imported first: a page from disk may not load modules from files beside it."""
    taken.append(name)
    source = (_PARTS / name).read_text("utf-8")
    imported = [_joined(each, taken) for each in _IMPORT.findall(source) if each not in taken]
    return "".join([*imported, re.sub(r"^export ", "", _IMPORT.sub("", source), flags=re.MULTILINE)])
