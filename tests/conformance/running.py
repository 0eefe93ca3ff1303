"""Cases that run one perceptron in many ways, such as scripted, compiled or checkpointed.

The matmuls are always the same. Work that runs again is counted as recompute.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, stack_module_state, vmap
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import lflops
from tests.conformance.making import Family, Function, data, layer, leaf, of
from tests.conformance.pencil import Macs, attention, product

__all__ = ["CASES"]

batch = 6
inputs = 4
hidden = 8
outputs = 5
members = 3
x = leaf(batch, inputs)
given = data(batch, inputs)
up = product(batch, inputs, hidden)
down = product(batch, hidden, outputs)
trained = Family("running").trained
inference = Family("running").inference


def perceptron() -> nn.Sequential:
    """Return two layers with Tanh between them, which has a second derivative."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class Run(nn.Module):
    """A perceptron that a function runs."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.model = perceptron()
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self.model, x)


def by(run: Callable[[nn.Module, Tensor], Any]) -> Callable[[], nn.Module]:
    """Return a function that creates a perceptron which `run` runs."""
    return lambda: Run(run)


def in_inference(model: nn.Module, x: Tensor) -> Tensor:
    """Run in inference mode, where lflops receives composite operators instead of their parts."""
    with torch.inference_mode():
        return model(x)


def without_gradients(model: nn.Module, x: Tensor) -> Tensor:
    """Run the first layer without gradients, so only the second layer is trained."""
    with torch.no_grad():
        x = model[:2](x)
    return model[2](x)


def cast(model: nn.Module, x: Tensor) -> Tensor:
    """Run under autocast to bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x)


def checkpointed(model: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    """Run with activation checkpointing, which runs forward again in backward."""
    return checkpoint(model, x, use_reentrant=reentrant)


def selected(model: nn.Module, x: Tensor, *, products: bool) -> Tensor:
    """Run with selective checkpointing. The policy keeps the results of matmuls, or nothing."""
    keep = torch.ops.aten.addmm.default

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if products and operator is keep:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint(
        model,
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    """Return the square of the input's gradient. Backward differentiates this gradient again."""
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().sum()


def called(model: nn.Module, x: Tensor) -> Tensor:
    """Call the model with other parameters than its own."""
    doubled = {name: 2 * value for name, value in model.named_parameters()}
    return functional_call(model, doubled, (x,))


def optimised(x: Tensor, weight: Tensor) -> Tensor:
    """Call a function that `torch.compile` wraps inside forward."""
    return torch.compile(torch.mm, backend="eager")(x, weight)


class Ensemble(nn.Module):
    """Several perceptrons at once, as one perceptron with a batch of weights."""

    def __init__(self) -> None:
        super().__init__()
        parameters, _ = stack_module_state([perceptron() for _ in range(members)])
        self.names = list(parameters)
        self.stacked = nn.ParameterList(parameters.values())
        self.skeleton = [perceptron().to("meta")]

    def forward(self, x: Tensor) -> Tensor:
        def run(parameters: dict[str, Tensor]) -> Tensor:
            return functional_call(self.skeleton[0], parameters, (x,))

        return vmap(run)(dict(zip(self.names, self.stacked, strict=True)))


class Jacobian(nn.Module):
    """The Jacobian of one row, from a batch of backward passes. Only its scale is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.model = [perceptron()]
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * jacrev(self.model[0])(x).detach()


class Product(torch.autograd.Function):
    """A matmul with handwritten gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradients[0] @ b.mT, a.mT @ gradients[0]


@functools.cache
def foreign() -> Callable[[Tensor, Tensor], Tensor]:
    """Return a custom operator for a matmul, for which a formula is registered in lflops.

    Its gradients are computed by torch's matmuls.
    """

    @torch.library.custom_op("conformance::product", mutates_args=())
    def foreign_product(a: Tensor, b: Tensor) -> Tensor:
        return torch.from_numpy(a.detach().numpy() @ b.detach().numpy())

    def keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    foreign_product.register_autograd(Product.backward, setup_context=keep)
    lflops.register_formula(torch.ops.conformance.product, lambda a, b, *, out: a[0] * a[1] * b[1])
    return foreign_product


both = up + down
again = both.forward
WAYS = (
    trained("eager", layer(perceptron, x), both),
    trained("scripted", layer(lambda: torch.jit.script(perceptron()), x), both),
    inference(
        "scripted and frozen",
        layer(lambda: torch.jit.freeze(torch.jit.script(perceptron().eval())), given),
        both,
    ),
    trained(
        "traced", layer(lambda: torch.jit.trace(perceptron(), torch.zeros(batch, inputs)), x), both
    ),
    trained("compiled", layer(lambda: torch.compile(perceptron(), backend="eager"), x), both),
    trained("compiled within", of(optimised, x, leaf(inputs, hidden)), up),
    trained("functional_call", layer(by(called), x), both),
    trained("vmap over rows", layer(by(lambda model, x: vmap(model)(x)), x), both),
    trained(
        "vmap of mm",
        of(vmap(torch.mm), leaf(members, batch, inputs), leaf(members, inputs, hidden)),
        members * up,
    ),
    trained("vmap over an ensemble", layer(Ensemble, x), members * both),
    trained(
        "jacrev",
        layer(Jacobian, data(inputs)),
        Macs((inputs + outputs) * hidden, outputs * (inputs + outputs) * hidden),
    ),
    inference(
        "jvp, with products for the weights' tangents of zero",
        layer(by(lambda model, x: jvp(model, (x,), (torch.ones_like(x),))), given),
        3 * both,
    ),
    inference("inference mode", layer(by(in_inference), given), both),
    inference("no gradients", layer(perceptron, given), both),
    trained(
        "no gradients for the first layer",
        layer(by(without_gradients), x),
        Macs(up.forward) + product(batch, hidden, outputs, gradients=1),
    ),
    trained("autocast", layer(by(cast), x), both),
)

AGAIN = (
    trained(
        "checkpoint, reentrant",
        layer(by(functools.partial(checkpointed, reentrant=True)), x),
        both + Macs(recompute=again),
    ),
    # Recomputation stops as soon as backward has all saved tensors. The last one is the input of
    # the last matmul, so this matmul is not recomputed.
    trained(
        "checkpoint",
        layer(by(functools.partial(checkpointed, reentrant=False)), x),
        both + Macs(recompute=up.forward),
    ),
    trained(
        "checkpoint that keeps products",
        layer(by(functools.partial(selected, products=True)), x),
        both,
    ),
    trained(
        "checkpoint that could keep products",
        layer(by(functools.partial(selected, products=False)), x),
        both + Macs(recompute=up.forward),
    ),
    trained(
        "a gradient's gradient",
        layer(by(penalised), x),
        # Forward, and the gradient of the input. Backward differentiates this gradient, in which
        # ones are multiplied by the second weight, and then goes through the first layer.
        Macs(again, again) + Macs(0, down.forward + up.backward) + Macs(0, up.backward),
    ),
)

OPERATORS = (
    trained("autograd.Function", of(Product.apply, x, leaf(inputs, hidden)), up),
    trained(
        "an operator with a formula of its own",
        layer(lambda: Function(foreign()), x, leaf(inputs, hidden)),
        up,
    ),
)

channels = 4
size = 8
kernel = 3
heads = 2
width = 6


class InAutocast(nn.Module):
    """A convolution, attention and a linear layer under autocast, with weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, heads * width, kernel, padding=1)
        self.out = nn.Linear(heads * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pixels = self.convolution(x).flatten(2).unflatten(1, (heads, width)).mT.contiguous()
            seen = nn.functional.scaled_dot_product_attention(pixels, pixels, pixels)
            return self.out(seen.transpose(1, 2).flatten(2))


places = size * size
SETTINGS = (
    trained(
        "autocast of a convolution, attention and a product",
        layer(InAutocast, leaf(1, channels, size, size)),
        product(places, heads * width, channels, kernel * kernel)
        + attention(heads * places * places, width)
        + product(places, heads * width, outputs),
    ),
    trained(
        "channels last",
        layer(
            lambda: nn.Sequential(nn.Conv2d(channels, outputs, kernel), nn.BatchNorm2d(outputs)).to(
                memory_format=torch.channels_last
            ),
            leaf(batch, channels, size, size),
        ),
        product(batch, (size - kernel + 1) ** 2, outputs, channels, kernel * kernel),
    ),
)

CASES = (*WAYS, *AGAIN, *OPERATORS, *SETTINGS)
