"""The JSON file of a profile, and its JSON schema.

The file is written atomically, and checked when it is read. Every failure is a `ProfileError`.
"""

import inspect
import os
import re
import reprlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import isfinite
from operator import add, attrgetter
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Raw, Struct

from lflops.errors import HardwareError, ProfileError
from lflops.files import write_whole
from lflops.hardware.chips import Hardware
from lflops.profile import profile as model, timeline
from lflops.profile.profile import COUNTS, SCHEMA_VERSION, ModuleProfile, Profile, Work
from lflops.profile.records import PHASES

LARGEST_FILE = 1 << 30
LARGEST_SEARCH = 1 << 25
DEEPEST_NESTING = 100
LARGEST_SHOWN = 10**1000
_GZIP, _BEGIN = b"\x1f\x8b", 1 << 16
_TRACE = "is a trace of torch.profiler: lflops trace show reads it"
_inclusive_counts = attrgetter(*COUNTS)
_self_counts = attrgetter(*(f"self_{count}" for count in COUNTS))

# Quoted content is from an untrusted file, so it is shortened.
_short = reprlib.Repr()
_short.maxstring = _short.maxlong = 80
Key = str | int


class _OtherVersionError(ProfileError):
    """A profile of another schema version: the message does not ask for another file."""


def load(path: str | PathLike[str]) -> Profile:
    """Read a profile's file.

    Raises:
        ProfileError: The file cannot be read; the message names it and, where there is one, the
            module and the field.
    """
    with _naming(path, "give a file as Profile.save writes it"):
        return _checked(_content(Path(path)))


def save(profile: Profile, path: str | PathLike[str]) -> None:
    """Write a profile's file and the folders above it, atomically.

    A `ProfileError` where a number is NaN or infinite, `load` would refuse the profile for another
    reason, or the file cannot be written.
    """
    with _naming(path, "nothing was written"):
        _replace(Path(path), _encoded(profile))


@contextmanager
def _naming(path: str | PathLike[str], remark: str) -> Iterator[None]:
    """Turn every error into a `ProfileError` with the file's name and the remark."""
    name = given if (given := os.fspath(path)) and given.isprintable() else ascii(given)
    try:
        yield
    except ProfileError as error:
        tail = (
            ""
            if isinstance(error, _OtherVersionError) and remark.startswith("give")
            else f"; {remark}"
        )
        raise ProfileError(f"{name}: {error}{tail}") from None
    except OSError as error:
        raise ProfileError(f"{name}: {error.strerror or error}; {remark}") from error
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise ProfileError(
            f"{name}: {_short.repr(str(error) or type(error).__name__)}; {remark}"
        ) from error
    except HardwareError as error:
        raise ProfileError(f"{name}: run.hardware: {error}; {remark}") from error


def _content(path: Path) -> bytes:
    """Return the bytes of a regular file. Reading a pipe or a device could block."""
    if not path.is_file():
        # Raises the error of the system if nothing exists there.
        path.stat()
        raise ProfileError("is a folder, a pipe or a device")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST_FILE:
            raise ProfileError(f"has {size} bytes, a profile at most {LARGEST_FILE}")
        text = file.read(size)
    if not text.strip():
        raise ProfileError("is empty")
    if text.startswith(_GZIP):
        begin = b""
        # The file may be damaged.
        with suppress(zlib.error):
            begin = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(text, _BEGIN)
        raise ProfileError(
            _TRACE if b'"traceEvents"' in begin else "is packed by gzip: unpack it first"
        )
    try:
        # msgspec does not check the strings of unknown fields.
        text.decode()
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"{_path_at_byte(text, error.start)}byte {error.start} is not UTF-8"
        ) from None
    return text


def _checked(text: bytes) -> Profile:
    fields = _decoded(text, dict[str, Raw])
    if "schema_version" not in fields and "traceEvents" in fields:
        raise ProfileError(_TRACE)
    _check_version(bytes(fields.get("schema_version", Raw())))
    profile: Profile = _decoded(text, Profile)
    _check_rows(profile.modules)
    _check_references(profile)
    for phase in PHASES:
        _check_sums(phase, {name: row.work(phase) for name, row in profile.modules.items()})
    return profile


def _check_version(given: bytes) -> None:
    """Check the version first, so that a file of another version is not reported as damaged."""
    version = re.fullmatch(rb'"([0-9]{1,9})\.([0-9]{1,9})"', given)
    if not version:
        problem = (
            f'is {_short.repr(given.decode())[1:-1]}, "major.minor" is taken'
            if given
            else "is missing"
        )
        raise ProfileError(f"not an lflops profile: schema_version {problem}")
    major, read_major = int(version[1]), int(SCHEMA_VERSION.partition(".")[0])
    if major != read_major:
        needed = "a later" if major > read_major else "an earlier"
        raise _OtherVersionError(
            f"schema_version is {given.decode()}, this lflops reads {read_major}.x: {needed} one is needed"
        )


def _check_rows(modules: Mapping[str, ModuleProfile]) -> None:
    if "" not in modules:
        raise ProfileError("modules has no row '', the root")
    for name, row in modules.items():
        above = name.rpartition(".")[0]
        if above not in modules:
            raise ProfileError(
                f"{_spelled(['modules', name])} has no row above it, {_short.repr(above)} is missing"
            )
        if row.depth != (modules[above].depth + 1 if name else 0):
            raise ProfileError(
                f"{_spelled(['modules', name, 'depth'])} is {_short.repr(row.depth)}, which is not how deep its name is"
            )
        if row.owner is not None and row.owner not in modules:
            raise ProfileError(
                f"{_spelled(['modules', name, 'owner'])} is {_short.repr(row.owner)}, which is no row of modules"
            )


def _check_references(profile: Profile) -> None:
    tables: dict[str, Sequence[Any]] = {
        table: getattr(profile, table)
        for table in ("op_counts", "unsupported", "communication", "rank_stats")
    }
    if profile.memory:
        tables |= {"memory.alive": profile.memory.alive, "memory.timeline": profile.memory.timeline}
        for module in profile.memory.by_module:
            if module not in profile.modules:
                raise ProfileError(
                    f"memory.by_module has {_short.repr(module)}, which is no row of modules"
                )
    for table, rows in tables.items():
        for index, row in enumerate(rows):
            if row.module not in profile.modules:
                raise ProfileError(
                    f"{table}[{index}].module is {_short.repr(row.module)}, which is no row of modules"
                )
    for index, wait in enumerate(profile.waits):
        if wait.phase not in PHASES:
            raise ProfileError(
                f"waits[{index}][1] is {_short.repr(wait.phase)}, which is no phase of the model"
            )


def _check_sums(phase: str, works: Mapping[str, Work]) -> None:
    """Raise if a row's inclusive counts are not the sum of its self counts and the rows below.

    The last rows, which are mostly the deepest, are checked first.
    """
    sums = {name: _self_counts(work) for name, work in works.items()}
    for name, work in works.items():
        if name:
            above = name.rpartition(".")[0]
            sums[above] = tuple(map(add, sums[above], _inclusive_counts(work)))
    for name in reversed(sums):
        counts = _inclusive_counts(works[name])
        if counts != sums[name]:
            count, given, summed = next(
                each for each in zip(COUNTS, counts, sums[name], strict=True) if each[1] != each[2]
            )
            path = _spelled(["modules", name, phase, count])
            total = _short.repr(summed) if summed < LARGEST_SHOWN else "more"
            raise ProfileError(
                f"{path} is {_short.repr(given)}, self_{count} and the rows right below add up to {total}"
            )


def _decoded(text: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        problem = f"{_path_at_byte(text, len(text))}nested too deeply"
    except msgspec.ValidationError as error:
        problem = _misfit(text, str(error))
    except msgspec.DecodeError as error:
        byte = re.search(r"\(byte (\d+)\)$", str(error))
        problem = f"{_path_at_byte(text, int(byte[1]) if byte else len(text))}{error}"
    raise ProfileError(problem)


def _misfit(text: bytes, error: str) -> str:
    """Add the missing keys and the value to the message of a msgspec ValidationError."""
    reason, at, path = error.rpartition(" - at `$")
    if not at:
        return f"not an lflops profile: {error[0].lower()}{error[1:]}"
    try:
        keys, given, kind = _misfitting(text, path)
    except (msgspec.MsgspecError, LookupError):
        # A key appears twice. msgspec reports the first value, and only the last can be read.
        return f"{path.strip('.`')}: {_short.repr(reason)}"
    value = "" if given[:1] in b"{[" else f" is {_short.repr(given.decode())[1:-1]}"
    taken = (
        f"one of {', '.join(get_args(kind))} is taken"
        if get_origin(kind) is Literal
        else reason[0].lower() + reason[1:]
    )
    return f"{_spelled(keys)}{value}: {taken}"


def _misfitting(text: bytes, path: str) -> tuple[list[Key], bytes, Any]:
    """Follow msgspec's path, and try the values of a mapping one by one.

    Returns the keys, and the JSON and the type at the end of the path.
    """
    keys: list[Key] = []
    kind: Any = Profile
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if NoneType in get_args(kind):
            kind = get_args(kind)[0]
        if index.isdigit():
            key: Key = int(index)
            kind = (
                get_args(kind)[0]
                if get_origin(kind) is tuple
                else [*get_type_hints(kind, include_extras=True).values()][int(index)]
            )
            text = bytes(msgspec.json.decode(text, type=list[Raw])[int(index)])
        else:
            kind = get_type_hints(kind, include_extras=True)[name] if name else get_args(kind)[1]
            values = msgspec.json.decode(text, type=dict[str, Raw])
            key = name or _first_misfit(values, kind)
            text = bytes(values[key])
        keys.append(key)
    return keys, text, kind


def _first_misfit(values: Mapping[str, Raw], kind: Any) -> str:
    for key, value in values.items():
        try:
            msgspec.json.decode(value, type=kind)
        except msgspec.ValidationError:
            return key
    raise LookupError


# A string is one token, so that its brackets do not count. An unterminated string ends with the text.
_TOKEN = re.compile(rb'"(?P<string>[^"\\]*+(?:\\.[^"\\]*+)*+)"?\s*+(?P<colon>:?)|[\[\]{},]')


def _path_at_byte(text: bytes, byte: int) -> str:
    """Return the path to a byte of invalid or too deep JSON, with a colon.

    Empty at the top level, and for a large text, in which it would take minutes.
    """
    keys: list[Key | None] = []
    if byte > LARGEST_SEARCH:
        return ""
    for token in _TOKEN.finditer(text, 0, byte):
        match token[0][:1]:
            case b"{" | b"[" as opening:
                keys.append(None if opening == b"{" else 0)
            case b"}" | b"]":
                del keys[-1:]
            case b"," if keys:
                keys[-1] = keys[-1] + 1 if isinstance(keys[-1], int) else None
            case b'"' if keys and token["colon"]:
                keys[-1] = token["string"].decode(errors="replace")
        if len(keys) > DEEPEST_NESTING:
            break
    return _spelled([*(key for key in keys if key is not None)], ": ")


def _encoded(profile: Profile) -> bytes:
    """Return the text of the file, after checking that `load` accepts it."""
    try:
        text = msgspec.json.encode(profile, enc_hook=dict)
        same = _checked(text) == profile
    except (ProfileError, TypeError, ValueError):
        _check_leaves(profile)
        raise
    if not same:
        _check_leaves(profile)
    return text


def _check_leaves(value: object, keys: tuple[Key, ...] = ()) -> None:
    """Raise for a value that cannot be written.

    Msgspec names no path, and writes NaN and infinity as null.
    """
    items: Iterable[tuple[Key, object]] = ()
    match value:
        case Struct():
            items = ((name, getattr(value, name)) for name in value.__struct_fields__)
        case Hardware():
            items = vars(value).items()
        case Mapping():
            items = value.items()
        case tuple() | list():
            items = enumerate(value)
        case float() if not isfinite(value):
            raise ProfileError(
                f"{_spelled(keys)} is {value}: finite numbers are taken, and None where one is unknown"
            )
        case _ if type(value) not in {str, int, float, bool, NoneType}:
            raise ProfileError(
                f"{_spelled(keys)} is a {type(value).__qualname__}: plain numbers, strings and None are taken"
            )
    for key, inner in items:
        _check_leaves(inner, (*keys, key))


def _replace(path: Path, text: bytes) -> None:
    if path.exists() and not path.is_file():
        raise ProfileError("is a folder, a pipe or a device")
    path.resolve().parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text, lasting=True)


def _spelled(keys: Sequence[Key], end: str = "") -> str:
    """Format `["modules", "encoder.0", "forward"]` as `modules['encoder.0'].forward`.

    `end` is added unless there are no keys.
    """
    spelled = ""
    for key in keys[:10]:
        if (
            isinstance(key, str)
            and key.isidentifier()
            and len(key) <= _short.maxstring
            and spelled != "modules"
        ):
            spelled += f".{key}" if spelled else key
        else:
            spelled += f"[{_short.repr(key)}]"
    return spelled and spelled + end


_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def json_schema(
    value: type = model.Profile,
    title: str = f"A profile of lflops, schema_version {model.SCHEMA_VERSION}",
) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a value, with descriptions of objects and fields.

    It allows unknown fields, so it accepts the files of every minor version of its major version.
    """
    schema = msgspec.json.schema(value)
    for name, definition in schema["$defs"].items():
        _describe(name, definition)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title} | schema


def _describe(name: str, definition: dict[str, Any]) -> None:
    """Move each line of "Attributes" in an object's description to the description of its field."""
    text, _, attributes = inspect.cleandoc(definition.get("description", "")).partition(
        "Attributes:\n"
    )
    if text:
        definition["description"] = " ".join(text.split())
    fields = definition.get("properties", {})
    # The items of an array are the fields of a tuple or of a struct.
    if "prefixItems" in definition:
        kind = getattr(model, name, None) or getattr(timeline, name)
        names = kind._fields if issubclass(kind, tuple) else kind.__struct_fields__
        fields = dict(zip(names, definition["prefixItems"], strict=True))
        for field, item in fields.items():
            item["title"] = field
    for field, meaning in _ATTRIBUTE.findall(attributes):
        if field in fields:
            fields[field]["description"] = " ".join(meaning.split())
