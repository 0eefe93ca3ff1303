"""Changes to a model that is to be estimated: dtype, autocast, low-rank adapters and checkpointing, as options name them."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lflops.collect.estimate.estimate import Subject
from lflops.collect.model.module_tree import blocks_in
from lflops.errors import CountError

Policy = Literal["none", "selective", "full"]

POLICIES: tuple[Policy, ...] = ("none", "selective", "full")
"""What a block recomputes in backward: nothing, all but the operators in `KEPT`, or all."""

_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
KEPT = ("mm", "addmm", "convolution", *(f"_scaled_dot_product_{name}" for name in _ATTENTION))
"""ATen operators whose results a block keeps under the policy `selective`: linear layers, convolutions and fused attention."""

SCALE = 2.0  # what the adapter's result is multiplied by: alpha over rank. Its value changes neither work nor memory.


class Adapted(nn.Module):
    """A frozen linear layer and its adapter, as PEFT computes them."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's result and the adapter's."""
        result: Tensor = self.base(x) + self.up(self.down(x)) * SCALE
        return result


def add_adapters(caller: str, model: nn.Module, rank: int) -> None:
    """Freeze a model, and give each linear layer of its blocks an adapter; without any, a `CountError`."""
    model.requires_grad_(requires_grad=False)
    found = 0
    for block in blocks_in(model).values():
        layers = {name: layer for name, layer in block.named_modules() if name and isinstance(layer, nn.Linear)}
        for name, layer in layers.items():
            container, _, attribute = name.rpartition(".")
            setattr(block.get_submodule(container), attribute, Adapted(layer, rank))
        found += len(layers)
    if not found:
        raise CountError(f"{caller}: {type(model).__name__} has no blocks with linear layers to adapt: give the model with its adapters")


def recomputable(caller: str, model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that are made of modules, as a single operator would save nothing by recomputing; without any, a `CountError`."""
    blocks = {name: block for name, block in blocks_in(model).items() if next(block.children(), None) is not None}
    if not blocks:
        raise CountError(
            f"{caller}: {type(model).__name__} has no blocks: those are modules made of others, in a ModuleList or Sequential, as layers.0"
        )
    return blocks


def recompute(block: nn.Module, policy: Policy) -> None:
    """Change the forward of a block to one that is recomputed in backward."""
    if policy == "none":
        return
    how: dict[str, Any] = {}
    if policy == "selective":
        kept = [getattr(torch.ops.aten, name).default for name in KEPT if hasattr(torch.ops.aten, name)]
        how["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False, **how)


@contextlib.contextmanager
def checkpointed(blocks: Mapping[str, nn.Module], policies: Mapping[str, Policy]) -> Iterator[None]:
    """A context in which blocks recompute; afterwards their forwards are what they were."""
    before = {name: {key: value for key, value in vars(blocks[name]).items() if key == "forward"} for name in policies}
    try:
        for name, policy in policies.items():
            recompute(blocks[name], policy)
        yield
    finally:
        for name, own in before.items():
            vars(blocks[name]).pop("forward", None)
            vars(blocks[name]).update(own)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What is changed."""

    dtype: str | None = None  # of parameters and floating arguments, by torch's word; `None` leaves them
    precision: str | None = None  # `bf16-mixed` or `16-mixed` for autocast; `None` for none
    adapter_rank: int | None = None  # of low-rank adapters; `None` for none
    policy: Policy = "none"  # what every block recomputes

    def __post_init__(self) -> None:
        for name, value, known in (("dtype", self.dtype, DTYPES), ("precision", self.precision, MIXED), ("ac", self.policy, POLICIES)):
            if value is not None and value not in known:
                raise CountError(f"{name}={value!r}: give one of {', '.join(known)}{', best' if name == 'ac' else ''}")

    def applied(self, caller: str, subject: Subject) -> Subject:
        """The subject, its model changed; a `CountError` where the model has no blocks to change."""
        if self.dtype is not None:
            dtype = DTYPES[self.dtype]
            subject = subject._replace(
                model=subject.model.to(dtype), args=tuple(_cast(subject.args, dtype)), kwargs=dict(_cast(subject.kwargs, dtype))
            )
        if self.adapter_rank is not None:
            add_adapters(caller, subject.model, self.adapter_rank)
        if self.policy != "none":
            for block in recomputable(caller, subject.model).values():
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
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _cast(each, dtype) for name, each in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_cast(each, dtype) for each in value)
    return value
