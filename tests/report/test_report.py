"""What was profiled, in lines."""

from lflops.analysis.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.profile.records import Rank
from lflops.profile.steps import Step
from lflops.report.report import Fact, Report, report_of
from tests.support.profile_builders import product, profile, run


def device(**fields: object) -> str:
    """The line about the device."""
    given = profile(
        {"": {}},
        [product("", "mm", "forward", macs=1, bytes_moved=1)],
        run=run(device_name="AMD EPYC", **fields),
    )
    return next(fact.text for fact in report_of(analyze(given)).subject if fact.name == "device")


def test_an_estimate_is_of_the_chip_that_it_was_asked_for() -> None:
    """And not of the processor that it was made on; without a chip it is of none.

    What ran names what it ran on.
    """
    chip = Hardware("NVIDIA H200", {"bf16": 1.0})
    assert "NVIDIA H200, estimated on node0, float32" == device(kind="estimate", hardware=chip)
    assert "no device, estimated on node0, float32" == device(kind="estimate")
    assert "AMD EPYC on node0, float32" == device(kind="count", hardware=chip)


def test_ranks_with_different_chips_have_no_common_peak() -> None:
    """Unless the user has given one for all. The chips are named."""
    chips = "H100", "A100", "A100"
    ranks = tuple(
        Rank(rank=n, node=None, host=None, device=chip, coordinates={}, status="ok")
        for n, chip in enumerate(chips)
    )

    def of(hardware: Hardware | None) -> Report:
        rows = [product("", "mm", "forward", macs=1, bytes_moved=1)]
        steps = (Step(index=1, kind="unprofiled", seconds=1.0, phases={}),)
        return report_of(
            analyze(
                profile(
                    {"": {}},
                    rows,
                    run=run(hardware=hardware, world_size=3),
                    ranks=ranks,
                    steps=steps,
                )
            )
        )

    def said(fact: Fact | None) -> str:
        assert fact is not None
        return fact.remark

    assert (
        said(of(None).fact("MFU"))
        == "the ranks have different chips, which have no common peak: H100, A100"
    )
    assert said(of(Hardware("H100", {"fp32": 1e3})).fact("MFU")).endswith("(H100, fp32 dense)")
    assert "H100 and A100 on node0, float32, 3 ranks" in [fact.text for fact in of(None).subject]
