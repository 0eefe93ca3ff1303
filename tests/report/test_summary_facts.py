"""Test the lines of a report about what was profiled."""

from lflops.analysis.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.profile.records import Rank
from lflops.profile.steps import Step
from lflops.report.summary_facts import Report, report_of
from tests.support.profile_builders import product, profile, run


def device(**fields: object) -> str:
    """Return the line about the device."""
    cells = [product("", "mm", "forward", macs=1, bytes_moved=1)]
    given = profile({"": {}}, cells, run=run(device_name="AMD EPYC", **fields))
    return next(fact.text for fact in report_of(analyze(given)).subject if fact.name == "device")


def test_an_estimate_is_of_the_chip_that_it_was_asked_for() -> None:
    """An estimate names the requested chip, or no device; a count names the device that it ran on.

    An estimate does not name the processor that computed it.
    """
    chip = Hardware("NVIDIA H200", {"bf16": 1.0})
    assert "NVIDIA H200, estimated on node0, float32" == device(kind="estimate", hardware=chip)
    assert "no device, estimated on node0, float32" == device(kind="estimate")
    assert "AMD EPYC on node0, float32" == device(kind="count", hardware=chip)


def test_ranks_with_different_chips_have_no_common_peak() -> None:
    """If ranks have different chips, MFU is unknown and the chips are named.

    A chip that the user passes applies to all ranks, so MFU is known then.
    """
    ranks = tuple(
        Rank(rank=n, node=None, host=None, device=chip, coordinates={}, status="ok")
        for n, chip in enumerate(["H100", "A100", "A100"])
    )
    cells = [product("", "mm", "forward", macs=1, bytes_moved=1)]
    steps = (Step(index=1, kind="unprofiled", seconds=1.0, phases={}),)

    def report_with(hardware: Hardware | None) -> Report:
        of_run = run(hardware=hardware, world_size=3)
        return report_of(analyze(profile({"": {}}, cells, run=of_run, ranks=ranks, steps=steps)))

    without_chip = report_with(None)
    mfu = without_chip.fact("MFU")
    assert mfu is not None
    assert mfu.remark == "the ranks use different chips, so there is no common peak: H100, A100"
    texts = [fact.text for fact in without_chip.subject]
    assert "H100 and A100 on node0, float32, 3 ranks" in texts
    mfu = report_with(Hardware("H100", {"fp32": 1e3})).fact("MFU")
    assert mfu is not None
    assert mfu.remark.endswith("(H100, fp32 dense)")
