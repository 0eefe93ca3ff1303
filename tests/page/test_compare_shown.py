"""Test that Compare shows what `lflops.diff` returns for two profiles, in the tab and in a file.

The comparison is checked twice: the data that the page receives, and the rows that it draws.
"""

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
from lflops.profile.profile import Profile, Work, ancestry
from lflops.profile.records import PHASES, Phase, TimingStats
from lflops.report.diff import headline, is_news
from lflops.report.html import page
from lflops.report.payload.compare import compared_windows
from lflops.report.payload.payload import payload
from tests.support.browser import bench
from tests.support.profile_builders import (
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
    """Return the comparison that the tab's server computes from two payloads."""
    before, after = (json.encode(payload(analyze(side))) for side in pair)
    return json.decode(compared_windows(before, after))


def in_file(*profiles: Profile) -> Any:
    """Return the comparison of the last two of several profiles that a page contains."""
    names = [str(number) for number in range(len(profiles))]
    text = page(*map(analyze, profiles), names=names)
    packed = re.findall(r'id="comparison-(?=1-2)\d+-\d+">([^<]*)<', text)
    return json.decode(zlib.decompress(base64.b64decode(packed[-1])))


def columns_of(module: ModuleDiff) -> dict[str, Any]:
    """Return the values of a module in `lflops.diff`, by the columns of the comparison."""
    values = {
        "before": module.before,
        "after": module.after,
        "kind": module.kind,
        "pattern": module.pattern,
        "own": module.news is module.self_work.time,
    }
    for name in TIMES:
        values[f"time.{name}"] = getattr(module.news, name)
    changes = {
        "macs": module.self_work.macs,
        "flops": module.self_work.flops,
        "bytes_moved": module.self_work.bytes_moved,
        "parameters": module.self_work.parameters,
        "peak_bytes": module.peak_bytes,
    }
    for name, change in changes.items():
        values[f"{name}.before"] = change.before
        values[f"{name}.after"] = change.after
    return values


def as_json(value: Any) -> Any:
    """Return a value as a reader of its JSON text sees it."""
    return json.decode(json.encode(value))


def expected(diff: Diff) -> dict[str, Any]:
    """Return the comparison that the page must receive for a diff."""
    whole_model = diff.modules[0].inclusive
    changes = {
        "mfu": diff.mfu,
        "samples_per_second": diff.samples_per_second,
        "tokens_per_second": diff.tokens_per_second,
        "peak_bytes": diff.peak_bytes,
        "macs": whole_model.macs,
        "flops": whole_model.flops,
        "bytes_moved": whole_model.bytes_moved,
        "parameters": whole_model.parameters,
    }
    return {
        "facts": as_json(diff.facts),
        "whole": as_json(diff.whole),
        "step": as_json(diff.step),
        "phases": as_json(diff.phases),
        "headline": list(headline(diff)),
        "is_news": is_news(diff),
        "figures": {name: [change.before, change.after] for name, change in changes.items()},
        "modules": [columns_of(module) for module in diff.modules],
    }


def rows_of(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert a table from columns to rows; a column may be one value for all rows."""
    size = next((len(column) for column in table.values() if isinstance(column, list)), 1)
    columns = {
        name: column if isinstance(column, list) else [column] * size
        for name, column in table.items()
    }
    return [{name: column[row] for name, column in columns.items()} for row in range(size)]


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value in a tree with its path, and the length of every container.

    Counts of 2^53 and more are strings of digits, because JavaScript numbers cannot hold them.
    """
    if isinstance(value, dict):
        yield path, len(value)
        for name, inner in value.items():
            yield from flat(inner, f"{path}/{name}")
    elif isinstance(value, list):
        yield path, len(value)
        for index, inner in enumerate(value):
            yield from flat(inner, f"{path}/{index}")
    elif isinstance(value, int) and value >= 2**53:
        yield path, str(value)
    else:
        yield path, value


def mismatches(pair: Pair, given: Any) -> list[str]:
    """Return the paths at which the page receives other values than `lflops.diff` returns.

    Texts, counts and verdicts must be equal. Floats may differ by rounding to four digits.
    """
    modules = []
    for row in rows_of(given["modules"]):
        # `lflops.diff` has no columns of single phases.
        in_diff = [name for name in row if name.split(".")[0] not in PHASES]
        modules.append({name: row[name] for name in in_diff})
    wanted = dict(flat(expected(lflops.diff(*pair))))
    actual = dict(flat(given | {"modules": modules}))
    wrong = []
    for path in wanted | actual:
        left = wanted.get(path, "absent")
        right = actual.get(path, "absent")
        if isinstance(left, float) and isinstance(right, float):
            is_equal = math.isclose(left, right, rel_tol=5e-4)
        else:
            is_equal = left == right
        if not is_equal:
            wrong.append(path)
    return sorted(wrong)


def word(module: ModuleDiff) -> str | None:
    """Return what changed in a module, in the words of the page."""
    if module.before is None:
        return "added"
    if module.after is None:
        return "removed"
    if module.news.verdict in {"slower", "faster"}:
        return module.news.verdict
    if module.self_work.differs:
        return "work changed"
    is_root = not module.before or not module.after
    last_before = module.before.rpartition(".")[2]
    last_after = module.after.rpartition(".")[2]
    if not is_root and last_before != last_after:
        return "renamed"
    return module.news.verdict


def ratio_of(before: Any, after: Any) -> float | None:
    """Return `after / before`, or `None` if it is unknown. Large counts are strings of digits."""
    if after is None or before is None or not float(before):
        return None
    return float(after) / float(before)


def drawn_rows(pair: Pair, given: Any) -> list[list[Any]]:
    """Return the rows that the table must show when all of them are open."""
    found = []
    # The columns after the change: the interval, the cost, and MACs before and after
    nothing = [None] * 5
    for module, row in zip(lflops.diff(*pair).modules, rows_of(given["modules"]), strict=True):
        before_name = "(model)" if module.before == "" else module.before
        after_name = "(model)" if module.after == "" else module.after
        names = [before_name, after_name, module.kind, 1]
        times = [
            row[f"time.{each}"] for each in ("before", "after", "ratio", "low", "high", "lost")
        ]
        found.append([*names, None, word(module), *times, row["macs.before"], row["macs.after"]])
        for phase in ("forward", "backward", "recompute"):
            seconds = [row[f"{phase}.seconds.before"], row[f"{phase}.seconds.after"]]
            macs = [row[f"{phase}.macs.before"], row[f"{phase}.macs.after"]]
            if any(float(value or 0) for value in [*seconds, *macs]):
                ratio = ratio_of(*seconds)
                found.append([*names, phase, None, *seconds, ratio, None, None, None, *macs])
        if module.news.per_mac is not None:
            per_mac = row["time.per_mac"]
            found.append([*names, "time per MAC", None, None, None, per_mac, *nothing])
        labels = {
            "flops": "self FLOPs",
            "bytes_moved": "self bytes moved",
            "parameters": "self parameters",
            "peak_bytes": "peak memory",
        }
        for name, label in labels.items():
            before = row[f"{name}.before"]
            after = row[f"{name}.after"]
            if before is not None and after is not None and before != after:
                ratio = ratio_of(before, after)
                found.append([*names, label, None, before, after, ratio, *nothing])
    return found


FIVE = {
    "encoder.a": 20e-3,
    "encoder.b": 20e-3,
    "decoder.c": 20e-3,
    "decoder.d": 20e-3,
    "head": 20e-3,
}


def by_hand() -> list[Pair]:
    """Return a pair of profiles for every way in which two windows can differ.

    The tests of `lflops.diff` derive the result of each pair.
    """
    slow = FIVE | {"head": 22e-3}
    all_slower = {name: 1.1 * seconds for name, seconds in slow.items()}
    renamed = {name.replace("decoder", "tail"): seconds for name, seconds in FIVE.items()}
    noisy = {"width": 0.2, "n": 10}
    short_steps = clean(0.1, 0.1, 0.1, data=0.05, forward=0.95)
    long_steps = clean(0.12, 0.13, 0.12, data=0.25, forward=0.75)
    untimed_profile = untimed(small_profile())
    estimate = replace(untimed_profile, run=replace(untimed_profile.run, kind="estimate"))
    return [
        (ran(FIVE), ran(FIVE)),
        (ran(FIVE, width=0.01), ran(slow, width=0.01)),
        (ran(FIVE, **noisy), ran(slow, **noisy)),
        (ran(FIVE, steps=short_steps), ran(all_slower, steps=long_steps)),
        (ran(FIVE), ran(slow, macs={"head": 200})),
        (ran(FIVE, n=1), ran(slow, n=1)),
        (ran({"a": 1e-3, "b": 1e-3}), ran({"a": 2e-3, "b": 1e-3})),
        (
            ran(FIVE, device_name="cpu", samples_per_step=4, steps=short_steps),
            ran(FIVE, device_name="cuda", samples_per_step=8, steps=short_steps),
        ),
        (ran(FIVE), ran({f"module.{name}": each for name, each in FIVE.items()})),
        (ran(FIVE), ran({f"model.{name}": each for name, each in FIVE.items()})),
        (ran(FIVE), ran(renamed | {"extra": 1e-3})),
        (ran(FIVE), ran(FIVE, macs={"head": 2**53 + 1})),
        (shared(110e-3, 100), shared(110e-3, 200)),
        (shared(130e-3, 100), shared(130e-3, 200)),
        (estimate, small_profile()),
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
    """Return a model of three layers of 20 ms that another model also has, and one other layer."""
    return ran(dict.fromkeys("abc", 20e-3) | {"own": own}, width=0.01, macs={"own": macs})


def by_chance(seed: int) -> Pair:
    """Return a random model and a random modification of it.

    Modules are renamed, wrapped, added or removed, have other work, or have no times.
    """
    chance = random.Random(seed)  # noqa: S311 - random cases, not secrets
    names: dict[str, int] = {}
    for number in range(12):
        above = chance.choice("ab")
        label = chance.choice(("x", "0", "1", "y"))
        names[f"{above}{number % 3}.{label}{number}"] = chance.choice((100, 100, 200))
    kinds = {name: chance.choice(("Linear", "GELU", "FSDPLinear")) for name in names}
    after = {}
    for name, macs in names.items():
        if chance.random() >= 0.85:
            continue
        label = name
        if chance.random() >= 0.8:
            label = f"{label}_renamed"
        if chance.random() < 0.2:
            label = f"{label}.{chance.choice(WRAPPERS)}"
        has_other_work = chance.random() >= 0.8
        after[label] = macs + 1 if has_other_work else macs
        kinds[label] = kinds[name]
    if chance.random() < 0.3:
        kinds |= {f"model.{name}": kinds[name] for name in after}
        after = {f"model.{name}": macs for name, macs in after.items()}
    if chance.random() < 0.5:
        after["added"] = 50
    return made(chance, names, kinds), made(chance, after, kinds)


def made(chance: random.Random, macs: dict[str, int], kinds: dict[str, str]) -> Profile:
    """Return a profile of these modules with random times.

    Some times are unknown, and some phases do not run.
    """
    phases = [phase for phase in WORK_AND_TIME if chance.random() < 0.9]
    cells = []
    rows: dict[str, dict[str, Any]] = {}
    for name, done in macs.items():
        for phase in phases:
            cells.append(product(name, "aten::mm", phase, macs=done, bytes_moved=done))
        for above in reversed(ancestry(name)):
            kind = {"class_name": kinds.get(above, "Block")}
            rows[above] = weights(macs.get(above, 0)) | kind
    counted = profile(rows, cells)
    steps = chance.choice((2, 10, 30))

    def spread(scale: float) -> TimingStats | None:
        is_single = chance.random() < 0.05
        count = 1 if is_single else steps
        seconds = [scale * 1e-5 * chance.uniform(0.99, 1.01) for _ in range(count)]
        is_known = chance.random() > 0.02
        return TimingStats.of(seconds) if is_known else None

    def timed(given: Work) -> Work:
        factor = chance.choice((1.0, 1.0, 1.0, 1.5))
        self_seconds = spread(given.self_macs * factor) if given.self_calls else None
        seconds = spread(given.macs * factor)
        if not given.calls:
            return given
        return replace(given, self_seconds=self_seconds, seconds=seconds)

    modules = {}
    for name, module in counted.modules.items():
        works = {phase: timed(module.work(phase)) for phase in PHASES}
        modules[name] = replace(module, **works)
    return replace(counted, modules=modules)


def test_the_page_is_given_what_python_says() -> None:
    """For every handmade pair, the server and a file contain the comparison of `lflops.diff`."""
    for number, pair in enumerate(by_hand()):
        assert [] == mismatches(pair, served(pair)), f"pair {number}, from the server"
        in_page = in_file(small_profile(), *pair)
        assert [] == mismatches(pair, in_page), f"pair {number}, in a file"


def test_the_page_is_given_what_python_says_of_random_pairs() -> None:
    """For 150 random pairs too, the server computes the comparison of `lflops.diff`.

    Together they have all verdicts, added and removed modules, and unknown times.
    """
    pairs = [by_chance(seed) for seed in range(150)]
    given = [served(pair) for pair in pairs]
    rows = []
    for seed, (pair, comparison) in enumerate(zip(pairs, given, strict=True)):
        assert [] == mismatches(pair, comparison), f"seed {seed}"
        rows.extend(rows_of(comparison["modules"]))
    assert {*get_args(Verdict), None} == {row["time.verdict"] for row in rows}
    assert {True, False} == {row["before"] is None for row in rows}
    assert {True, False} == {row["after"] is None for row in rows}
    assert {True, False} == {row["own"] for row in rows}


def test_another_verdict_would_be_seen() -> None:
    """A changed verdict and a changed number are reported, so the tests above can fail."""
    pair = (ran(FIVE), ran(FIVE | {"head": 22e-3}))
    given = served(pair)
    given["modules"]["time.verdict"][-1] = "same"
    given["modules"]["time.high"][-1] *= 1.001
    assert ["/modules/7/time.high", "/modules/7/time.verdict"] == mismatches(pair, given)


def test_the_page_shows_what_it_is_given(browser: Any) -> None:
    """The page draws every row, every known figure and every sentence of all pairs."""
    pairs = [*by_hand(), *map(by_chance, range(150))]
    given = [served(pair) for pair in pairs]
    with bench(browser) as opened:
        drawn = json.decode(opened.evaluate(SHOWN, json.encode(given).decode()))

    def key(row: list[Any]) -> str:
        return json.encode(row).decode()

    for pair, each, shown in zip(pairs, given, drawn, strict=True):
        wanted = as_json(drawn_rows(pair, each))
        assert sorted(wanted, key=key) == sorted(shown["rows"], key=key)
        # The step is a figure too. FLOPs and bytes moved are not drawn as figures.
        figures = {**each["figures"], "step": [each["step"]["before"], each["step"]["after"]]}
        known = []
        for name, (before, after) in figures.items():
            is_known = before is not None or after is not None
            if is_known and name not in {"flops", "bytes_moved"}:
                known.append(name)
        assert len(known) == len(shown["figures"])
        assert each["headline"] == shown["sentences"]


def test_what_has_no_comparison_is_refused() -> None:
    """A payload that lacks data for a comparison or has damaged columns is refused."""
    good = json.encode(payload(analyze(small_profile())))
    content = json.decode(good)
    modules = content["modules"]
    wrong: list[dict[str, Any]] = [
        {"lflops": 2},
        content | {"compare": None},
        content | {"modules": {"name": ["a"]}},
        content | {"modules": {"name": ["", ""]}},
        content | {"modules": {**modules, "forward.self_macs": ["x"]}},
        content | {"modules": {**modules, "forward.self_macs": None}},
    ]
    for changed in wrong:
        with pytest.raises(ValueError, match=r"^lack data that a comparison needs: "):
            compared_windows(good, json.encode(changed))
