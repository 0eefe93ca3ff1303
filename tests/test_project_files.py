"""What the repository says about the package beside it: its badges, its citation, its forms."""

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from tests.support.repository import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def facts(project: dict[str, Any]) -> dict[str, str]:
    """What each badge has to say."""
    pythons = [
        each.rpartition(" ")[2]
        for each in project["classifiers"]
        if re.search(r"Python :: 3\.\d+$", each)
    ]
    torch = next(
        each.partition(">=")[2] for each in project["dependencies"] if each.startswith("torch>=")
    )
    return {"python": " | ".join(pythons), "pytorch": f"≥ {torch}", "license": project["license"]}


def badges(readme: str) -> dict[str, str]:
    """Label and message of each badge that is a picture of a text."""
    found = re.findall(r"https://img\.shields\.io/badge/(\w+)-(\S+)-\w+\)", readme)
    return {label: unquote(message).replace("--", "-") for label, message in found}


def test_the_badges_tell_what_the_package_says() -> None:
    """Pythons, the oldest torch, the license."""
    assert facts(PROJECT) == badges((ROOT / "README.md").read_text("utf-8"))


def test_a_badge_that_is_wrong_would_be_seen() -> None:
    """A Python that is no longer supported."""
    project = {
        **PROJECT,
        "classifiers": [each for each in PROJECT["classifiers"] if not each.endswith("3.11")],
    }
    assert facts(project) != badges((ROOT / "README.md").read_text("utf-8"))


def test_the_citation_is_of_this_version() -> None:
    """And of the day that the changelog has."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    newest = re.search(
        r"^## \[(.+?)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    assert newest is not None
    assert newest.groups() == (citation["version"], str(citation["date-released"]))
    assert PROJECT["license"] == citation["license"]


@pytest.mark.skipif(not FORMS, reason="the sdist has no files of GitHub")
def test_the_forms_ask_for_the_version_and_the_profile() -> None:
    """All but the settings."""
    forms = {
        path.stem: yaml.safe_load(path.read_text("utf-8"))
        for path in FORMS
        if path.stem != "config"
    }
    assert {"bug", "wrong_number"} == forms.keys()
    for form in forms.values():
        asked = {field["id"]: field for field in form["body"]}
        assert "lflops --version" == asked["version"]["attributes"]["label"]
        assert asked["version"]["validations"]["required"]
        assert "profile.json" in asked["profile"]["attributes"]["description"]


def unpinned(workflow: str) -> list[str]:
    """Actions that are not named by a commit, with the version as a comment."""
    used = re.findall(r"uses: (.*)", workflow)
    return [each for each in used if not re.fullmatch(r"\S+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_commits(workflow: Path) -> None:
    """A tag can be moved to other code."""
    found = unpinned(workflow.read_text("utf-8"))
    assert [] == found


def test_an_action_by_its_tag_is_found() -> None:
    """The check above can fail."""
    commit = "a" * 40
    text = f"- uses: a/b@v4\n- uses: a/c@{commit}\n- uses: a/d@{commit} # v1.2.3\n"
    assert ["a/b@v4", f"a/c@{commit}"] == unpinned(text)
