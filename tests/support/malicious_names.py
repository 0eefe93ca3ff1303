"""Names that would do harm if they were interpreted as markup or as code."""

from typing import Any

from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from tests.support.profile_builders import product, profile, with_seconds

IMAGE = "<img src=x onerror=alert(1)>"
SCRIPT = "</script><script>alert(2)</script>"


def hostile_profile() -> Profile:
    """Return a profile whose modules, classes, operators and notes have malicious names."""
    rows: dict[str, dict[str, Any]] = {
        "": {"class_name": IMAGE},
        IMAGE: {"class_name": SCRIPT},
        SCRIPT: {"class_name": "__proto__"},
        "__proto__": {},
    }
    unknown: Any = IMAGE
    cells = [product(name, IMAGE, "forward", macs=7, bytes_moved=1) for name in rows]
    note = Note(code=unknown, subject=SCRIPT, values={IMAGE: SCRIPT})
    return with_seconds(profile(rows, cells, notes=(note,)))
