"""Fit a few rates to published step times, and judge them on models and chips that were left out.

Residuals are logarithms of measured over predicted seconds. The fit is robust (Huber) and has a
prior for each rate, so a rate that the rows do not determine keeps its prior. The share of a family
of chips is a common share plus the deviation of this family. A family that is left out is predicted
with the common share.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

import lflops
from benchmarks.step_time.work import LLAMA, MPT, Row, rows
from lflops.estimation.prediction import Rates, fitted, predict
from lflops.hardware.chips import named
from lflops.profile.module_names import ancestry
from lflops.profile.profile import OpCount, Profile

# For each rate, its value before the fit, and the standard deviation of its logarithm.
PRIORS = {
    "product": (0.7, 0.3),
    "product of Ampere": (1.0, 0.2),
    "product of Hopper": (1.0, 0.2),
    "attention": (0.4, 0.4),
    "attention of Ampere": (1.0, 0.3),
    "attention of Hopper": (1.0, 0.3),
    "bandwidth": (0.8, 0.2),
    "link": (0.8, 0.3),
    "contention": (0.1, 0.7),
    "lag": (2e-6, 1.0),
}
# The usual error of a prediction, as a difference of logarithms.
OFF = 0.06
# An error above this multiple of OFF influences the fit no more than this multiple.
OUTLIER = 1.5


class Step(NamedTuple):
    """A published training run, and the work of its step."""

    row: Row
    profile: Profile

    def predicted(self, rates: Rates) -> float:
        """Return the predicted seconds of a step.

        Each of its micro batches gathers parameters and reduces gradients.
        """
        found = predict(self.profile, self.row.chip, rates=rates)
        if found is None:
            raise ValueError(f"{self.row.file} is not predicted")
        once = found.by_phase.get("optimizer", 0.0)
        return once + (found.seconds - once) * self.row.accumulation

    @property
    def peak_seconds(self) -> float:
        """Return the time of the model's work at the chip's peak, by the usual formula.

        The formula counts attention as a full square.
        """
        row = self.row
        llama = LLAMA.get(row.model, {})
        width, _, blocks = MPT.get(row.model) or (
            llama["hidden_size"],
            0,
            llama["num_hidden_layers"],
        )
        flops = (
            (6 * row.parameters + 12 * blocks * width * row.tokens)
            * row.tokens
            * row.samples
            * row.accumulation
            / row.tensor
        )
        return flops / named(row.chip).peak_flops_per_second["bf16"]


def steps_in(folder: Path) -> list[Step]:
    """Return the steps whose estimates are in a folder."""
    return [Step(row, condensed(lflops.load(folder / row.file))) for row in rows()]


def condensed(profile: Profile) -> Profile:
    """Return a profile with fewer op counts, for which the prediction is the same.

    Op counts of one FSDP2 unit that have the same bound are merged.
    """
    units = {each.module for each in profile.communication}
    cells: dict[tuple[object, ...], OpCount] = {}
    for cell in profile.op_counts:
        unit = next((each for each in ancestry(cell.module) if each in units), "")
        kind = (
            ("attention" if "attention" in cell.operator else "mm")
            if cell.executed_macs
            else "moves"
        )
        key = (
            unit,
            kind,
            cell.phase,
            *((cell.dtype, cell.bytes_moved / cell.executed_macs) if cell.executed_macs else ()),
        )
        cells[key] = (
            replace(cell, module=unit, operator=kind)
            if key not in cells
            else _added(cells[key], cell)
        )
    kept = {above for unit in units for above in ancestry(unit)} | {""}
    modules = {name: module for name, module in profile.modules.items() if name in kept}
    return replace(profile, op_counts=tuple(cells.values()), modules=modules)


def _added(cell: OpCount, other: OpCount) -> OpCount:
    names = ("calls", "macs", "executed_macs", "flops", "bytes_moved")
    return replace(cell, **{name: getattr(cell, name) + getattr(other, name) for name in names})


def rates_of(logarithms: Sequence[float]) -> Rates:
    """Convert a point of the fit, which consists of logarithms, to rates."""
    of = dict(zip(PRIORS, map(math.exp, logarithms), strict=True))
    rates = fitted()
    families = {
        name: replace(
            family,
            product=of["product"] * of[f"product of {name.title()}"],
            attention=of["attention"] * of[f"attention of {name.title()}"],
        )
        for name, family in rates.families.items()
    }
    return replace(
        rates,
        families=families,
        bandwidth=of["bandwidth"],
        link=of["link"],
        contention=of["contention"],
        lag_seconds=of["lag"],
    )


def fit(steps: Sequence[Step]) -> Rates:
    """Return the rates that are most likely for the steps and the priors.

    The Gauss-Newton method is used, with new weights in each iteration.
    """
    prior = np.array([math.log(middle) for middle, _ in PRIORS.values()])
    width = np.array([width for _, width in PRIORS.values()])
    point = prior.copy()

    def residuals(at: np.ndarray) -> np.ndarray:
        rates = rates_of(at)
        return (
            np.array([math.log(step.row.seconds / step.predicted(rates)) for step in steps]) / OFF
        )

    for _ in range(12):
        here = residuals(point)
        slopes = np.stack(
            [(residuals(point + 1e-3 * unit) - here) / 1e-3 for unit in np.eye(len(point))], axis=1
        )
        weights = np.minimum(1.0, OUTLIER / np.maximum(np.abs(here), 1e-9))
        normal = slopes.T @ (slopes * weights[:, None]) + np.diag(width**-2)
        move = np.linalg.solve(normal, -slopes.T @ (weights * here) + (prior - point) / width**2)
        point += np.clip(move, -0.3, 0.3)
        if np.abs(move).max() < 1e-3:
            break
    return rates_of(point)


class Judged(NamedTuple):
    """A step that was not fitted, and its predictions.

    Attributes:
        step: The step.
        predicted: The predicted seconds.
        constant: The seconds that follow from the median MFU of the other steps.
    """

    step: Step
    predicted: float
    constant: float

    @property
    def off(self) -> float:
        """Return the ratio of measured and predicted seconds."""
        return self.step.row.seconds / self.predicted

    @property
    def error(self) -> float:
        """Return the relative error of the prediction."""
        return abs(self.predicted / self.step.row.seconds - 1)

    @property
    def constant_error(self) -> float:
        """Return the relative error of the constant."""
        return abs(self.constant / self.step.row.seconds - 1)


def judged(of: Sequence[Step], by: Sequence[Step]) -> list[Judged]:
    """Predict steps with the rates that are fitted to other steps."""
    rates = fit(by)
    utilization = median(each.peak_seconds / each.row.seconds for each in by)
    return [Judged(each, each.predicted(rates), each.peak_seconds / utilization) for each in of]


def left_out(steps: Sequence[Step], of: Callable[[Row], str]) -> list[Judged]:
    """Predict each model, or each chip, with the rates that are fitted to the others."""
    groups = sorted({of(each.row) for each in steps})
    return [
        one
        for group in groups
        for one in judged(
            [each for each in steps if of(each.row) == group],
            [each for each in steps if of(each.row) != group],
        )
    ]


def interval(of: Iterable[Judged], wider: float = 1.0) -> tuple[float, float]:
    """Return an interval of measured over predicted seconds.

    A tenth of the steps is below it, and a tenth is above. `wider` is an exponent that makes the
    interval wider, because all steps of a model have a common error.
    """
    tenths = quantiles([each.off for each in of], n=10, method="inclusive")
    return tenths[0] ** wider, tenths[-1] ** wider


def coverage(of: Sequence[Judged], group: Callable[[Row], str], wider: float = 1.0) -> float:
    """Return the share of the steps that are in the interval of the other groups."""
    held = 0
    for each in of:
        low, high = interval(
            (other for other in of if group(other.step.row) != group(each.step.row)), wider
        )
        held += low <= each.off <= high
    return held / len(of)


ASPECTS = ("tokens", "gpus", "chip", "sharding", "checkpointing", "tensor", "compiled")
"""Aspects in which the steps of a pair may differ. The batch may always differ."""


def order(of: Sequence[Judged]) -> dict[str, tuple[int, float, float]]:
    """Compare pairs of steps of one model that differ in one aspect.

    Returns, by aspect, the number of pairs, and Kendall's tau of the tokens/s per GPU, for the
    prediction and for the constant.
    """

    def speeds(one: Judged) -> tuple[float, float, float]:
        row = one.step.row
        tokens = row.samples * row.accumulation * row.tokens / row.tensor
        return row.tokens_per_second_per_gpu, tokens / one.predicted, tokens / one.constant

    signs: dict[str, list[tuple[float, float]]] = {}
    for one, other in combinations(of, 2):
        differ = [
            name for name in ASPECTS if getattr(one.step.row, name) != getattr(other.step.row, name)
        ]
        if one.step.row.model != other.step.row.model or len(differ) > 1:
            continue
        measured, predicted, constant = (
            np.sign(a - b) for a, b in zip(speeds(one), speeds(other), strict=True)
        )
        if measured:
            signs.setdefault(differ[0] if differ else "batch", []).append(
                (measured * predicted, measured * constant)
            )
    everything = [pair for pairs in signs.values() for pair in pairs]
    both = signs | ({"all": everything} if everything else {})
    return {
        name: (len(pairs), fmean(a for a, _ in pairs), fmean(b for _, b in pairs))
        for name, pairs in both.items()
    }
