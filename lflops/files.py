"""Open, read and write files safely, even if other users created the files or share the folders.

Reading never waits for a pipe, and never uses more memory than the caller allows. A file is written
completely or not at all, and never through a link. Other modules use this module for all files of a
run.
"""

import errno
import gzip
import os
import platform
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import BinaryIO, Self

GZIP = b"\x1f\x8b"
"""First bytes of a gzip file."""

SMALL = 1 << 20
"""Maximum size of a table, a configuration file or a file of the operating system, in bytes."""

MOST_INFLATED = 1 << 25
INFLATED_RATIO = 100
"""Maximum ratio of a file's decompressed size to its compressed size.

Up to `MOST_INFLATED` decompressed bytes are always allowed.
"""

_ACCESS_LIST = "system.posix_acl_access"
"""Name of the extended attribute in which Linux stores the access control list of a file."""

_NOT_REGULAR = "not a regular file, but a folder, a pipe or a device"


def open_file(path: str | PathLike[str], *, follow_link: bool = True) -> BinaryIO:
    """Open a regular file for reading.

    A pipe is rejected, because opening it could block until another process writes to it.

    Raises:
        OSError: The file cannot be opened, or it is a folder, a pipe or a device.
    """
    # Opening a device can have an effect, so the type of the file is checked before it is opened.
    _check_regular(Path(path).stat(), path)
    number = os.open(path, _flags("O_RDONLY", "" if follow_link else "O_NOFOLLOW"))
    try:
        # Another file may have replaced the checked file before it was opened.
        _check_regular(os.fstat(number), path)
    except BaseException:
        os.close(number)
        raise
    return os.fdopen(number, "rb")


def size_of(file: BinaryIO) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def read(path: str | PathLike[str], most: int = SMALL) -> bytes:
    """Read a whole regular file of at most `most` bytes.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is larger than `most` bytes.
    """
    with open_file(path) as file:
        size = size_of(file)
        if size > most:
            raise _error(
                errno.EFBIG, f"the file has {size} bytes, but lflops reads at most {most}", path
            )
        # Files of the operating system, such as the files in `/proc`, report a size of 0.
        return file.read(size or SMALL)


def path_text(path: str | PathLike[str]) -> str:
    """Return a path as text that can be written to a file.

    Bytes that are not valid UTF-8 are replaced.
    """
    return os.fsencode(path).decode(errors="replace")


class InflatedFile:
    """A regular file for reading. A gzip file is decompressed while it is read."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = path
        self._raw = open_file(path)
        self._left = max(MOST_INFLATED, INFLATED_RATIO * size_of(self._raw))
        is_compressed = self._raw.read(len(GZIP)) == GZIP
        self._raw.seek(0)
        self._file = gzip.GzipFile(fileobj=self._raw) if is_compressed else self._raw

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes after decompression.

        Raises:
            OSError: The file is damaged, or its decompressed size is over the limit.
        """
        try:
            content = self._file.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _error(errno.EIO, str(error), self._path) from error
        self._left -= len(content)
        if self._left < 0:
            message = (
                f"the decompressed file is more than {INFLATED_RATIO} times as large: "
                "decompress it yourself first"
            )
            raise _error(errno.EFBIG, message, self._path)
        return content


def write_whole(path: Path, content: bytes, *, lasting: bool = False) -> None:
    """Write a new file, and replace the file at `path` when the new file is complete.

    If `lasting` is true, the function waits until the content is on the disk.
    """
    with replacing(path) as file:
        file.write(content)
        if lasting:
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, which replaces the file at `path` when the context ends without an error.

    If `path` is a link, the link is replaced, and its target does not change. If the old file
    belongs to this user, other users who could not read the old file cannot read the new file.

    Raises:
        OSError: The file cannot be written, or `path` is a folder, a pipe or a device.
    """
    before = _replaced(path)
    # If the new file replaces an old file, other users cannot read it until its permissions are set
    # below.
    permissions = 0o666 if before is None else 0o600
    temporary = temporary_path(path.parent, ".tmp")
    flags = _flags("O_WRONLY", "O_CREAT", "O_EXCL")
    number = os.open(temporary, flags, permissions)
    try:
        with os.fdopen(number, "wb") as file:
            if before is not None:
                temporary.chmod(_permissions(path, before, temporary))
            yield file
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def temporary_path(folder: Path, ending: str) -> Path:
    """Return a new path for a temporary file. `remove_leftovers` removes the file after a crash."""
    return folder / f"{_temporary_prefix()}{os.getpid()}-{os.urandom(8).hex()}{ending}"


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of processes that ran on this machine and have ended."""
    prefix = _temporary_prefix()
    paths: list[Path] = []
    with suppress(OSError):
        paths.extend(folder.iterdir())
    for path in paths:
        process = path.name.removeprefix(prefix).partition("-")[0]
        if path.name.startswith(prefix) and process.isdecimal() and not _is_running(process):
            # The path may be a folder that another user has created. It stays.
            with suppress(OSError):
                path.unlink(missing_ok=True)


def owner_text() -> bytes:
    """Return text that identifies this process.

    The caller writes the text to a file. Another process can pass it to `has_ended` later.
    """
    return f"{platform.node()} {os.getpid()}".encode()


def has_ended(owner: bytes) -> bool:
    """Return whether the process that wrote the `owner_text` has ended.

    The result is false for a process on another machine, because its state is unknown.
    """
    node, _, process = owner.decode(errors="replace").rpartition(" ")
    return node == platform.node() and process.isdecimal() and not _is_running(process)


def _temporary_prefix() -> str:
    # The prefix contains the machine's name, because other machines may share the folder and it is
    # unknown whether their processes are still running.
    return f".lflops-{platform.node()}-"


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        # The process belongs to another user.
        return True
    return True


def open_for_append(path: Path, *, new: bool) -> int:
    """Open a file for appending, and return its descriptor.

    If `new` is true, the file is created. Otherwise, it must already exist as a regular file.

    Raises:
        OSError: The file cannot be opened, it is a link, or it already exists although `new` is
            true.
    """
    created = ("O_CREAT", "O_EXCL") if new else ()
    number = os.open(path, _flags("O_WRONLY", "O_APPEND", "O_NOFOLLOW", *created), 0o666)
    try:
        _check_regular(os.fstat(number), path)
    except BaseException:
        os.close(number)
        raise
    return number


@contextmanager
def folder_opened(folder: Path) -> Iterator[Path]:
    """Yield a path to a folder, for code that supports only ASCII paths.

    The path contains only ASCII characters, because it goes through `/proc`. On systems without
    `/proc`, the path of the folder itself is yielded.
    """
    number = os.open(folder, os.O_RDONLY)
    try:
        other = Path(f"/proc/self/fd/{number}")
        yield other if other.exists() else folder
    finally:
        os.close(number)


def open_lock(path: Path) -> int:
    """Open a file for the function `lock`, and return its descriptor.

    If the file is new, only this user can read and write it. A link is rejected.

    Raises:
        OSError: The file cannot be opened.
    """
    return os.open(path, _flags("O_RDWR", "O_CREAT", "O_NOFOLLOW"), 0o600)


def lock(file: int) -> bool:
    """Lock an open file without waiting.

    Returns false if another process has locked the file. On Windows, nothing is locked, and the
    result is always true.
    """
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_device(path: Path) -> BinaryIO:
    """Open a device or a pipe that the user chose as an output."""
    return path.open("wb", buffering=0)


def _replaced(path: Path) -> os.stat_result | None:
    """Return the `stat_result` of the file at `path` that a new file is about to replace.

    Returns `None` if there is no file at `path`, or if the file is a link or belongs to another
    user.
    """
    with suppress(FileNotFoundError):
        _check_regular(path.stat(), path)
        before = path.lstat()
        is_own = not hasattr(os, "getuid") or before.st_uid == os.getuid()
        if stat.S_ISREG(before.st_mode) and is_own:
            return before
    return None


def _permissions(path: Path, before: os.stat_result, new: Path) -> int:
    """Give a new file the group of the old file at `path`, and return the permissions to set.

    The permissions of the group are left out if the group of the new file cannot be changed, or if
    the old file has an access control list, which may limit the group.
    """
    permissions = stat.S_IMODE(before.st_mode) & 0o777
    is_limited = False
    with suppress(OSError, AttributeError):
        is_limited = _ACCESS_LIST in os.listxattr(path)
    try:
        if not is_limited and before.st_gid != new.stat().st_gid:
            os.chown(new, -1, before.st_gid)
    except OSError:
        is_limited = True
    return permissions & ~stat.S_IRWXG if is_limited else permissions


def _flags(*names: str) -> int:
    """Combine flags for `os.open`. Flags that this system does not have are left out."""
    flags = 0
    for name in (*names, "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    return flags


def _check_regular(status: os.stat_result, path: str | PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _error(errno.EINVAL, _NOT_REGULAR, path)


def _error(number: int, message: str, path: str | PathLike[str]) -> OSError:
    return OSError(number, message, os.fspath(path))
