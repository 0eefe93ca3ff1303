"""Read and write the JSON file of a profile, and make the JSON schema of this file.

The file is written atomically. Its content is checked before it is written and when it is read.
Every failure raises a `ProfileError`.
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
from lflops.files import GZIP, read, write_whole
from lflops.hardware.chips import Hardware
from lflops.profile import profile as model, timeline
from lflops.profile.module_names import parent_of
from lflops.profile.profile import COUNTS, SCHEMA_VERSION, ModuleProfile, Profile, Work
from lflops.profile.records import PHASES
from lflops.profile.series import without_none

LARGEST_FILE = 1 << 30
"""Maximum size in bytes of a profile's file. Larger files are not read."""

LARGEST_SEARCH = 1 << 25
"""Number of bytes at the start of a file in which lflops finds the field of a JSON error.

The message of an error after these bytes does not name the field, because the search would take too
long.
"""

MOST_DIMENSIONS = 64
"""Maximum number of dimensions of a tensor in torch."""

DEEPEST_NESTING = 100
"""Depth of nested objects and arrays at which the search for the field of a JSON error stops."""

LARGEST_SHOWN = 10**1000
"""Largest sum that an error message shows. Python refuses to print much larger numbers."""

# Number of bytes of a compressed file that are decompressed to check whether it is a trace.
_BEGIN = 1 << 16
_TRACE = "this file is a trace of torch.profiler, which `lflops trace show` can read"
_LEDGER = "this file is a ledger, not a profile: pass its folder to `lflops why` or `lflops ledger`"
_inclusive_counts = attrgetter(*COUNTS)
_self_counts = attrgetter(*(f"self_{count}" for count in COUNTS))

# Quoted content comes from an untrusted file, so it is shortened.
_short = reprlib.Repr()
_short.maxstring = _short.maxlong = 80
Key = str | int


_ADVICE = "pass a file that FlopsMonitor or Profile.save wrote, such as *.profile.json"


class _OtherVersionError(ProfileError):
    """The profile has a different schema version.

    The message already contains advice, so `_ADVICE` is not added to it.
    """


def load(path: str | PathLike[str]) -> Profile:
    """Read a profile's file.

    Raises:
        ProfileError: The file cannot be read or is not a valid profile. The message names the file
            and, if known, the module and the field.
    """
    with _naming(path, _ADVICE):
        return _checked(_content(Path(path)))


def save(profile: Profile, path: str | PathLike[str]) -> None:
    """Write a profile's file atomically, and create missing folders.

    Raises:
        ProfileError: The file cannot be written, or `load` would reject it, for example because a
            number is NaN.
    """
    with _naming(path, "nothing was written"):
        _replace(Path(path), _encoded(profile))


@contextmanager
def _naming(path: str | PathLike[str], remark: str) -> Iterator[None]:
    """Convert every error into a `ProfileError` that names the file and ends with `remark`."""
    name = os.fspath(path)
    if not name or not name.isprintable():
        name = ascii(name)
    try:
        yield
    except ProfileError as error:
        needs_other_version = isinstance(error, _OtherVersionError) and remark == _ADVICE
        tail = "" if needs_other_version else f"; {remark}"
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
    """Return the JSON text of a file.

    Raises:
        ProfileError: The file is empty, compressed, or not UTF-8.
    """
    if path.name.endswith(".ledger.jsonl"):
        raise ProfileError(_LEDGER)
    text = read(path, LARGEST_FILE)
    if not text.strip():
        raise ProfileError("the file is empty")
    if text.startswith(GZIP):
        begin = b""
        # A damaged file is reported like any other compressed file.
        with suppress(zlib.error):
            begin = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(text, _BEGIN)
        is_trace = b'"traceEvents"' in begin
        raise ProfileError(
            _TRACE if is_trace else "the file is compressed with gzip: decompress the file first"
        )
    try:
        # msgspec does not check whether the strings of unknown fields are UTF-8.
        text.decode()
    except UnicodeDecodeError as error:
        path_to_byte = _path_at_byte(text, error.start)
        raise ProfileError(f"{path_to_byte}byte {error.start} is not UTF-8") from None
    return text


def _checked(text: bytes) -> Profile:
    fields = _decoded(text, dict[str, Raw])
    if "schema_version" not in fields and "traceEvents" in fields:
        raise ProfileError(_TRACE)
    _check_version(bytes(fields.get("schema_version", Raw())))
    profile: Profile = _decoded(text, Profile)
    _check_shapes(profile.run.shapes)
    _check_modules(profile.modules)
    _check_references(profile)
    for phase in PHASES:
        works = {name: module.work(phase) for name, module in profile.modules.items()}
        _check_sums(phase, works)
    return profile


def _check_version(given: bytes) -> None:
    """Check that lflops can read files with this version of the schema.

    The version is checked before the rest of the file. Otherwise, a file with another major version
    would be reported as damaged.

    Args:
        given: The JSON text of the field `schema_version`; empty if the field is missing.
    """
    version = re.fullmatch(rb'"([0-9]{1,9})\.([0-9]{1,9})"', given)
    if not given:
        raise ProfileError("not an lflops profile: schema_version is missing")
    if not version:
        shown = _short.repr(given.decode())[1:-1]
        raise ProfileError(
            f'not an lflops profile: schema_version is {shown}, but must be "major.minor"'
        )
    major = int(version[1])
    supported = int(SCHEMA_VERSION.partition(".")[0])
    if major != supported:
        needed = "a later" if major > supported else "an earlier"
        raise _OtherVersionError(
            f"schema_version is {given.decode()}, but this lflops reads {supported}.x: "
            f"{needed} version of lflops is needed"
        )


def _check_shapes(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that no shape has more dimensions than a tensor can have."""
    for name, shape in shapes.items():
        if len(shape) > MOST_DIMENSIONS:
            raise ProfileError(
                f"{_spelled(['run', 'shapes', name])} has {len(shape):,} dimensions, but a tensor "
                f"has at most {MOST_DIMENSIONS}"
            )


def _check_modules(modules: Mapping[str, ModuleProfile]) -> None:
    """Check that every module has a parent and the right depth, and that its `owner` exists."""
    if "" not in modules:
        raise ProfileError("modules has no entry for the root module, which is named ''")
    for name, module in modules.items():
        above = parent_of(name)
        if above not in modules:
            path = _spelled(["modules", name])
            raise ProfileError(f"{path} has no parent: {_short.repr(above)} is missing")
        depth = modules[above].depth + 1 if name else 0
        if module.depth != depth:
            path = _spelled(["modules", name, "depth"])
            raise ProfileError(
                f"{path} is {_short.repr(module.depth)}, "
                f"but a module with this name has depth {depth}"
            )
        if module.owner is not None:
            _check_module(modules, _spelled(["modules", name, "owner"]), module.owner)


def _check_module(modules: Mapping[str, ModuleProfile], path: str, name: str) -> None:
    if name not in modules:
        raise ProfileError(f"{path} is {_short.repr(name)}, which is not in modules")


def _check_references(profile: Profile) -> None:
    """Check that operators, memory, ranks and waits refer only to existing modules and phases."""
    tables: dict[str, Sequence[Any]] = {
        "op_counts": profile.op_counts,
        "unsupported": profile.unsupported,
        "communication": profile.communication,
        "rank_stats": profile.rank_stats,
    }
    if profile.memory:
        tables["memory.alive"] = profile.memory.alive
        tables["memory.timeline"] = profile.memory.timeline
        for module in profile.memory.by_module:
            _check_module(profile.modules, "a key of memory.by_module", module)
    for table, rows in tables.items():
        for index, row in enumerate(rows):
            _check_module(profile.modules, f"{table}[{index}].module", row.module)
    for index, wait in enumerate(profile.waits):
        if wait.phase not in PHASES:
            raise ProfileError(
                f"waits[{index}][1] is {_short.repr(wait.phase)}: the phases are {', '.join(PHASES)}"
            )


def _check_sums(phase: str, works: Mapping[str, Work]) -> None:
    """Check that the counts of each module are its self counts plus those of its direct submodules.

    If the number of a module is wrong, the sum of its parent is wrong too. Usually, submodules come
    after their parents, so the modules are checked from the last to the first. The first error is
    then in the module with the wrong number.
    """
    sums = {name: _self_counts(work) for name, work in works.items()}
    for name, work in works.items():
        if name:
            above = parent_of(name)
            sums[above] = tuple(map(add, sums[above], _inclusive_counts(work)))
    for name in reversed(sums):
        counts = _inclusive_counts(works[name])
        if counts == sums[name]:
            continue
        for count, given, summed in zip(COUNTS, counts, sums[name], strict=True):
            if given != summed:
                path = _spelled(["modules", name, phase, count])
                total = _short.repr(summed) if summed < LARGEST_SHOWN else "more"
                raise ProfileError(
                    f"{path} is {_short.repr(given)}, but self_{count} and the {count} of the "
                    f"direct submodules add up to {total}"
                )


def _decoded(text: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        problem = f"{_path_at_byte(text, len(text))}the JSON is nested too deeply"
    except msgspec.ValidationError as error:
        problem = _misfit(text, str(error))
    except msgspec.DecodeError as error:
        byte = re.search(r"\(byte (\d+)\)$", str(error))
        problem = f"{_path_at_byte(text, int(byte[1]) if byte else len(text))}{error}"
    raise ProfileError(problem)


def _misfit(text: bytes, error: str) -> str:
    """Return the message of a msgspec `ValidationError`, with the full path and the invalid value.

    In msgspec's message, the path has `...` instead of the keys of mappings.
    """
    reason, at, path = error.rpartition(" - at `$")
    if not at:
        return f"not an lflops profile: {error[0].lower()}{error[1:]}"
    try:
        keys, given, kind = _misfitting(text, path)
    except (msgspec.MsgspecError, LookupError):
        # A key appears twice. msgspec reports the first value, but only the last value can be read.
        return f"{path.strip('.`')}: {_short.repr(reason)}"
    value = ""
    is_container = given[:1] in b"{["
    if not is_container:
        value = f" is {_short.repr(given.decode())[1:-1]}"
    expected = reason[0].lower() + reason[1:]
    if get_origin(kind) is Literal:
        expected = f"it must be one of {', '.join(get_args(kind))}"
    return f"{_spelled(keys)}{value}: {expected}"


def _misfitting(text: bytes, path: str) -> tuple[list[Key], bytes, Any]:
    """Find the invalid value that a msgspec error reports.

    If msgspec's path has `...` instead of a key, the first invalid value of the mapping is used.

    Returns:
        The keys of the full path, the JSON text of the value, and the expected type.
    """
    keys: list[Key] = []
    kind: Any = Profile
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if NoneType in get_args(kind):
            kind = get_args(kind)[0]
        if index.isdigit():
            key: Key = int(index)
            if get_origin(kind) is tuple:
                kind = get_args(kind)[0]
            else:
                kind = list(get_type_hints(kind, include_extras=True).values())[int(index)]
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


# A string is one token, so that brackets inside it are not mistaken for JSON brackets. A string
# without a closing quote extends to the end of the text.
_TOKEN = re.compile(rb'"(?P<string>[^"\\]*+(?:\\.[^"\\]*+)*+)"?\s*+(?P<colon>:?)|[\[\]{},]')


def _path_at_byte(text: bytes, byte: int) -> str:
    """Return the path of keys to the byte at which JSON is invalid, such as `modules['a'].calls: `.

    Returns the empty string for a byte at the top level. The result is also empty if the byte is
    beyond `LARGEST_SEARCH`, because the search would take minutes.
    """
    # For each open object its current key, and for each open array its current index. The key is
    # `None` if the object has no key so far.
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
    return _spelled(without_none(keys), ": ")


def _encoded(profile: Profile) -> bytes:
    """Return the JSON text of a profile, after checking that `load` accepts it."""
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
    """Raise an error that names the field if a value cannot be written to a file.

    msgspec does not name the field in its errors, and writes NaN and infinity as null without an
    error.

    Args:
        value: The value. Its fields or items are checked too.
        keys: The keys that lead from the profile to the value.
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
                f"{_spelled(keys)} is {value}, but must be a finite number, "
                "or None if it is unknown"
            )
        case _ if type(value) not in {str, int, float, bool, NoneType}:
            raise ProfileError(
                f"{_spelled(keys)} is a {type(value).__qualname__}, but must be a number, a string "
                "or None"
            )
    for key, inner in items:
        _check_leaves(inner, (*keys, key))


def _replace(path: Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text, lasting=True)


def _spelled(keys: Sequence[Key], end: str = "") -> str:
    """Format `["modules", "encoder.0", "forward"]` as `modules['encoder.0'].forward`.

    `end` is appended, unless there are no keys and the result is empty.
    """
    spelled = ""
    for key in keys[:10]:
        is_field = isinstance(key, str) and key.isidentifier() and len(key) <= _short.maxstring
        if is_field and spelled != "modules":
            spelled += f".{key}" if spelled else str(key)
        else:
            spelled += f"[{_short.repr(key)}]"
    return spelled and spelled + end


_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def json_schema(
    value: type = model.Profile,
    title: str = f"A profile of lflops, schema_version {model.SCHEMA_VERSION}",
) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a type.

    The docstrings of the classes become the descriptions of objects and fields. The schema allows
    unknown fields, so it accepts the files of all versions with the same major version.

    Args:
        value: The type, by default `Profile`.
        title: Title of the schema.
    """
    schema = msgspec.json.schema(value)
    for name, definition in schema["$defs"].items():
        _describe(name, definition)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title} | schema


def _describe(name: str, definition: dict[str, Any]) -> None:
    """Move the "Attributes" section of a class's docstring to the descriptions of the fields.

    msgspec uses the whole docstring as the description of the object.
    """
    description = inspect.cleandoc(definition.get("description", ""))
    text, _, attributes = description.partition("Attributes:\n")
    if text:
        definition["description"] = " ".join(text.split())
    fields = definition.get("properties", {})
    # A named tuple or an array-like struct is an array in JSON, so its fields are the items.
    if "prefixItems" in definition:
        kind = getattr(model, name, None) or getattr(timeline, name)
        names = kind._fields if issubclass(kind, tuple) else kind.__struct_fields__
        fields = dict(zip(names, definition["prefixItems"], strict=True))
        for field, item in fields.items():
            item["title"] = field
    for field, meaning in _ATTRIBUTE.findall(attributes):
        if field in fields:
            fields[field]["description"] = " ".join(meaning.split())
