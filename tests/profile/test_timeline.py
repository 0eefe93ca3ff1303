"""Test how a step becomes nested slices, and which slices are kept if there are too many."""

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
    """Return module, phase, start, length and depth of each slice of `nested`."""
    return {
        (each.fqn, each.phase, each.start, each.length, each.depth) for each in nested(stretches)
    }


def test_a_slice_is_around_those_of_the_modules_below_it() -> None:
    """The slice of a module contains the slices of the modules below it.

    The root runs from 0 to 9 and `a` from 1 to 7. `a.x` runs in it twice, and the time between
    these two calls belongs to `a`.
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
    expected = {
        ("", "forward", 0, 9, 0),
        ("a", "forward", 1, 6, 1),
        ("a.x", "forward", 2, 2, 2),
        ("a.x", "forward", 5, 1, 2),
    }
    assert expected == found


def test_another_phase_ends_all_slices() -> None:
    """A change of phase ends all slices.

    Recompute interrupts backward: it has its own slices, and backward continues in new slices.
    """
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
    """In backward, time of the autograd engine between two nodes does not end a slice.

    Between the nodes of `a.y` and `a.x` the engine takes 1, and `a` stays one slice. In forward,
    such time belongs to the root and ends the slice of `a`.
    """
    backward = [
        SelfTime("a.y", "backward", 0, 3),
        SelfTime("", "backward", 3, 4),
        SelfTime("a.x", "backward", 4, 9),
    ]
    assert {("", "backward", 0, 9, 0), ("a", "backward", 0, 9, 1)} < slices(*backward)
    forward = [each._replace(phase="forward") for each in backward]
    assert {("a", "forward", 0, 3, 1), ("a", "forward", 4, 5, 1)} < slices(*forward)


def test_the_longest_slices_are_kept_with_what_is_around_them() -> None:
    """If there are too many slices, the longest are kept, with the slices that contain them.

    One slice contains one long slice and many short ones. The root and the long one stay, and short
    ones fill the rest of `MOST_SLICES`: 12 are left out. Of the operators, 3 are left out.
    """
    many = MOST_SLICES + 10
    short = [ModuleSlice(f"a.{number}", "forward", number, 1, 1) for number in range(many)]
    works = [TimedWork("aten::mm", number, number) for number in range(MOST_WORK + 3)]
    long = ModuleSlice("a.long", "forward", many, 50, 1)
    root = ModuleSlice("", "forward", 0, many + 50, 0)
    found = longest("traced", 10_000, [*short, long, root], works)
    assert MOST_SLICES == len(found.slices)
    assert (root, long) == (found.slices[0], found.slices[-1])
    assert (12, 3, 0) == found.left_out
    assert [3, 4, 5] == [each.start for each in found.operators[:3]]
