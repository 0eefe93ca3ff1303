"""The rule for clean steps."""

from typing import get_args

import pytest

from lflops.profile.steps import Step, StepKind, is_unprofiled


@pytest.mark.parametrize(
    ("kind", "marks", "expected"),
    [
        ("unprofiled", (), True),
        ("unprofiled", ("no_update",), True),
        *[(kind, (), False) for kind in ("counting", "module_timing", "traced")],
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
    """Each other kind and each disturbance excludes a step.

    A step without an update is as long as the others.
    """
    assert expected is is_unprofiled(kind, marks)
    assert expected is Step(index=0, kind=kind, seconds=1.0, phases={}, marks=marks).is_unprofiled


def test_every_kind_is_tested() -> None:
    """By the list above."""
    assert {"unprofiled", "counting", "module_timing", "traced"} == set(get_args(StepKind))
