"""Pieces of text that all reports share. Names of modules, operators and files come from the user and may hold anything."""

from lflops import units

__all__ = ["counted", "plain", "shortened"]


def plain(content: str) -> str:
    """The content without control characters: a module's name does not drive the terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in content)


def shortened(name: str, width: int) -> str:
    """The name, or its two ends where it is longer than the width."""
    if len(name) <= width:
        return name
    end = max(width - 1, 0) // 2
    return f"{name[: max(width - 1 - end, 0)]}…{name[len(name) - end :]}"


def counted(number: int, noun: str) -> str:
    """A number with its noun, as `3 calls`."""
    return f"{units.count(number)} {noun}" if number == 1 else f"{units.count(number)} {noun}s"
