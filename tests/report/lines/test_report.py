"""What was profiled, in lines."""

from lflops.analyze.analysis import analyze
from lflops.hardware.chips import Hardware
from lflops.report.lines.report import report_of
from tests.support.profile_builders import product, profile, run


def device(**fields: object) -> str:
    """The line about the device."""
    given = profile({"": {}}, [product("", "mm", "forward", macs=1, bytes_moved=1)], run=run(device_name="AMD EPYC", **fields))
    return next(fact.text for fact in report_of(analyze(given)).subject if fact.name == "device")


def test_an_estimate_is_of_the_chip_that_it_was_asked_for() -> None:
    """And not of the processor that it was made on; without a chip it is of none. What ran names what it ran on."""
    chip = Hardware("NVIDIA H200", {"bf16": 1.0})
    assert "NVIDIA H200, estimated on node0, float32" == device(kind="estimate", hardware=chip)
    assert "no device, estimated on node0, float32" == device(kind="estimate")
    assert "AMD EPYC on node0, float32" == device(kind="count", hardware=chip)
