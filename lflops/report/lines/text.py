"""Pieces of text that all reports share. Names of modules, operators and files come from the user and may hold anything."""

import re
from pathlib import Path

import msgspec

from lflops import units

WORDS = msgspec.toml.decode(Path(__file__).with_name("words.toml").read_bytes(), type=dict[str, dict[str, str]])

_NUMBER = re.compile(r"…[*{\d]")  # what is left of a name that was cut before a number


def plain(content: str) -> str:
    """The content without control characters: a module's name does not drive the terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in content)


def shortened(name: str, width: int) -> str:
    """The name, or its two ends where it is longer than the width."""
    if len(name) <= width:
        return name
    end = max(width - 1, 0) // 2
    return f"{name[: max(width - 1 - end, 0)]}…{name[len(name) - end :]}"


def shortened_name(name: str, width: int) -> str:
    """A module's name, without its first parts where it is longer than the width: the last ones say most."""
    parts = name.split(".")
    while len(parts) > 1 and (len(name) > width or _NUMBER.match(name)):
        parts = parts[1:]
        name = f"…{'.'.join(parts)}"
    return shortened(name, width)


def itself_of(kind: str) -> str:
    """Name what is in no module below the root, by the root's class. Several models are in a `ModuleDict`, which no user wrote."""
    return "the code around the models" if kind == "ModuleDict" else f"{plain(kind) or 'the model'} itself, outside its layers"


def plus_minus(spread: float) -> str:
    """How far steps are from the median, as a share of it; no step can be shorter than nothing."""
    return units.percent(spread) if spread <= 1 else "more than 100 %"


def counted(number: int, noun: str) -> str:
    """A number with its noun, as `3 calls`."""
    return f"{units.count(number)} {noun}" if number == 1 else f"{units.count(number)} {noun}s"
