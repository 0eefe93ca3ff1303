"""The ledger of what no total holds, by hand."""

from msgspec.structs import replace

from lflops.analysis.operators import UnsupportedOperator, unsupported_operators
from lflops.profile.profile import Profile, UnsupportedCall
from lflops.profile.records import Trace, TracedOperator
from tests.support.profile_builders import run, small_profile


def test_the_ledger_adds_operators_up_over_modules_and_phases() -> None:
    """`my::scan` ran 2 + 1 times in two modules and moved the most.

    Without a trace of them no time is known.
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
    """One call of `my::scan` without a formula, and a trace of some batches in which it took 0.8 s on the host."""
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
    """0.8 s on the host in four batches are 0.2 s a batch, and 0.4 s a step of two.

    With a device it is the device's 0.08 s that count.
    """
    assert [0.2] == [line.seconds for line in unsupported_operators(traced(0.0, accumulation=None))]
    assert [0.4] == [line.seconds for line in unsupported_operators(traced(0.0, accumulation=2))]
    assert [0.02] == [
        line.seconds for line in unsupported_operators(traced(0.08, accumulation=None))
    ]
    assert [None] == [
        line.seconds for line in unsupported_operators(traced(0.0, accumulation=None, batches=None))
    ]
