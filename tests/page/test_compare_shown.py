"""What Compare shows of two windows is what `lflops.diff` returns for the two profiles, in the tab and in a file."""

import base64
import math
import random
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pytest
from msgspec import json
from msgspec.structs import replace

import lflops
from lflops.analysis.analysis import analyze
from lflops.analysis.compare.diff import Diff, ModuleDiff
from lflops.analysis.compare.significance import Verdict
from lflops.profile.profile import ModuleProfile, Profile, Work, ancestry
from lflops.profile.records import PHASES, Phase, TimingStats
from lflops.report.diff import headline, is_news
from lflops.report.html import page
from lflops.report.payload.compare import compared_windows
from lflops.report.payload.payload import payload
from tests.support.browser import bench
from tests.support.profile_builders import (
    fields_of,
    product,
    profile,
    small_profile,
    untimed,
    weights,
)
from tests.support.profile_pairs import clean, ran

Pair = tuple[Profile, Profile]

SHOWN = """async (given) => {
  const [{ compare }, { gridOf }] = await Promise.all([import("./views/compare.js"), import("./table/virtual_table.js")]);
  const listed = { windows: [1, 2].map((step) => ({ run: "a", tag: "b", step })), problems: [] };
  const all = JSON.parse(given).map(async (comparison) => {
    const source = { compare: () => comparison };
    const node = compare.draw({}, { state: { show: "all", unfold: "true" }, remember() {}, source, listed, window: listed.windows[1] });
    await new Promise((done) => { setTimeout(done); });
    const grid = gridOf(node.querySelector(".grid"));
    for (const row of grid.content.rows) grid.content.toggle(row);
    const figures = [...node.querySelectorAll(".figure")].map((each) => [...each.children].map(({ textContent }) => textContent));
    const sentences = [...node.querySelectorAll(".verdict, li")].map(({ textContent }) => textContent);
    return { rows: grid.content.rows.map(grid.content.exported.values), figures, sentences };
  });
  return JSON.stringify(await Promise.all(all));
}"""
WORK_AND_TIME: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer")
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")
TIMES = ("before", "after", "ratio", "per_mac", "low", "high", "lost", "verdict")


def served(pair: Pair) -> Any:
    """What the tab's server answers, from the payloads in the event files."""
    return json.decode(compared_windows(*(json.encode(payload(analyze(side))) for side in pair)))


def in_file(*profiles: Profile) -> Any:
    """What a file of several profiles has of the last two."""
    packed = re.findall(
        r'id="comparison-(?=1-2)\d+-\d+">([^<]*)<',
        page(*map(analyze, profiles), names=[str(i) for i in range(len(profiles))]),
    )
    return json.decode(zlib.decompress(base64.b64decode(packed[-1])))


def columns_of(module: ModuleDiff) -> dict[str, Any]:
    """What Python says of a module, by the names of the comparison's columns."""
    values = {
        "before": module.before,
        "after": module.after,
        "kind": module.kind,
        "pattern": module.pattern,
        "own": module.news is module.self_work.time,
    }
    values |= {f"time.{name}": getattr(module.news, name) for name in TIMES}
    changes = {
        name: getattr(module.self_work, name)
        for name in ("macs", "flops", "bytes_moved", "parameters")
    } | {"peak_bytes": module.peak_bytes}
    return values | {
        f"{name}.{side}": getattr(change, side)
        for name, change in changes.items()
        for side in ("before", "after")
    }


def expected(diff: Diff) -> dict[str, Any]:
    """What Python says, as the page is given it."""
    changes = {
        name: getattr(diff, name)
        for name in ("mfu", "samples_per_second", "tokens_per_second", "peak_bytes")
    }
    changes |= {
        name: getattr(diff.modules[0].inclusive, name)
        for name in ("macs", "flops", "bytes_moved", "parameters")
    }
    parts = {
        name: json.decode(json.encode(getattr(diff, name)))
        for name in ("facts", "whole", "step", "phases")
    }
    figures = {name: [change.before, change.after] for name, change in changes.items()}
    parts |= {"headline": list(headline(diff)), "is_news": is_news(diff)}
    return parts | {"figures": figures, "modules": [columns_of(module) for module in diff.modules]}


def rows_of(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A table's columns, in which one value stands for all, as rows."""
    size = next((len(column) for column in table.values() if isinstance(column, list)), 1)
    columns = {
        name: column if isinstance(column, list) else [column] * size
        for name, column in table.items()
    }
    return [{name: column[row] for name, column in columns.items()} for row in range(size)]


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in a tree, by its path.

    A count that the page cannot hold is a text of its digits.
    """
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else None
    )
    if inside is None:
        yield path, str(value) if isinstance(value, int) and value >= 2**53 else value
    else:
        yield path, len(value)
        for name, each in inside:
            yield from flat(each, f"{path}/{name}")


def mismatches(pair: Pair, given: Any) -> list[str]:
    """Where the page is given something else than Python says.

    Texts, counts and verdicts; numbers beyond an error's four digits.
    """
    modules = [
        {name: value for name, value in row.items() if name.split(".")[0] not in PHASES}
        for row in rows_of(given["modules"])
    ]
    said, actual = (
        dict(flat(expected(lflops.diff(*pair)))),
        dict(flat(given | {"modules": modules})),
    )
    floats = {
        path
        for path, value in actual.items()
        if isinstance(value, float) and isinstance(said.get(path), float)
    }
    close = {path for path in floats if math.isclose(said[path], actual[path], rel_tol=5e-4)}
    other = [
        path
        for path in said | actual
        if path not in floats and said.get(path, "absent") != actual.get(path, "absent")
    ]
    return sorted([*other, *(floats - close)])


def word(module: ModuleDiff) -> str | None:
    """What changed, in a word."""
    if module.before is None or module.after is None:
        return "added" if module.before is None else "removed"
    if module.news.verdict in {"slower", "faster"} or module.self_work.differs:
        return (
            module.news.verdict if module.news.verdict in {"slower", "faster"} else "work changed"
        )
    is_renamed = (
        module.before
        and module.after
        and module.before.rpartition(".")[2] != module.after.rpartition(".")[2]
    )
    return "renamed" if is_renamed else module.news.verdict


def ratio_of(before: Any, after: Any) -> float | None:
    """As Python divides; where the page has digits, of the numbers that they are."""
    return (
        None
        if after is None or before is None or not float(before)
        else float(after) / float(before)
    )


def drawn_rows(pair: Pair, given: Any) -> list[list[Any]]:
    """The rows that the table has to show, all of them open, in the order of the modules."""
    found = []
    for module, row in zip(lflops.diff(*pair).modules, rows_of(given["modules"]), strict=True):
        names = ["(model)" if name == "" else name for name in (module.before, module.after)] + [
            module.kind,
            1,
        ]
        times = [
            row[f"time.{each}"] for each in ("before", "after", "ratio", "low", "high", "lost")
        ]
        found.append([*names, None, word(module), *times, row["macs.before"], row["macs.after"]])
        for phase in ("forward", "backward", "recompute"):
            seconds, macs = (
                [row[f"{phase}.{name}.{side}"] for side in ("before", "after")]
                for name in ("seconds", "macs")
            )
            if any(map(float, (each or 0 for each in (*seconds, *macs)))):
                found.append(
                    [*names, phase, None, *seconds, ratio_of(*seconds), None, None, None, *macs]
                )
        if module.news.per_mac is not None:
            found.append(
                [*names, "time per MAC", None, None, None, row["time.per_mac"], *[None] * 5]
            )
        labels = {
            "flops": "self FLOPs",
            "bytes_moved": "self bytes moved",
            "parameters": "self parameters",
            "peak_bytes": "peak memory",
        }
        for name, label in labels.items():
            before, after = row[f"{name}.before"], row[f"{name}.after"]
            if before is not None and after is not None and before != after:
                found.append(
                    [*names, label, None, before, after, ratio_of(before, after), *[None] * 5]
                )
    return found


FIVE = {
    "encoder.a": 20e-3,
    "encoder.b": 20e-3,
    "decoder.c": 20e-3,
    "decoder.d": 20e-3,
    "head": 20e-3,
}


def by_hand() -> list[Pair]:
    """A pair for every way in which two windows differ, each of which tests of `lflops.diff` derive."""
    slow, noisy = FIVE | {"head": 22e-3}, {"width": 0.2, "n": 10}
    steps = (
        {"steps": clean(0.1, 0.1, 0.1, data=0.05, forward=0.95)},
        {"steps": clean(0.12, 0.13, 0.12, data=0.25, forward=0.75)},
    )
    estimate = untimed(small_profile())
    return [
        (ran(FIVE), ran(FIVE)),
        (ran(FIVE, width=0.01), ran(slow, width=0.01)),
        (ran(FIVE, **noisy), ran(slow, **noisy)),
        (ran(FIVE, **steps[0]), ran({name: 1.1 * each for name, each in slow.items()}, **steps[1])),
        (ran(FIVE), ran(slow, macs={"head": 200})),
        (ran(FIVE, n=1), ran(slow, n=1)),
        (ran({"a": 1e-3, "b": 1e-3}), ran({"a": 2e-3, "b": 1e-3})),
        (
            ran(FIVE, device_name="cpu", samples_per_step=4, **steps[0]),
            ran(FIVE, device_name="cuda", samples_per_step=8, **steps[0]),
        ),
        (ran(FIVE), ran({f"module.{name}": each for name, each in FIVE.items()})),
        (ran(FIVE), ran({f"model.{name}": each for name, each in FIVE.items()})),
        (
            ran(FIVE),
            ran(
                {name.replace("decoder", "tail"): each for name, each in FIVE.items()}
                | {"extra": 1e-3}
            ),
        ),
        (ran(FIVE), ran(FIVE, macs={"head": 2**53 + 1})),
        *((shared(own, 100), shared(own, 200)) for own in (110e-3, 130e-3)),
        (replace(estimate, run=replace(estimate.run, kind="estimate")), small_profile()),
        (small_profile(), replace(small_profile(), op_counts=())),
        (
            small_profile(),
            profile(
                {"": {"class_name": "Linear"}},
                [product("", "aten::mm", "forward", macs=1, bytes_moved=1)],
            ),
        ),
    ]


def shared(own: float, macs: int) -> Profile:
    """Three layers of 20 ms that another model has too, and one of its own."""
    return ran(dict.fromkeys("abc", 20e-3) | {"own": own}, width=0.01, macs={"own": macs})


def by_chance(seed: int) -> Pair:
    """A model and what became of it.

    Modules moved, renamed, wrapped, added, left out, with other work or without times.
    """
    chance = random.Random(seed)  # noqa: S311 - cases, no secret
    names = {
        f"{chance.choice('ab')}{i % 3}.{chance.choice(('x', '0', '1', 'y'))}{i}": chance.choice(
            (100, 100, 200)
        )
        for i in range(12)
    }
    kinds = {name: chance.choice(("Linear", "GELU", "FSDPLinear")) for name in names}
    after = {}
    for name, macs in names.items():
        if chance.random() < 0.85:
            label = name if chance.random() < 0.8 else f"{name}_renamed"
            label = f"{label}.{chance.choice(WRAPPERS)}" if chance.random() < 0.2 else label
            after[label] = macs if chance.random() < 0.8 else macs + 1
            kinds[label] = kinds[name]
    if chance.random() < 0.3:
        after, kinds = (
            {f"model.{name}": macs for name, macs in after.items()},
            kinds | {f"model.{name}": kinds[name] for name in after},
        )
    if chance.random() < 0.5:
        after["added"] = 50
    return made(chance, names, kinds), made(chance, after, kinds)


def made(chance: random.Random, macs: dict[str, int], kinds: dict[str, str]) -> Profile:
    """A profile of these modules with times that vary.

    Some are unknown, and some phases do not run.
    """
    phases = [phase for phase in WORK_AND_TIME if chance.random() < 0.9]
    names = {above: None for name in macs for above in reversed(ancestry(name))}
    cells = [
        product(name, "aten::mm", phase, macs=done, bytes_moved=done)
        for name, done in macs.items()
        for phase in phases
    ]
    counted = profile(
        {
            name: weights(macs.get(name, 0)) | {"class_name": kinds.get(name, "Block")}
            for name in names
        },
        cells,
    )
    steps = chance.choice((2, 10, 30))

    def spread(scale: float) -> TimingStats | None:
        seconds = [
            scale * 1e-5 * chance.uniform(0.99, 1.01)
            for _ in range(1 if chance.random() < 0.05 else steps)
        ]
        return TimingStats.of(seconds) if chance.random() > 0.02 else None

    def timed(given: Work) -> Work:
        factor = chance.choice((1.0, 1.0, 1.0, 1.5))
        times = {
            "self_seconds": spread(given.self_macs * factor) if given.self_calls else None,
            "seconds": spread(given.macs * factor),
        }
        return Work(**fields_of(given) | (times if given.calls else {}))

    rows = {
        name: ModuleProfile(**fields_of(row) | {p: timed(row.work(p)) for p in PHASES})
        for name, row in counted.modules.items()
    }
    return replace(counted, modules=rows)


def test_the_page_is_given_what_python_says() -> None:
    """Pairs made by hand, every kind of change there is; from event files, and in a file."""
    pairs = by_hand()
    assert {} == {
        i: wrong for i, pair in enumerate(pairs) if (wrong := mismatches(pair, served(pair)))
    }
    assert {} == {
        i: wrong
        for i, pair in enumerate(pairs)
        if (wrong := mismatches(pair, in_file(small_profile(), *pair)))
    }


def test_the_page_is_given_what_python_says_of_random_pairs() -> None:
    """150 pairs at random; among them all verdicts, modules that come and go, and unknown times."""
    pairs = [by_chance(seed) for seed in range(150)]
    given = [served(pair) for pair in pairs]
    assert {} == {
        seed: wrong
        for seed, (pair, each) in enumerate(zip(pairs, given, strict=True))
        if (wrong := mismatches(pair, each))
    }
    rows = [row for each in given for row in rows_of(each["modules"])]
    assert {*get_args(Verdict), None} == {row["time.verdict"] for row in rows}
    assert (
        {True, False}
        == {row["before"] is None for row in rows}
        == {row["after"] is None for row in rows}
        == {row["own"] for row in rows}
    )


def test_another_verdict_would_be_seen() -> None:
    """The check above can fail, by a verdict and by a number."""
    pair = (ran(FIVE), ran(FIVE | {"head": 22e-3}))
    given = served(pair)
    given["modules"]["time.verdict"][-1], given["modules"]["time.high"][-1] = (
        "same",
        given["modules"]["time.high"][-1] * 1.001,
    )
    assert ["/modules/7/time.high", "/modules/7/time.verdict"] == mismatches(pair, given)


def test_the_page_shows_what_it_is_given(browser: Any) -> None:
    """All pairs: each module's row and what it opens into, a figure for all that is known, and a sentence at least."""
    pairs = [*by_hand(), *map(by_chance, range(150))]
    given = [served(pair) for pair in pairs]
    with bench(browser) as opened:
        drawn = json.decode(opened.evaluate(SHOWN, json.encode(given).decode()))

    def key(row: list[Any]) -> str:
        return json.encode(row).decode()

    for pair, each, shown in zip(pairs, given, drawn, strict=True):
        assert sorted(json.decode(json.encode(drawn_rows(pair, each))), key=key) == sorted(
            shown["rows"], key=key
        )
        known = [
            name
            for name, sides in each["figures"].items()
            if any(side is not None for side in sides)
        ]
        figures = [name for name in known if name not in {"flops", "bytes_moved"}]
        assert len(figures) + (
            each["step"]["before"] is not None or each["step"]["after"] is not None
        ) == len(shown["figures"])
        assert each["headline"] == shown["sentences"]


def test_what_has_no_comparison_is_refused() -> None:
    """A payload without the part that is compared, and columns that are none.

    An error that says so.
    """
    good = json.encode(payload(analyze(small_profile())))
    wrong: list[dict[str, Any]] = [
        {"compare": None},
        {"modules": {"name": ["a"]}},
        {"modules": {"name": ["", ""]}},
    ]
    wrong += [{"modules": {**json.decode(good)["modules"], "forward.self_macs": ["x"]}}]
    wrong += [{"modules": {**json.decode(good)["modules"], "forward.self_macs": None}}]
    for changed in ({"lflops": 2}, *(json.decode(good) | each for each in wrong)):
        with pytest.raises(ValueError, match=r"^lack data that a comparison needs: "):
            compared_windows(good, json.encode(changed))
