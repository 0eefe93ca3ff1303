"""Build and unpack a wheel of lflops, so that its entry points exist as after `pip install`."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from tests.support.repository import ROOT


def unpacked_wheel(folder: Path) -> Path:
    """Build a wheel in a folder, unpack it there, and return the folder."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    ZipFile(wheel).extractall(folder)
    return folder
