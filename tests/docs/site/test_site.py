"""Test that the site builds and opens without a network, and that broken links fail the build."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.repository import ROOT


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Run what `make docs` runs, in a separate process.

    The proxies point to a closed port, so a request to any other host fails.
    """
    nowhere = dict.fromkeys(["http_proxy", "https_proxy"], "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", config, "--site-dir", site]
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_the_site_builds_and_asks_no_server(tmp_path: Path, opening: Callable) -> None:
    """The site builds without warnings, and its pages request only files of the site.

    Each page is opened from disk, and must show a text that is generated from the code or included
    from another file of the repository.
    """
    built = build(ROOT / "mkdocs.yml", tmp_path)
    assert 0 == built.returncode, built.stderr
    for page, shown in [
        ("index.html", "lflops"),
        ("reference/python.html", "largest_batch"),
        ("reference/command-line.html", "--max-regress"),
        ("reference/chips.html", "H200"),
        ("reference/profile-file.html", "executed_macs"),
        ("reference/notes.html", "the schedule is"),
        ("repository/benchmarks/RESULTS.html", "What counting costs"),
    ]:
        seen = opening((tmp_path / page).as_uri())
        assert shown in seen.page.inner_text("article")
        assert [] == [
            address for address in seen.asked if not address.startswith(tmp_path.as_uri())
        ]


CULPRITS = {
    "[a](missing.md)": "missing.md",
    "[a](index.md#missing)": "#missing",
    "[a](/absolute.md)": "/absolute.md",
    "[a][lflops.missing]": "lflops.missing",
}
"""Broken links, each with the text that must appear in the build's error output."""


def test_what_is_broken_fails_the_build(tmp_path: Path) -> None:
    """Each broken link fails the build, and the error output names its target.

    The build uses the settings of `mkdocs.yml` without hooks and navigation, and a site of one
    page.
    """
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("\n\n".join(["# Page", *CULPRITS]), "utf-8")
    settings = re.sub(
        r"^(hooks|nav):\n(?: .*\n?)+",
        "",
        (ROOT / "mkdocs.yml").read_text("utf-8"),
        flags=re.MULTILINE,
    )
    (tmp_path / "mkdocs.yml").write_text(settings, "utf-8")
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert 1 == built.returncode
    assert [] == [named for named in CULPRITS.values() if named not in built.stderr]
