"""Screens of the commands.

They are as in `tests/golden/`, and rules hold for them that no redrawing can change.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from lflops.profile.profile import Profile
from tests.support.screens import (
    BLOCKS,
    GOLDEN,
    SCREENS,
    TOKENS,
    WIDTH,
    deep_model,
    drawn_screen,
    files,
    golden_screens,
    gpt_training,
)

OF_A_TERMINAL = sorted(
    name
    for name in SCREENS
    if name.rpartition("-")[2] not in {"markdown", "latex", "csv", "json", "why"}
)
TREES = {"show": gpt_training, "show-by-time": gpt_training, "estimate": gpt_training}
UNIT = re.compile(r"^(%|[nµm]?s|[KMGT]i?B|B|[kMGTP]?FLOP/s|[kMGTP]?B/s)([^\w]|$)")
COUNTED = "batch|thread|step|pass|call|module|rank|row|sample|token|operator|kernel|line|change|event|trace|warning"
PLURAL = re.compile(rf"(?<![\d.,×])\b1 (?:more )?(?:{COUNTED})(?:e?s)\b")
PRIVATE = (
    *(
        "steps back",
        "lies over",
        "has asked for",
        "being watched",
        "what is stamped",
        "alike",
        "answered",
        "not told",
        "nobody knows",
    ),
    *(
        "the model's products",
        "fewer of them",
        "how far the quartiles are",
        "is the wait for",
        "of its own",
        "beside",
        "was told",
    ),
)
"""Of the table of words: what is not printed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands read."""
    made = tmp_path_factory.mktemp("screens")
    files(made)
    return made


def too_wide(text: str, width: int) -> list[str]:
    """Lines that a terminal would break."""
    return [line for line in text.splitlines() if len(line) > width]


def divided(text: str) -> list[str]:
    """Lines that begin with the unit of the number above."""
    return [line for line in text.splitlines() if UNIT.match(line.strip())]


def broken_words(narrow: str, wide: str) -> set[str]:
    """Words that the same screen has not where it has room.

    A name that is shortened has an ellipsis.
    """
    remarks = re.compile(r"too narrow for.*?\(COLUMNS=200\s+shows\s+them\)", re.DOTALL)
    words = {word for word in remarks.sub("", narrow).split() if "…" not in word}
    return {word for word in words - set(wide.split()) if not re.fullmatch(r"─+", word)}


def plurals(text: str) -> list[str]:
    """One of something, in the plural."""
    return PLURAL.findall(text)


def rows(text: str) -> Iterator[tuple[int, str]]:
    """The indent and the label of each row of the tree."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if re.match(r"─+$", line.strip())) + 1
    for line in lines[start : lines.index("", start) if "" in lines[start:] else len(lines)]:
        yield len(line) - len(line.lstrip()), line.split()[0]


def no_modules(text: str, profile: Profile) -> list[str]:
    """Rows whose place in the indented tree is no module's of the profile.

    Two that are no siblings at one indent, or a gap.
    """
    wrong, above = [], []
    for indent, label in rows(text):
        above = [each for each in above if each[0] < indent]
        path = ".".join([*(name for _, name in above[1:]), *([label] if above else [])])
        first = re.sub(r"(\w+)…\w+", r"\1", path)
        wrong += [] if first in profile.modules else [path]
        above.append((indent, label))
    return wrong


def test_the_screens_are_those_that_are_kept(folder: Path) -> None:
    """`python -m tests.support.screens` redraws them; look at what it changed."""
    drawn = {name: draw() for name, draw in golden_screens(folder).items()}
    kept = {path.stem: path.read_text("utf-8") for path in GOLDEN.glob("*.txt")}
    assert drawn.keys() == kept.keys()
    assert [] == [name for name, text in drawn.items() if text != kept[name]]


@pytest.mark.parametrize("name", OF_A_TERMINAL)
def test_a_screen_keeps_to_its_width_and_breaks_no_word(name: str, folder: Path) -> None:
    """At 80, 100 and 120 columns; as another program reads it. A number stays with its unit."""
    wide = drawn_screen(SCREENS[name], 1000, folder)
    for width in (80, 100, 120):
        text = drawn_screen(SCREENS[name], width, folder)
        assert ([], [], set()) == (too_wide(text, width), divided(text), broken_words(text, wide))
    assert ([], []) == (
        plurals(wide),
        [word for word in PRIVATE if re.search(rf"\b{word}\b", wide)],
    )


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("name", TREES)
def test_only_siblings_have_the_same_indent(name: str, width: int, folder: Path) -> None:
    """The path that the indents make is a module's."""
    assert [] == no_modules(drawn_screen(SCREENS[name], width, folder), TREES[name]())


@pytest.mark.parametrize(("width", "levels"), [(80, 40), (60, 31), (40, 11)])
def test_a_tree_that_is_too_deep_is_cut_and_says_so(width: int, levels: int, folder: Path) -> None:
    """Time, its share and the gaps take 21 columns of the width, and a name 8.

    Each level is indented by one.
    """
    text = drawn_screen(("show", "deep.json"), width, folder)
    assert [] == too_wide(text, width)
    assert [] == no_modules(text, deep_model())
    assert levels == max(indent for indent, _ in rows(text))
    assert (levels < 40) == ("too narrow for" in text and "below level" in " ".join(text.split()))


@pytest.mark.parametrize("width", [50, 80, 100, 120])
def test_total_time_and_its_share_of_the_step_are_never_left_out(width: int, folder: Path) -> None:
    """6 blocks of 5.5 ms and 1.2 ms are 34.2 ms forward, three times that in all.

    102.6 of the step's 114.7 ms.
    """
    text = drawn_screen(SCREENS["show"], width, folder)
    (root,) = (line.split() for line in text.splitlines() if line.startswith("GPT"))
    assert ["GPT", "103", "ms", "89.5", "%"] == root[:5]
    above = [line.split() for line in text.splitlines() if line.startswith("module ")]
    assert "time" in above[0][1]


def test_the_table_as_csv_is_exact(folder: Path) -> None:
    """By hand: six blocks of 12 * 256**2 weights on 512 tokens, and twice that backward.

    Nothing where a time is not known.
    """
    text = drawn_screen(SCREENS["show-csv"], 80, folder)
    lines = {line["module"]: line for line in csv.DictReader(io.StringIO(text))}
    macs = BLOCKS * 12 * WIDTH**2 * TOKENS
    assert (str(macs), str(2 * macs)) == (
        lines["blocks"]["forward_macs"],
        lines["blocks"]["backward_macs"],
    )
    assert pytest.approx(0.099) == float(lines["blocks"]["total_seconds"])
    assert pytest.approx(0.099 / 0.1147) == float(lines["blocks"]["share_of_step"])
    assert "" == lines["blocks"]["optimizer_seconds"]
    below = drawn_screen(("show", "gpt.json", "--format", "csv"), 80, folder)
    folded = {line["module"]: line for line in csv.DictReader(io.StringIO(below))}["blocks.0…5.qkv"]
    assert ("6", str(6 * 3 * WIDTH**2 * TOKENS)) == (folded["modules"], folded["forward_macs"])


@pytest.mark.parametrize(("form", "cells"), [("markdown", r"\| "), ("latex", " & ")])
def test_the_table_for_a_paper_has_a_cell_for_each_heading(
    form: str, cells: str, folder: Path
) -> None:
    """With the names in full; what a format reads as its own is escaped."""
    lines = drawn_screen(SCREENS[f"show-{form}"], 80, folder).splitlines()
    counts = {len(re.findall(cells, line)) for line in lines if re.search(cells, line)}
    assert 1 == len(counts)
    whole = drawn_screen(("show", "gpt.json", "--format", form), 80, folder)
    assert {
        "markdown": "| blocks.0…5.mlp ×6 | Sequential |",
        "latex": r"blocks.0\ldots{}5.mlp $\times$6 & Sequential &",
    }[form] in whole


@pytest.mark.parametrize(
    "options",
    [["--format", "html"], ["--format", "csv", "--json"], ["--format", "latex", "--memory"]],
)
def test_a_format_that_is_not_known_is_refused(options: Sequence[str], folder: Path) -> None:
    """With one line and status 2, which `drawn_screen` takes for an error."""
    with pytest.raises(AssertionError, match="ended with 2"):
        drawn_screen(("show", "gpt.json", *options), 80, folder)


CULPRITS: dict[str, tuple[str, Iterable[object]]] = {
    "a line too wide": ("x" * 81, too_wide("x" * 81, 80)),
    "a unit on a line of its own": ("6.7\n % shorter", divided("6.7\n  % shorter")),
    "a word that is broken": ("atten\ntion", broken_words("atten\ntion", "attention")),
    "a plural": ("1 batches", plurals("over 1 batches")),
    "a row at a stranger's indent": (
        "",
        no_modules("──\nGPT  1\n  blocks  1\n  mlp  1\n", gpt_training()),
    ),
}


@pytest.mark.parametrize("name", CULPRITS)
def test_what_breaks_a_rule_is_seen(name: str) -> None:
    """One culprit of each kind."""
    assert CULPRITS[name][1]
