"""The step that `lflops estimate` estimates: of a configuration or a function, changed as the options say."""

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lflops.analyze.memory.checkpointing_plan import CheckpointingPlan
from lflops.cli.output import UsageError
from lflops.errors import LflopsError
from lflops.profile.model import Profile

__all__ = ["Step", "bytes_of"]

BEST = "best"
UNITS = {"": 1, "B": 1, **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}}
UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}


def bytes_of(size: str) -> float:
    """The bytes of a size as people write it: `40GB`, `37.5 GiB`, `4e10`.

    Raises:
        UsageError: It is no size.
    """
    found = re.fullmatch(r"([0-9.]+(?:[eE]\+?[0-9]+)?)\s*([A-Za-z]*)", size.strip())
    unit = None if found is None else {name.lower(): factor for name, factor in UNITS.items()}.get(found[2].lower())
    try:
        return float(found[1]) * unit  # type: ignore[index, operator]
    except (TypeError, ValueError):
        raise UsageError(f"--memory {size}: give a size, as 40GB or 37GiB") from None


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the options say.

    Attributes:
        target: A configuration or a function.
        samples: Of the batch.
        tokens: Of each sample; `None` without the option.
        remote_code: Whether Python code that comes with a configuration may run.
        changes: To the model, by the names of `Changes`.
        fused: Whether the optimizer is fused.
        memory: The budget of `--ac best`.
        how: Arguments of the `Estimator`.
    """

    target: str
    samples: int
    tokens: int | None
    remote_code: bool
    changes: Mapping[str, Any]
    optimizer: str | None
    fused: bool
    memory: str | None
    how: Mapping[str, Any]

    def estimated(self) -> tuple[Profile, CheckpointingPlan | None]:
        """The estimate, with the plan of `--ac best`.

        Raises:
            UsageError: The options do not go together, or the user's function failed.
        """
        from lflops.collect.estimate.estimate import Estimator  # with torch
        from lflops.collect.estimate.optimizer_step import makes_optimizer
        from lflops.planning.best_checkpointing import search
        from lflops.planning.changes import Changes

        searched = self.changes["policy"] == BEST
        if searched and self.memory is None and self.how["hardware"] is None:
            raise UsageError("--ac best: give --memory, as 40GB, or --hardware")
        if self.memory is not None and not searched:
            raise UsageError("--memory is for --ac best; --hardware says whether a step fits")
        if self.fused and self.optimizer is None:
            raise UsageError("--fused is for an optimizer: give --optimizer")
        budget = None if self.memory is None else bytes_of(self.memory)
        words = {**self.changes, "policy": "none" if searched else self.changes["policy"], "adapter_rank": self._rank()}
        changes = Changes(**{name: value for name, value in words.items() if value is not None})
        makes = makes_optimizer(self.target, self.optimizer, fused=self.fused)
        estimator = Estimator(asker=self.target, optimizer=makes, progress=sys.stderr.isatty(), **self.how)
        with _modules_of_this_folder(), self._errors_of_the_user():
            make = self._maker()
            with changes.autocast():
                if not searched:
                    return estimator.run(lambda: changes.applied(self.target, make())), None
                plan = search(estimator, lambda: changes.applied(self.target, make()), budget)
                return plan.profile, plan

    def _rank(self) -> int | None:
        """The rank of `--lora`."""
        lora = self.changes["adapter_rank"]
        if lora is None:
            return None
        rank = lora.removeprefix("r=")
        if not rank.isdecimal() or not int(rank):
            raise UsageError(f"--lora {lora}: give the rank, as r=16")
        return int(rank)

    def _maker(self) -> Callable[[], Any]:
        """Makes the subject."""
        from lflops.collect.estimate.estimate import subject_of
        from lflops.collect.estimate.from_config import FromConfig, is_config

        arguments = [self.samples]
        if is_config(self.target):
            tokens = {} if self.tokens is None else {"tokens": self.tokens}
            build: Callable[..., Any] = FromConfig(target=self.target, remote_code=self.remote_code, **tokens).builder()
        elif self.remote_code:
            raise UsageError("--trust-remote-code is for a configuration")
        else:
            arguments += [] if self.tokens is None else [self.tokens]
            build = _function(self.target)
            _check_arguments(self.target, build, arguments)
        return lambda: subject_of(self.target, build(*arguments))

    @contextlib.contextmanager
    def _errors_of_the_user(self) -> Iterator[None]:
        """Errors of the user's code as one line."""
        try:
            yield
        except (LflopsError, UsageError):
            raise
        except Exception as error:
            where = "".join(f"; {note.removeprefix(f'{self.target}: ')}" for note in getattr(error, "__notes__", ()))
            raise UsageError(f"{self.target} failed: {type(error).__name__}: {error}{where}") from error


def _function(target: str) -> Callable[[int], Any]:
    """The function that the user named."""
    module, _, name = target.partition(":")
    if not module or not name or module.endswith(".py"):
        raise UsageError(f"{target!r}: give package.module:function, as train:build for build in a train.py of this folder")
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{target}: {error}") from error
    if not callable(function):
        raise UsageError(f"{target}: {function!r} is no function")
    return function  # type: ignore[no-any-return]


@contextlib.contextmanager
def _modules_of_this_folder() -> Iterator[None]:
    """Found as `python -m` finds them, also when the user's function imports them only as it runs."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _check_arguments(target: str, build: Callable[..., Any], arguments: list[int]) -> None:
    """See that it can be called with these numbers."""
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # native code has none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UsageError(
            f"{target}{signature}: {error}: it is called with one argument, the number of samples that --batch gives"
            + (", and with the tokens of --seq" if len(arguments) > 1 else "")
        ) from error
