"""Reading a pickle that may be anyone's: it makes plain containers, texts and numbers, and refuses everything else by its name."""

import io
import pickle
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from lflops.errors import ProfileError

__all__ = ["LARGEST_FILE", "load_plain"]

LARGEST_FILE = 8 * 2**30


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that looks nothing up: no class, no function, no object from elsewhere."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse a global by its name."""
        raise pickle.UnpicklingError(f"has {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse an object that is stored elsewhere."""
        raise pickle.UnpicklingError(f"has an object that is stored elsewhere, {str(pid)[:60]!r}")


def load_plain(path: str | PathLike[str]) -> Any:
    """What a pickle holds, where that is plain.

    Raises:
        ProfileError: The file cannot be read, is no pickle, or has anything but containers, texts and numbers.
    """
    path = Path(path)
    try:
        if not path.is_file():
            path.stat()
            raise ProfileError(f"{path}: is a folder, a pipe or a device; give a file of torch.cuda.memory._dump_snapshot")
        if path.stat().st_size > LARGEST_FILE:
            raise ProfileError(f"{path}: has {path.stat().st_size} bytes; {LARGEST_FILE} at most are read")
        content = path.read_bytes()
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror or error}; give a file of torch.cuda.memory._dump_snapshot") from error
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except pickle.UnpicklingError as error:
        if str(error).startswith("has "):
            plain = "only plain containers, texts and numbers are read, because a pickle can run code"
            raise ProfileError(f"{path}: {error}: {plain}") from None
        raise ProfileError(f"{path}: is no pickle: {error}") from None
    except (
        ArithmeticError,
        AttributeError,
        EOFError,
        ImportError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise ProfileError(f"{path}: is no pickle, or a damaged one: {type(error).__name__}") from None
