"""Changes to a model that is to be estimated: dtype, autocast, low-rank adapters and checkpointing, as options name them."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lflops.analyze.memory.checkpointing_plan import POLICIES, Policy
from lflops.collect.estimate.estimate import Subject
from lflops.errors import CountError
from lflops.planning.lora import add_adapters
from lflops.planning.policies import recomputable, recompute

__all__ = ["Changes"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What is changed.

    Attributes:
        dtype: Of parameters and floating arguments, by torch's word; `None` leaves them.
        precision: `bf16-mixed` or `16-mixed` for autocast; `None` for none.
        adapter_rank: Of low-rank adapters; `None` for none.
        policy: What every block recomputes.
    """

    dtype: str | None = None
    precision: str | None = None
    adapter_rank: int | None = None
    policy: Policy = "none"

    def __post_init__(self) -> None:
        """Check the words.

        Raises:
            CountError: One of them is unknown.
        """
        for name, value, known in (("dtype", self.dtype, DTYPES), ("precision", self.precision, MIXED), ("ac", self.policy, POLICIES)):
            if value is not None and value not in known:
                raise CountError(f"{name}={value!r}: give one of {', '.join(known)}{', best' if name == 'ac' else ''}")

    def applied(self, asker: str, subject: Subject) -> Subject:
        """The subject, its model changed.

        Raises:
            CountError: The model has no blocks to change.
        """
        if self.dtype is not None:
            dtype = DTYPES[self.dtype]
            subject = subject._replace(
                model=subject.model.to(dtype), args=tuple(_cast(subject.args, dtype)), kwargs=dict(_cast(subject.kwargs, dtype))
            )
        if self.adapter_rank is not None:
            add_adapters(asker, subject.model, self.adapter_rank)
        if self.policy != "none":
            for block in recomputable(asker, subject.model).values():
                recompute(block, self.policy)
        return subject

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The context in which the model runs."""
        if self.precision is None:
            yield
            return
        with torch.autocast("cpu", MIXED[self.precision]):
            yield


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Arguments with their floating tensors in a dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _cast(each, dtype) for name, each in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_cast(each, dtype) for each in value)
    return value
