"""Test MFU, HFU and the executed share against values that are worked out by hand."""

from typing import Any

import pytest
from msgspec.structs import replace

from lflops.analysis.utilization import Utilization, utilization
from lflops.errors import HardwareError
from lflops.hardware.chips import Hardware, lookup
from lflops.profile.profile import OpCount, Profile
from lflops.profile.records import Rank
from lflops.profile.steps import Step
from tests.support.profile_builders import cell, product, profile, run

CHIP = Hardware("chip", {"fp32": 1000.0, "tf32": 4000.0, "bf16": 8000.0, "fp64": 500.0})


def timed(*cells: OpCount, seconds: float | None = 0.5, **facts: Any) -> Profile:
    """Return the profile of one unprofiled step on `CHIP`, by default of half a second."""
    step = Step(index=0, kind="unprofiled", seconds=seconds, phases={})
    return profile(
        {"": {}}, cells, run=run(**({"kind": "measure", "hardware": CHIP} | facts)), steps=(step,)
    )


def training() -> tuple[OpCount, ...]:
    """Return 50 MACs of forward, 100 of backward, 20 of recompute and 5 of the optimizer.

    All are in float32.
    """
    return (
        product("", "aten::mm", "forward", macs=50, bytes_moved=1),
        product("", "aten::mm", "backward", macs=100, bytes_moved=1),
        product("", "aten::mm", "recompute", macs=20, bytes_moved=1),
        product("", "aten::mm", "optimizer", macs=5, bytes_moved=1),
    )


def test_mfu_is_of_forward_and_backward_and_hfu_of_what_ran_again_too() -> None:
    """MFU has the MACs of forward and backward. HFU also has the MACs of recompute.

    2 * 150 FLOPs in half a second are 600 FLOP/s of 1000. With the 20 MACs of recompute they are
    680 FLOP/s. The optimizer's MACs are in neither.
    """
    expected = Utilization(
        mfu=600 / 1000,
        hfu=680 / 1000,
        executed=680 / 1000,
        flops_per_second=600.0,
        peak_flops_per_second=1000.0,
        dtype="fp32",
        hardware="chip",
    )
    assert expected == replace(utilization(timed(*training())), breakdown=None)


def test_what_a_mask_skips_is_in_hfu_and_was_not_executed() -> None:
    """MACs that a mask skips are in MFU and HFU, but not in the executed share.

    60 of the 100 MACs of forward and 24 of the 40 MACs of recompute are executed. So MFU has
    400 FLOP/s of 1000, HFU 560 and the executed share 336.
    """
    cells = (
        replace(product("", "aten::sdpa", "forward", macs=100, bytes_moved=1), executed_macs=60),
        replace(product("", "aten::sdpa", "recompute", macs=40, bytes_moved=1), executed_macs=24),
    )
    found = utilization(timed(*cells))
    assert (400 / 1000, 560 / 1000, 336 / 1000) == (found.mfu, found.hfu, found.executed)


def test_executed_work_is_of_each_dtypes_own_peak() -> None:
    """The executed share compares each dtype with its own peak. MFU and HFU use the run's dtype.

    100 MACs in float32 need 0.2 s at 1000 FLOP/s. 400 MACs in bfloat16 need 0.1 s at 8000 FLOP/s.
    Together they need 0.3 s of half a second.
    """
    cells = (
        product("", "aten::mm", "forward", macs=100, bytes_moved=1),
        replace(product("", "aten::mm", "forward", macs=400, bytes_moved=1), dtype="bfloat16"),
    )
    found = utilization(timed(*cells, dtype="bfloat16"))
    assert (2000 / 8000, 2000 / 8000, pytest.approx(0.3 / 0.5)) == (
        found.mfu,
        found.hfu,
        found.executed,
    )


@pytest.mark.parametrize(
    ("dtype", "peak"),
    [
        ("float32", "fp32"),
        ("tf32", "tf32"),
        ("bfloat16", "bf16"),
        ("float64", "fp64"),
        ("complex64", "fp32"),
        ("float16", "fp16"),
        ("float8_e4m3fn", "fp8"),
        ("float4_e2m1fn_x2", "fp4"),
        ("quint8", "int8"),
        ("int64", None),
        (None, None),
    ],
)
def test_the_peak_is_that_of_the_runs_dtype(dtype: str | None, peak: str | None) -> None:
    """The dtype of the run selects the peak. Dtypes such as int64 have no peak on any chip."""
    found = utilization(timed(*training(), dtype=dtype))
    assert (peak, CHIP.peak_flops_per_second.get(peak or "")) == (
        found.dtype,
        found.peak_flops_per_second,
    )


def test_a_chip_without_tf32_multiplies_float32_as_it_is() -> None:
    """A run in TF32 uses the TF32 peak of the chip, or the FP32 peak if the chip has no TF32."""
    of_run = timed(*training(), dtype="tf32")
    found = [utilization(of_run, chip) for chip in (None, Hardware("older", {"fp32": 2000.0}))]
    assert [(600 / 4000, "tf32"), (600 / 2000, "fp32")] == [
        (each.mfu, each.dtype) for each in found
    ]


def test_the_chip_that_is_given_is_taken_before_that_of_the_run() -> None:
    """The run was on `CHIP`, but the other chip's peak counts: 600 of 2000 FLOP/s."""
    found = utilization(timed(*training()), Hardware("other", {"fp32": 2000.0}))
    assert ("other", 600 / 2000) == (found.hardware, found.mfu)


def test_without_a_chip_the_rate_alone_is_known() -> None:
    """Without a peak, only the 600 FLOP/s are known."""
    expected = Utilization(
        mfu=None,
        hfu=None,
        executed=None,
        flops_per_second=600.0,
        peak_flops_per_second=None,
        dtype="fp32",
        hardware=None,
    )
    assert expected == utilization(timed(*training(), hardware=None))


def test_a_chip_whose_peak_for_that_dtype_is_unknown_gives_no_share() -> None:
    """MFU and HFU are unknown, but the result still has the name of the chip."""
    found = utilization(timed(*training()), Hardware("other", {"bf16": 2000.0}))
    assert ("other", None, None, None, None) == (
        found.hardware,
        found.peak_flops_per_second,
        found.mfu,
        found.hfu,
        found.executed,
    )


def test_one_dtype_without_a_peak_leaves_what_was_executed_unknown() -> None:
    """MFU and HFU only need the peak of the run's dtype, so they are still known."""
    odd = replace(product("", "aten::mm", "forward", macs=50, bytes_moved=1), dtype="float8_e5m2")
    found = utilization(timed(odd, *training()))
    assert (800 / 1000, 880 / 1000, None) == (found.mfu, found.hfu, found.executed)


def test_what_has_no_macs_needs_no_peak() -> None:
    """A copy of int64 values has no MACs, so a missing int64 peak does not change HFU."""
    copied = cell("", "aten::copy_", "forward", dtype="int64")
    assert 680 / 1000 == utilization(timed(copied, *training())).hfu


@pytest.mark.parametrize("seconds", [None, 0.0])
def test_without_a_time_there_is_no_rate(seconds: float | None) -> None:
    """The rate is unknown without a time, and also if the clock did not advance."""
    found = utilization(timed(*training(), seconds=seconds))
    assert (None, None, None) == (found.flops_per_second, found.mfu, found.hfu)


def test_what_was_not_counted_is_no_rate_of_0() -> None:
    """A profile with times but without operators was not counted, so its rate is unknown."""
    found = utilization(timed())
    assert (None, None, None) == (found.flops_per_second, found.mfu, found.hfu)


def test_what_was_counted_without_a_product_has_a_rate_of_0() -> None:
    """A counted step without matmuls has 0 MACs, so its rate is 0, not unknown."""
    found = utilization(
        timed(replace(product("", "aten::add", "forward", macs=0, bytes_moved=1), flops=8))
    )
    assert (0.0, 0.0, 0.0) == (found.flops_per_second, found.mfu, found.hfu)


def test_a_merged_profile_reaches_what_its_mean_rank_does() -> None:
    """The rate of a merged profile is the mean of its ranks.

    The ranks have 30 and 90 MACs, and the profile has their sum. The mean of 60 MACs in half a
    second is 240 FLOP/s of 1000.
    """
    of_ranks = tuple(
        Rank(rank=index, node=None, host=None, device=None, coordinates={}, status="ok", macs=macs)
        for index, macs in enumerate((30, 90))
    )
    cells = (
        product("", "aten::mm", "forward", macs=40, bytes_moved=1),
        product("", "aten::mm", "backward", macs=80, bytes_moved=1),
    )
    found = utilization(replace(timed(*cells), ranks=of_ranks))
    assert (240.0, 0.24, 0.24) == (found.flops_per_second, found.mfu, found.hfu)


def test_a_chip_can_be_given_by_its_name() -> None:
    """The name of a chip gives the same result as the chip. An unknown name is an error."""
    assert lookup("NVIDIA H200") is not None
    assert utilization(timed(*training()), lookup("NVIDIA H200")) == utilization(
        timed(*training()), "NVIDIA H200"
    )
    with pytest.raises(
        HardwareError, match="hardware='H2000': 'H2000' is not in the table of chips"
    ):
        utilization(timed(*training()), "H2000")
