"""What becomes of a window that is closed: it is put together with those of all ranks, saved, logged and kept."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from lflops.callback.bases import say
from lflops.callback.facts import logged_step
from lflops.callback.loggers import Outlets, scalars
from lflops.callback.places import Places
from lflops.callback.settings import Settings
from lflops.collect.gather import Gather
from lflops.collect.timing.timeline import Place
from lflops.collect.topology import Topology, topology_of
from lflops.merging import merge
from lflops.profile import Profile

__all__ = ["Results"]


class Results:
    """The windows of one monitor in one run of the Trainer, of all stages.

    Args:
        trainer: Whose run it is.
        topology: Where its ranks stand.
        gather: Brings the ranks' windows together; `None` where there is one rank, or they cannot be reached.
        outlets: Where results go; `None` on all processes but the main one.
        places: Where files go; `None` for none.

    Attributes:
        profiles: The windows, those of all ranks together, on the main process.
    """

    def __init__(self, trainer: Any, topology: Topology, gather: Gather | None, outlets: Outlets | None, places: Places | None) -> None:
        """None is closed yet."""
        self.profiles: list[Profile] = []
        self.topology = topology
        self.outlets = outlets
        self.places = places
        self._trainer = trainer
        self._gather = gather

    @classmethod
    def of(cls, trainer: Any, pl_module: Any, settings: Settings, log_dir: str | None, *, monitor: int, run: int) -> Self:
        """Find out who takes part, and where results go; on every process, for they have to agree.

        Args:
            trainer: Whose run it is.
            pl_module: What is trained, or asked.
            settings: What is asked for.
            log_dir: The Trainer's, if it has one.
            monitor: Which of the Trainer's monitors it is for, from 1.
            run: Which of the process's runs it is, the same number on all ranks.

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
        gather = Gather.of(rank, topology, monitor=monitor, fit=run, timeout=settings.gather_timeout)
        outlets = Outlets(trainer, settings, monitor) if trainer.is_global_zero else None
        dirpath = None if settings.dirpath is None else Path(settings.dirpath)
        return cls(trainer, topology, gather, outlets, Places.of(log_dir, dirpath, monitor))

    @property
    def wants_windows(self) -> bool:
        """Whether this rank's windows are of use to anybody."""
        return self._gather is not None or self.outlets is not None

    @property
    def pending(self) -> bool:
        """Whether windows are on their way."""
        return self._gather is not None and self._gather.pending

    @property
    def busy(self) -> bool:
        """Whether something of that works beside the training."""
        return self._gather is not None and self._gather.busy

    def add(self, profile: Profile, steps: tuple[Mapping[Place, float], ...]) -> None:
        """A window of this rank is closed.

        Args:
            profile: The window.
            steps: The own seconds of modules, of each hooked step in it.
        """
        if self._gather is not None:
            self._gather.push(profile, steps)
        else:
            self._tell(profile if self.topology.world_size == 1 else merge({self._trainer.global_rank: profile}))

    def tell_ready(self) -> bool:
        """Tell of the windows that have become ready. Returns whether there were any."""
        ready = [] if self._gather is None else self._gather.ready()
        for profile in ready:
            self._tell(profile)
        return bool(ready)

    def finish(self, *, failed: bool) -> None:
        """No more windows come: tell of those that are on their way. After a failure nobody is waited for."""
        for profile in [] if self._gather is None else self._gather.finish(failed=failed):
            self._tell(profile)
        if self.outlets is not None and not failed:
            self.outlets.end(self.profiles, logged_step(self._trainer))

    def _tell(self, profile: Profile) -> None:
        if self.outlets is None:
            return
        run, saved = profile.run, None
        if self.places is not None:
            saved = self.places.profile(run)
            saved.parent.mkdir(parents=True, exist_ok=True)
            profile.save(saved)
        self.profiles.append(profile)
        step = logged_step(self._trainer)
        text, files = self.outlets.window(profile, saved, step)
        written = f": {', '.join(map(str, files))}" if files else ""
        ended = " before its end" if run.partial else ""
        say(f"lflops: {run.stage} window {run.window} closed at step {run.step}{ended}{written}\n{text}")
        self.outlets.scalars(scalars(profile), run.stage or "", step)
        self.outlets.module_scalars(profile, step)
