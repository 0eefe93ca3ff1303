"""The registry of rules, and the page that is generated from it."""

from docs.site_pages import TABLES
from lflops.findings.registry import all_rules, issue_share, part_rule


def test_the_page_of_findings_has_every_rule() -> None:
    """Each name is a heading, with the documentation and the fix of its rules."""
    page = TABLES["findings"]()
    for name, rules in all_rules().items():
        _, _, section = page.partition(f"## `{name}`\n")
        section = section.partition("\n## ")[0]
        assert "**Counts as an issue**: " in section
        for rule in rules:
            assert (type(rule).__doc__ or "").strip().splitlines()[0] in section
        assert any(rule.fix for rule in rules) == ("**What to do**: " in section)


def test_no_placeholder_is_left_in_the_page() -> None:
    """A reader sees words in place of the values of a finding."""
    assert "{" not in TABLES["findings"]()


def test_every_rule_has_its_own_name_and_documentation() -> None:
    """The documentation is the docstring of its class."""
    for name, rules in all_rules().items():
        assert name
        for rule in rules:
            assert (type(rule).__doc__ or "").strip()


def test_a_phase_that_users_name_has_a_general_rule() -> None:
    """It is never an issue."""
    rule = part_rule("augmentation")
    assert "augmentation" == rule.name
    assert None is rule.threshold.share


def test_the_threshold_of_a_rule_is_found_by_its_name() -> None:
    """A name without a rule has none."""
    assert 0.09 == issue_share("data")
    assert None is issue_share("augmentation")
