"""The settings in the variable `LFLOPS`: a line of names and values, as `wait=2,active=5`."""

import re
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from lflops.errors import CountError
from lflops.schedule import Schedule
from lflops.session.inputs.settings import Settings


def settings_of(line: str) -> dict[str, Any]:
    """The arguments of a monitor that was asked for from outside, each of them checked.

    A window opens only when it is asked for, unless the line has a field of the schedule, or stages. An `LflopsError` where a name is not
    known, or its value cannot be.
    """
    given = arguments_of(line, Settings.__init__)
    settings = given if "schedule" in given else {"stages": ()} | given
    Settings(**settings).check()
    return settings


def arguments_of(line: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments in a line of names and values, for a function that makes a monitor, by the annotations of what it takes.

    A value may be several, with commas between them. The fields of the schedule are named as the function's own arguments are. A
    `CountError` where a name is not known or its value cannot be.
    """
    of_schedule = get_type_hints(Schedule)
    hints = {name: hint for name, hint in get_type_hints(function).items() if name != "return"}
    settings = {name: reading for name, hint in (of_schedule | hints).items() if (reading := _reading(hint))}
    given: dict[str, Any] = {}
    for setting in filter(None, re.split(r",(?=[^,=]*=)", line)):
        name, equals, text = map(str.strip, setting.partition("="))
        if name not in settings:
            raise CountError(f"{name!r} is no setting; these are: {', '.join(settings)}")
        if not equals:
            raise CountError(f"{name} has no value: give {settings[name].taken}, as in {name}=…")
        try:
            given[name] = settings[name].read(text)
        except ValueError as error:
            raise CountError(f"{name}={text!r}: give {settings[name].taken}") from error
    schedule = {name: given.pop(name) for name in of_schedule if name in given}
    return given | ({"schedule": Schedule(**schedule)} if schedule else {})


class Reading(NamedTuple):
    """How a text becomes a value: what is taken, in words, and a function that raises `ValueError` on all else."""

    taken: str
    read: Callable[[str], Any]


def _reading(hint: Any) -> Reading | None:
    """How to read what is annotated so; `None` where no text can say it."""
    if hint in PLAIN:
        return PLAIN[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _one_of({str(option).lower(): option for option in inner})
    if origin in {Union, UnionType}:
        return _first_of(inner)
    if isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        return _several(_reading(inner[0]), list if origin is list else tuple)
    return None


def _one_of(words: dict[str, Any]) -> Reading:
    def read(text: str) -> Any:
        if text.lower() not in words:
            raise ValueError(text)
        return words[text.lower()]

    return Reading(" or ".join(words), read)


def _first_of(hints: tuple[Any, ...]) -> Reading | None:
    """One after the other: `None` first, and text last, for any is one. That it may be `None` is no reason to have a setting."""
    nothing = [PLAIN[NoneType]] if NoneType in hints else []
    something = [reading for hint in hints if hint not in {NoneType, str} and (reading := _reading(hint))]
    something += [PLAIN[str]] if str in hints else []

    def read(text: str) -> Any:
        for each in nothing + something:
            try:
                return each.read(text)
            except ValueError:
                continue
        raise ValueError(text)

    return Reading(" or ".join(each.taken for each in something + nothing), read) if something else None


def _several(one: Reading | None, made: type) -> Reading | None:
    if one is None:
        return None
    read = one.read
    return Reading(f"{one.taken}, or several with commas between them", lambda line: made(read(text.strip()) for text in line.split(",")))


PLAIN = {
    NoneType: _one_of({"none": None}),
    bool: Reading("true or false", _one_of({"true": True, "1": True, "false": False, "0": False}).read),
    int: Reading("a whole number", int),
    float: Reading("a number", float),
    str: Reading("text", str),
}
