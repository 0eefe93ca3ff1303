"""Test that each fact has one value in all views of a report, and that parts add up to their whole.

The profiles are random. Planted contradictions must be found.
"""

import random

import pytest
from msgspec.structs import replace

from lflops.hardware.chips import Hardware
from lflops.profile.profile import Profile
from lflops.profile.records import Phase
from lflops.profile.steps import Step
from tests.support.profile_builders import cell, clocked, product, profile, run, small_profile
from tests.support.report_claims import claims, disagreements, wrong_sums
from tests.support.screens import gpt_training

# The numbers of random profiles that the tests draw, or only add up
DRAWN = 30
SUMMED = 150
CHIP = Hardware("abacus", {"fp32": 1e9}, bandwidth_bytes_per_second=1e9, memory_bytes=2**30)


def by_chance(seed: int) -> Profile:
    """Return a random profile of a training run or a measurement.

    Its steps vary: slow data loading, steps without an optimizer, time in no phase, and a known or
    unknown peak.
    """
    chance = random.Random(seed)  # noqa: S311 - a seed gives the same profile again
    rows: dict[str, dict[str, str]] = {"": {"class_name": "Net"}, "blocks": {}}
    names = []
    for block in range(chance.randint(1, 5)):
        rows[f"blocks.{block}"] = {"class_name": "Block"}
        rows[f"blocks.{block}.fc"] = {"class_name": "Linear"}
        rows[f"blocks.{block}.norm"] = {"class_name": "LayerNorm"}
        names += [f"blocks.{block}.fc", f"blocks.{block}.norm"]
    phases: tuple[Phase, ...] = ("forward", "backward")
    cells = []
    for name in names:
        for phase in phases:
            if name.endswith("fc"):
                macs = chance.randint(10**5, 10**7)
                moved = chance.randint(1, 10**6)
                cells.append(product(name, "aten::mm", phase, macs=macs, bytes_moved=moved))
            else:
                moved = chance.randint(1, 10**7)
                norm = cell(name, "aten::native_layer_norm", phase, flops=10, bytes_moved=moved)
                cells.append(norm)
    own: dict[tuple[str, Phase], float] = {}
    for name in names:
        for phase in phases:
            own[name, phase] = chance.uniform(1e-4, 2e-2)
    steps = tuple(_step(chance, index) for index in range(chance.randint(1, 30)))
    kind = chance.choice(("training", "measure"))
    of = run(
        kind=kind,
        stage="train" if kind == "training" else None,
        hardware=chance.choice((CHIP, None)),
        samples_per_step=chance.choice((4, None)),
    )
    return clocked(profile(rows, cells, run=of, steps=steps), own)


def _step(chance: random.Random, index: int) -> Step:
    """Return a random step. Steps that a validation disturbs do not count."""
    phases = {
        "data": chance.choice((1e-4, 1e-4, 0.5)),
        "forward": chance.uniform(0.05, 0.4),
        "backward": chance.uniform(0.05, 0.4),
    }
    if chance.random() < 0.7:
        phases["optimizer"] = chance.uniform(1e-3, 0.1)
    # With a factor of 1.1, some time of the step is in no phase.
    seconds = sum(phases.values()) * chance.choice((1.0, 1.1))
    is_disturbed = chance.random() < 0.2 and index > 0
    marks = ("validation",) if is_disturbed else ()
    return Step(
        index=index,
        kind="unprofiled",
        seconds=seconds,
        phases=phases,
        marks=marks,
        cpu_user=chance.uniform(0, 1),
        cpu_system=0.01,
    )


def test_every_drawing_says_the_one_value() -> None:
    """No view contradicts the report: terminal, log, page, DeepSpeed's text, CSV and scalars."""
    for seed in range(DRAWN):
        assert [] == disagreements(by_chance(seed)), f"seed {seed}"
    assert [] == disagreements(small_profile())
    assert [] == disagreements(gpt_training())


def test_parts_add_up_to_their_whole() -> None:
    """Phases and the breakdown add up to the step, and modules add up to the root.

    A cost in a sentence is its share of the step.
    """
    for seed in range(SUMMED):
        assert [] == wrong_sums(by_chance(seed)), f"seed {seed}"
    assert [] == wrong_sums(small_profile())
    assert [] == wrong_sums(gpt_training())


def test_the_drawings_are_read_at_all() -> None:
    """The facts about speed are read from the terminal, the log and the page.

    Otherwise the tests above would find nothing.
    """
    read = claims(gpt_training())
    labels = {"step", "data wait", "forward", "backward", "optimizer", "samples/s", "MFU"}
    for drawing in ("terminal", "log", "page"):
        assert labels <= read[drawing].keys(), drawing


@pytest.mark.parametrize("drawing", ["terminal", "log", "page"])
def test_a_planted_disagreement_is_found(drawing: str) -> None:
    """Another step time in one view is reported."""
    read = claims(gpt_training())
    read[drawing]["step"] = "116 ms"
    (wrong,) = disagreements(gpt_training(), read)
    assert wrong.startswith(f"{drawing}: step is '116 ms'")


def test_a_planted_part_too_much_is_found() -> None:
    """Phases that add up to more than the step are reported."""
    given = gpt_training()
    steps = tuple(replace(step, phases={**step.phases, "clip": 1.0}) for step in given.steps)
    wrong = wrong_sums(replace(given, steps=steps))
    assert any(message.startswith("phases") for message in wrong)
