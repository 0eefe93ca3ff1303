"""Files that are written completely or not at all."""

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: bytes, *, lasting: bool = False) -> None:
    """Write a file under a temporary name, and rename it when it is complete.

    A symbolic link stays a link. `lasting` waits until the disk has the content.
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
