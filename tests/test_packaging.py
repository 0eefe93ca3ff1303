import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import lflops
from tests.support.repository import ROOT


def test_the_version_is_the_installed_one() -> None:
    """`lflops.__version__` is what the package's metadata says."""
    assert version("lflops") == lflops.__version__


def test_the_wheel_ships_the_whole_package_and_nothing_else(tmp_path: Path) -> None:
    """Every file under lflops/, `py.typed` and data among them; no tests, no examples."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}

    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lflops").rglob("*") if path.is_file()}
    assert {name for name in ours if "__pycache__" not in name} == shipped
    assert "lflops/py.typed" in shipped
