"""Test that phases have the same labels on the page and in the Python reports."""

import json
import subprocess

from lflops.report.text import WORDS, phase_label
from tests.page.test_module_columns import NODE, needs_node
from tests.support.repository import ROOT

FORMAT = ROOT / "lflops/page/lib/format.js"
LABELS = 'import { PHASE_LABELS } from "%s"; console.log(JSON.stringify(PHASE_LABELS));'


@needs_node
def test_the_page_has_the_labels_of_the_reports() -> None:
    """The labels are equal; another label would look like another phase."""
    script = LABELS % FORMAT.as_uri()
    ran = subprocess.run(
        [str(NODE), "--input-type=module", "-e", script], check=True, capture_output=True, text=True
    )
    assert WORDS["phases"] == json.loads(ran.stdout)


def test_a_phase_without_a_label_has_its_name() -> None:
    """Only few phases have a label; the label of all others is their name."""
    assert "data wait" == phase_label("data")
    assert "forward" == phase_label("forward")
