"""One fact has one value, in every drawing; parts add up to their whole.

Of random profiles; planted culprits are found.
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

DRAWN, SUMMED = 30, 150
CHIP = Hardware("abacus", {"fp32": 1e9}, bandwidth_bytes_per_second=1e9, memory_bytes=2**30)


def by_chance(seed: int) -> Profile:
    """A training whose steps vary.

    Bursts of the loader, steps without an optimizer's, phases that nobody marked, a peak or none.
    """
    chance = random.Random(seed)  # noqa: S311 - to be had again
    blocks = chance.randint(1, 5)
    names = [f"blocks.{block}.{name}" for block in range(blocks) for name in ("fc", "norm")]
    rows = {"": {"class_name": "Net"}, "blocks": {}} | {
        f"blocks.{block}": {"class_name": "Block"} for block in range(blocks)
    }
    rows |= {
        name: {"class_name": "Linear" if name.endswith("fc") else "LayerNorm"} for name in names
    }
    phases: tuple[Phase, ...] = ("forward", "backward")
    cells = [
        product(
            name,
            "aten::mm",
            phase,
            macs=chance.randint(10**5, 10**7),
            bytes_moved=chance.randint(1, 10**6),
        )
        if name.endswith("fc")
        else cell(
            name, "aten::native_layer_norm", phase, flops=10, bytes_moved=chance.randint(1, 10**7)
        )
        for name in names
        for phase in phases
    ]
    own = {(name, phase): chance.uniform(1e-4, 2e-2) for name in names for phase in phases}
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
    """Some are disturbed, and count for nothing."""
    phases = {
        "data": chance.choice((1e-4, 1e-4, 0.5)),
        "forward": chance.uniform(0.05, 0.4),
        "backward": chance.uniform(0.05, 0.4),
    }
    phases |= {"optimizer": chance.uniform(1e-3, 0.1)} if chance.random() < 0.7 else {}
    seconds = sum(phases.values()) * chance.choice((1.0, 1.1))
    marks = ("validation",) if chance.random() < 0.2 and index else ()
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
    """Terminal, log, page, DeepSpeed's text, CSV and curves."""
    assert {} == {seed: wrong for seed in range(DRAWN) if (wrong := disagreements(by_chance(seed)))}
    assert [[], []] == [disagreements(given) for given in (small_profile(), gpt_training())]


def test_parts_add_up_to_their_whole() -> None:
    """Phases and breakdown to the summed steps, modules to the root.

    A cost in a sentence is its share of the step.
    """
    assert {} == {seed: wrong for seed in range(SUMMED) if (wrong := wrong_sums(by_chance(seed)))}
    assert [[], []] == [wrong_sums(given) for given in (small_profile(), gpt_training())]


def test_the_drawings_are_read_at_all() -> None:
    """The terminal has every fact, the log those about speed.

    A check that reads nothing finds nothing.
    """
    read = claims(gpt_training())
    labels = {"step", "data wait", "forward", "backward", "optimizer", "samples/s", "MFU"}
    assert [True] * 3 == [labels <= read[drawing].keys() for drawing in ("terminal", "log", "page")]


@pytest.mark.parametrize("drawing", ["terminal", "log", "page"])
def test_a_planted_disagreement_is_found(drawing: str) -> None:
    """One drawing says another step time, by its last digit."""
    read = claims(gpt_training())
    read[drawing]["step"] = "116 ms"
    (wrong,) = disagreements(gpt_training(), read)
    assert wrong.startswith(f"{drawing}: step is '116 ms'")


def test_a_planted_part_too_much_is_found() -> None:
    """A phase that overlaps another one makes more than the step."""
    given = gpt_training()
    steps = [replace(step, phases=step.phases | {"clip": 1.0}) for step in given.steps]
    assert [
        wrong
        for wrong in wrong_sums(replace(given, steps=tuple(steps)))
        if wrong.startswith("phases")
    ]
