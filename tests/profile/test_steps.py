"""Test which steps are unprofiled, so that their times count."""

from typing import get_args

import pytest

from lflops.profile.steps import Step, StepKind, is_unprofiled

PROFILED = ("counting", "module_timing", "stack_sampling", "traced")


@pytest.mark.parametrize(
    ("kind", "marks", "expected"),
    [
        ("unprofiled", (), True),
        ("unprofiled", ("no_update",), True),
        *[(kind, (), False) for kind in PROFILED],
        *[
            ("unprofiled", ("no_update", mark), False)
            for mark in (
                "warmup",
                "recompiled",
                "new_shapes",
                "validation",
                "checkpoint",
                "background",
            )
        ],
    ],
)
def test_a_step_is_clean_where_only_the_clock_was_read_and_nothing_disturbed_it(
    kind: StepKind, marks: tuple[str, ...], expected: bool
) -> None:
    """A step is unprofiled if lflops only read the clock and nothing disturbed the step.

    Every other kind and every disturbing mark excludes the step. A step without an optimizer update
    takes as long as other steps, so its mark `no_update` does not.
    """
    assert expected is is_unprofiled(kind, marks)
    assert expected is Step(index=0, kind=kind, seconds=1.0, phases={}, marks=marks).is_unprofiled


def test_every_kind_is_tested() -> None:
    """The parametrized list above contains every kind of step."""
    assert {"unprofiled", *PROFILED} == set(get_args(StepKind))
