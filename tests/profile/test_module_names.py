"""Test functions of dotted module names: ancestors, children and patterns of repeated modules."""

from lflops.profile.module_names import (
    added_up,
    ancestry,
    children,
    fold_repeats,
    outermost,
    patterns,
)


def test_a_name_s_ancestry_ends_at_the_root() -> None:
    """The ancestry begins with the name itself and ends with the root, the empty name."""
    assert ("a.b", "a", "") == ancestry("a.b")
    assert ("",) == ancestry("")


def test_children_are_in_the_given_order() -> None:
    """Children have the order of the given names; a name without children has an empty list."""
    assert {"": ["b", "a"], "b": [], "a": ["a.0"], "a.0": []} == children(["", "b", "a", "a.0"])


def patterns_of(kinds: dict[str, str]) -> dict[str, str]:
    """Return the patterns of modules by name; all that is known of a module is its class."""
    return patterns({name: (kind, None) for name, kind in kinds.items()})


def test_a_pattern_has_stars_where_neighbours_are_the_same() -> None:
    """A star replaces the number of repeated blocks, also in the names of modules below them.

    No star replaces the first and third layer of a Sequential, which are not neighbours, or the
    number of an only child.
    """
    kinds = {"": "Model", "layers": "ModuleList"}
    for block in "01":
        kinds |= {f"layers.{block}": "Block", f"layers.{block}.mlp": "Sequential"}
        kinds[f"layers.{block}.mlp.0"] = "Linear"
        kinds[f"layers.{block}.mlp.1"] = "GELU"
        kinds[f"layers.{block}.mlp.2"] = "Linear"
    found = patterns_of(kinds | {"head": "Sequential", "head.0": "Linear"})
    assert ["layers.*.mlp.0", "layers.*.mlp.1", "layers.*.mlp.2"] == [
        found[f"layers.1.mlp.{layer}"] for layer in range(3)
    ]
    assert "" == found[""]
    assert "layers" == found["layers"]
    assert "layers.*" == found["layers.0"]
    assert "head.0" == found["head.0"]


def test_a_star_stands_for_all_numbers_that_there_are() -> None:
    """A star requires that all siblings are repeated; otherwise the pattern lists the numbers.

    Six siblings have the classes A, A, A, B, C and A. Only the first three are neighbours of one
    class.
    """
    found = patterns_of(dict(zip(["", *"012345"], "MAAABCA", strict=True)))
    assert ["", *["{0-2}"] * 3, "3", "4", "5"] == list(found.values())


def test_blocks_that_alternate_are_repeats() -> None:
    """Of five blocks, three couplings alternate with two norms. A norm has no submodules here."""
    kinds = {"": "Flow", "steps": "ModuleList"}
    for number in range(5):
        name = f"steps.{number}"
        kinds[name] = "Norm" if number % 2 else "Coupling"
        if number % 2 == 0:
            kinds[f"{name}.net"] = "Linear"
    found = patterns_of(kinds)
    assert {"steps.{0,2,4}"} == {found[f"steps.{number}"] for number in (0, 2, 4)}
    assert {"steps.{0,2,4}.net"} == {found[f"steps.{number}.net"] for number in (0, 2, 4)}
    assert "steps.1" == found["steps.1"]


def test_what_only_some_blocks_have_is_not_called_by_a_star() -> None:
    """Modules that exist only in some blocks get a list of numbers instead of a star.

    Of four blocks, only the third has `m.l`, and its `x` has another class. The second has no `y`.
    """
    kinds = {"": "Model", "blocks": "ModuleList"}
    for block in range(4):
        kinds |= {
            f"blocks.{block}": "Block",
            f"blocks.{block}.x": "Slow" if block == 2 else "Identity",
            f"blocks.{block}.m": "M",
        }
        if block != 1:
            kinds[f"blocks.{block}.y"] = "Linear"
    found = patterns_of(kinds | {"blocks.2.m.l": "Linear"})
    assert "blocks.*" == found["blocks.1"]
    assert "blocks.*.m" == found["blocks.1.m"]
    assert "blocks.2.m.l" == found["blocks.2.m.l"]
    assert "blocks.2.x" == found["blocks.2.x"]
    assert "blocks.{0-1,3}.x" == found["blocks.0.x"]
    assert "blocks.{0,2-3}.y" == found["blocks.3.y"]


def test_two_classes_never_share_a_pattern() -> None:
    """Modules of different classes have different patterns.

    In two stacks of two, the classes alternate like the colours of a chessboard. No list of numbers
    describes the modules of one class, so each module keeps its own name.
    """
    kinds = {"": "Model", **dict.fromkeys("01", "Stack")}
    for stack in "01":
        for block in "01":
            kinds[f"{stack}.{block}"] = "Pair"
            kinds[f"{stack}.{block}.x"] = "A" if stack == block else "B"
    found = patterns_of(kinds)
    patterns_of_a = {found[name] for name, kind in kinds.items() if kind == "A"}
    patterns_of_b = {found[name] for name, kind in kinds.items() if kind == "B"}
    assert patterns_of_a
    assert patterns_of_b
    assert not patterns_of_a & patterns_of_b


def test_items_of_repeated_modules_are_grouped() -> None:
    """Items of repeated modules form a group if their values are equal.

    Two of three layers have the same value. `head` is there twice, so its label is its own name.
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
    """Values are added up per pattern, and the label names exactly the modules that have a value.

    All three layers are `layers.*`, two are `layers.{0,2}`, and a single layer keeps its name.
    """
    patterns = {f"layers.{layer}": "layers.*" for layer in range(3)}
    values = {"layers.0": 1.0, "layers.1": 2.0, "layers.2": 4.0}
    assert {"layers.*": 7.0} == added_up(values, patterns)
    assert {"layers.{0,2}": 5.0} == added_up({"layers.0": 1.0, "layers.2": 4.0}, patterns)
    assert {"layers.1": 2.0} == added_up({"layers.1": 2.0}, patterns)


def test_the_outermost_names_have_no_parent_among_the_names() -> None:
    """A grandchild without its parent among the names is outermost too."""
    assert ["a", "b.c", "d.e.f"] == outermost(["a", "a.b", "b.c", "b.c.d", "d.e.f"])
