"""Dotted names: what is above and below one, and which repeat."""

from lflops.profile.module_names import ancestry, children, fold_repeats, pattern


def test_a_name_s_ancestry_ends_at_the_root() -> None:
    """Itself first."""
    assert ("a.b", "a", "") == ancestry("a.b")
    assert ("",) == ancestry("")


def test_children_are_in_the_given_order() -> None:
    """A name without any has an empty list."""
    assert {"": ["b", "a"], "b": [], "a": ["a.0"], "a.0": []} == children(["", "b", "a", "a.0"])


def test_a_pattern_has_stars_for_numbers() -> None:
    """Of whole parts of the name only."""
    assert "layers.*.conv1" == pattern("layers.12.conv1")


def test_items_of_repeated_modules_are_grouped() -> None:
    """Two layers with the same value, one with another, and a module that is there twice: its label is its own name."""
    items = [("layers.0", 1), ("head", 5), ("layers.1", 1), ("layers.2", 2), ("head", 5)]
    grouped = [
        ("layers.*", [("layers.0", 1), ("layers.1", 1)]),
        ("head", [("head", 5), ("head", 5)]),
        ("layers.2", [("layers.2", 2)]),
    ]
    assert grouped == fold_repeats(items, lambda item: item)
