"""The table of modules: what the payload has and what the page reads are the same columns."""

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
"""Read by `lflops/page/views/modules.js` itself.

They are of the rows, and no columns that a user can choose.
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
    """The columns of the payload that the page's table reads."""
    script = READS % json.dumps(file.as_uri())
    ran = subprocess.run(
        [str(NODE), "--input-type=module", "-e", script], check=True, capture_output=True, text=True
    )
    return set(json.loads(ran.stdout))


def one_sided(in_payload: set[str], in_page: set[str]) -> list[str]:
    """What to do about each column that only one side has."""
    return [
        *[
            f"{PAYLOAD} has the column {name!r}: read it in lflops/page/table/module_columns.js"
            for name in sorted(in_payload - in_page)
        ],
        *[
            f"lflops/page/table/module_columns.js reads {name!r}: write it in {PAYLOAD}"
            for name in sorted(in_page - in_payload)
        ],
    ]


@needs_node
def test_the_page_reads_the_columns_that_the_payload_has() -> None:
    """A column on one side only is either never shown or always empty, and nothing else would say so."""
    view = (ROOT / "lflops/page/views/modules.js").read_text("utf-8")
    assert [] == [name for name in sorted(IN_THE_VIEW) if name not in view]
    assert [] == one_sided(set(modules(analyze(small_profile()))), read_by(COLUMNS) | IN_THE_VIEW)


@needs_node
def test_a_column_of_one_side_would_be_seen(tmp_path: Path) -> None:
    """The message names the file of the other side."""
    source = COLUMNS.read_text("utf-8").replace('plain(table, "calls")', 'plain(table, "visits")')
    for name in ("./fold.js", "../lib/format.js"):
        source = source.replace(f'"{name}"', json.dumps((COLUMNS.parent / name).resolve().as_uri()))
    changed = tmp_path / "module_columns.mjs"
    changed.write_text(source, "utf-8")
    assert [
        "lflops/report/payload/operators.py has the column 'calls': read it in lflops/page/table/module_columns.js",
        "lflops/page/table/module_columns.js reads 'visits': write it in lflops/report/payload/operators.py",
    ] == one_sided(set(modules(analyze(small_profile()))), read_by(changed) | IN_THE_VIEW)
