"""The registry of rules, and the page that is generated from it."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterable

from docs.site_pages import TABLES
from lflops.findings import rules as folder
from lflops.findings.registry import all_rules, issue_share, part_rule
from lflops.findings.rule import Rule


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


def unregistered(defined: Iterable[type[Rule]]) -> set[str]:
    """The concrete rules with a name that no registered rule is an instance of."""
    registered = [type(rule) for rules in all_rules().values() for rule in rules]
    return {
        kind.__name__
        for kind in defined
        if getattr(kind, "name", "")
        and not inspect.isabstract(kind)
        and not any(issubclass(other, kind) for other in registered)
    }


def test_every_rule_is_registered() -> None:
    """A rule that is in no tuple of the registry would never run."""
    defined: set[type[Rule]] = set()
    for module in pkgutil.iter_modules(folder.__path__):
        file = importlib.import_module(f"{folder.__name__}.{module.name}")
        for value in vars(file).values():
            if inspect.isclass(value) and issubclass(value, Rule):
                defined.add(value)
    assert len(defined) > len(all_rules())
    assert unregistered(defined) == set()


def test_a_rule_that_is_not_registered_is_found() -> None:
    """The twin of the test above."""

    class Forgotten(type(part_rule("augmentation"))):  # type: ignore[misc]
        """A rule without a place in the registry."""

        name = "forgotten"

    assert unregistered([Forgotten]) == {"Forgotten"}
