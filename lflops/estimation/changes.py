"""Change a model before it is estimated, according to the options of `lflops estimate`.

The options can change the dtype, and add autocast, adapters, activation checkpointing, a loss that
uses less memory, or activation offloading. Some of them apply to blocks: modules in a `ModuleList`
or `Sequential`, such as `layers.0`.
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

With `none`, backward recomputes nothing. With `selective`, backward recomputes all operators except
the operators in `SAVED_OPERATORS`. With `full`, backward recomputes all operators.
"""

EVERY_POLICY: tuple[Policy, ...] = ("none", "selective", "selective-op", "full")
"""The policies in `POLICIES`, and the policy `selective-op` of torchtitan.

With `selective-op`, backward recomputes the same operators as with `selective`, and also every
second `mm`.
"""

_ATTENTION = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
)
SAVED_OPERATORS = (
    "mm",
    "addmm",
    "convolution",
    *(f"_scaled_dot_product_{name}" for name in _ATTENTION),
)
"""ATen operators that the policy `selective` does not recompute; their results are kept.

These are linear layers, convolutions and fused attention.
"""

# Factor by which the result of an adapter is multiplied (alpha divided by rank). Its value changes
# neither work nor memory.
SCALE = 2.0


QUANTIZED = ("nf4", "nf4-dq")
"""Names of the formats of 4-bit weights in bitsandbytes.

In both formats, 64 weights share a scale. A scale is stored in float32 for `nf4`, and in 8 bits for
`nf4-dq`.
"""


class FourBit(nn.Module):
    """A stand-in for a frozen linear layer whose weight bitsandbytes has quantized to 4 bits.

    Its tensors have the same sizes as in bitsandbytes, so the estimated memory is correct. Their
    values are not set.
    """

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        super().__init__()
        elements = layer.weight.numel()
        scales = -(-elements // 64)
        scale_dtype = torch.float32
        # A table contains the 16 values that a weight can have.
        values = 16
        if kind == "nf4-dq":
            scale_dtype = torch.uint8
            # The scales are quantized, too: 256 scales share a second scale. The table of the 256
            # values that a scale can have, and a mean, are stored as well.
            values += -(-scales // 256) + 256 + 1
        self.shape = layer.weight.shape
        self.bias = layer.bias
        packed = torch.empty((elements + 1) // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Buffer(torch.empty(scales, dtype=scale_dtype))
        self.values = nn.Buffer(torch.empty(values, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the input by the dequantized weight.

        The dequantized weight is not saved for backward. Backward dequantizes the weight again.
        """
        with saved_tensors_hooks(_free, _fetch):
            return linear(x, x.new_empty(self.shape), self.bias)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter (LoRA), as in PEFT."""

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
    """Freeze a model, and add a low-rank adapter to each linear layer of its blocks.

    If `quantized` is one of `QUANTIZED`, the weights of these layers get this format. Raises
    `CountError` if the blocks have no linear layers.
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
            f"{caller}: {type(model).__name__} has no blocks with linear layers, to which --lora "
            "could add adapters: leave --lora out, and pass a model that already has adapters"
        )


def recomputable(caller: str, model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model to which checkpointing can be applied, keyed by name.

    These are the blocks with submodules, because the recomputation of a single operator would save
    no memory. Raises `CountError` if no block has submodules.
    """
    blocks = with_submodules(blocks_in(model))
    if not blocks:
        raise CountError(
            f"{caller}: {type(model).__name__} has no blocks to checkpoint: pass a model with "
            "blocks; a block is a module with submodules in a ModuleList or Sequential, such as "
            "layers.0"
        )
    return blocks


def with_submodules(blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Select the blocks that have submodules."""
    return {name: block for name, block in blocks.items() if _has_submodule(block)}


def _has_submodule(block: nn.Module) -> bool:
    return next(block.children(), None) is not None


def recompute(block: nn.Module, policy: Policy) -> None:
    """Apply an activation checkpointing policy to a block, by replacing the block's forward."""
    if policy == "none":
        return
    recomputed: Callable[..., Any] = partial(checkpoint, block.forward, use_reentrant=False)
    if policy == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _kept_operators())
        recomputed = partial(recomputed, context_fn=contexts)
    if policy == "selective-op":
        contexts = partial(_every_second_matmul, frozenset(_kept_operators()))
        recomputed = partial(recomputed, context_fn=contexts)
    vars(block)["forward"] = recomputed


def _kept_operators() -> list[Any]:
    """Return those operators in `SAVED_OPERATORS` that this version of torch has."""
    kept = []
    for name in SAVED_OPERATORS:
        operator = getattr(torch.ops.aten, name, None)
        if operator is not None:
            kept.append(operator.default)
    return kept


def _every_second_matmul(kept: frozenset[Any]) -> Any:
    """Return the two contexts that torch's `checkpoint` needs for the policy `selective-op`.

    They are for the forward and for its recomputation. The policy keeps the results of the
    operators in `kept`. For `mm`, the policy keeps only every second result, starting with the
    first.
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
    """Apply checkpointing policies to blocks inside a context.

    At the end of the context, the original forwards are restored.

    Args:
        blocks: All blocks of a model, keyed by name.
        policies: The policies to apply, keyed by the name of a block.
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
    """A cross-entropy that uses as little memory as a cross-entropy compiled by Inductor.

    Besides the logits, only their gradient is as large as the logits. The gradient has the dtype of
    the logits.
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
    """Make a transformers language model compute its logits and loss in chunks of the sequence.

    With more than one chunk, backward recomputes the logits of each chunk, so the logits of only
    one chunk are in memory at a time. With `compiled`, the loss uses as little memory as a compiled
    loss.
    """
    model: Any = subject.model
    head = None
    if hasattr(model, "get_output_embeddings") and "labels" in subject.kwargs:
        head = model.get_output_embeddings()
    if head is None:
        raise CountError(
            f"{caller}: {type(model).__name__} is not a transformers language model with labels, "
            "so its loss cannot be split or compiled: pass the configuration of such a model, or "
            "build the loss into your function"
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


# Smallest size in bytes of a tensor that is offloaded. torchtune has the same limit.
LEAST_OFFLOADED = 1024


def offload_activations(model: nn.Module) -> None:
    """Change a model so that it uses as much device memory as with activation offloading.

    Each tensor that forward saves for backward is freed, as if it were copied to the host. Backward
    allocates the tensor again. Parameters, views of parameters and small tensors stay on the
    device.
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
    """The shape, strides, dtype and device of a freed tensor, with which backward allocates it."""

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
    """Return torch's dtype for a name such as `bf16`, in upper or lower case.

    If no dtype has this name, raise a `CountError` that mentions `option`, the name of an option of
    `lflops estimate`.
    """
    lower = name.lower()
    found = DTYPES.get(SHORT_NAMES.get(lower, lower))
    if found is None:
        raise CountError(f"--{option} {name}: pass one of {', '.join((*DTYPES, *SHORT_NAMES))}")
    return found


def mixed_precision(compute: str | None, reduce: str | None) -> MixedPrecisionPolicy:
    """Return FSDP2's mixed-precision policy for two names of dtypes.

    FSDP2 computes in the first dtype, and reduces gradients in the second dtype. `None` means that
    FSDP2 does not change the dtype.
    """
    return MixedPrecisionPolicy(
        param_dtype=None if compute is None else dtype_of("mp", compute),
        reduce_dtype=None if reduce is None else dtype_of("reduce", reduce),
    )


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes to a model before it is estimated. By default, nothing is changed.

    Attributes:
        dtype: Name of the dtype to which parameters and floating-point arguments are converted.
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
                f"--quantize {self.quantized} applies only to layers with adapters: pass --lora as "
                "well"
            )

    def applied(self, caller: str, subject: Subject) -> Subject:
        """Apply the changes to a model, its arguments and its loss, and return them.

        Raises `CountError` if a change is for blocks, and the model has no such blocks.
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
    """Make the model and the loss run under autocast, but not backward and the optimizer.

    Lightning and Accelerate do the same. At the end of forward, autocast frees the copies of the
    parameters that it has cast.
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
