"""Install the files of lflops as pip would, with the entry points that other packages use."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from tests.support.repository import ROOT


def unpacked_wheel(folder: Path) -> Path:
    """Build a wheel and unpack it there."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    ZipFile(wheel).extractall(folder)
    return folder
