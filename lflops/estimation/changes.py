"""Change a model before it is estimated, as options of `lflops estimate` request.

The changes are the dtype, autocast, adapters, activation checkpointing, the loss, and offloading.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lflops.errors import CountError
from lflops.estimation.estimate import Subject
from lflops.model.module_tree import blocks_in
from lflops.torch_private.tensors import storage_key

Policy = Literal["none", "selective", "selective-op", "full"]

POLICIES: tuple[Policy, ...] = ("none", "selective", "full")
"""Policies for the activation checkpointing of a block.

With `none`, backward recomputes nothing. With `selective`, it recomputes everything except the
operators in `KEPT`. With `full`, it recomputes everything.
"""

EVERY_POLICY: tuple[Policy, ...] = ("none", "selective", "selective-op", "full")
"""The policies in `POLICIES`, and torchtitan's policy `selective-op`.

`selective-op` is `selective`, but also recomputes every second `mm`.
"""

_ATTENTION = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
)
KEPT = ("mm", "addmm", "convolution", *(f"_scaled_dot_product_{name}" for name in _ATTENTION))
"""ATen operators whose results the policy `selective` keeps for backward.

They are linear layers, convolutions and fused attention.
"""

# Factor of an adapter's result: alpha divided by rank. Its value changes neither work nor memory.
SCALE = 2.0


QUANTIZED = ("nf4", "nf4-dq")
"""Formats of 4-bit weights in bitsandbytes.

Every 64 weights share a scale. The scale is stored in float32 for `nf4`, and in 8 bits for
`nf4-dq`.
"""


class FourBit(nn.Module):
    """A stand-in for a frozen linear layer that bitsandbytes has quantized to 4 bits.

    Its tensors have the same sizes as in bitsandbytes, so the estimated memory is right. The values
    of the tensors are not set.
    """

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        super().__init__()
        elements = layer.weight.numel()
        scales = -(-elements // 64)
        scale_dtype = torch.float32
        # The table of the 16 values that a weight can have.
        values = 16
        if kind == "nf4-dq":
            scale_dtype = torch.uint8
            # The scales are quantized too. 256 of them share a second scale. A table of 256 values
            # and a mean are also stored.
            values += -(-scales // 256) + 256 + 1
        self.shape = layer.weight.shape
        self.bias = layer.bias
        packed = torch.empty((elements + 1) // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Buffer(torch.empty(scales, dtype=scale_dtype))
        self.values = nn.Buffer(torch.empty(values, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the input by the dequantized weight.

        The dequantized weight is not kept for backward. Backward creates it again.
        """
        with saved_tensors_hooks(_free, _fetch):
            return linear(x, x.new_empty(self.shape), self.bias)


class Adapted(nn.Module):
    """A frozen linear layer and its low-rank adapter, computed in the same way as in PEFT."""

    def __init__(self, base: nn.Linear, rank: int, quantized: str | None = None) -> None:
        super().__init__()
        self.base = base if quantized is None else FourBit(base, quantized)
        device = base.weight.device
        dtype = base.weight.dtype
        self.down = nn.Linear(base.in_features, rank, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x)) * SCALE
        return result


def add_adapters(caller: str, model: nn.Module, rank: int, quantized: str | None = None) -> None:
    """Freeze a model, and add an adapter to each linear layer of its blocks.

    `quantized` is the format for the weights of these layers, or `None`. Raises `CountError` if the
    blocks have no linear layers.
    """
    model.requires_grad_(requires_grad=False)
    found = 0
    for block in blocks_in(model).values():
        for name, layer in list(block.named_modules()):
            if name and isinstance(layer, nn.Linear):
                container, _, attribute = name.rpartition(".")
                setattr(block.get_submodule(container), attribute, Adapted(layer, rank, quantized))
                found += 1
    if not found:
        raise CountError(
            f"{caller}: {type(model).__name__} has no blocks with linear layers to adapt: pass a "
            "model that already has adapters"
        )


def recomputable(caller: str, model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that can be recomputed, which are the blocks with submodules.

    Recomputing a single operator would save nothing. Raises `CountError` if no block has
    submodules.
    """
    blocks = with_submodules(blocks_in(model))
    if not blocks:
        raise CountError(
            f"{caller}: {type(model).__name__} has no blocks: "
            "a block is a module with submodules in a ModuleList or Sequential, such as layers.0"
        )
    return blocks


def with_submodules(blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Select the blocks that have submodules."""
    return {name: block for name, block in blocks.items() if _has_submodule(block)}


def _has_submodule(block: nn.Module) -> bool:
    return next(block.children(), None) is not None


def recompute(block: nn.Module, policy: Policy) -> None:
    """Change a block so that backward recomputes the block's forward, as the policy says."""
    if policy == "none":
        return
    recomputed: Callable[..., Any] = partial(checkpoint, block.forward, use_reentrant=False)
    kept = [getattr(torch.ops.aten, name).default for name in KEPT if hasattr(torch.ops.aten, name)]
    if policy == "selective":
        contexts = partial(create_selective_checkpoint_contexts, kept)
        recomputed = partial(recomputed, context_fn=contexts)
    if policy == "selective-op":
        contexts = partial(_every_second_matmul, frozenset(kept))
        recomputed = partial(recomputed, context_fn=contexts)
    vars(block)["forward"] = recomputed


def _every_second_matmul(kept: frozenset[Any]) -> Any:
    """Return the context managers for one checkpointed forward under the policy `selective-op`.

    The policy keeps the results of the same operators as `selective`, except for `mm`: it keeps the
    result of every second `mm`, starting with the first. `checkpoint` needs two contexts, one for
    the forward and one for its recomputation.
    """
    matmuls: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operator not in kept:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if operator is torch.ops.aten.mm.default:
            matmuls[context.is_recompute] += 1
            if matmuls[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


@contextlib.contextmanager
def checkpointed(blocks: Mapping[str, nn.Module], policies: Mapping[str, Policy]) -> Iterator[None]:
    """Apply a checkpointing policy to each of the given blocks inside a context.

    At the end of the context, the original forwards are restored.
    """
    with contextlib.ExitStack() as stack:
        for name, policy in policies.items():
            attributes = vars(blocks[name])
            if "forward" in attributes:
                stack.callback(attributes.__setitem__, "forward", attributes["forward"])
            else:
                stack.callback(attributes.pop, "forward", None)
            recompute(blocks[name], policy)
        yield


class CompiledLoss(Function):
    """A cross-entropy with the memory use of code that Inductor compiles.

    The only tensor as large as the logits is their gradient, which has the dtype of the logits.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor) -> Tensor:
        losses = logits.logsumexp(-1).float()
        context.save_for_backward(logits, labels, logits.amax(-1).float(), losses)
        return losses.sum()

    @staticmethod
    def backward(context: Any, *_gradients: Tensor) -> tuple[Tensor, None]:
        return torch.softmax(context.saved_tensors[0], -1), None


def divide_loss(caller: str, subject: Subject, chunks: int, *, compiled: bool) -> None:
    """Make a transformers language model compute logits and loss in chunks of the sequence.

    With more than one chunk, backward recomputes each chunk, so only one chunk of logits is in
    memory at a time. With `compiled`, the loss uses as little memory as compiled code.
    """
    model: Any = subject.model
    head = None
    if hasattr(model, "get_output_embeddings") and "labels" in subject.kwargs:
        head = model.get_output_embeddings()
    if head is None:
        raise CountError(
            f"{caller}: {type(model).__name__} is not a transformers language model with labels: "
            "pass its configuration, or build the loss into your function"
        )
    chunk_loss: Callable[..., Any] = partial(_chunk_loss, head, compiled=compiled)
    if chunks > 1:
        chunk_loss = partial(checkpoint, chunk_loss, use_reentrant=False)

    def forward(*, labels: Tensor, **inputs: Any) -> Any:
        states = model.base_model(**inputs)[0].chunk(chunks, 1)
        parts = zip(states, labels.chunk(chunks, 1), strict=True)
        losses = [chunk_loss(*part) for part in parts]
        return SimpleNamespace(loss=torch.stack(losses).sum() / labels.numel())

    vars(model)["forward"] = forward


def _chunk_loss(head: nn.Module, states: Tensor, labels: Tensor, *, compiled: bool) -> Tensor:
    if compiled:
        loss: Tensor = CompiledLoss.apply(head(states), labels)  # type: ignore[no-untyped-call]
        return loss
    return cross_entropy(head(states).float().flatten(0, 1), labels.flatten(), reduction="sum")


# Tensors with fewer bytes stay on the chip, as in torchtune.
LEAST_OFFLOADED = 1024


def offload_activations(model: nn.Module) -> None:
    """Change a model so that it uses as little memory as with activation offloading.

    Each tensor that forward saves for backward is freed, as if it were copied to the host. Backward
    allocates it again. Parameters of the model, and views of parameters, stay on the chip.
    """
    forward = model.forward

    def offloading(*args: Any, **kwargs: Any) -> Any:
        held = {storage_key(each)[1] for each in model.parameters()}

        def offload(saved: Tensor) -> Any:
            if saved.nbytes < LEAST_OFFLOADED or storage_key(saved)[1] in held:
                return saved
            return _free(saved)

        with saved_tensors_hooks(offload, _fetch):
            return forward(*args, **kwargs)

    vars(model)["forward"] = wraps(forward)(offloading)


class _Freed(NamedTuple):
    """The layout of a tensor that was freed after forward. Backward allocates it again."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _free(saved: Tensor) -> _Freed:
    return _Freed(saved.shape, saved.stride(), saved.dtype, saved.device)


def _fetch(saved: Tensor | _Freed) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return torch.empty_strided(saved.size, saved.stride, dtype=saved.dtype, device=saved.device)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def dtype_of(option: str, name: str) -> torch.dtype:
    """Return the dtype with this name, in upper or lower case.

    Raises a `CountError` that names the option of `lflops estimate` if there is no such dtype.
    """
    lower = name.lower()
    found = DTYPES.get(SHORT_NAMES.get(lower, lower))
    if found is None:
        raise CountError(f"--{option} {name}: pass one of {', '.join((*DTYPES, *SHORT_NAMES))}")
    return found


def mixed_precision(compute: str | None, reduce: str | None) -> MixedPrecisionPolicy:
    """Return FSDP2's policy from the names of the dtypes for computation and for reduction."""
    return MixedPrecisionPolicy(
        param_dtype=None if compute is None else dtype_of("mp", compute),
        reduce_dtype=None if reduce is None else dtype_of("reduce", reduce),
    )


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes that are made to a model before it is estimated. The defaults change nothing.

    Attributes:
        dtype: Name of the dtype of parameters and floating-point arguments.
        precision: Precision of autocast: `bf16-mixed` or `16-mixed`.
        adapter_rank: Rank of the low-rank adapters to add; `None` adds no adapters.
        quantized: Format of the quantized weights of layers with adapters, one of `QUANTIZED`.
        policy: Activation checkpointing policy of every block, one of `EVERY_POLICY`.
        chunks: Number of chunks into which the sequence is divided to compute logits and loss.
        compiled_loss: Whether to estimate the loss as if it were compiled. The rest of the model is
            estimated as code that is not compiled.
        offload: Whether to keep activations on the host between forward and backward.
    """

    dtype: str | None = None
    precision: str | None = None
    adapter_rank: int | None = None
    quantized: str | None = None
    policy: Policy = "none"
    chunks: int | None = None
    compiled_loss: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None:
            dtype_of("dtype", self.dtype)
        _check_choice("precision", self.precision, list(MIXED))
        _check_choice("quantize", self.quantized, QUANTIZED)
        _check_choice("ac", self.policy, EVERY_POLICY, also="best")
        if self.quantized is not None and self.adapter_rank is None:
            raise CountError(
                f"--quantize {self.quantized} applies to the frozen layers below adapters: pass "
                "--lora as well"
            )

    def applied(self, caller: str, subject: Subject) -> Subject:
        """Apply the changes to the model and arguments of a subject, and return the subject.

        A subject is a model with its arguments and loss. Raises `CountError` if the model has no
        blocks to change.
        """
        if self.dtype is not None:
            dtype = dtype_of("dtype", self.dtype)
            subject = subject._replace(
                model=subject.model.to(dtype),
                args=tuple(_cast(subject.args, dtype)),
                kwargs=dict(_cast(subject.kwargs, dtype)),
            )
        if self.adapter_rank is not None:
            add_adapters(caller, subject.model, self.adapter_rank, self.quantized)
        if self.chunks is not None or self.compiled_loss:
            divide_loss(caller, subject, self.chunks or 1, compiled=self.compiled_loss)
        if self.policy != "none":
            for block in recomputable(caller, subject.model).values():
                recompute(block, self.policy)
        if self.offload:
            offload_activations(subject.model)
        if self.precision is not None:
            subject = _in_autocast(subject, MIXED[self.precision])
        return subject


def _in_autocast(subject: Subject, dtype: torch.dtype) -> Subject:
    """Run the model and the loss under autocast, but not backward and the optimizer.

    This is what Lightning and Accelerate do. At the end of forward, autocast drops its casts of the
    parameters.
    """
    autocast = torch.autocast("cpu", dtype)
    subject.model.forward = autocast(subject.model.forward)
    if subject.loss is None:
        return subject
    return subject._replace(loss=autocast(subject.loss))


def _check_choice(name: str, value: str | None, known: Sequence[str], also: str = "") -> None:
    if value is not None and value not in known:
        choices = [*known, also] if also else known
        raise CountError(f"--{name} {value}: pass one of {', '.join(choices)}")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _cast(each, dtype) for name, each in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_cast(each, dtype) for each in value)
    return value
