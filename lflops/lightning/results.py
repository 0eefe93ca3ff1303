"""What becomes of a window that is closed: it is put together with those of all ranks, saved, logged and kept."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

from lflops.analyze.analysis import analyze
from lflops.collect.ranks.gather import Gather
from lflops.collect.ranks.topology import Topology, topology_of
from lflops.lightning.outlets.failures import Failures
from lflops.lightning.outlets.loggers import Outlets, scalars
from lflops.lightning.outlets.paths import OutputPaths
from lflops.lightning.trainer.compat import say, warn
from lflops.lightning.trainer.facts import reader_of_logged_step
from lflops.lightning.trainer.settings import Settings
from lflops.merging.merge import merge
from lflops.profile.model import Profile
from lflops.profile.records import ModulePhase

__all__ = ["Results"]


class Results:
    """The windows of one monitor in one run of the Trainer, of all stages.

    Args:
        trainer: Whose run it is.
        topology: Where its ranks stand.
        gather: Brings the ranks' windows together; `None` where there is one rank, or they cannot be reached.
        outlets: Where results go; `None` on all processes but the main one.
        places: Where files go; `None` for none.
        failures: What becomes of an error of one file or one logger.

    Attributes:
        profiles: The windows, those of all ranks together, on the main process.
    """

    def __init__(
        self,
        trainer: Any,
        topology: Topology,
        gather: Gather | None,
        outlets: Outlets | None,
        paths: OutputPaths | None,
        *,
        failures: Failures,
    ) -> None:
        """None is closed yet."""
        self.profiles: list[Profile] = []
        self.topology = topology
        self.outlets = outlets
        self.paths = paths
        self.failures = failures
        self._trainer = trainer
        self._gather = gather
        self._saved: tuple[Profile, Path] | None = None  # the last that was

    @classmethod
    def of(cls, trainer: Any, pl_module: Any, settings: Settings, log_dir: str | None, *, monitor: int, store: Any) -> Self:
        """Find out who takes part, and where results go; on every process, for they have to agree.

        Args:
            trainer: Whose run it is.
            pl_module: What is trained, or asked.
            settings: What is asked for.
            log_dir: The Trainer's, if it has one.
            monitor: Which of the Trainer's monitors it is for, from 1.
            store: That all ranks reach; `None` where they have none, or there is one rank.

        Raises:
            CountError: What the user says of the ranks cannot be.
        """
        strategy, rank = trainer.strategy, trainer.global_rank
        topology = topology_of(
            trainer.world_size,
            rank,
            function=settings.topology,
            mesh=getattr(strategy, "device_mesh", None),
            model=pl_module,
            sampler=getattr(strategy, "distributed_sampler_kwargs", None),
            node=str(trainer.node_rank),
        )
        gather = None if store is None else Gather(store, rank, topology, timeout=settings.gather_timeout)
        failures = Failures(raised=settings.on_error == "raise")
        outlets = Outlets(trainer, settings, monitor, failures) if trainer.is_global_zero else None
        dirpath = None if settings.dirpath is None else Path(settings.dirpath)
        paths = OutputPaths.of(log_dir, dirpath, monitor)
        if gather is None and topology.world_size > 1 and outlets is not None:
            kept = "there is no folder for what the others have" if paths is None else f"each keeps its own in {paths.profiles}"
            warn(f"FlopsMonitor: the ranks have no store to reach each other by: {kept}; lflops.merge makes one profile of them")
        return cls(trainer, topology, gather, outlets, paths, failures=failures)

    @property
    def wants_windows(self) -> bool:
        """Whether this rank's windows are of use to anybody."""
        return self._gather is not None or self.outlets is not None or self.paths is not None

    @property
    def pending(self) -> bool:
        """Whether windows are on their way."""
        return self._gather is not None and self._gather.pending

    @property
    def busy(self) -> bool:
        """Whether something of that works beside the training."""
        return self._gather is not None and self._gather.busy

    def add(self, profile: Profile, steps: tuple[Mapping[ModulePhase, float], ...]) -> None:
        """A window of this rank is closed.

        Args:
            profile: The window.
            steps: The own seconds of modules, of each hooked step in it.
        """
        if self._gather is not None:
            self._gather.push(profile, steps)
        elif self.topology.world_size == 1:
            self._report(profile)
        else:
            alone = replace(profile, run=self.topology.of(profile.run))
            self._save_of_rank(alone)
            if self.outlets is not None:
                self._report(merge({self._trainer.global_rank: alone}))

    def report_ready(self) -> bool:
        """Tell of the windows that have become ready. Returns whether there were any."""
        ready = [] if self._gather is None else self._gather.ready()
        for profile in ready:
            self._report(profile)
        return bool(ready)

    def finish(self, *, failed: bool) -> None:
        """No more windows come: tell of those that are on their way. After a failure nobody is waited for."""
        for profile in [] if self._gather is None else self._gather.finish(failed=failed):
            self._report(profile)
        if self.outlets is not None and not failed:
            self.outlets.end(self.profiles, reader_of_logged_step(self._trainer)())

    def save(self, profile: Profile, path: Path, outlet: str = "the profile's file") -> bool:
        """Write a window's file and the folders above it, unless it was the last that was written: the annotation of a trace reads it.

        Args:
            profile: The window.
            path: Its file.
            outlet: What the file is called where it cannot be written.

        Returns:
            Whether it is there.
        """
        if self._saved is None or self._saved[0] is not profile or self._saved[1] != path:
            self._saved = None
            with self.failures.contained(outlet):
                profile.save(path)
                self._saved = profile, path
        return self._saved is not None

    def _save_of_rank(self, profile: Profile) -> None:
        """What this rank alone knows of a window, which nobody else has: for `lflops.merge`."""
        if self.paths is not None:
            self.save(profile, self.paths.of_rank(profile.run, self._trainer.global_rank), "the file of this rank's profile")

    def _report(self, profile: Profile) -> None:
        if self.outlets is None:
            self._save_of_rank(profile)
            return
        self.profiles.append(profile)
        run, files = profile.run, []
        path = None if self.paths is None else self.paths.profile(run)
        if path is not None and self.save(profile, path):
            files.append(path)
        step = reader_of_logged_step(self._trainer)()
        analysis = analyze(profile)
        text, others = self.outlets.window(analysis, path, step)
        files += others
        written = f": {', '.join(map(str, files))}" if files else ""
        ended = " before its end" if run.partial else ""
        say(f"lflops: {run.stage} window {run.window} closed at step {run.step}{ended}{written}\n{text}")
        self.outlets.scalars(scalars(analysis), run.stage or "", step)
        self.outlets.module_scalars(profile, step)
