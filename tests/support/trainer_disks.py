"""Training runs that cannot write some or all of their files, each in a separate process."""

import resource
import warnings
from pathlib import Path
from typing import NamedTuple

from lflops.profile.profile import Profile
from tests.support.lightning_runs import Classifier, fit, watching
from tests.support.trainer_ranks import SOON, rank, train

LARGEST_FILE = 2048
"""Bytes: less than any file of a window has."""


class Watched(NamedTuple):
    """What a training with a monitor leaves.

    The profiles, the files below the folder, and what the monitor warned of.
    """

    profiles: list[Profile]
    files: list[str]
    warned: list[str]
    steps: int


def on_a_full_disk(folder: Path) -> Watched:
    """No file gets longer than a little: this process's, Kineto's, or that of a process of ours."""
    monitor = watching(
        on_error="warn", trace=True, html=True, dirpath=folder, output_file=folder / "summary.txt"
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, most))
        try:
            trainer = fit(Classifier(), monitor)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    return _watched(monitor.profiles, folder, warned, trainer.global_step)


def where_the_second_cannot_write(folder: Path) -> Watched:
    """Every rank traces; for the folder of the second one there is a file in the way."""
    own = folder / str(rank())
    if rank():
        own.touch()
    monitor = watching(schedule=SOON, on_error="warn", trace=True, trace_ranks="all", dirpath=own)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        module = train("ddp", monitor)
    return _watched(monitor.profiles, own, warned, len(module.losses))


def _watched(
    profiles: list[Profile], folder: Path, warned: list[warnings.WarningMessage], steps: int
) -> Watched:
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return Watched(
        profiles,
        files,
        [text for each in warned if (text := str(each.message)).startswith("FlopsMonitor")],
        steps,
    )
