"""Test the version, the changelog, and the contents of the wheel and of the sdist."""

import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest

import lflops
from tests.support.repository import ROOT
from tests.support.warm_python import WarmPython


def test_the_version_is_the_installed_one() -> None:
    """`lflops.__version__` is equal to the version in the metadata of the package."""
    assert version("lflops") == lflops.__version__


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and the sdist, and return their folder."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return folder


def test_the_wheel_ships_the_whole_package_and_nothing_else(built: Path) -> None:
    """The wheel contains exactly the files in `lflops/`, including `py.typed` and data files.

    It contains no tests and no examples.
    """
    (wheel,) = built.glob("*.whl")
    shipped = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}

    ours = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "lflops").rglob("*") if path.is_file()
    }
    assert {name for name in ours if "__pycache__" not in name} == shipped
    assert "lflops/py.typed" in shipped


def test_the_changelog_begins_with_this_version() -> None:
    """The first section of the changelog is for the current version."""
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert lflops.__version__.removesuffix(".dev0") == newest[1]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs git's list of files")
def test_the_sdist_has_what_a_contributor_needs(built: Path) -> None:
    """The sdist contains its metadata, `.gitignore` and all files that git tracks.

    Other hidden files are not included.
    """
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        shipped = {name.partition("/")[2] for name in file.getnames()}
    listed = subprocess.run(
        ["git", "ls-files"],  # noqa: S607
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    tracked = {name for name in listed if name and not name.startswith(".")}
    assert {"PKG-INFO", ".gitignore"} | tracked == shipped


def test_the_wheel_runs_where_it_alone_is_installed(built: Path, tmp_path: Path) -> None:
    """A wheel that pip has installed works without the repository on the path.

    The test checks its version, its entry points, the output of a command, and the script.
    """
    (wheel,) = built.glob("*.whl")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--target",
        tmp_path / "site",
        wheel,
    ]
    subprocess.run(pip, check=True, capture_output=True)
    code = (
        "import sys, importlib.metadata as m, lflops; from lflops.cli.main import main;"
        "print(lflops.__file__, lflops.__version__, m.metadata('lflops')['Version'], flush=True);"
        "print(*sorted(each.group for each in m.distribution('lflops').entry_points), flush=True);"
        "sys.exit(main(['hardware', 'H200']))"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "site")}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    where, groups, *figures = ran.stdout.splitlines()
    version = wheel.name.split("-")[1]
    assert f"{tmp_path}/site/lflops/__init__.py {version} {version}" == where
    assert GROUPS == groups.split()
    assert any("bf16" in line and "989.50 TFLOP/s" in line for line in figures)
    script = subprocess.run(
        [sys.executable, tmp_path / "site/bin/lflops", "--version"],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert f"lflops {version}\n" == script.stdout


LIGHTNINGS = ["lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory"]
GROUPS = ["console_scripts", *LIGHTNINGS, "tensorboard_plugins", "torch.backends"]


# The script makes imports of the packages in `BLOCKED` fail. Its argument is an output folder.
ALONE = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED = {"lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "tensorboard", "matplotlib", "transformers"}
for name in [name for name in sys.modules if name.partition(".")[0] in BLOCKED]:
    del sys.modules[name]
sys.meta_path.insert(0, Missing())

import torch, lflops
from lflops.cli.main import main

folder = sys.argv[1]
model, x = torch.nn.Linear(4, 5), torch.zeros(2, 4)
profile = lflops.count(model, x)
print(profile.modules[""].forward.macs)
profile.save(f"{folder}/a.json")
lflops.measure(model, x, repeats=1).save(f"{folder}/b.json")
assert lflops.estimate(model, x).modules[""].forward.macs == 40
assert [0] * 4 == [main(asked) for asked in (["show", f"{folder}/a.json"], ["diff", f"{folder}/a.json", f"{folder}/b.json"],
    ["html", f"{folder}/b.json"], ["roofline", f"{folder}/b.json"])]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = lflops.Schedule(wait=2, warmup=1, active=1)
with lflops.monitor(model, optimizer, dirpath=f"{folder}/run", schedule=schedule, trace=False) as monitor:
    for _ in range(8):
        with monitor.step(x):
            model(x).sum().backward()
            optimizer.step()
print(len(monitor.profiles))
assert main(["roofline", f"{folder}/b.json", "--figure", f"{folder}/a.svg"]) == 2
for use in (lambda: lflops.FlopsMonitor(), lambda: lflops.tensorboard.log, lambda: __import__("lflops.huggingface")):
    try:
        use()
    except lflops.LflopsError as error:
        assert isinstance(error, ImportError)
        print(error)
"""


def test_counting_needs_no_lightning_tensorboard_or_matplotlib(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    """Most of lflops works without the packages in `BLOCKED`.

    Counting, estimating, measuring, a custom loop and the commands run. Features that need one of
    these packages raise an error that names the package.
    """
    ended = warm_python.run(ALONE, tmp_path)
    assert 0 == ended.status, ended.err
    lines = ended.out.splitlines()
    assert ["40", "1"] == [lines[0], lines[-4]]
    assert (
        "lflops: a figure needs matplotlib, which is not installed: pip install matplotlib\n"
        in ended.err
    )
    assert [
        "FlopsMonitor needs lightning or pytorch-lightning, and neither is installed: pip install lightning",
        "lflops.tensorboard.log needs tensorboard, which is not installed: pip install tensorboard",
        "lflops.huggingface needs transformers, which is not installed: pip install transformers",
    ] == lines[-3:]
