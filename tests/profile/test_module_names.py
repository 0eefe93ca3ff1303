"""Dotted names: what is above and below one, and which repeat."""

from lflops.profile.module_names import ancestry, children, fold_repeats, patterns


def test_a_name_s_ancestry_ends_at_the_root() -> None:
    """Itself first."""
    assert ("a.b", "a", "") == ancestry("a.b")
    assert ("",) == ancestry("")


def test_children_are_in_the_given_order() -> None:
    """A name without any has an empty list."""
    assert {"": ["b", "a"], "b": [], "a": ["a.0"], "a.0": []} == children(["", "b", "a", "a.0"])


def test_a_pattern_has_stars_where_neighbours_are_the_same() -> None:
    """The blocks of a stack, and what is below them; not the first and the third layer of a Sequential, nor a number that is alone."""
    kinds = {"": "Model", "layers": "ModuleList"}
    for block in "01":
        kinds |= {f"layers.{block}": "Block", f"layers.{block}.mlp": "Sequential"}
        kinds |= {f"layers.{block}.mlp.{layer}": kind for layer, kind in enumerate(("Linear", "GELU", "Linear"))}
    found = patterns(kinds | {"head": "Sequential", "head.0": "Linear"})
    assert ["layers.*.mlp.0", "layers.*.mlp.1", "layers.*.mlp.2"] == [found[f"layers.1.mlp.{layer}"] for layer in range(3)]
    assert ("", "layers", "layers.*", "head.0") == tuple(found[name] for name in ("", "layers", "layers.0", "head.0"))


def test_neighbours_of_another_kind_are_no_repeats() -> None:
    """Of four numbered siblings the first two are the same."""
    found = patterns(dict(zip(["", "0", "1", "2", "3"], "MAABA", strict=True)))
    assert ["", "*", "*", "2", "3"] == list(found.values())


def test_items_of_repeated_modules_are_grouped() -> None:
    """Two layers with the same value, one with another, and a module that is there twice: its label is its own name."""
    items = [("layers.0", 1), ("head", 5), ("layers.1", 1), ("layers.2", 2), ("head", 5)]
    grouped = [
        ("layers.*", [("layers.0", 1), ("layers.1", 1)]),
        ("head", [("head", 5), ("head", 5)]),
        ("layers.2", [("layers.2", 2)]),
    ]
    patterns = {f"layers.{layer}": "layers.*" for layer in range(3)}
    assert grouped == fold_repeats(items, lambda item: item, patterns)
