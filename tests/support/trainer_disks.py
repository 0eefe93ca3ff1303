"""Training runs that cannot write some or all of their files, each in a separate process."""

import resource
import warnings
from pathlib import Path
from typing import NamedTuple

from lflops.profile.profile import Profile
from tests.support.lightning_runs import Classifier, fit, watching
from tests.support.trainer_ranks import SOON, rank, train

LARGEST_FILE = 2048
"""Size limit in bytes. Every file of a window is larger."""


class Watched(NamedTuple):
    """The results of a training run with a monitor.

    Attributes:
        profiles: The profiles.
        files: The files in the folder, with relative paths.
        warned: The warnings of the monitor.
        steps: The number of steps that the run has done.
    """

    profiles: list[Profile]
    files: list[str]
    warned: list[str]
    steps: int


def on_a_full_disk(folder: Path) -> Watched:
    """Train while no file may be larger than `LARGEST_FILE`.

    The limit applies to the files of this process, of Kineto, and of the child processes of lflops.
    """
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
    """Train two ranks with traces. Rank 1 has a file where its folder should be."""
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
    texts = [str(each.message) for each in warned]
    of_monitor = [text for text in texts if text.startswith("FlopsMonitor")]
    return Watched(profiles, files, of_monitor, steps)
