"""Define the interface of a client: `Client` describes a training run, and `Run` is one such run.

A client is a file in `packages/`. It has a `CLIENT` and a function `train(run)`, which builds and
starts the training run as the documentation of its package does. Packages are imported within
`train`, so that every environment can read every `CLIENT`.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.clients.digest import digest, digest_of_random_states
from benchmarks.clients.stopwatch import FaultTimer, PhaseTimer, StepCounter

Watch = Literal["lightning", "transformers", "monitor", "run", "window"]

Fault = Literal[
    "slow data",
    "slow module",
    "slow hook",
    "step logging",
    "slow validation",
    "slow reward",
    "slow rollout",
]

SEED = 7


@dataclass(frozen=True, kw_only=True)
class Client:
    """A training run of a package, and known facts about it.

    Attributes:
        package: The name on PyPI of the package that trains.
        about: What is trained, in a few words.
        watch: How lflops is attached: as a callback of Lightning or of transformers, by
            `lflops.monitor`, or by `lflops run` with or without a profiled window.
        faults: The faults that can be planted.
        imports: Modules that `train` imports. They are imported before the process is forked.
        samples: Smallest and largest number of samples in an optimizer step, or `None` if there
            are none.
        tokens: Smallest and largest number of tokens in a step, or `None` if the data has none.
        validates: Whether the run has a validation.
        padding: Smallest and largest share of padding in its batches.
        environment: The environment that it needs, as in `requirements-<environment>.txt`.
        accepts: Further causes that name a fault of this client, because of where its code is.
        held_out: Whether it was added after the rules for findings were fixed.
        note: A remark about the facts above.
    """

    package: str
    about: str
    watch: Watch
    faults: tuple[Fault, ...]
    imports: tuple[str, ...] = ("torch",)
    samples: tuple[int, int] | None
    tokens: tuple[int, int] | None = None
    validates: bool = False
    padding: tuple[float, float] = (0.0, 0.0)
    environment: Literal["general", "vision"] = "general"
    accepts: Mapping[Fault, frozenset[str]] = field(default_factory=dict)
    held_out: bool = False
    note: str = ""


@dataclass(kw_only=True)
class Run:
    """One training run in this process.

    Attributes:
        client: What trains.
        is_watched: Whether lflops is attached.
        fault: The planted fault, if there is one.
        folder: A folder for the files of the run. The current directory, too.
        faults: The planted fault with its stopwatch.
        steps: Counts and times the steps of the optimizer.
        phases: A stopwatch for the phases of the step, or `None`.
        module: The name of the module that "slow module" is planted in, in the trained model.
        result: The digests of what was trained.
    """

    client: Client
    folder: Path
    is_watched: bool
    fault: Fault | None
    faults: FaultTimer
    steps: StepCounter
    phases: PhaseTimer | None = None
    module: str = ""
    result: dict[str, str] = field(default_factory=dict)

    # -- how lflops is attached ------------------------------------------------------------------

    def callbacks(self, framework: str) -> list[Any]:
        """Return callbacks for a Trainer.

        They are lflops, if this run is watched, and the planted logging. The framework is
        `lightning.pytorch`, `pytorch_lightning` or `transformers`.
        """
        callbacks: list[Any] = []
        if self.is_watched and framework == "transformers":
            from lflops.integrations.huggingface import FlopsCallback

            callbacks.append(FlopsCallback(dirpath=str(self.watched_folder)))
        elif self.is_watched:
            from lflops import FlopsMonitor

            callbacks.append(FlopsMonitor(dirpath=str(self.watched_folder)))
        if self.fault == "step logging":
            from benchmarks.clients.step_logging import callback_for

            callbacks.append(callback_for(framework))
        return callbacks

    @contextlib.contextmanager
    def monitor(self, model: Any, optimizer: Any) -> Iterator[Any]:
        """`lflops.monitor`, or a stand-in that does nothing if this run is not watched."""
        if not self.is_watched:
            yield _NoMonitor()
            return
        import lflops

        with lflops.monitor(model, optimizer, dirpath=str(self.watched_folder)) as monitor:
            yield monitor

    @property
    def watched_folder(self) -> Path:
        """The folder that lflops writes to."""
        return self.folder / "lflops"

    # -- how faults are planted ------------------------------------------------------------------

    def slow(self, fault: Fault, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that first spends the planted time, if this run has this fault."""

        @functools.wraps(function)
        def slowed(*args: Any, **kwargs: Any) -> Any:
            self.faults.reach(fault)
            return function(*args, **kwargs)

        return slowed

    def slow_method(self, fault: Fault, owner: Any, name: str) -> None:
        """Replace a method of an object or of a class by its slow version.

        The class is necessary if the client copies its objects.
        """
        setattr(owner, name, self.slow(fault, getattr(owner, name)))

    def slow_module(self, model: Any, name: str, at: str | None = None) -> None:
        """Plant a hook on a module that spends time in training.

        "slow module" is a hook before forward, "slow hook" one after it.

        Args:
            model: A model that contains the module.
            name: The name of the module in this model.
            at: The name of the module in the model that is trained, if that is another model.
        """

        def spend(module: Any, *_: Any) -> None:
            if module.training:
                self.faults.reach(str(self.fault))

        module = model.get_submodule(name)
        if self.fault == "slow module":
            module.register_forward_pre_hook(spend)
        if self.fault == "slow hook":
            module.register_forward_hook(spend)
        self.module = name if at is None else at

    def log_step(self, model: Any) -> None:
        """Log the norms of a model's parameters for the planted time, if this run has that fault.

        This is for loops in the client's file. Trainers have a callback for it.
        """
        if self.fault == "step logging":
            self.faults.log(model)

    # -- how a run ends --------------------------------------------------------------------------

    def finish(self, model: Any, **losses: Any) -> None:
        """Digest the trained weights, the losses, and the state of the random generators."""
        self.result = {
            "weights": digest(model.state_dict()),
            "losses": digest(losses),
            "random states": digest_of_random_states(),
        }


def seed_everything(seed: int = SEED) -> None:
    """Seed the random generators of Python, numpy and torch."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class _NoMonitor:
    """A replacement for `lflops.monitor` in runs without lflops."""

    def step(self, _batch: Any = None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def data(self, loader: Iterable[Any]) -> Iterable[Any]:
        return loader

    def stage(self, _name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
