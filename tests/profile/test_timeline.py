"""A step in time: slices around slices, and only so many of them."""

from lflops.profile.timeline import (
    MOST_SLICES,
    MOST_WORK,
    ModuleSlice,
    SelfTime,
    TimedWork,
    longest,
    nested,
)


def slices(*stretches: SelfTime) -> set[tuple[str, str, int, int, int]]:
    """Row, phase, start, length and depth of each slice."""
    return {
        (each.fqn, each.phase, each.start, each.length, each.depth) for each in nested(stretches)
    }


def test_a_slice_is_around_those_of_the_modules_below_it() -> None:
    """The root runs from 0 to 9.

    `a` from 1 to 7, with `a.x` in it twice; what is between the two is `a`'s own.
    """
    stretches = [
        ("", 0, 1),
        ("a", 1, 2),
        ("a.x", 2, 4),
        ("a", 4, 5),
        ("a.x", 5, 6),
        ("a", 6, 7),
        ("", 7, 9),
    ]
    found = slices(*(SelfTime(row, "forward", start, end) for row, start, end in stretches))
    expected = {("", 0, 9, 0), ("a", 1, 6, 1), ("a.x", 2, 2, 2), ("a.x", 5, 1, 2)}
    assert {
        (row, "forward", start, length, depth) for row, start, length, depth in expected
    } == found


def test_another_phase_ends_all_slices() -> None:
    """Recompute within backward is a slice of its own, and backward goes on behind it."""
    found = slices(
        SelfTime("b", "backward", 0, 2),
        SelfTime("a", "recompute", 2, 3),
        SelfTime("a", "backward", 3, 7),
    )
    backward = {
        ("", "backward", 0, 2, 0),
        ("b", "backward", 0, 2, 1),
        ("", "backward", 3, 4, 0),
        ("a", "backward", 3, 4, 1),
    }
    assert backward | {("", "recompute", 2, 1, 0), ("a", "recompute", 2, 1, 1)} == found


def test_the_engine_ends_no_slice_in_backward() -> None:
    """Between the nodes of `a.y` and of `a.x` the engine takes 1.

    `a` is one slice. In forward such time is the root's.
    """
    backward = [
        SelfTime(row, "backward", start, end)
        for row, start, end in [("a.y", 0, 3), ("", 3, 4), ("a.x", 4, 9)]
    ]
    assert {("", "backward", 0, 9, 0), ("a", "backward", 0, 9, 1)} < slices(*backward)
    forward = [each._replace(phase="forward") for each in backward]
    assert {("a", "forward", 0, 3, 1), ("a", "forward", 4, 5, 1)} < slices(*forward)


def test_the_longest_slices_are_kept_with_what_is_around_them() -> None:
    """One slice around many short ones and one long one.

    The long one is kept, and as many of the others as there is room for.
    """
    many = MOST_SLICES + 10
    short = [ModuleSlice(f"a.{number}", "forward", number, 1, 1) for number in range(many)]
    works = [TimedWork("aten::mm", number, number) for number in range(MOST_WORK + 3)]
    long, root = (
        ModuleSlice("a.long", "forward", many, 50, 1),
        ModuleSlice("", "forward", 0, many + 50, 0),
    )
    found = longest("traced", 10_000, [*short, long, root], works)
    assert MOST_SLICES == len(found.slices)
    assert (root, long) == (found.slices[0], found.slices[-1])
    assert (12, 3, 0) == found.left_out
    assert [3, 4, 5] == [each.start for each in found.operators[:3]]
