"""Test `lflops.files`, the only module of lflops that opens files.

It never waits for a pipe, and never writes through a link.
"""

import ast
import gzip
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lflops import files
from lflops.files import (
    InflatedFile,
    open_for_append,
    read,
    remove_leftovers,
    replacing,
    temporary_path,
    write_whole,
)
from tests.support.repository import ROOT

pytestmark = pytest.mark.skipif(os.name != "posix", reason="no pipes, links or permissions here")

OPENERS = {
    "NamedTemporaryFile",
    "TemporaryDirectory",
    "TemporaryFile",
    "mkfifo",
    "mkstemp",
    "open",
    "read_bytes",
    "read_text",
    "touch",
    "write_bytes",
    "write_text",
}
"""Functions and methods that open a file by its path.

A method `open` counts only if its arguments are those of `Path.open`.
"""

MODULES = {"codecs", "gzip", "io", "np", "os", "shutil", "torch", "zipfile"}
"""Modules with functions that open files."""

OF_MODULES = {"copy", "copyfile", "copytree", "load", "open", "save"}
"""Functions of the modules above that open files."""

ALLOWED = {
    # Reads the list of public names, before any other module is imported.
    "lflops/__init__.py: open",
    # Opens /dev/null.
    "lflops/cli/main.py: os.open",
    # Opens the counters of a thread in /proc.
    "lflops/timing/clock.py: os.open",
    # Creates a file without a name.
    "lflops/trace/annotate_in_background.py: TemporaryFile",
    # Creates a folder that only this user can read.
    "lflops/monitoring/outputs/loggers.py: TemporaryDirectory",
    # Creates a new folder, and removes it at once.
    "lflops/monitoring/inputs/settings.py: TemporaryDirectory",
}
"""Calls outside `lflops.files` that open a file, and may do so."""


def openings(source: str) -> Iterator[str]:
    """Yield the names of the calls that open a file.

    Calls that open files of the package itself, by `__file__`, are skipped.
    """
    tree = ast.parse(source)
    of_package = {"__file__"}
    for node in tree.body:
        if isinstance(node, ast.Assign) and of_package & names_in(node.value):
            of_package |= names_in(*node.targets)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not of_package & names_in(node.func):
            name = opening(node)
            if name:
                yield name


def names_in(*nodes: ast.AST) -> set[str]:
    """Return all variables in expressions."""
    found = set()
    for node in nodes:
        found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found


def opening(call: ast.Call) -> str:
    """Return the name of the function if the call opens a file, else an empty text."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id if function.id in OPENERS else ""
    if not isinstance(function, ast.Attribute):
        return ""
    owner = ast.unparse(function.value)
    if owner in MODULES and function.attr in OF_MODULES:
        return f"{owner}.{function.attr}"
    if function.attr == "open":
        return "Path.open" if is_mode(call) else ""
    return function.attr if function.attr in OPENERS else ""


def is_mode(call: ast.Call) -> bool:
    """Return whether a call of a method `open` has the arguments of `Path.open`."""
    if any(each.arg in {"mode", "encoding", "buffering"} for each in call.keywords):
        return True
    first = call.args[0] if call.args else None
    return isinstance(first, ast.Constant) and set(str(first.value)) <= set("rwaxbt+")


def test_nothing_else_opens_a_file() -> None:
    """Only `lflops.files` opens files, except for the calls in `ALLOWED`.

    So the tests of `lflops.files` apply to every reader and writer of lflops.
    """
    found = set()
    for path in sorted((ROOT / "lflops").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name != "lflops/files.py":
            found |= {f"{name}: {each}" for each in openings(path.read_text("utf-8"))}
    assert ALLOWED == found


CULPRITS = {
    "open('a')": ["open"],
    "path.open('rb')": ["Path.open"],
    "path.open(encoding='utf-8')": ["Path.open"],
    "Path(name).read_text()": ["read_text"],
    "gzip.open(path)": ["gzip.open"],
    "os.open(path, os.O_RDONLY)": ["os.open"],
    "np.load(path)": ["np.load"],
    "tempfile.mkstemp()": ["mkstemp"],
    "path.touch()": ["touch"],
    "TABLE = Path(__file__).with_suffix('.toml')\nTABLE.read_bytes()": [],
    "segment.open()": [],
    "run.open('loop', 2)": [],
    "Image.open(BytesIO(png))": [],
}


@pytest.mark.parametrize(("source", "expected"), CULPRITS.items())
def test_an_opening_of_a_file_is_found(source: str, expected: list[str]) -> None:
    """The check above can fail: `openings` finds each call that opens a file."""
    assert expected == list(openings(source))


@pytest.fixture(params=["pipe", "device", "link to a device", "folder"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a path that is not a regular file."""
    path = tmp_path / "other"
    match request.param:
        case "pipe":
            os.mkfifo(path)
        case "device":
            return Path("/dev/zero")
        case "link to a device":
            path.symlink_to("/dev/zero")
        case _:
            path.mkdir()
    return path


def test_only_a_regular_file_is_read(no_file: Path) -> None:
    """Reading refuses pipes, devices and folders.

    Reading a pipe would wait for its writer, and reading `/dev/zero` would never end.
    """
    with pytest.raises(OSError, match="not a regular file, but a folder, a pipe or a device"):
        read(no_file)
    with pytest.raises(OSError, match="not a regular file, but a folder, a pipe or a device"):
        InflatedFile(no_file)


def test_only_a_regular_file_is_replaced(no_file: Path) -> None:
    """Writing refuses pipes, devices and folders. A user who is root could replace a device."""
    before = no_file.lstat().st_mode
    with pytest.raises(OSError, match="not a regular file, but a folder, a pipe or a device"):
        write_whole(no_file, b"new")
    assert before == no_file.lstat().st_mode


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    """A file above the size limit is refused. The test's sparse file needs no space on the disk."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="has 1099511627776 bytes, but lflops reads at most 1048576"):
        read(path)


def test_files_of_the_system_are_read_although_they_have_no_size() -> None:
    """Files in `/proc` have a size of 0, but are read."""
    assert 0 == Path("/proc/self/status").stat().st_size
    assert b"Pid:\t%d\n" % os.getpid() in read("/proc/self/status")


def test_a_compressed_file_is_read_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that decompresses to more than 100 times its size is refused.

    The test compresses a million zeros to about a thousand bytes.
    """
    monkeypatch.setattr(files, "MOST_INFLATED", 1000)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(1_000_000), mtime=0))
    with InflatedFile(path) as file:
        assert bytes(99_000) == file.read(99_000)
        with pytest.raises(OSError, match="the decompressed file is more than 100 times as large"):
            file.read(99_000)


@pytest.mark.parametrize("content", [b"text", gzip.compress(b"text", mtime=0)])
def test_a_file_is_read_whether_it_is_compressed_or_not(content: bytes, tmp_path: Path) -> None:
    """The first bytes of a file decide whether it is decompressed, not its name."""
    path = tmp_path / "file"
    path.write_bytes(content)
    with InflatedFile(path) as file:
        assert b"text" == file.read(100)
        assert b"" == file.read(100)


@pytest.mark.parametrize(
    "content", [gzip.compress(b"text" * 99, mtime=0)[:-9], gzip.compress(b"a", mtime=0)[:-1] + b"b"]
)
def test_damaged_compression_is_an_error_of_reading(content: bytes, tmp_path: Path) -> None:
    """A damaged gzip file raises an `OSError`. Python itself raises three kinds of errors."""
    path = tmp_path / "file"
    path.write_bytes(content)
    with InflatedFile(path) as file, pytest.raises(OSError, match=r"end-of-stream|CRC|length"):
        file.read(1000)


def test_a_planted_link_is_replaced(tmp_path: Path) -> None:
    """Writing replaces a link, and leaves its target unchanged.

    Otherwise, anyone who can write into the folder could choose the file that this user overwrites.
    """
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    path = tmp_path / "file"
    path.symlink_to(target)
    write_whole(path, b"new")
    assert b"precious" == target.read_bytes()
    assert b"new" == path.read_bytes()
    assert not path.is_symlink()


def test_a_link_in_place_of_the_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing fails if another user has created a link with the name of the temporary file.

    The name is random. The test replaces the random bytes, as if the other user had guessed them.
    """
    monkeypatch.setattr(os, "urandom", bytes)
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    temporary_path(tmp_path, ".tmp").symlink_to(target)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "file", b"new")
    assert b"precious" == target.read_bytes()


@pytest.mark.parametrize(("before", "expected"), [(None, 0o644), (0o600, 0o600), (0o666, 0o666)])
def test_a_file_keeps_its_permissions(before: int | None, expected: int, tmp_path: Path) -> None:
    """A replaced file keeps its permissions.

    A new file has the permissions that the umask allows.
    """
    path = tmp_path / "file"
    if before is not None:
        path.touch()
        path.chmod(before)
    umask = os.umask(0o022)
    try:
        write_whole(path, b"new")
    finally:
        os.umask(umask)
    assert expected == stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to any group")
def test_a_file_keeps_its_group(tmp_path: Path) -> None:
    """A replaced file keeps its group. Otherwise, another group could read it."""
    path = tmp_path / "file"
    path.touch()
    os.chown(path, -1, 12_345)
    path.chmod(0o660)
    write_whole(path, b"new")
    assert (12_345, 0o660) == (path.stat().st_gid, stat.S_IMODE(path.stat().st_mode))


def test_a_file_whose_group_cannot_be_kept_is_closed_to_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the old file has an access control list, the group gets no permissions for the new file.

    The list may deny access that the permissions seem to allow. The same happens if the new file
    cannot be given to the group of the old file; the test does not cover that case.
    """
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o664)
    monkeypatch.setattr(os, "listxattr", lambda _: ["system.posix_acl_access"], raising=False)
    write_whole(path, b"new")
    assert 0o604 == stat.S_IMODE(path.stat().st_mode)


def test_an_error_while_writing_leaves_the_file_before(tmp_path: Path) -> None:
    """If writing fails, the old file stays, and no temporary file is left."""
    path = tmp_path / "file"
    path.write_bytes(b"older")
    with pytest.raises(TypeError), replacing(path) as file:
        file.write(object())  # type: ignore[arg-type]
    assert b"older" == path.read_bytes()
    assert [path] == list(tmp_path.iterdir())


def test_appending_follows_no_link(tmp_path: Path) -> None:
    """A link cannot be opened for appending, with or without `new`."""
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    path = tmp_path / "file"
    path.symlink_to(target)
    for new in (True, False):
        with pytest.raises(OSError, match=r"symbolic links|File exists"):
            open_for_append(path, new=new)
    assert b"precious" == target.read_bytes()


def test_appending_to_a_pipe_does_not_wait(tmp_path: Path) -> None:
    """A pipe without a reader is refused at once. Opening it would otherwise wait for a reader."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(
        OSError, match=r"No such device|not a regular file, but a folder, a pipe or a device"
    ):
        open_for_append(path, new=False)


def test_what_a_killed_process_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary files of a process that has ended are removed, and all other files stay.

    The other files belong to a running process or to another machine, or have other names.
    """
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    own = temporary_path(tmp_path, ".raw")
    left = own.with_name(own.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-"))
    of_init = own.with_name(own.name.replace(f"-{os.getpid()}-", "-1-"))
    elsewhere = own.with_name(left.name.replace(platform.node(), "elsewhere"))
    others = [own, of_init, elsewhere, tmp_path / "a.profile.json", tmp_path / f".{ended.pid}"]
    # Another user has created a folder with such a name.
    folder = left.with_name(f"{left.name}-1")
    folder.mkdir()
    for path in (left, left.with_name(f"{left.name}.calls"), *others):
        path.touch()
    remove_leftovers(tmp_path)
    assert {*others, folder} == set(tmp_path.iterdir())
    remove_leftovers(tmp_path / "missing")
