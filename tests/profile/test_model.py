"""Test the queries of a `Profile`: their metrics, their phases and their errors."""

import re
from typing import Any

import pytest

import lflops
from tests.support.profile_builders import small_profile


@pytest.mark.parametrize(
    ("metric", "encoder"),
    [
        ("macs", 512),
        ("executed_macs", 512),
        ("flops", 2 * 512 + 64),
        ("bytes_moved", 4 * (240 + 128)),
    ],
)
def test_every_query_gives_the_metric_that_is_asked_for(metric: Any, encoder: int) -> None:
    """Every query returns the requested metric for the forward pass of the encoder.

    In `small_profile`, its matmul has 512 MACs and moves 240 floats, and its activation has 64
    FLOPs and moves 128 floats.
    """
    profile = small_profile()
    assert encoder == profile.by_module(metric=metric)["encoder"]
    assert encoder == profile.total("encoder", metric=metric)
    assert encoder == sum(profile.by_operator(module="encoder", metric=metric).values())
    assert encoder == sum(profile.by_module_and_operator(metric=metric)["encoder"].values())


def test_all_is_every_phase() -> None:
    """The phase `all`, which the command line also accepts, and `None` both mean every phase."""
    profile = small_profile()
    assert 640 + 768 == profile.total(phase="all") == profile.total(phase=None)
    assert profile.by_module(None) == profile.by_module("all")
    assert {"addmm": 640, "mm": 768} == {
        name.removeprefix("aten::"): macs for name, macs in profile.by_operator("all").items()
    }


@pytest.mark.parametrize("query", ["by_module", "by_operator", "by_module_and_operator", "total"])
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            {"phase": "bwd"},
            "phase='bwd': pass one of forward, backward, recompute, optimizer, other, all",
        ),
        ({"metric": "mac"}, "metric='mac': pass one of macs, executed_macs, flops, bytes_moved"),
    ],
)
def test_a_slip_of_the_pen_is_no_empty_answer(
    query: str, argument: dict[str, Any], message: str
) -> None:
    """A wrong phase or metric is an error that lists the valid values, not an empty result."""
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(small_profile(), query)(**argument)


@pytest.mark.parametrize("query", ["by_operator", "total"])
@pytest.mark.parametrize(
    ("module", "near"), [("encodr.0", "; the most similar name is 'encoder.0'"), ("xyz", "")]
)
def test_an_unknown_module_is_named_with_the_nearest(query: str, module: str, near: str) -> None:
    """The error for an unknown module suggests a similar name, if there is one."""
    with pytest.raises(
        ValueError,
        match=re.escape(f"module={module!r}: the profile has no such module{near}") + "$",
    ):
        getattr(small_profile(), query)(module=module)


def test_a_profile_is_named_in_one_line() -> None:
    """The `repr` has 640 and 768 MACs, five modules and one operator without a formula."""
    said = (
        "<Profile Model, 640 MACs forward, 768 MACs backward, modules: 5, unsupported operators: 1>"
    )
    assert said == repr(small_profile())


def test_the_package_lists_what_is_public() -> None:
    """`dir(lflops)` lists only public names, and no names that the package only uses itself."""
    assert sorted([*lflops.__all__, "hardware", "tensorboard"]) == dir(lflops)
