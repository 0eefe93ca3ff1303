"""Build the numbers of the first screen, such as MFU and the share of time spent on training."""

from collections.abc import Iterator

from lflops import units
from lflops.ledger.account import CATEGORIES, Ledger
from lflops.profile.series import ratio
from lflops.report.first_screen.step_times import Steps, StepTimes, work_ratio
from lflops.report.first_screen.window import WindowSummary
from lflops.report.summary_facts import Fact
from lflops.report.text import counted, joined

MOST_OTHERS = 3
"""Maximum number of categories besides training in the sentence about the time trained."""


def figures_of(
    window: WindowSummary | None, ledger: Ledger | None, times: StepTimes | None
) -> Iterator[Fact]:
    if times is not None:
        yield _of_step(times.steps)
    if window is not None and window.flops is not None and times is not None:
        yield _of_compute(window, window.flops, times)
    if ledger is not None:
        yield _time_trained(ledger)
    elif window is not None:
        yield from window.rates[:1]
    if window is not None and window.peak_bytes is not None:
        yield _of_memory(window.peak_bytes, window.usable_bytes)


def _of_step(steps: Steps) -> Fact:
    number = counted(steps.number, "unprofiled step")
    return Fact(
        name="step",
        label="step",
        value=steps.mean,
        unit="s",
        text=units.duration(steps.mean),
        remark=f"mean of {number} of the {steps.source}",
    )


def _of_compute(window: WindowSummary, flops: float, times: StepTimes) -> Fact:
    """Return MFU, or the rate if the peak of the chip is unknown.

    Both the FLOPs and the time are those of the window if the other steps of the run take much
    longer or shorter, because these may do different work. This is also the case if the steps of
    the window contain inference, which the ledger keeps outside of steps.
    """
    seconds = times.steps.mean
    source = ""
    has_inference = bool(window.phases.keys() & CATEGORIES.keys())
    if has_inference or not work_ratio(window, times).is_similar:
        seconds = window.mean or seconds
        source = "in the window; "
    rate = flops / seconds
    if window.peak is None:
        return _achieved(rate, f"{source}the peak of the chip is unknown")
    peak = units.rate(window.peak, "FLOP/s")
    if rate > window.peak:
        return _achieved(rate, f"{source}more than the peak of {peak}, so this peak is too low")
    return Fact(
        name="MFU",
        label="MFU",
        value=rate / window.peak,
        unit="of peak",
        text=units.of_peak(rate / window.peak),
        remark=f"{source}{units.rate(rate, 'FLOP/s')} of {peak}",
    )


def _achieved(rate: float, remark: str) -> Fact:
    return Fact(
        name="achieved",
        label="achieved",
        value=rate,
        unit="FLOP/s",
        text=units.rate(rate, "FLOP/s"),
        remark=remark,
    )


def _time_trained(ledger: Ledger) -> Fact:
    share = trained_share(ledger)
    return Fact(
        name="trained",
        label="time trained",
        value=share,
        unit="share",
        text=units.percent(share),
        remark=joined(
            f"of {units.long_duration(ledger.total)}", *_other_groups(ledger)[:1], separator="; "
        ),
    )


def _other_groups(ledger: Ledger) -> list[str]:
    """Return the label and share of each category besides training as text, largest first."""
    others = []
    for group, seconds in ledger.by_group().items():
        if group != "training":
            share = ratio(seconds, ledger.total)
            once = " (once)" if group == "start_up" and len(ledger.starts) == 1 else ""
            others.append(f"{CATEGORIES[group]}{once} {units.percent(share)}")
    return others


def _of_memory(peak: int, usable: int | None) -> Fact:
    of_chip = ""
    if usable is not None:
        of_chip = f"of the {units.size(usable)} that the chip has"
    return Fact(
        name="peak live memory",
        label="peak live memory",
        value=peak,
        unit="bytes",
        text=units.size(peak),
        remark=of_chip,
    )


def trained_share(ledger: Ledger) -> float | None:
    """Return the share of the run's time that was spent in training steps that were not slow.

    Return `None` if the run has no duration.
    """
    if not ledger.total:
        return None
    return ledger.by_group().get("training", 0.0) / ledger.total


def time_trained_sentence(ledger: Ledger | None) -> str:
    """Return a sentence with the share of the run's time that was spent on training.

    The sentence also names the largest other categories. It is empty if there is no ledger.
    """
    if ledger is None or not ledger.total:
        return ""
    total = units.long_duration(ledger.total)
    trained = f"{units.percent(trained_share(ledger))} of {total} was training"
    others = ", ".join(_other_groups(ledger)[:MOST_OTHERS])
    return f"{joined(trained, others, separator='; ')}."
