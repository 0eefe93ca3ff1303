"""Test the JSON file of a profile: it is read as it was saved, and damaged files are refused.

Most tests change one part of the file of `small_profile` and check the text of the error.
"""

import gzip
import itertools
import json
import os
import stat
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from lflops.errors import ProfileError
from lflops.profile.json_file import load, save
from lflops.profile.notes import Note
from lflops.profile.profile import OpCount, Profile, Step
from lflops.profile.records import PHASES
from tests.support.profile_builders import (
    cell,
    fields_of,
    module_profile,
    profile,
    profile_of,
    small_profile,
    spread,
    work,
)

# The fields of a `Work` that are counts: without arguments, `work` sets them to 0.
COUNTS = tuple(name for name, value in fields_of(work()).items() if value == 0)
SMALL = msgspec.json.encode(small_profile())
TRACE = b'{"schemaVersion": 1, "traceEvents": []}'
PLACEHOLDER = "what the test puts here"
HINT = "; pass a file that FlopsMonitor or Profile.save wrote, such as *.profile.json"

# The path to a value in a tree of JSON values.
Keys = tuple[str | int, ...]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of the file that a test reads or writes."""
    return tmp_path / "small.profile.json"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of one file that all examples of a property test overwrite."""
    return tmp_path_factory.mktemp("property") / "damaged.profile.json"


def tree() -> Any:
    """Return the small profile as plain JSON values that a test can change."""
    return json.loads(SMALL)


def places(value: Any, keys: Keys = ()) -> Iterator[Keys]:
    """Yield the path to every value in a tree of JSON values."""
    yield keys
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*keys, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*keys, index))


PLACES = list(places(tree()))


def at(root: Any, keys: Keys) -> Any:
    """Return the value at a path in a tree of JSON values."""
    for key in keys:
        root = root[key]
    return root


def replaced(keys: Keys, value: object) -> bytes:
    """Return the file of the small profile with another value at a path."""
    if not keys:
        return json.dumps(value).encode()
    root = tree()
    at(root, keys[:-1])[keys[-1]] = value
    return json.dumps(root).encode()


def spoilt(keys: Keys, text: bytes) -> bytes:
    """Return the file of the small profile with any text at a path, even if it is not JSON."""
    return replaced(keys, PLACEHOLDER).replace(json.dumps(PLACEHOLDER).encode(), text)


def without(keys: Keys) -> bytes:
    """Return the file of the small profile without the value at a path."""
    root = tree()
    del at(root, keys[:-1])[keys[-1]]
    return json.dumps(root).encode()


def refusal(path: Path, text: bytes | None = None) -> str:
    """Load a file that must be refused, and return the reason.

    The error begins with the file's name. Unless the file has another version, the error ends with
    a hint about which file to pass. The returned text has neither.

    Args:
        path: The file.
        text: What to write to the file first.
    """
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ProfileError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    is_about_version = "this lflops reads" in message
    assert is_about_version != message.endswith(HINT)
    return message.removeprefix(f"{path}: ").removesuffix(HINT)


def read_or_refused(path: Path, text: bytes) -> None:
    """Check that a file is either read or refused; any other exception fails the test.

    An error begins with the file's name and is one short printable line.
    """
    path.write_bytes(text)
    try:
        assert isinstance(load(path), Profile)
    except ProfileError as error:
        message = str(error)
        assert message.startswith(f"{path}: ")
        assert message.isprintable()
        assert len(message) < len(str(path)) + 1500


# Saving and loading


def test_a_profile_is_read_as_it_was_saved(path: Path) -> None:
    """The small profile, which has every kind of record, is equal after saving and loading."""
    save(small_profile(), path)
    assert small_profile() == load(path)


def test_a_profile_of_many_modules_is_read_as_it_was_saved(path: Path) -> None:
    """A profile of 300 modules with 9 op counts each is equal after saving and loading."""
    save(profile_of(300), path)
    assert profile_of(300) == load(path)


def test_the_small_profile_has_its_pencilled_macs() -> None:
    """The small profile has the MACs of its two linear layers, computed by hand.

    Forward has both matmuls. Backward has the first once, because its input needs no gradient, and
    the second twice.
    """
    assert 4 * 8 * 16 + 4 * 16 * 2 == small_profile().total()
    assert 4 * 8 * 16 + 2 * 4 * 16 * 2 == small_profile().total(phase="backward")


def test_a_profile_saves_itself(path: Path) -> None:
    """`Profile.save` writes the same file as `save`."""
    small_profile().save(str(path))
    assert small_profile() == load(str(path))


names = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="."), min_size=1, max_size=5
)
counts = st.integers(0, 2**70)
finite = st.floats(0, allow_infinity=False)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Draw profiles with any module tree, any counts in any op counts, and any values in notes."""
    rows: dict[str, dict[str, Any]] = {"": {}}
    for name in draw(st.lists(names, max_size=6, unique=True)):
        above = draw(st.sampled_from(sorted(rows)))
        rows[f"{above}.{name}".removeprefix(".")] = {
            "class_name": name,
            "peak_bytes": draw(st.none() | counts),
        }
    cells = st.builds(
        OpCount,
        module=st.sampled_from(sorted(rows)),
        operator=names,
        phase=st.sampled_from(PHASES),
        dtype=names,
        calls=counts,
        macs=counts,
        executed_macs=counts,
        flops=counts,
        bytes_moved=counts,
    )
    notes = st.builds(
        Note,
        code=names,
        subject=names,
        values=st.dictionaries(names, st.integers() | finite | names, max_size=3),
    )
    steps = st.builds(
        Step,
        index=counts,
        kind=st.just("unprofiled"),
        seconds=st.none() | finite,
        phases=st.dictionaries(names, finite, max_size=3),
    )
    return profile(
        rows,
        draw(st.lists(cells, max_size=6)),
        notes=draw(st.tuples(notes) | st.just(())),
        steps=draw(st.tuples(steps) | st.just(())),
    )


@given(any_profile=profiles())
def test_any_profile_is_read_as_it_was_saved(scratch: Path, any_profile: Profile) -> None:
    """Any names, counts above 64 bits and all bits of floats survive saving and loading."""
    save(any_profile, scratch)
    assert any_profile == load(scratch)


def with_unknown(value: Any) -> Any:
    """Return a value as JSON values, with one additional field in every struct."""
    if isinstance(value, msgspec.Struct):
        fields = {name: with_unknown(getattr(value, name)) for name in value.__struct_fields__}
        if value.__struct_config__.array_like:
            return [*fields.values(), "new"]
        return fields | {"new": [{"at": None}, 1e9]}
    if isinstance(value, dict):
        return {key: with_unknown(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [with_unknown(inner) for inner in value]
    return value


def test_what_a_later_minor_version_adds_is_ignored(path: Path) -> None:
    """An additional field in every struct is ignored, whatever it contains."""
    later = msgspec.structs.replace(small_profile(), schema_version="2.7")
    path.write_bytes(json.dumps(with_unknown(later)).encode())
    assert later == load(path)


@pytest.mark.parametrize(
    "key", ["communication", "steps", "memory", "trace", "ranks", "rank_stats", "notes"]
)
def test_what_only_a_training_run_has_may_be_missing(path: Path, key: str) -> None:
    """A missing field that only training runs have gets its default value.

    The file of a count does not have these fields.
    """
    path.write_bytes(without((key,)))
    defaults = {field.name: field.default for field in msgspec.structs.fields(Profile)}
    assert defaults[key] == getattr(load(path), key)


# Random damage


@given(text=st.binary())
def test_any_bytes_are_refused(scratch: Path, text: bytes) -> None:
    """Random bytes are never a profile."""
    refusal(scratch, text)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_foreign_json_is_refused(scratch: Path, value: object) -> None:
    """Random JSON, including the `NaN` and `Infinity` that Python writes, is never a profile."""
    refusal(scratch, json.dumps(value).encode())


@given(length=st.integers(0, len(SMALL) - 1))
def test_a_truncated_file_is_refused(scratch: Path, length: int) -> None:
    """A file that was truncated at any byte is refused."""
    refusal(scratch, SMALL[:length])


@given(
    flips=st.lists(
        st.tuples(st.integers(0, len(SMALL) - 1), st.integers(1, 255)), min_size=1, max_size=4
    )
)
def test_flipped_bits_are_refused_or_harmless(scratch: Path, flips: list[tuple[int, int]]) -> None:
    """A file with flipped bits is read or refused.

    It can be read if, for example, only a name or a time has changed.
    """
    text = bytearray(SMALL)
    for position, mask in flips:
        text[position] ^= mask
    read_or_refused(scratch, bytes(text))


@given(
    start=st.integers(0, len(SMALL)),
    length=st.integers(0, 200),
    inserted=st.binary(max_size=20) | st.sampled_from([b"{", b"[", b'"', b",", b"\\", b"NaN"]),
)
def test_a_replaced_stretch_is_refused_or_harmless(
    scratch: Path, start: int, length: int, inserted: bytes
) -> None:
    """A file with a range of bytes replaced is read or refused.

    Examples are lost brackets, doubled quotes and single backslashes.
    """
    read_or_refused(scratch, SMALL[:start] + inserted + SMALL[start + length :])


ODD = [
    # Numbers, other literals, and texts that look like numbers
    *(
        b"null",
        b"true",
        b"-1",
        b"-0",
        b"0",
        b"1.5",
        b"1e3",
        b"1e999",
        b"-1e999",
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1_000",
        b"0x10",
        b"'x'",
    ),
    # Strings
    *(
        b'""',
        b'"-1"',
        b'"1.0"',
        b'"\\ud800"',
        b'"\\u0000"',
        b'"\x00"',
        b'"\xff"',
        b"\xff",
        b'"\\u001b[31m\\u202e\\n"',
        '"ä.ö.☃"'.encode(),
    ),
    # Containers, some of them deep or not closed
    *(
        b"[]",
        b"[[]]",
        b"{}",
        b'{"":{}}',
        b'{"calls":-1}',
        b"[" * 2000,
        b"[" * 2000 + b"]" * 2000,
        b'{"a":' * 2000,
    ),
    # Long values
    *(b"9" * 30, b"9" * 4300, b"9" * 5000, b"-" + b"9" * 30, b'"' + b"x" * 5000 + b'"'),
]


@settings(max_examples=500)
@given(keys=st.sampled_from(PLACES), odd=st.sampled_from(ODD))
def test_any_value_replaced_by_an_odd_one_is_refused_or_harmless(
    scratch: Path, keys: Keys, odd: bytes
) -> None:
    """A file with an unusual value of any type at any path is read or refused."""
    read_or_refused(scratch, spoilt(keys, odd) if keys else odd)


@settings(max_examples=300)
@given(keys=st.sampled_from(PLACES[1:]), other=st.sampled_from(PLACES[1:]))
def test_any_value_that_stands_at_anothers_place_is_refused_or_harmless(
    scratch: Path, keys: Keys, other: Keys
) -> None:
    """A file with a copy of one of its values at another path is read or refused."""
    read_or_refused(scratch, replaced(keys, at(tree(), other)))


@settings(max_examples=300)
@given(keys=st.sampled_from([keys for keys in PLACES if keys]))
def test_any_missing_value_is_refused_or_harmless(scratch: Path, keys: Keys) -> None:
    """A file without any one of its values, required or not, is read or refused."""
    read_or_refused(scratch, without(keys))


@given(
    keys=st.sampled_from([keys for keys in PLACES if keys and isinstance(keys[-1], str)]),
    odd=st.sampled_from(ODD),
    first=st.booleans(),
)
def test_a_key_that_is_there_twice_is_refused_or_harmless(
    scratch: Path, keys: Keys, odd: bytes, *, first: bool
) -> None:
    """A file with a duplicate key, before or after the original key, is read or refused.

    The last value counts, but the decoder also checks the first.
    """
    root = tree()
    container = at(root, keys[:-1])
    value = container.pop(keys[-1])
    if first:
        container[PLACEHOLDER] = 0
        container[keys[-1]] = value
    else:
        container[keys[-1]] = value
        container[PLACEHOLDER] = 0
    placeholder = json.dumps(PLACEHOLDER).encode() + b": 0"
    twin = json.dumps(keys[-1]).encode() + b": " + odd
    read_or_refused(scratch, json.dumps(root).encode().replace(placeholder, twin))


def test_a_wrong_value_is_refused_with_its_place(path: Path) -> None:
    """Every number and string that is replaced by a list of lists is refused with its path.

    No field of a profile is a list of a list, so each replacement is wrong.
    """
    root = tree()
    leaves = []
    for keys in PLACES:
        is_leaf = not isinstance(at(root, keys), dict | list)
        if is_leaf and keys != ("schema_version",):
            leaves.append(keys)
    assert 800 < len(leaves)
    for keys in leaves:
        said = refusal(path, replaced(keys, [[]]))
        assert said.startswith(keys[0])
        if keys[0] == "modules":
            assert said.startswith(f"modules[{keys[1]!r}].")
        place = said.partition(":")[0]
        last = keys[-1]
        if isinstance(last, int):
            assert place.endswith(f"[{last}]")
        else:
            assert place.endswith((f".{last}", f"[{last!r}]"))


def test_every_missing_count_is_refused_with_its_place(path: Path) -> None:
    """Each missing count is refused with its module, phase and name.

    There are 5 modules with 5 phases of 12 counts.
    """
    works = list(itertools.product(small_profile().modules, PHASES, COUNTS))
    assert 5 * 5 * 12 == len(works)
    for module, phase, count in works:
        said = refusal(path, without(("modules", module, phase, count)))
        assert f"modules[{module!r}].{phase}: object missing required field `{count}`" == said


# Texts of errors


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"hello", "JSON is malformed: invalid character (byte 0)"),
        (b"null", "not an lflops profile: expected `object`, got `null`"),
        (b"[1, 2]", "not an lflops profile: expected `object`, got `array`"),
        (b'{"events": []}', "not an lflops profile: schema_version is missing"),
        (
            b'{"schema_version": "2.0"}',
            "not an lflops profile: object missing required field `run`",
        ),
        (b"\x1f\x8b\x08", "the file is compressed with gzip: decompress the file first"),
        (
            gzip.compress(SMALL, mtime=0),
            "the file is compressed with gzip: decompress the file first",
        ),
        (TRACE, "this file is a trace of torch.profiler, which `lflops trace show` can read"),
        (
            gzip.compress(TRACE, mtime=0),
            "this file is a trace of torch.profiler, which `lflops trace show` can read",
        ),
        (b'\xef\xbb\xbf{"schema_version": "2.0"}', "JSON is malformed: invalid character (byte 0)"),
        (SMALL + b"}", f"JSON is malformed: trailing characters (byte {len(SMALL) + 1})"),
    ],
)
def test_what_is_no_profile_is_called_so(path: Path, text: bytes, said: str) -> None:
    """The error says what is wrong with a file that is not a profile.

    The files are empty, foreign, compressed, traces, or have a byte order mark or an extra bracket.
    """
    assert said == refusal(path, text)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (
            b'"3.0"',
            (
                'schema_version is "3.0", but this lflops reads 2.x: a later version of lflops is '
                "needed"
            ),
        ),
        (
            b'"10.3"',
            (
                'schema_version is "10.3", but this lflops reads 2.x: a later version of lflops is '
                "needed"
            ),
        ),
        (
            b'"1.0"',
            (
                'schema_version is "1.0", but this lflops reads 2.x: an earlier version of lflops '
                "is needed"
            ),
        ),
        (b"null", 'not an lflops profile: schema_version is null, but must be "major.minor"'),
        (b"1.0", 'not an lflops profile: schema_version is 1.0, but must be "major.minor"'),
        (b'"1"', 'not an lflops profile: schema_version is "1", but must be "major.minor"'),
        (b'"1.0.0"', 'not an lflops profile: schema_version is "1.0.0", but must be "major.minor"'),
        (b'"-1.0"', 'not an lflops profile: schema_version is "-1.0", but must be "major.minor"'),
        (
            '"١.٠"'.encode(),
            'not an lflops profile: schema_version is "١.٠", but must be "major.minor"',
        ),
    ],
)
def test_another_version_is_refused_before_anything_else_is_looked_at(
    path: Path, version: bytes, said: str
) -> None:
    """The version is checked first: the error reports only the version.

    `modules` in this file is wrong as well.
    """
    assert said == refusal(path, b'{"modules": 5, "schema_version": ' + version + b"}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"-5", "is -5: expected `int` >= 0"),
        (b"true", "is true: expected `int`, got `bool`"),
        (b'"12"', 'is "12": expected `int`, got `str`'),
        (b"null", "is null: expected `int`, got `null`"),
        (b"1e3", "is 1e3: expected `int`, got `float`"),
        (b"9" * 5000, "is " + "9" * 37 + "..." + "9" * 38 + ": integer value out of range"),
        (b"[[1]]", ": expected `int`, got `array`"),
    ],
)
def test_a_wrong_count_is_shown_with_its_module_and_field(
    path: Path, text: bytes, said: str
) -> None:
    """The error has the path, the wrong value and the expected type.

    The error of msgspec lacks the name of the module.
    """
    place = "modules['encoder.0'].forward.self_macs"
    separator = "" if said.startswith(":") else " "
    keys = ("modules", "encoder.0", "forward", "self_macs")
    assert f"{place}{separator}{said}" == refusal(path, spoilt(keys, text))


@pytest.mark.parametrize(
    ("keys", "text", "said"),
    [
        (
            ("run", "kind"),
            b'"guess"',
            'run.kind is "guess": it must be one of count, measure, estimate, training',
        ),
        (("run", "shapes", "0", 1), b"-8", "run.shapes['0'][1] is -8: expected `int` >= 0"),
        (("run", "observer_ratio"), b"1e999", "run.observer_ratio is 1e999: number out of range"),
        (
            ("modules", "head", "dtypes", "float32", "bytes"),
            b"-1",
            "modules['head'].dtypes.float32.bytes is -1: expected `int` >= 0",
        ),
        (
            ("modules", "head", "forward", "seconds", "low"),
            b"-1.5",
            "modules['head'].forward.seconds.low is -1.5: expected `float` >= 0.0",
        ),
        (
            ("op_counts", 3, "operator"),
            b"7",
            "op_counts[3].operator is 7: expected `str`, got `int`",
        ),
        (
            ("op_counts", 3, "phase"),
            b'"sideways"',
            (
                'op_counts[3].phase is "sideways": it must be one of forward, backward, recompute, '
                "optimizer, other"
            ),
        ),
        (("memory", "timeline", 2, 3), b"-1", "memory.timeline[2][3] is -1: expected `int` >= 0"),
        (
            ("memory", "by_category", "parameters"),
            b"{}",
            "memory.by_category.parameters: expected `int`, got `object`",
        ),
        (
            ("steps", 0, "phases", "forward"),
            b'"fast"',
            'steps[0].phases.forward is "fast": expected `float`, got `str`',
        ),
        (
            ("notes", 0, "values", "host"),
            b"null",
            "notes[0].values.host is null: expected `int | float | str`, got `null`",
        ),
        (
            ("ranks", 1, "status"),
            b'"lost"',
            'ranks[1].status is "lost": it must be one of ok, late, missing, failed',
        ),
    ],
)
def test_a_wrong_value_is_shown_with_its_place_and_what_is_taken(
    path: Path, keys: Keys, text: bytes, said: str
) -> None:
    """The error has the path and the valid values, at every kind of place.

    These are mappings, tuples, structs that are written as arrays, and optional structs.
    """
    assert said == refusal(path, spoilt(keys, text))


@pytest.mark.parametrize(
    "literal",
    [b"NaN", b"Infinity", b"-Infinity", b"nan", b"tru", b'"\\x"', b'"\\ud800 "', b"01", b"'1'"],
)
def test_what_is_no_json_is_named_with_its_module_and_field(path: Path, literal: bytes) -> None:
    """The error for malformed JSON has the path of the value at which parsing stopped."""
    keys = ("modules", "encoder.0", "forward", "seconds", "median")
    assert "modules['encoder.0'].forward.seconds.median: JSON is malformed" in refusal(
        path, spoilt(keys, literal)
    )


def test_a_wrong_row_that_is_there_twice_is_refused_with_the_mapping(path: Path) -> None:
    """If a wrong module has a correct duplicate, the error names only the mapping.

    The last duplicate counts, so the wrong one cannot be identified afterwards.
    """
    assert "modules[...]: 'Expected `object`, got `int`'" == refusal(
        path, SMALL.replace(b'"head":{"class_name"', b'"head":5,"head":{"class_name"', 1)
    )


def test_a_truncated_file_is_named_with_the_place_at_which_it_ends(path: Path) -> None:
    """The error for a truncated file has the path at which the file ends.

    Here the file ends directly after a key of the module `encoder.1`.
    """
    end = SMALL.index(b'"calls"', SMALL.index(b'"encoder.1"')) + len(b'"calls":')
    assert "modules['encoder.1'].calls: Input data was truncated" == refusal(path, SMALL[:end])


def test_the_place_in_a_huge_file_is_not_searched_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file above a size limit, the path of the error is not searched for.

    The search would take minutes. The test lowers the limit to 100 bytes.
    """
    monkeypatch.setattr("lflops.profile.json_file.LARGEST_SEARCH", 100)
    assert "Input data was truncated" == refusal(path, SMALL[:-200])


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        (("run", "host"), "run.host"),
        (("modules", "encoder.0", "class_name"), "modules['encoder.0'].class_name"),
        (("op_counts", 2, "operator"), "op_counts[2].operator"),
        (("notes", 0, "values", "host"), "notes[0].values.host"),
        (("memory", "timeline", 3, 0), "memory.timeline[3][0]"),
        (("unknown",), "unknown"),
        (("not a name",), "['not a name']"),
        (("x" * 5000,), f"['{'x' * 37}...{'x' * 38}']"),
    ],
)
def test_bad_utf8_is_named_with_its_place(path: Path, keys: Keys, place: str) -> None:
    """The error for invalid UTF-8 has the path, in known fields and in fields that are ignored."""
    text = spoilt(keys, b'"caf\xe9"')
    position = text.index(b"\xe9")
    assert f"{place}: byte {position} is not UTF-8" == refusal(path, text)


def test_bad_utf8_in_a_key_is_named_with_the_mapping(path: Path) -> None:
    """If the name of a module is not UTF-8, the error names the mapping that contains it."""
    text = SMALL.replace(b'"encoder.0"', b'"encoder.\xff"', 1)
    position = text.index(b"\xff")
    assert f"modules: byte {position} is not UTF-8" == refusal(path, text)


def test_bad_utf8_in_a_first_key_is_named_with_the_mapping(path: Path) -> None:
    """The mapping is also named if the invalid key is its first key."""
    text = spoilt(("run", "versions"), b'{"\xff": "1"}')
    position = text.index(b"\xff")
    assert f"run.versions: byte {position} is not UTF-8" == refusal(path, text)


def test_quotes_and_brackets_in_strings_do_not_mislead_the_search_for_a_place(path: Path) -> None:
    """The search for the path ignores escaped quotes and brackets inside strings.

    Such a string comes before the invalid byte.
    """
    text = replaced(("run", "host"), 'a"]}, {"b": [\\').replace(b'"node1"', b'"\xff"')
    position = text.index(b"\xff")
    assert f"notes[0].values.host: byte {position} is not UTF-8" == refusal(path, text)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("closed", [True, False])
def test_deep_nesting_is_refused_wherever_it_is(
    path: Path, opening: bytes, *, closed: bool
) -> None:
    """100,000 levels of nesting are refused with a short error.

    The nesting is the whole file, or the value of an unknown or a known field.
    """
    deep = opening * 100_000
    if closed:
        closing = b"]" if opening == b"[" else b"}"
        deep += b"0" + closing * 100_000
    refusal(path, deep)
    places: list[Keys] = [
        ("unknown",),
        ("run", "shapes", "0", 0),
        ("modules", "encoder", "forward", "calls"),
        ("notes", 0, "values", "host"),
    ]
    for keys in places:
        said = refusal(path, spoilt(keys, deep))
        assert said.startswith(str(keys[0]))
        assert said.endswith("nested too deeply")
        assert len(said) < 200
        if keys[0] == "modules":
            assert said.startswith("modules['encoder'].forward.calls")


def test_deep_nesting_that_json_bears_is_refused_as_a_wrong_type(path: Path) -> None:
    """50 levels are not too deep for JSON, so the error is only the wrong type."""
    deep = b"[" * 50 + b"]" * 50
    assert "modules['head'].calls: expected `int`, got `array`" == refusal(
        path, spoilt(("modules", "head", "calls"), deep)
    )


def test_strings_of_a_hostile_file_are_shown_short_and_printable(path: Path) -> None:
    """Errors quote a megabyte of terminal escapes as a short printable text.

    The escapes are names, keys or values in various places.
    """
    hostile = "\x1b]0;owned\x07\u202e\n" * 100_000
    row = at(tree(), ("modules", "head"))
    for text in (
        replaced(("modules", hostile), row),
        replaced(("modules", f"{hostile}.{hostile}"), row),
        replaced(("modules", "head", "owner"), hostile),
        replaced(("op_counts", 0, "module"), hostile),
        replaced(("memory", "by_module", hostile), 1),
        replaced(("run", "kind"), hostile),
        replaced(("schema_version",), hostile),
        replaced((hostile,), PLACEHOLDER).replace(PLACEHOLDER.encode(), b"\xff"),
    ):
        said = refusal(path, text)
        assert said.isprintable()
        assert len(said) < 500


# Inconsistent modules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (without(("modules", "")), "modules has no entry for the root module, which is named ''"),
        (
            without(("modules", "encoder")),
            "modules['encoder.0'] has no parent: 'encoder' is missing",
        ),
        (
            replaced(("modules", "head", "depth"), 2),
            "modules['head'].depth is 2, but a module with this name has depth 1",
        ),
        (
            replaced(("modules", "", "depth"), 1),
            "modules[''].depth is 1, but a module with this name has depth 0",
        ),
        (
            replaced(("modules", "head", "owner"), "tail"),
            "modules['head'].owner is 'tail', which is not in modules",
        ),
        (
            replaced(("op_counts", 1, "module"), "encoder.2"),
            "op_counts[1].module is 'encoder.2', which is not in modules",
        ),
        (
            replaced(("unsupported", 0, "module"), "encoder.2"),
            "unsupported[0].module is 'encoder.2', which is not in modules",
        ),
        (
            replaced(("communication", 0, "module"), "dp"),
            "communication[0].module is 'dp', which is not in modules",
        ),
        (
            replaced(("rank_stats", 0, "module"), "Head"),
            "rank_stats[0].module is 'Head', which is not in modules",
        ),
        (
            replaced(("memory", "alive", 1, 2), "x"),
            "memory.alive[1].module is 'x', which is not in modules",
        ),
        (
            replaced(("memory", "timeline", 3, 1), "x"),
            "memory.timeline[3].module is 'x', which is not in modules",
        ),
        (
            replaced(("memory", "by_module", "x"), 0),
            "a key of memory.by_module is 'x', which is not in modules",
        ),
        (
            replaced(("waits",), [["head", "dp"]]),
            "waits[0][1] is 'dp': the phases are forward, backward, recompute, optimizer, other",
        ),
        (
            replaced(("modules", "encoder", "forward", "macs"), 511),
            (
                "modules['encoder'].forward.macs is 511, but self_macs and the macs of the direct submodules "
                "add up to 512"
            ),
        ),
        (
            replaced(("modules", "", "backward", "self_comm_bytes"), 0),
            (
                "modules[''].backward.comm_bytes is 712, but self_comm_bytes and the comm_bytes of the direct "
                "submodules add up to 0"
            ),
        ),
        (
            replaced(("modules", "head", "optimizer", "self_flops"), 10**4300 - 1),
            (
                "modules['head'].optimizer.flops is 34, but self_flops and the flops of the direct submodules "
                "add up to more"
            ),
        ),
        (
            replaced(("modules", "head", "optimizer", "self_flops"), 10**30),
            (
                "modules['head'].optimizer.flops is 34, but self_flops and the flops of the direct "
                f"submodules add up to 1{'0' * 30}"
            ),
        ),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(path: Path, text: bytes, said: str) -> None:
    """Inconsistent modules are refused.

    Every module needs its parent, every name that is referred to must exist, and inclusive counts
    must be the sum of the self counts and the counts of the modules directly below.
    """
    assert said == refusal(path, text)


def test_the_order_of_rows_does_not_matter(path: Path) -> None:
    """The modules may have any order, here with children before parents and the root last."""
    root = tree()
    root["modules"] = dict(reversed(root["modules"].items()))
    path.write_bytes(json.dumps(root).encode())
    assert small_profile() == load(path)


# Missing files and files of another kind


def test_a_missing_file_is_refused(path: Path) -> None:
    """The error is the message of the operating system."""
    assert "No such file or directory" == refusal(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    """A folder, such as the folder of a run, is refused."""
    assert "not a regular file, but a folder, a pipe or a device" == refusal(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_without_waiting_for_its_writer(path: Path) -> None:
    """A named pipe is refused without opening it, which would wait for a writer."""
    os.mkfifo(path)
    assert "not a regular file, but a folder, a pipe or a device" == refusal(path)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no devices here")
def test_a_device_is_refused_without_reading_it(path: Path) -> None:
    """A device such as `/dev/zero`, which has no end, is refused unread."""
    path.symlink_to("/dev/zero")
    assert "not a regular file, but a folder, a pipe or a device" == refusal(path)


def test_a_file_that_is_too_large_is_refused_unread(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file above the size limit is refused unread.

    The limit is 1 GiB; the test lowers it to one byte less than the size of the file.
    """
    monkeypatch.setattr("lflops.profile.json_file.LARGEST_FILE", len(SMALL) - 1)
    assert f"the file has {len(SMALL)} bytes, but lflops reads at most {len(SMALL) - 1}" == refusal(
        path, SMALL
    )


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(path: Path) -> None:
    """The error is the message of the operating system."""
    path.touch(mode=0o000)
    assert "Permission denied" == refusal(path)


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000, "new\nline", "lone\udcff"])
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    """An invalid file name is refused, and the error shows unprintable names escaped."""
    with pytest.raises(ProfileError) as caught:
        load(name)
    is_printable = name == "x" * 5000
    shown = name if is_printable else ascii(name)
    assert str(caught.value).startswith(f"{shown}: ")


# Refusals and failures of saving


def unsaved(value: Profile, path: Path) -> str:
    """Save a profile that must be refused, and return the reason without the file's name."""
    with pytest.raises(ProfileError) as caught:
        save(value, path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.endswith("; nothing was written")
    return message.removeprefix(f"{path}: ").removesuffix("; nothing was written")


def with_row(name: str, **fields: Any) -> Profile:
    """Return the small profile with changed fields of one module."""
    small = small_profile()
    row = msgspec.structs.replace(small.modules[name], **fields)
    return msgspec.structs.replace(small, modules={**small.modules, name: row})


NAN = float("nan")
INFINITY = float("inf")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            with_row("encoder.0", backward=work(seconds=spread(NAN))),
            "modules['encoder.0'].backward.seconds.median is nan",
        ),
        (
            with_row("head", other=work(device_seconds=spread(INFINITY))),
            "modules['head'].other.device_seconds.median is inf",
        ),
        (with_row("head", calls=NAN), "modules['head'].calls is nan"),
        (
            msgspec.structs.replace(
                small_profile(), notes=(Note(code="c", subject="s", values={"ratio": -INFINITY}),)
            ),
            "notes[0].values.ratio is -inf",
        ),
        (
            msgspec.structs.replace(
                small_profile(), steps=(Step(index=0, kind="unprofiled", seconds=NAN, phases={}),)
            ),
            "steps[0].seconds is nan",
        ),
    ],
)
def test_what_is_not_finite_is_refused_with_its_place(
    path: Path, given: Profile, said: str
) -> None:
    """NaN and infinity are not written.

    As `null`, they would be read as unknown or not at all.
    """
    expected = f"{said}, but must be a finite number, or None if it is unknown"
    assert expected == unsaved(given, path)
    assert not path.exists()


def test_what_is_no_plain_value_is_refused_with_its_place(path: Path) -> None:
    """A number of another type, here a `Fraction`, is refused with its path."""
    said = "modules['head'].calls is a Fraction, but must be a number, a string or None"
    assert said == unsaved(with_row("head", calls=Fraction(1)), path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (with_row("head", calls=-1), "modules['head'].calls is -1: expected `int` >= 0"),
        (
            with_row("head", depth=0),
            "modules['head'].depth is 0, but a module with this name has depth 1",
        ),
        (
            msgspec.structs.replace(small_profile(), modules={}),
            "modules has no entry for the root module, which is named ''",
        ),
        (
            msgspec.structs.replace(small_profile(), modules={"a": module_profile()}),
            "modules has no entry for the root module, which is named ''",
        ),
        (
            msgspec.structs.replace(
                small_profile(), op_counts=(cell("x", "aten::add", "forward"),)
            ),
            "op_counts[0].module is 'x', which is not in modules",
        ),
        (
            msgspec.structs.replace(small_profile(), schema_version="3.0"),
            (
                'schema_version is "3.0", but this lflops reads 2.x: a later version of lflops is '
                "needed"
            ),
        ),
    ],
)
def test_what_would_not_be_read_is_not_written(path: Path, given: Profile, said: str) -> None:
    """`save` refuses what `load` would refuse, with the same message."""
    assert said == unsaved(given, path)
    assert not path.exists()


def test_a_name_that_unicode_cannot_write_is_refused(path: Path) -> None:
    """A class name that is half of a surrogate pair is refused."""
    assert "surrogates not allowed" in unsaved(with_row("head", class_name="\ud800"), path)


def test_a_value_that_contains_itself_is_refused(path: Path) -> None:
    """A mapping that contains itself is refused; writing it would never end."""
    values: dict[str, Any] = {}
    values["self"] = values
    unsaved(
        msgspec.structs.replace(
            small_profile(), notes=(Note(code="c", subject="s", values=values),)
        ),
        path,
    )


def test_a_key_that_json_cannot_write_is_refused(path: Path) -> None:
    """A key that is neither a string nor a number is refused."""
    nothing: Any = None
    unsaved(
        msgspec.structs.replace(
            small_profile(), notes=(Note(code="c", subject="s", values={nothing: 1}),)
        ),
        path,
    )


def test_any_mapping_can_be_saved(path: Path) -> None:
    """A read-only mapping is saved too, and loaded as an equal dictionary."""
    small = small_profile()
    save(msgspec.structs.replace(small, modules=MappingProxyType(small.modules)), path)
    assert small == load(path)


def test_a_name_as_long_as_the_system_takes_can_be_saved(tmp_path: Path) -> None:
    """A file name of the maximum length works, so the temporary file cannot have a longer name."""
    save(small_profile(), tmp_path / ("x" * 255))
    assert small_profile() == load(tmp_path / ("x" * 255))


def test_missing_folders_are_made(tmp_path: Path) -> None:
    """`save` creates two missing parent folders."""
    save(small_profile(), tmp_path / "run" / "lflops" / "small.profile.json")
    assert small_profile() == load(tmp_path / "run" / "lflops" / "small.profile.json")


def test_a_file_is_replaced(path: Path) -> None:
    """An older file is replaced, and no other file is left in its folder."""
    path.write_bytes(b"older")
    save(small_profile(), path)
    assert small_profile() == load(path)
    assert [path] == list(path.parent.iterdir())


def test_a_refused_profile_leaves_the_older_file_as_it_was(path: Path) -> None:
    """If a profile is refused, the older file is unchanged, and no other file is left."""
    save(small_profile(), path)
    unsaved(with_row("head", other=work(seconds=spread(NAN))), path)
    assert SMALL == path.read_bytes()
    assert [path] == list(path.parent.iterdir())


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()]
)
def test_a_failure_while_writing_leaves_the_older_file_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str, failure: BaseException
) -> None:
    """A full disk or Ctrl-C leaves the older file unchanged and no temporary file.

    The failure occurs when the file is flushed to disk or when it is renamed.
    """

    def fail(*_: object) -> None:
        raise failure

    path.write_bytes(b"older")
    monkeypatch.setattr(step, fail)
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else ProfileError
    with pytest.raises(expected):
        save(small_profile(), path)
    assert b"older" == path.read_bytes()
    assert [path] == list(path.parent.iterdir())


def test_a_folder_is_not_written_over(tmp_path: Path) -> None:
    """Saving to the path of a folder is refused."""
    assert "not a regular file, but a folder, a pipe or a device" == unsaved(
        small_profile(), tmp_path
    )


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_written_over(path: Path) -> None:
    """Saving to a named pipe is refused, and the pipe remains."""
    os.mkfifo(path)
    assert "not a regular file, but a folder, a pipe or a device" == unsaved(small_profile(), path)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_folder_that_is_a_file_is_refused(path: Path) -> None:
    """If the parent is a file, the error is the message of the operating system."""
    path.touch()
    assert unsaved(small_profile(), path / "small.profile.json") in {
        "Not a directory",
        "File exists",
    }


def test_a_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    """`save` replaces a link and leaves its target unchanged.

    In a shared folder, another user's link could lead to any file of this user.
    """
    (tmp_path / "first").write_bytes(b"something else")
    (tmp_path / "latest").symlink_to(tmp_path / "first")
    save(small_profile(), tmp_path / "latest")
    assert not (tmp_path / "latest").is_symlink()
    assert small_profile() == load(tmp_path / "latest")
    assert b"something else" == (tmp_path / "first").read_bytes()


@pytest.mark.skipif(os.name != "posix", reason="no permissions here")
def test_a_private_file_stays_private(path: Path) -> None:
    """Saving again keeps the permissions of a file that only its owner can read."""
    save(small_profile(), path)
    path.chmod(0o600)
    save(small_profile(), path)
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(os.name != "posix", reason="no umask here")
def test_a_file_can_be_read_by_whom_the_umask_lets(path: Path) -> None:
    """A new file has the permissions of the umask.

    A temporary file of the standard library would be readable only by its owner.
    """
    before = os.umask(0o022)
    try:
        save(small_profile(), path)
    finally:
        os.umask(before)
    assert 0o644 == stat.S_IMODE(path.stat().st_mode)


def test_a_shape_with_countless_dimensions_is_refused(tmp_path: Path) -> None:
    """A shape with more than 64 dimensions, the maximum of torch, is refused.

    Otherwise showing a small file could need much memory.
    """
    path = tmp_path / "a.profile.json"
    save(small_profile(), path)
    content = json.loads(path.read_text("utf-8"))
    for dimensions, is_read in ((64, True), (65, False)):
        content["run"]["shapes"] = {"x": [1] * dimensions}
        path.write_text(json.dumps(content))
        if is_read:
            assert len(load(path).run.shapes["x"]) == dimensions
        else:
            with pytest.raises(ProfileError, match=r"shapes.* has 65 dimensions, but a tensor has"):
                load(path)
