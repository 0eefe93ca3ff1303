"""Activation checkpointing of blocks: by a policy for each, as `CheckpointingPlan.code` applies it."""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lflops.analyze.memory.checkpointing_plan import KEPT, Policy
from lflops.collect.model.blocks import blocks_in
from lflops.errors import CountError

__all__ = ["checkpointed", "recomputable", "recompute"]


def recomputable(asker: str, model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that a model may recompute: those that are made of modules. A single operator would save nothing.

    Raises:
        CountError: There is none.
    """
    blocks = {name: block for name, block in blocks_in(model).items() if next(block.children(), None) is not None}
    if not blocks:
        raise CountError(
            f"{asker}: {type(model).__name__} has no blocks: those are modules made of others, in a ModuleList or Sequential, as layers.0"
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
    before = {name: dict(vars(blocks[name])) for name in policies}
    try:
        for name, policy in policies.items():
            recompute(blocks[name], policy)
        yield
    finally:
        for name, attributes in before.items():
            vars(blocks[name]).pop("forward", None)
            if "forward" in attributes:
                vars(blocks[name])["forward"] = attributes["forward"]
