"""Test the list of unsupported operators: their calls, bytes and traced time."""

from msgspec.structs import replace

from lflops.analysis.operators import UnsupportedOperator, unsupported_operators
from lflops.profile.profile import Profile, UnsupportedCall
from lflops.profile.records import Trace, TracedOperator
from tests.support.profile_builders import run, small_profile


def test_the_ledger_adds_operators_up_over_modules_and_phases() -> None:
    """The calls and bytes of each operator are added up, and the most bytes come first.

    `my::scan` ran 2 + 1 times in two modules. The trace does not have these operators, so their
    time is unknown.
    """
    entries = (
        UnsupportedCall(module="head", operator="my::sort", phase="forward", calls=1, bytes=8),
        UnsupportedCall(module="head", operator="my::scan", phase="forward", calls=2, bytes=64),
        UnsupportedCall(module="encoder", operator="my::scan", phase="backward", calls=1, bytes=32),
        UnsupportedCall(module="head", operator="my::sort", phase="backward", calls=1, bytes=8),
    )
    assert (
        UnsupportedOperator(
            operator="my::scan", modules=("head", "encoder"), calls=3, bytes=96, seconds=None
        ),
        UnsupportedOperator(
            operator="my::sort", modules=("head",), calls=2, bytes=16, seconds=None
        ),
    ) == unsupported_operators(replace(small_profile(), unsupported=entries))


def traced(device: float, *, accumulation: int | None, batches: int | None = 4) -> Profile:
    """Return a profile with one call per step of the unsupported operator `my::scan`, and a trace.

    Args:
        device: Device seconds of the operator in the whole trace. On the host, it took 0.8 s.
        accumulation: Number of batches per step, or `None` for one batch.
        batches: Number of traced batches, or `None` if unknown.
    """
    scan = TracedOperator(
        name="my::scan",
        calls=4,
        host_seconds=0.9,
        self_host_seconds=0.8,
        device_seconds=device,
        self_device_seconds=device,
    )
    entry = UnsupportedCall(module="head", operator="my::scan", phase="forward", calls=1, bytes=8)
    trace = Trace(files={}, batches=batches, operators=(scan,))
    return replace(
        small_profile(), unsupported=(entry,), trace=trace, run=run(accumulation=accumulation)
    )


def test_a_trace_tells_the_ledger_s_time() -> None:
    """The traced time of an operator is converted to seconds per step.

    0.8 s on the host in four batches are 0.2 s per batch, and 0.4 s per step of two batches. If the
    operator ran on a device, its device time of 0.08 s counts instead. If the number of traced
    batches is unknown, so is the time.
    """

    def seconds(given: Profile) -> list[float | None]:
        return [line.seconds for line in unsupported_operators(given)]

    assert [0.2] == seconds(traced(0.0, accumulation=None))
    assert [0.4] == seconds(traced(0.0, accumulation=2))
    assert [0.02] == seconds(traced(0.08, accumulation=None))
    assert [None] == seconds(traced(0.0, accumulation=None, batches=None))
