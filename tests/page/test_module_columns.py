"""Test that the payload and the page have the same columns of the module table."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from lflops.analysis.analysis import analyze
from lflops.report.payload.operators import modules
from tests.support.profile_builders import small_profile
from tests.support.repository import ROOT

PAYLOAD = "lflops/report/payload/operators.py"
COLUMNS = ROOT / "lflops/page/table/module_columns.js"
IN_THE_VIEW = {"name", "kind", "compiled", "owner", "identical"}
"""Columns that `lflops/page/views/modules.js` reads itself.

They belong to rows. A user cannot choose them as columns.
"""

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(
    NODE is None, reason="needs Node.js 20 or newer: apt-get install nodejs"
)

READS = """
import { columns } from %s;
const reads = new Set();
columns(new Proxy({}, { get: (_, name) => { reads.add(name); return null; } }), [0]);
console.log(JSON.stringify([...reads]));
"""


def read_by(file: Path) -> set[str]:
    """Return the columns of the payload that a version of `module_columns.js` reads."""
    script = READS % json.dumps(file.as_uri())
    ran = subprocess.run(
        [str(NODE), "--input-type=module", "-e", script], check=True, capture_output=True, text=True
    )
    return set(json.loads(ran.stdout))


def one_sided(in_payload: set[str], in_page: set[str]) -> list[str]:
    """Return a message, with what to do, for each column that only one side has."""
    messages = []
    for name in sorted(in_payload - in_page):
        messages.append(
            f"{PAYLOAD} has the column {name!r}: read it in lflops/page/table/module_columns.js"
        )
    for name in sorted(in_page - in_payload):
        messages.append(
            f"lflops/page/table/module_columns.js reads {name!r}: write it in {PAYLOAD}"
        )
    return messages


@needs_node
def test_the_page_reads_the_columns_that_the_payload_has() -> None:
    """Every column of the payload is read by the page, and every column that it reads exists.

    Otherwise a column would never be shown, or always be empty, without any error.
    """
    view = (ROOT / "lflops/page/views/modules.js").read_text("utf-8")
    assert [] == [name for name in sorted(IN_THE_VIEW) if name not in view]
    assert [] == one_sided(set(modules(analyze(small_profile()))), read_by(COLUMNS) | IN_THE_VIEW)


@needs_node
def test_a_column_of_one_side_would_be_seen(tmp_path: Path) -> None:
    """Each message names the file in which the column is missing."""
    source = COLUMNS.read_text("utf-8").replace('plain(table, "calls")', 'plain(table, "visits")')
    for name in ("./fold.js", "../lib/format.js"):
        source = source.replace(f'"{name}"', json.dumps((COLUMNS.parent / name).resolve().as_uri()))
    changed = tmp_path / "module_columns.mjs"
    changed.write_text(source, "utf-8")
    in_payload = set(modules(analyze(small_profile())))
    unread, unwritten = one_sided(in_payload, read_by(changed) | IN_THE_VIEW)
    assert (
        "lflops/report/payload/operators.py has the column 'calls': "
        "read it in lflops/page/table/module_columns.js"
    ) == unread
    assert (
        "lflops/page/table/module_columns.js reads 'visits': "
        "write it in lflops/report/payload/operators.py"
    ) == unwritten
