"""What the page's Operators is given."""

from typing import Any

import pytest
from msgspec import json
from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.analysis.operators import MODULES
from lflops.analysis.roofline import roofline
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.report.payload.operators import KERNELS
from lflops.report.payload.payload import payload
from tests.support.compiled_profiles import compiled_profile, kernel
from tests.support.profile_builders import cell, product, profile, profile_of, small_profile


def shown(given: Profile) -> Any:
    """What arrives at the page."""
    return json.decode(json.encode(payload(analyze(given))))["operators"]


def rows(found: Any) -> list[dict[str, Any]]:
    """The table's rows: a column is a list, or the value of all."""
    table = found["table"]
    return [
        {name: each[row] if isinstance(each, list) else each for name, each in table.items()}
        for row in range(len(table["operator"]))
    ]


def row(found: Any, operator: str, phase: str, dtype: str | None = "float32") -> dict[str, Any]:
    """The one of an operator in a phase and dtype."""
    (one,) = [
        each
        for each in rows(found)
        if (each["operator"], each["phase"], each["dtype"]) == (operator, phase, dtype)
    ]
    return one


def test_an_operator_has_its_phases_and_all_of_them() -> None:
    """512 and 128 MACs of 640 in forward, of 1408 in all.

    The products in backward are another operator's.
    """
    found = shown(small_profile())
    forward, whole = row(found, "aten::addmm", "forward"), row(found, "aten::addmm", "all")
    assert (2, 640, 1280, 1.0) == tuple(
        forward[name] for name in ("calls", "macs", "flops", "share")
    )
    assert (2, 640, pytest.approx(640 / 1408)) == tuple(
        whole[name] for name in ("calls", "macs", "share")
    )
    assert "backward" not in {
        each["phase"] for each in rows(found) if each["operator"] == "aten::addmm"
    }


def test_each_dtype_has_a_row_in_its_phase() -> None:
    """And all of them one row together."""
    cells = [
        product("", "mm", "forward", macs=3, bytes_moved=1),
        cell("", "mm", "forward", dtype="bfloat16", macs=1, executed_macs=1, flops=2),
    ]
    found = shown(profile({"": {}}, cells))
    assert (0.75, 0.25) == tuple(
        row(found, "mm", "forward", dtype)["share"] for dtype in ("float32", "bfloat16")
    )
    assert 4 == row(found, "mm", "all", "float32, bfloat16")["macs"]


def test_where_there_are_no_macs_the_share_is_of_flops() -> None:
    """All of what the optimizer does, and of the loss."""
    found = shown(small_profile())
    assert ("FLOPs", 1.0) == tuple(
        row(found, "aten::_foreach_add_", "optimizer")[name] for name in ("share_of", "share")
    )
    assert "MACs" == row(found, "aten::addmm", "forward")["share_of"]


def test_what_has_no_formula_comes_first_and_has_no_count() -> None:
    """Its calls and bytes are known: 2, and 64."""
    found = shown(small_profile())
    first = rows(found)[0]
    assert ("my_ops::scan", "all", "no formula", 2, 64) == tuple(
        first[name] for name in ("operator", "phase", "kind", "calls", "bytes_moved")
    )
    assert (None, None, None) == tuple(first[name] for name in ("macs", "flops", "share"))
    assert 1 == found["unsupported"]


def test_the_trace_tells_the_mean_batch_of_all_phases() -> None:
    """200 µs on the host over 2 batches, half of it the operator's own.

    A name of torch's is the same without where it is from.
    """
    found = shown(small_profile())
    whole = row(found, "aten::addmm", "all")
    times = ("self_device_seconds", "device_seconds", "self_host_seconds", "host_seconds")
    assert (1.5e-5, 1.5e-5, 5e-5, 1e-4) == tuple(whole[name] for name in times)
    assert (None,) * 4 == tuple(row(found, "aten::addmm", "forward")[name] for name in times)


def test_what_only_the_trace_saw_has_times_alone() -> None:
    """One that others call, or of a window in which nothing was counted."""
    found = shown(
        replace(small_profile(), notes=(Note(code="not_counted", subject="", values={}),))
    )
    (one,) = rows(found)
    assert ("addmm", "traced", None, None, 1e-4) == tuple(
        one[name] for name in ("operator", "kind", "calls", "macs", "host_seconds")
    )


def within(found: Any, operator: str, phase: str) -> list[tuple[int, int]]:
    """The modules that ran it, and its MACs in each."""
    places, table = found["within"], found["table"]
    macs = (
        places["macs"]
        if isinstance(places["macs"], list)
        else [places["macs"]] * len(places["row"])
    )
    at = [
        index
        for index, number in enumerate(places["row"])
        if (table["operator"][number], table["phase"][number]) == (operator, phase)
    ]
    return [(places["module"][index], macs[index]) for index in at]


def test_an_operator_names_the_modules_that_ran_it() -> None:
    """The most first: 512 MACs in the encoder's layer, which is row 2, and 128 in the head.

    No container.
    """
    found = shown(small_profile())
    assert (
        [(2, 512), (4, 128)]
        == within(found, "aten::addmm", "forward")
        == within(found, "aten::addmm", "all")
    )


def test_of_many_modules_some_are_named() -> None:
    """And all are counted."""
    found = shown(profile_of(100))
    assert MODULES == len(within(found, "aten::addmm", "forward"))
    assert 100 == row(found, "aten::addmm", "forward")["modules"]


def test_where_nothing_was_counted_or_traced_there_is_none() -> None:
    """A model that ran nothing."""
    assert shown(profile({"": {}}, [])) is None


def test_a_fused_backward_is_one_call_and_has_the_roofline_s_intensity() -> None:
    """Its second product is a cell of recompute without bytes: one call of 500 FLOPs.

    A mask leaves out half of backward's 200 MACs.
    """
    backward = cell(
        "", "sdpa_backward", "backward", macs=200, executed_macs=100, flops=400, bytes_moved=100
    )
    recompute = cell(
        "", "sdpa_backward", "recompute", macs=50, executed_macs=50, flops=100, bytes_moved=0
    )
    given = profile({"": {}}, [backward, recompute])
    found = shown(given)
    whole = row(found, "sdpa_backward", "all")
    assert (1, 250, 500, 3.0) == tuple(
        whole[name] for name in ("calls", "macs", "flops", "intensity")
    )
    (point,) = [each for each in roofline(given).operators if each.phase == "backward"]
    assert point.intensity == row(found, "sdpa_backward", "backward")["intensity"] == 2.0


def test_what_is_run_again_is_a_call_of_its_own() -> None:
    """A checkpointed product: its bytes move twice."""
    cells = [
        product("", "mm", phase, macs=10, bytes_moved=5)
        for phase in ("forward", "backward", "recompute")
    ]
    assert 3 == row(shown(profile({"": {}}, cells)), "mm", "all")["calls"]


def test_kernels_of_compiled_code_come_with_their_modules() -> None:
    """In the mean of two batches.

    40 of the 100 µs of compiled code; 10 % of it is of no known module, 20 % in fused kernels.
    """
    found = shown(compiled_profile())["kernels"]
    table = found["table"]
    assert table["name"][:2] == ["extern_kernels.addmm", "cpp_fused_gelu_0"]
    assert (table["module"], table["modules"]) == ([2, 3, 3, 3, 2], [1, 2, 1, 1, 1])
    assert table["fused_bytes"] == [960, 256, 512, 64, None]
    assert (table["seconds"][0], table["share"][0], table["calls"]) == (
        pytest.approx(4e-5),
        pytest.approx(0.4),
        1,
    )
    assert (found["graphs"], found["timed_on"], found["left_out"]) == (2, "host", 0)
    assert (found["assigned"], found["fused"]) == (pytest.approx(0.9), pytest.approx(0.2))


def test_of_many_kernels_those_with_the_least_time_are_left_out() -> None:
    """The page has room for a thousand."""
    given = compiled_profile()
    assert given.trace is not None
    assert given.trace.compiled is not None
    many = tuple(
        kernel(f"cpp_fused_{number}", "head", "forward", moved=1) for number in range(KERNELS + 3)
    )
    found = shown(
        replace(
            given, trace=replace(given.trace, compiled=replace(given.trace.compiled, kernels=many))
        )
    )["kernels"]
    assert (len(found["table"]["name"]), found["left_out"]) == (KERNELS, 3)


def test_without_compiled_code_there_are_no_kernels() -> None:
    """As for most models."""
    assert shown(small_profile())["kernels"] is None
