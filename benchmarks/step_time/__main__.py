"""Predict published step times for models and chips that were not fitted.

The predictions are compared with a constant: the median MFU of the other rows.

    python -m benchmarks.step_time estimate DIR   estimates the work of each row on fake tensors,
                                                  except for rows that are already in DIR
    python -m benchmarks.step_time fit DIR        fits the rates of `prediction.toml` and prints
                                                  their errors; --record writes RESULTS.md
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.results import record
from benchmarks.step_time.fit import (
    Judged,
    Step,
    coverage,
    fit,
    interval,
    judged,
    left_out,
    order,
    steps_in,
)
from benchmarks.step_time.work import Row, estimated, missing
from lflops.estimation.prediction import Rates, why_not
from lflops.hardware.chips import named

WORST = 8
# With this value, the intervals hold 75 to 85 % of the rows of a model that is left out.
WIDER = 1.75


def main() -> None:
    """Estimate the rows, or fit the rates and judge them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("estimate", "fit"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.what == "estimate":
        for row in missing(given.folder):
            estimated(row).save(given.folder / row.file)
            print(row.file, flush=True)
        return
    lines = list(_report(steps_in(given.folder)))
    if given.record:
        record("step_time", "Step times that others published", lines)
    else:
        print("\n".join(lines))


def _report(steps: Sequence[Step]) -> Iterator[str]:
    known = [each for each in steps if not each.row.is_held_out]
    models, chips = left_out(known, lambda row: row.model), left_out(known, lambda row: row.chip)
    unseen = judged(
        [
            each
            for each in steps
            if each.row.is_held_out and why_not(each.profile, named(each.row.chip)) is None
        ],
        known,
    )
    rates = fit(known)
    low, high = interval(models, WIDER)
    yield f"{len(known)} rows of MPT are fitted by {_rates(rates)}; the 80 % interval is {low:.3f} to {high:.3f} times a prediction."
    yield 'The "constant" is a simpler prediction, from the median MFU of the other steps.'
    yield ""
    yield "| left out of the fit | rows | mean error | largest error | mean error of the constant | largest error of the constant | intervals that contain the measured time |"
    yield "|---|---|---|---|---|---|---|"
    for name, found, group in (("each model", models, _model), ("each chip", chips, _chip)):
        yield _row(name, found, f"{coverage(found, group, WIDER):.0%}")
    within = sum(low <= each.off <= high for each in unseen)
    yield _row("Llama (torchtitan), always", unseen, f"{within} of {len(unseen)}")
    fitted = [each._replace(predicted=each.step.predicted(rates)) for each in models]
    yield _row("nothing: these were fitted", fitted, "")
    yield ""
    yield "The next table compares pairs of steps of one model that differ in one thing. It shows how well the predictions rank the pairs by"
    yield "tokens/s on a GPU. Each model is left out of the fit:"
    yield ""
    yield "| what differs | pairs | Kendall's tau | Kendall's tau of the constant |"
    yield "|---|---|---|---|"
    for name, (pairs, predicted, constant) in order([*models, *unseen]).items():
        yield f"| {name} | {pairs} | {predicted:.2f} | {constant:.2f} |"
    yield ""
    yield "Compiled code and tensor parallelism are not predicted. torchtitan's other four rows use them."
    yield ""
    yield "The farthest off, where each model is left out, and the rows that are always:"
    yield ""
    yield "| model | tokens | samples | GPUs | chip | measured | predicted |"
    yield "|---|---|---|---|---|---|---|"
    for each in [*sorted(models, key=lambda each: -each.error)[:WORST], *unseen]:
        row = each.step.row
        more = ", compiled" if row.compiled else ""
        yield (
            f"| {row.model}{more} | {row.tokens:,} | {row.samples} x {row.accumulation} | {row.gpus} | {row.chip} | {row.seconds:.3f} s "
            f"| {each.predicted:.3f} s ({each.predicted / row.seconds - 1:+.1%}) |"
        )


def _model(row: Row) -> str:
    return row.model


def _chip(row: Row) -> str:
    return row.chip


def _row(name: str, found: Sequence[Judged], held: str) -> str:
    errors, constant = [each.error for each in found], [each.constant_error for each in found]
    return f"| {name} | {len(found)} | {fmean(errors):.1%} | {max(errors):.1%} | {fmean(constant):.1%} | {max(constant):.1%} | {held} |"


def _rates(rates: Rates) -> str:
    families = [
        f"{name}: products {of.product:.3f}, attention {of.attention:.3f}"
        for name, of in rates.families.items()
    ]
    shared = (
        f"bandwidth {rates.bandwidth:.3f}, link {rates.link:.3f}, contention {rates.contention:.3f}"
    )
    return "; ".join([*families, f"{shared}, lag {1e6 * rates.lag_seconds:.1f} µs"])


if __name__ == "__main__":
    main()
