"""Test the part of the page's payload about operators and compiled kernels."""

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
    """Return the operator part of a profile's payload as the page reads it."""
    return json.decode(json.encode(payload(analyze(given))))["operators"]


def rows(found: Any) -> list[dict[str, Any]]:
    """Return the rows of the table. A column is a list, or one value for all rows."""
    table = found["table"]
    size = len(table["operator"])
    columns = {}
    for name, column in table.items():
        columns[name] = column if isinstance(column, list) else [column] * size
    return [{name: columns[name][row] for name in columns} for row in range(size)]


def row(found: Any, operator: str, phase: str, dtype: str | None = "float32") -> dict[str, Any]:
    """Return the only row of an operator in a phase and dtype."""
    wanted = (operator, phase, dtype)
    (one,) = [
        each for each in rows(found) if wanted == (each["operator"], each["phase"], each["dtype"])
    ]
    return one


def test_an_operator_has_its_phases_and_all_of_them() -> None:
    """An operator has a row for each of its phases and a row for all phases.

    `aten::addmm` has 512 + 128 MACs: all 640 of forward, and 640 of 1,408 of all phases. The
    matmuls of backward belong to another operator.
    """
    found = shown(small_profile())
    forward = row(found, "aten::addmm", "forward")
    assert 2 == forward["calls"]
    assert 640 == forward["macs"]
    assert 1280 == forward["flops"]
    assert 1.0 == forward["share"]
    whole = row(found, "aten::addmm", "all")
    assert 2 == whole["calls"]
    assert 640 == whole["macs"]
    assert pytest.approx(640 / 1408) == whole["share"]
    phases = {each["phase"] for each in rows(found) if each["operator"] == "aten::addmm"}
    assert "backward" not in phases


def test_each_dtype_has_a_row_in_its_phase() -> None:
    """An operator has a row for each dtype in a phase, and one row for all dtypes together."""
    cells = [
        product("", "mm", "forward", macs=3, bytes_moved=1),
        cell("", "mm", "forward", dtype="bfloat16", macs=1, executed_macs=1, flops=2),
    ]
    found = shown(profile({"": {}}, cells))
    assert 0.75 == row(found, "mm", "forward", "float32")["share"]
    assert 0.25 == row(found, "mm", "forward", "bfloat16")["share"]
    assert 4 == row(found, "mm", "all", "float32, bfloat16")["macs"]


def test_where_there_are_no_macs_the_share_is_of_flops() -> None:
    """In a phase without MACs, the share refers to FLOPs."""
    found = shown(small_profile())
    optimizer = row(found, "aten::_foreach_add_", "optimizer")
    assert "FLOPs" == optimizer["share_of"]
    assert 1.0 == optimizer["share"]
    assert "MACs" == row(found, "aten::addmm", "forward")["share_of"]


def test_what_has_no_formula_comes_first_and_has_no_count() -> None:
    """An operator without a formula is the first row; only its calls and bytes are known."""
    found = shown(small_profile())
    first = rows(found)[0]
    assert "my_ops::scan" == first["operator"]
    assert "all" == first["phase"]
    assert "no formula" == first["kind"]
    assert 2 == first["calls"]
    assert 64 == first["bytes_moved"]
    assert first["macs"] is None
    assert first["flops"] is None
    assert first["share"] is None
    assert 1 == found["unsupported"]


def test_the_trace_tells_the_mean_batch_of_all_phases() -> None:
    """Traced times are the mean per batch, and only the row of all phases has them.

    The trace has 200 µs on the host in 2 batches, half of them self time.
    """
    found = shown(small_profile())
    whole = row(found, "aten::addmm", "all")
    assert 1.5e-5 == whole["self_device_seconds"]
    assert 1.5e-5 == whole["device_seconds"]
    assert 5e-5 == whole["self_host_seconds"]
    assert 1e-4 == whole["host_seconds"]
    forward = row(found, "aten::addmm", "forward")
    assert forward["self_device_seconds"] is None
    assert forward["device_seconds"] is None
    assert forward["self_host_seconds"] is None
    assert forward["host_seconds"] is None


def test_what_only_the_trace_saw_has_times_alone() -> None:
    """An operator that was only traced has times but no counts.

    This is an operator that another operator calls, or any operator if nothing was counted.
    """
    not_counted = Note(code="not_counted", subject="", values={})
    (one,) = rows(shown(replace(small_profile(), notes=(not_counted,))))
    assert "addmm" == one["operator"]
    assert "traced" == one["kind"]
    assert one["calls"] is None
    assert one["macs"] is None
    assert 1e-4 == one["host_seconds"]


def within(found: Any, operator: str, phase: str) -> list[tuple[int, int]]:
    """Return the modules that ran an operator in a phase, each with its MACs."""
    places = found["within"]
    table = found["table"]
    macs = places["macs"]
    if not isinstance(macs, list):
        macs = [macs] * len(places["row"])
    modules = []
    for index, number in enumerate(places["row"]):
        if table["operator"][number] == operator and table["phase"][number] == phase:
            modules.append((places["module"][index], macs[index]))
    return modules


def test_an_operator_names_the_modules_that_ran_it() -> None:
    """The modules of an operator are sorted by work, without containers.

    The linear layer of the encoder, which is module 2, has 512 MACs, and the head has 128.
    """
    found = shown(small_profile())
    assert [(2, 512), (4, 128)] == within(found, "aten::addmm", "forward")
    assert [(2, 512), (4, 128)] == within(found, "aten::addmm", "all")


def test_of_many_modules_some_are_named() -> None:
    """At most `MODULES` modules are listed, but all of them are counted."""
    found = shown(profile_of(100))
    assert MODULES == len(within(found, "aten::addmm", "forward"))
    assert 100 == row(found, "aten::addmm", "forward")["modules"]


def test_where_nothing_was_counted_or_traced_there_is_none() -> None:
    """Without any operator, this part is missing."""
    assert shown(profile({"": {}}, [])) is None


def test_a_fused_backward_is_one_call_and_has_the_roofline_s_intensity() -> None:
    """A fused backward is one call, although a part of its work is recompute.

    The recomputed matmul is an op count without bytes, so both op counts are one call of 500 FLOPs.
    A mask skips 100 of the 200 MACs of backward, which the intensity leaves out.
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
    assert 1 == whole["calls"]
    assert 250 == whole["macs"]
    assert 500 == whole["flops"]
    # 2 * (100 + 50) executed FLOPs of 100 bytes
    assert 3.0 == whole["intensity"]
    (point,) = [each for each in roofline(given).operators if each.phase == "backward"]
    assert point.intensity == row(found, "sdpa_backward", "backward")["intensity"] == 2.0


def test_what_is_run_again_is_a_call_of_its_own() -> None:
    """A checkpointed matmul, which moves its bytes again, is a separate call."""
    cells = [
        product("", "mm", "forward", macs=10, bytes_moved=5),
        product("", "mm", "backward", macs=10, bytes_moved=5),
        product("", "mm", "recompute", macs=10, bytes_moved=5),
    ]
    assert 3 == row(shown(profile({"": {}}, cells)), "mm", "all")["calls"]


def test_kernels_of_compiled_code_come_with_their_modules() -> None:
    """Each kernel has its module, and its calls, time and bytes as the mean of two batches.

    The first kernel takes 40 of the 100 µs of compiled code. 10 % of this time belongs to no known
    module, and 20 % is in kernels for several modules.
    """
    found = shown(compiled_profile())["kernels"]
    table = found["table"]
    assert table["name"][:2] == ["extern_kernels.addmm", "cpp_fused_gelu_0"]
    assert table["module"] == [2, 3, 3, 3, 2]
    assert table["modules"] == [1, 2, 1, 1, 1]
    assert table["fused_bytes"] == [960, 256, 512, 64, None]
    assert table["seconds"][0] == pytest.approx(4e-5)
    assert table["share"][0] == pytest.approx(0.4)
    assert table["calls"] == 1
    assert found["graphs"] == 2
    assert found["timed_on"] == "host"
    assert found["left_out"] == 0
    assert found["assigned"] == pytest.approx(0.9)
    assert found["fused"] == pytest.approx(0.2)


def test_of_many_kernels_those_with_the_least_time_are_left_out() -> None:
    """At most `KERNELS` kernels are listed, and the others are counted as left out."""
    given = compiled_profile()
    assert given.trace is not None
    assert given.trace.compiled is not None
    many = tuple(
        kernel(f"cpp_fused_{number}", "head", "forward", moved=1) for number in range(KERNELS + 3)
    )
    compiled = replace(given.trace.compiled, kernels=many)
    found = shown(replace(given, trace=replace(given.trace, compiled=compiled)))["kernels"]
    assert len(found["table"]["name"]) == KERNELS
    assert found["left_out"] == 3


def test_without_compiled_code_there_are_no_kernels() -> None:
    """Without compiled code, this part is missing."""
    assert shown(small_profile())["kernels"] is None
