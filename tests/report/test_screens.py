"""Test the screens of the commands: they equal `tests/golden/`, and they follow general rules.

The rules also hold for screens that are drawn anew, for example that no line is too wide.
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
COUNTED = (
    "batch|thread|step|pass|call|module|rank|row|sample|token|operator|kernel|line|change|event"
    "|trace|warning"
)
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
"""Phrases of an earlier vocabulary that must not appear on any screen."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files that the commands read, and return their folder."""
    made = tmp_path_factory.mktemp("screens")
    files(made)
    return made


def too_wide(text: str, width: int) -> list[str]:
    """Return the lines that a terminal of this width would break."""
    return [line for line in text.splitlines() if len(line) > width]


def divided(text: str) -> list[str]:
    """Return the lines that begin with a unit, so that the number is on the line above."""
    return [line for line in text.splitlines() if UNIT.match(line.strip())]


def broken_words(narrow: str, wide: str) -> set[str]:
    """Return the words of a narrow screen that the same screen with enough width does not have.

    A shortened name, which has an ellipsis, is not a broken word.
    """
    remarks = re.compile(
        r"hidden at this terminal width:.*?\(COLUMNS=200\s+shows\s+more\)", re.DOTALL
    )
    words = set(remarks.sub("", narrow).split())
    new_words = words - set(wide.split())
    return {word for word in new_words if "…" not in word and not re.fullmatch(r"─+", word)}


def plurals(text: str) -> list[str]:
    """Return the phrases in which the number 1 has a plural noun."""
    return PLURAL.findall(text)


def rows(text: str) -> Iterator[tuple[int, str]]:
    """Yield the indent and the label of each row of the module tree."""
    lines = text.splitlines()
    rules = [number for number, line in enumerate(lines) if re.match(r"─+$", line.strip())]
    # The tree is between the first rule and the next empty line.
    for line in lines[rules[0] + 1 :]:
        if line == "":
            return
        yield len(line) - len(line.lstrip()), line.split()[0]


def no_modules(text: str, profile: Profile) -> list[str]:
    """Return the paths of rows whose indent does not fit any module of the profile.

    Examples are rows with the same indent that are not siblings, and a missing level.
    """
    wrong: list[str] = []
    # The rows that contain the current row, with the root first
    above: list[tuple[int, str]] = []
    for indent, label in rows(text):
        above = [each for each in above if each[0] < indent]
        above.append((indent, label))
        # The root has an empty name.
        path = ".".join(name for _, name in above[1:])
        # The row `0…5` stands for the modules from `0` to `5`.
        first = re.sub(r"(\w+)…\w+", r"\1", path)
        if first not in profile.modules:
            wrong.append(path)
    return wrong


def test_the_screens_are_those_that_are_kept(folder: Path) -> None:
    """The screens equal the golden files.

    `python -m tests.support.screens` draws them again; check the differences.
    """
    drawn = {name: draw() for name, draw in golden_screens(folder).items()}
    kept = {path.stem: path.read_text("utf-8") for path in GOLDEN.glob("*.txt")}
    assert drawn.keys() == kept.keys()
    assert [] == [name for name, text in drawn.items() if text != kept[name]]


@pytest.mark.parametrize("name", OF_A_TERMINAL)
def test_a_screen_keeps_to_its_width_and_breaks_no_word(name: str, folder: Path) -> None:
    """At 80, 100 and 120 columns, no line is too wide, no word is broken, and no unit is alone.

    The text has no plural after the number 1, and no phrase of the earlier vocabulary.
    """
    wide = drawn_screen(SCREENS[name], 1000, folder)
    for width in (80, 100, 120):
        text = drawn_screen(SCREENS[name], width, folder)
        assert [] == too_wide(text, width)
        assert [] == divided(text)
        assert set() == broken_words(text, wide)
    assert [] == plurals(wide)
    assert [] == [phrase for phrase in PRIVATE if re.search(rf"\b{phrase}\b", wide)]


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("name", TREES)
def test_only_siblings_have_the_same_indent(name: str, width: int, folder: Path) -> None:
    """The path that the indents of a row and its parents make is the path of a module."""
    assert [] == no_modules(drawn_screen(SCREENS[name], width, folder), TREES[name]())


@pytest.mark.parametrize(("width", "levels"), [(80, 40), (60, 31), (40, 11)])
def test_a_tree_that_is_too_deep_is_cut_and_says_so(width: int, levels: int, folder: Path) -> None:
    """A tree that is too deep for the width is cut, and a line below it says so.

    The time, its share and the gaps take 21 columns, and a name takes 8. Each level is indented by
    one column, so the rest of the width is the number of levels.
    """
    text = drawn_screen(("show", "deep.json"), width, folder)
    assert [] == too_wide(text, width)
    assert [] == no_modules(text, deep_model())
    assert levels == max(indent for indent, _ in rows(text))
    is_cut = levels < 40
    assert is_cut == ("hidden at this" in text and "below level" in " ".join(text.split()))


@pytest.mark.parametrize("width", [50, 80, 100, 120])
def test_total_time_and_its_share_of_the_step_are_never_left_out(width: int, folder: Path) -> None:
    """Even at 50 columns, the table has the total time and its share of the step.

    Forward takes 34.2 ms in 6 blocks (5.5 ms each) and outside of them (1.2 ms). With backward, it
    is three times as much: 102.6 ms of the step's 114.7 ms.
    """
    text = drawn_screen(SCREENS["show"], width, folder)
    lines = text.splitlines()
    (root,) = (line.split() for line in lines if line.startswith("GPT"))
    assert ["GPT", "103", "ms", "89.5", "%"] == root[:5]
    headings = [line.split() for line in lines if line.startswith("module ")]
    assert "time" in headings[0][1]


def test_the_table_as_csv_is_exact(folder: Path) -> None:
    """The CSV file has exact numbers, and empty cells for unknown times.

    Six blocks have 12 * 256**2 weights each and process 512 tokens. Backward has twice the MACs of
    forward.
    """
    text = drawn_screen(SCREENS["show-csv"], 80, folder)
    lines = {line["module"]: line for line in csv.DictReader(io.StringIO(text))}
    macs = BLOCKS * 12 * WIDTH**2 * TOKENS
    assert str(macs) == lines["blocks"]["forward_macs"]
    assert str(2 * macs) == lines["blocks"]["backward_macs"]
    assert pytest.approx(0.099) == float(lines["blocks"]["total_seconds"])
    assert pytest.approx(0.099 / 0.1147) == float(lines["blocks"]["share_of_step"])
    assert "" == lines["blocks"]["optimizer_seconds"]
    text = drawn_screen(("show", "gpt.json", "--format", "csv"), 80, folder)
    lines = {line["module"]: line for line in csv.DictReader(io.StringIO(text))}
    folded = lines["blocks.0…5.qkv"]
    assert "6" == folded["modules"]
    assert str(6 * 3 * WIDTH**2 * TOKENS) == folded["forward_macs"]


@pytest.mark.parametrize(("form", "cells"), [("markdown", r"\| "), ("latex", " & ")])
def test_the_table_for_a_paper_has_a_cell_for_each_heading(
    form: str, cells: str, folder: Path
) -> None:
    """Each line of a Markdown or LaTeX table has the same number of cells.

    Names are complete, and special characters of the format are escaped.
    """
    lines = drawn_screen(SCREENS[f"show-{form}"], 80, folder).splitlines()
    counts = {len(re.findall(cells, line)) for line in lines if re.search(cells, line)}
    assert 1 == len(counts)
    whole = drawn_screen(("show", "gpt.json", "--format", form), 80, folder)
    names = {
        "markdown": "| blocks.0…5.mlp ×6 | Sequential |",
        "latex": r"blocks.0\ldots{}5.mlp $\times$6 & Sequential &",
    }
    assert names[form] in whole


@pytest.mark.parametrize(
    "options",
    [["--format", "html"], ["--format", "csv", "--json"], ["--format", "latex", "--memory"]],
)
def test_a_format_that_is_not_known_is_refused(options: Sequence[str], folder: Path) -> None:
    """Invalid formats and combinations of options end with status 2."""
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
    """Each of the checks above reports a planted violation."""
    assert CULPRITS[name][1]
