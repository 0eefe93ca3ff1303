"""Files that are there whole or not at all."""

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: bytes, *, lasting: bool = False) -> None:
    """Write a file, which has its name once it is whole; a link stays a link.

    `lasting` waits until the disk has it.
    """
    path = path.resolve()
    temporary = path.with_name(f".lflops-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
