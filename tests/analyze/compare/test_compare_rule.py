"""The page compares two windows as `lflops.diff` compares two profiles: the same pairs of modules, figures, intervals and verdicts."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec import json
from msgspec.structs import replace

import lflops
from lflops.analyze.analysis import analyze
from lflops.profile.model import ModuleProfile, Profile, Work
from lflops.profile.module_names import ancestry
from lflops.profile.records import PHASES, Phase, Spread
from lflops.report.payload.payload import payload
from tests.support.browser import bench
from tests.support.profile_builders import fields_of, product, profile, small_profile, untimed, weights
from tests.support.profile_pairs import clean, ran

Pair = tuple[Profile, Profile]
Compared = Callable[..., list[Any]]

COMPARE = """async (pairs) => {
  const { differences } = await import("./compare/differences.js");
  return JSON.stringify(JSON.parse(pairs).map(([before, after]) => differences(before, after)));
}"""
WORK_AND_TIME: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer")
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")


@pytest.fixture(scope="module")
def compared(browser: Any) -> Iterator[Compared]:
    """What the page's own modules find in pairs of profiles."""

    def find(*pairs: Pair) -> list[Any]:
        found: list[Any] = json.decode(
            page.evaluate(COMPARE, json.encode([[payload(analyze(side)) for side in pair] for pair in pairs]).decode())
        )
        for each in found:
            for module in each["modules"]:
                del module["rows"]
        return found

    with bench(browser) as page:
        yield find


def flat(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in a tree, by its place; counts that the page cannot hold as it has them."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inside is None:
        yield place, str(value) if isinstance(value, int) and value >= 2**53 else value
    else:
        yield place, len(value)
        for name, each in inside:
            yield from flat(each, f"{place}/{name}")


def apart(pair: Pair, found: Any) -> list[str]:
    """Where the page and Python do not agree: texts, counts and verdicts alike, numbers to the four digits that an error has."""
    expected, actual = dict(flat(json.decode(json.encode(lflops.diff(*pair))))), dict(flat(found))
    near = {place for place, value in actual.items() if isinstance(value, float) and isinstance(expected.get(place), float)}
    close = {place for place in near if math.isclose(expected[place], actual[place], rel_tol=5e-4)}
    other = [place for place in expected | actual if place not in near and expected.get(place, "absent") != actual.get(place, "absent")]
    return sorted([*other, *(near - close)])


FIVE = {"encoder.a": 20e-3, "encoder.b": 20e-3, "decoder.c": 20e-3, "decoder.d": 20e-3, "head": 20e-3}


def by_hand() -> list[Pair]:
    """A pair for every way in which two windows differ, each of which tests of `lflops.diff` derive."""
    slow, noisy = FIVE | {"head": 22e-3}, {"width": 0.2, "n": 10}
    steps = {"steps": clean(0.1, 0.1, 0.1, data=0.05, forward=0.95)}, {"steps": clean(0.12, 0.13, 0.12, data=0.25, forward=0.75)}
    estimate = untimed(small_profile())
    return [
        (ran(FIVE), ran(FIVE)),
        (ran(FIVE, width=0.01), ran(slow, width=0.01)),
        (ran(FIVE, **noisy), ran(slow, **noisy)),
        (ran(FIVE, **steps[0]), ran({name: 1.1 * each for name, each in slow.items()}, **steps[1])),
        (ran(FIVE), ran(slow, macs={"head": 200})),
        (ran(FIVE, n=1), ran(slow, n=1)),
        (ran({"a": 1e-3, "b": 1e-3}), ran({"a": 2e-3, "b": 1e-3})),
        (ran(FIVE, device_name="cpu", samples_per_step=4, **steps[0]), ran(FIVE, device_name="cuda", samples_per_step=8, **steps[0])),
        (ran(FIVE), ran({f"module.{name}": each for name, each in FIVE.items()})),
        (ran(FIVE), ran({f"model.{name}": each for name, each in FIVE.items()})),
        (ran(FIVE), ran({name.replace("decoder", "tail"): each for name, each in FIVE.items()} | {"extra": 1e-3})),
        (ran(FIVE), ran(FIVE, macs={"head": 2**53 + 1})),
        *((shared(own, 100), shared(own, 200)) for own in (110e-3, 130e-3)),
        (replace(estimate, run=replace(estimate.run, kind="estimate")), small_profile()),
        (small_profile(), replace(small_profile(), cells=())),
        (small_profile(), profile({"": {"kind": "Linear"}}, [product("", "aten::mm", "forward", macs=1, bytes_moved=1)])),
    ]


def shared(own: float, macs: int) -> Profile:
    """Three layers of 20 ms that another model has too, and one of its own."""
    return ran(dict.fromkeys("abc", 20e-3) | {"own": own}, width=0.01, macs={"own": macs})


def by_chance(seed: int) -> Pair:
    """A model and what became of it: modules moved, renamed, wrapped, added, left out, with other work or without times."""
    chance = random.Random(seed)  # noqa: S311 - cases, no secret
    names = {f"{chance.choice('ab')}{i % 3}.{chance.choice(('x', '0', '1', 'y'))}{i}": chance.choice((100, 100, 200)) for i in range(12)}
    kinds = {name: chance.choice(("Linear", "GELU", "FSDPLinear")) for name in names}
    after = {}
    for name, macs in names.items():
        if chance.random() < 0.85:
            label = name if chance.random() < 0.8 else f"{name}_renamed"
            label = f"{label}.{chance.choice(WRAPPERS)}" if chance.random() < 0.2 else label
            after[label] = macs if chance.random() < 0.8 else macs + 1
            kinds[label] = kinds[name]
    if chance.random() < 0.3:
        after, kinds = {f"model.{name}": macs for name, macs in after.items()}, kinds | {f"model.{name}": kinds[name] for name in after}
    if chance.random() < 0.5:
        after["added"] = 50
    return made(chance, names, kinds), made(chance, after, kinds)


def made(chance: random.Random, macs: dict[str, int], kinds: dict[str, str]) -> Profile:
    """A profile of these modules with times that vary; some are unknown, and some phases do not run."""
    phases = [phase for phase in WORK_AND_TIME if chance.random() < 0.9]
    names = {above: None for name in macs for above in reversed(ancestry(name))}
    cells = [product(name, "aten::mm", phase, macs=done, bytes_moved=done) for name, done in macs.items() for phase in phases]
    counted = profile({name: weights(macs.get(name, 0)) | {"kind": kinds.get(name, "Block")} for name in names}, cells)
    steps = chance.choice((2, 10, 30))

    def spread(scale: float) -> Spread | None:
        seconds = [scale * 1e-5 * chance.uniform(0.99, 1.01) for _ in range(1 if chance.random() < 0.05 else steps)]
        return Spread.of(seconds) if chance.random() > 0.02 else None

    def timed(given: Work) -> Work:
        factor = chance.choice((1.0, 1.0, 1.0, 1.5))
        times = {"own_seconds": spread(given.own_macs * factor) if given.own_calls else None, "seconds": spread(given.macs * factor)}
        return Work(**fields_of(given) | (times if given.calls else {}))

    rows = {name: ModuleProfile(**fields_of(row) | {p: timed(row.work(p)) for p in PHASES}) for name, row in counted.modules.items()}
    return replace(counted, modules=rows)


def test_the_page_and_python_find_the_same(compared: Compared) -> None:
    """Pairs made by hand, every kind of change there is."""
    pairs = by_hand()
    assert {} == {i: wrong for i, (pair, found) in enumerate(zip(pairs, compared(*pairs), strict=True)) if (wrong := apart(pair, found))}


def test_the_page_and_python_find_the_same_by_chance(compared: Compared) -> None:
    """150 pairs at random; among them all verdicts, modules that come and go, and unknown times."""
    pairs = [by_chance(seed) for seed in range(150)]
    found = compared(*pairs)
    assert {} == {seed: wrong for seed, (pair, each) in enumerate(zip(pairs, found, strict=True)) if (wrong := apart(pair, each))}
    modules = [module for each in found for module in each["modules"]]
    assert {"slower", "faster", "same", None} == {module["own"]["time"]["verdict"] for module in modules}
    assert {True, False} == {module["before"] is None for module in modules} == {module["after"] is None for module in modules}


def test_another_verdict_would_be_seen(compared: Compared) -> None:
    """The check above can fail, by a verdict and by a number."""
    pair = (ran(FIVE), ran(FIVE | {"head": 22e-3}))
    (found,) = compared(pair)
    time = found["modules"][-1]["own"]["time"]
    time["verdict"], time["high"] = "same", time["high"] * 1.001
    assert ["/modules/7/own/time/high", "/modules/7/own/time/verdict"] == apart(pair, found)
