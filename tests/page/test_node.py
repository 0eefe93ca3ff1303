"""Run the tests of the page's code that needs no browser in Node.js."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.repository import ROOT

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="needs Node.js 20 or newer: apt-get install nodejs")
def test_the_page_s_code_passes_its_tests_in_node() -> None:
    """All `*.test.js` files of this folder pass."""
    files = sorted(str(path.relative_to(ROOT)) for path in Path(__file__).parent.glob("*.test.js"))
    assert files
    ran = subprocess.run(
        [str(NODE), "--test", *files], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert 0 == ran.returncode, ran.stdout + ran.stderr
