"""Dotted names: what is above and below one, and which repeat."""

from lflops.profile.module_names import added_up, ancestry, children, fold_repeats, patterns


def test_a_name_s_ancestry_ends_at_the_root() -> None:
    """Itself first."""
    assert ("a.b", "a", "") == ancestry("a.b")
    assert ("",) == ancestry("")


def test_children_are_in_the_given_order() -> None:
    """A name without any has an empty list."""
    assert {"": ["b", "a"], "b": [], "a": ["a.0"], "a.0": []} == children(["", "b", "a", "a.0"])


def patterns_of(kinds: dict[str, str]) -> dict[str, str]:
    """The patterns of modules that only have a class."""
    return patterns({name: (kind, None) for name, kind in kinds.items()})


def test_a_pattern_has_stars_where_neighbours_are_the_same() -> None:
    """The blocks of a stack, and what is below them.

    Not the first and the third layer of a Sequential, nor a number that is alone.
    """
    kinds = {"": "Model", "layers": "ModuleList"}
    for block in "01":
        kinds |= {f"layers.{block}": "Block", f"layers.{block}.mlp": "Sequential"}
        kinds |= {
            f"layers.{block}.mlp.{layer}": kind
            for layer, kind in enumerate(("Linear", "GELU", "Linear"))
        }
    found = patterns_of(kinds | {"head": "Sequential", "head.0": "Linear"})
    assert ["layers.*.mlp.0", "layers.*.mlp.1", "layers.*.mlp.2"] == [
        found[f"layers.1.mlp.{layer}"] for layer in range(3)
    ]
    assert ("", "layers", "layers.*", "head.0") == tuple(
        found[name] for name in ("", "layers", "layers.0", "head.0")
    )


def test_a_star_stands_for_all_numbers_that_there_are() -> None:
    """Of six numbered siblings the first three and the last are of one class.

    Neighbours are the same, so three of them repeat.
    """
    found = patterns_of(dict(zip(["", *"012345"], "MAAABCA", strict=True)))
    assert ["", *["{0-2}"] * 3, "3", "4", "5"] == list(found.values())


def test_what_only_some_blocks_have_is_not_called_by_a_star() -> None:
    """Of four blocks only the third has `m.l`, and its `x` is of another class.

    The second has no `y`.
    """
    kinds = {"": "Model", "blocks": "ModuleList"}
    for block in range(4):
        kinds |= {
            f"blocks.{block}": "Block",
            f"blocks.{block}.x": "Slow" if block == 2 else "Identity",
            f"blocks.{block}.m": "M",
        }
        kinds |= {f"blocks.{block}.y": "Linear"} if block != 1 else {}
    found = patterns_of(kinds | {"blocks.2.m.l": "Linear"})
    assert ("blocks.*", "blocks.*.m", "blocks.2.m.l") == tuple(
        found[name] for name in ("blocks.1", "blocks.1.m", "blocks.2.m.l")
    )
    assert ("blocks.2.x", "blocks.{0-1,3}.x", "blocks.{0,2-3}.y") == tuple(
        found[name] for name in ("blocks.2.x", "blocks.0.x", "blocks.3.y")
    )


def test_two_classes_never_share_a_pattern() -> None:
    """In two stacks of two they stand crosswise.

    No list of numbers says which are which, so each has its own name.
    """
    kinds = {"": "Model", **dict.fromkeys("01", "Stack")}
    kinds |= {f"{stack}.{block}": "Pair" for stack in "01" for block in "01"}
    kinds |= {
        f"{stack}.{block}.x": "A" if stack == block else "B" for stack in "01" for block in "01"
    }
    found = patterns_of(kinds)
    of = {kind: {found[name] for name, each in kinds.items() if each == kind} for kind in "AB"}
    assert not of["A"] & of["B"]


def test_items_of_repeated_modules_are_grouped() -> None:
    """Two layers of three with the same value, one with another, and a module that is there twice.

    Its label is its own name.
    """
    items = [("layers.0", 1), ("head", 5), ("layers.1", 1), ("layers.2", 2), ("head", 5)]
    grouped = [
        ("layers.{0-1}", [("layers.0", 1), ("layers.1", 1)]),
        ("head", [("head", 5), ("head", 5)]),
        ("layers.2", [("layers.2", 2)]),
    ]
    patterns = {f"layers.{layer}": "layers.*" for layer in range(3)}
    assert grouped == fold_repeats(items, lambda item: item, patterns)


def test_values_are_added_up_by_place() -> None:
    """All three layers are the star.

    Without the second one they are those two, and one of them is itself.
    """
    patterns = {f"layers.{layer}": "layers.*" for layer in range(3)}
    values = {"layers.0": 1.0, "layers.1": 2.0, "layers.2": 4.0}
    assert {"layers.*": 7.0} == added_up(values, patterns)
    assert {"layers.{0,2}": 5.0} == added_up(
        {name: value for name, value in values.items() if name != "layers.1"}, patterns
    )
    assert {"layers.1": 2.0} == added_up({"layers.1": 2.0}, patterns)
