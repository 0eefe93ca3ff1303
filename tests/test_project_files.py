"""Test that badges, citation, issue forms and workflows match the package."""

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
    """Return the text that each badge must show, by the label of the badge."""
    pythons = []
    for each in project["classifiers"]:
        if re.search(r"Python :: 3\.\d+$", each):
            pythons.append(each.rpartition(" ")[2])
    requirement = next(each for each in project["dependencies"] if each.startswith("torch>="))
    torch = requirement.removeprefix("torch>=")
    return {"python": " | ".join(pythons), "pytorch": f"≥ {torch}", "license": project["license"]}


def badges(readme: str) -> dict[str, str]:
    """Return the text of each badge in a README, by the label of the badge."""
    found = re.findall(r"https://img\.shields\.io/badge/(\w+)-(\S+)-\w+\)", readme)
    return {label: unquote(message).replace("--", "-") for label, message in found}


def test_the_badges_tell_what_the_package_says() -> None:
    """The badges show the Python versions, the oldest torch and the license of the package.

    The expected texts come from `pyproject.toml`.
    """
    assert facts(PROJECT) == badges((ROOT / "README.md").read_text("utf-8"))


def test_a_badge_that_is_wrong_would_be_seen() -> None:
    """The check above can fail: without Python 3.11 in the metadata, the badge is wrong."""
    classifiers = [each for each in PROJECT["classifiers"] if not each.endswith("3.11")]
    project = PROJECT | {"classifiers": classifiers}
    assert facts(project) != badges((ROOT / "README.md").read_text("utf-8"))


def test_the_citation_is_of_this_version() -> None:
    """The citation has the version and the date of the newest section of the changelog."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest = re.search(r"^## \[(.+?)\] - (\S+)$", changelog, re.MULTILINE)
    assert newest is not None
    assert newest.groups() == (citation["version"], str(citation["date-released"]))
    assert PROJECT["license"] == citation["license"]


@pytest.mark.skipif(not FORMS, reason="the sdist has no files of GitHub")
def test_the_forms_ask_for_the_version_and_the_profile() -> None:
    """Both issue forms ask for the version of lflops, which is required, and for the profile."""
    forms = {}
    for path in FORMS:
        # `config.yml` contains settings, and is not a form.
        if path.stem != "config":
            forms[path.stem] = yaml.safe_load(path.read_text("utf-8"))
    assert {"bug", "wrong_number"} == forms.keys()
    for form in forms.values():
        asked = {field["id"]: field for field in form["body"]}
        assert "lflops --version" == asked["version"]["attributes"]["label"]
        assert asked["version"]["validations"]["required"]
        assert "profile.json" in asked["profile"]["attributes"]["description"]


def unpinned(workflow: str) -> list[str]:
    """Return the actions that do not name a commit, with the version in a comment."""
    used = re.findall(r"uses: (.*)", workflow)
    return [each for each in used if not re.fullmatch(r"\S+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_commits(workflow: Path) -> None:
    """Workflows name each action by a commit, because a tag can be moved to other code."""
    found = unpinned(workflow.read_text("utf-8"))
    assert [] == found


def test_an_action_by_its_tag_is_found() -> None:
    """The check above can fail: it finds an action with a tag, and a commit without a version."""
    commit = "a" * 40
    text = f"- uses: a/b@v4\n- uses: a/c@{commit}\n- uses: a/d@{commit} # v1.2.3\n"
    assert ["a/b@v4", f"a/c@{commit}"] == unpinned(text)
