"""Changes to a model that is to be estimated, as options name them.

Dtype, autocast, adapters, checkpointing, the loss, and offloading.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, Literal

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
"""What a block recomputes in backward: nothing, all but the operators in `KEPT`, or all."""

EVERY_POLICY: tuple[Policy, ...] = ("none", "selective", "selective-op", "full")
"""Also torchtitan's per-operator policy, which recomputes every second product that `selective` keeps."""

_ATTENTION = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
)
KEPT = ("mm", "addmm", "convolution", *(f"_scaled_dot_product_{name}" for name in _ATTENTION))
"""ATen operators whose results a block keeps under the policy `selective`.

Linear layers, convolutions and fused attention.
"""

# what the adapter's result is multiplied by: alpha over rank. Its value changes neither work nor
# memory.
SCALE = 2.0


QUANTIZED = ("nf4", "nf4-dq")
"""bitsandbytes' weights of 4 bits.

With a scale in float32 for 64 of them, or with scales that are quantized to 8 bits themselves.
"""


class FourBit(nn.Module):
    """A frozen linear layer as bitsandbytes holds it under `QUANTIZED`.

    Only shapes are right, no values.
    """

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        super().__init__()
        self.shape, self.bias, scales = (
            layer.weight.shape,
            layer.bias,
            -(-layer.weight.numel() // 64),
        )
        self.weight = nn.Parameter(
            torch.empty((layer.weight.numel() + 1) // 2, 1, dtype=torch.uint8), requires_grad=False
        )
        self.scales = nn.Buffer(
            torch.empty(scales, dtype=torch.uint8 if kind == "nf4-dq" else torch.float32)
        )
        # The 16 values; of quantized scales also the scales of 256, their 256 values and their
        # mean.
        self.values = nn.Buffer(
            torch.empty(
                16 if kind == "nf4" else 16 + -(-scales // 256) + 256 + 1, dtype=torch.float32
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """The product with a whole weight, which is made anew in forward and in backward."""
        with saved_tensors_hooks(_let_go, _fetch):
            return linear(x, x.new_empty(self.shape), self.bias)


class Adapted(nn.Module):
    """A frozen linear layer and its adapter, as PEFT computes them."""

    def __init__(self, base: nn.Linear, rank: int, quantized: str | None = None) -> None:
        super().__init__()
        self.base = base if quantized is None else FourBit(base, quantized)
        self.down = nn.Linear(
            base.in_features, rank, bias=False, device=base.weight.device, dtype=base.weight.dtype
        )
        self.up = nn.Linear(
            rank, base.out_features, bias=False, device=base.weight.device, dtype=base.weight.dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x)) * SCALE
        return result


def add_adapters(caller: str, model: nn.Module, rank: int, quantized: str | None = None) -> None:
    """Freeze a model, quantize the linear layers of its blocks, and give each an adapter.

    Without any, a `CountError`.
    """
    model.requires_grad_(requires_grad=False)
    found = 0
    for block in blocks_in(model).values():
        layers = {
            name: layer
            for name, layer in block.named_modules()
            if name and isinstance(layer, nn.Linear)
        }
        for name, layer in layers.items():
            container, _, attribute = name.rpartition(".")
            setattr(block.get_submodule(container), attribute, Adapted(layer, rank, quantized))
        found += len(layers)
    if not found:
        raise CountError(
            f"{caller}: {type(model).__name__} has no blocks with linear layers to adapt: give the model with its adapters"
        )


def recomputable(caller: str, model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that are made of modules, as a single operator would save nothing by recomputing.

    Without any, a `CountError`.
    """
    blocks = {
        name: block
        for name, block in blocks_in(model).items()
        if next(block.children(), None) is not None
    }
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
    kept = [getattr(torch.ops.aten, name).default for name in KEPT if hasattr(torch.ops.aten, name)]
    if policy == "selective":
        how["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    if policy == "selective-op":
        how["context_fn"] = partial(_every_second_product, frozenset(kept))
    vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False, **how)


def _every_second_product(kept: frozenset[Any]) -> Any:
    """The contexts of one checkpointed forward.

    As `selective`, but of the products (`mm`) only the first, the third and so on are kept.
    """
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_product = operator is torch.ops.aten.mm.default
        products[context.is_recompute] += is_product
        skipped = is_product and not products[context.is_recompute] % 2
        return (
            CheckpointPolicy.MUST_SAVE
            if operator in kept and not skipped
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)


@contextlib.contextmanager
def checkpointed(blocks: Mapping[str, nn.Module], policies: Mapping[str, Policy]) -> Iterator[None]:
    """A context in which blocks recompute; afterwards their forwards are what they were."""
    before = {
        name: {key: value for key, value in vars(blocks[name]).items() if key == "forward"}
        for name in policies
    }
    try:
        for name, policy in policies.items():
            recompute(blocks[name], policy)
        yield
    finally:
        for name, own in before.items():
            vars(blocks[name]).pop("forward", None)
            vars(blocks[name]).update(own)


class CompiledLoss(Function):
    """The cross-entropy as inductor compiles it.

    Nothing is as large as the logits but their gradient, in the same dtype.
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
    """Let a language model of transformers compute its logits and loss in parts of the sequence.

    Several are recomputed in backward.
    """
    model: Any = subject.model
    head = (
        model.get_output_embeddings()
        if hasattr(model, "get_output_embeddings") and "labels" in subject.kwargs
        else None
    )
    if head is None:
        raise CountError(
            f"{caller}: {type(model).__name__} is no language model of transformers with labels: give its configuration,"
            " or build the loss into your function"
        )

    def forward(*, labels: Tensor, **inputs: Any) -> Any:
        states = model.base_model(**inputs)[0].chunk(chunks, 1)
        part = partial(_part, head, compiled=compiled)
        part = partial(checkpoint, part, use_reentrant=False) if chunks > 1 else part
        losses = [part(*each) for each in zip(states, labels.chunk(chunks, 1), strict=True)]
        return SimpleNamespace(loss=torch.stack(losses).sum() / labels.numel())

    vars(model)["forward"] = forward


def _part(head: nn.Module, states: Tensor, labels: Tensor, *, compiled: bool) -> Tensor:
    if compiled:
        loss: Tensor = CompiledLoss.apply(head(states), labels)  # type: ignore[no-untyped-call]
        return loss
    return cross_entropy(head(states).float().flatten(0, 1), labels.flatten(), reduction="sum")


# bytes: what is smaller stays on the chip, as torchtune has it
LEAST_OFFLOADED = 1024


def offload_activations(model: nn.Module) -> None:
    """Let go of what backward needs of forward, until it needs it.

    The model's parameters and views of them stay.
    """
    forward = model.forward

    def offloading(*args: Any, **kwargs: Any) -> Any:
        held = {storage_key(each)[1] for each in model.parameters()}

        def offload(saved: Tensor) -> Any:
            if saved.nbytes < LEAST_OFFLOADED or storage_key(saved)[1] in held:
                return saved
            return _let_go(saved)

        with saved_tensors_hooks(offload, _fetch):
            return forward(*args, **kwargs)

    vars(model)["forward"] = wraps(forward)(offloading)


def _let_go(saved: Tensor) -> Any:
    return saved.shape, saved.stride(), {"dtype": saved.dtype, "device": saved.device}


def _fetch(saved: Any) -> Tensor:
    return saved if isinstance(saved, Tensor) else torch.empty_strided(*saved[:2], **saved[2])


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def dtype_of(argument: str, name: str) -> torch.dtype:
    """The dtype of a name, in any letter case; any other is a `CountError` that names the argument."""
    word = name.lower()
    found = DTYPES.get(SHORT_NAMES.get(word, word))
    if found is None:
        raise CountError(f"{argument}={name!r}: give one of {', '.join((*DTYPES, *SHORT_NAMES))}")
    return found


def mixed_precision(compute: str | None, reduce: str | None) -> MixedPrecisionPolicy:
    """FSDP2's policy, from the names of the dtypes in which blocks compute and gradients are reduced."""
    return MixedPrecisionPolicy(
        param_dtype=None if compute is None else dtype_of("mp", compute),
        reduce_dtype=None if reduce is None else dtype_of("reduce", reduce),
    )


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What is changed."""

    dtype: str | None = (
        # of parameters and floating arguments, a name that `dtype_of` takes; `None` leaves them
        None
    )
    # `bf16-mixed` or `16-mixed` for autocast; `None` for none
    precision: str | None = None
    # of low-rank adapters; `None` for none
    adapter_rank: int | None = None
    quantized: str | None = (
        # how the weights below adapters are held, one of `QUANTIZED`; `None` as they are
        None
    )
    # what every block recomputes
    policy: Policy = "none"
    chunks: int | None = (
        # parts of the sequence in which logits and loss are computed; `None` for all of it at once
        None
    )
    # whether the loss is compiled, and the rest is not
    compiled_loss: bool = False
    # whether activations that backward needs are on the host meanwhile
    offload: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None:
            dtype_of("dtype", self.dtype)
        for name, value, known in (
            ("precision", self.precision, MIXED),
            ("quantize", self.quantized, QUANTIZED),
            ("ac", self.policy, EVERY_POLICY),
        ):
            if value is not None and value not in known:
                raise CountError(
                    f"{name}={value!r}: give one of {', '.join(known)}{', best' if name == 'ac' else ''}"
                )
        if self.quantized is not None and self.adapter_rank is None:
            raise CountError(
                f"quantize={self.quantized!r} is for the frozen layers below adapters: give lora as well"
            )

    def applied(self, caller: str, subject: Subject) -> Subject:
        """The subject, its model changed; a `CountError` where the model has no blocks to change."""
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
        return subject

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return (
            contextlib.nullcontext()
            if self.precision is None
            else torch.autocast("cpu", MIXED[self.precision])
        )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _cast(each, dtype) for name, each in value.items()}
    return (
        type(value)(_cast(each, dtype) for each in value) if type(value) in {list, tuple} else value
    )
