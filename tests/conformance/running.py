"""One perceptron run in every way that there is.

Its products are the same, and what is run again is told apart.
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

batch, inputs, hidden, outputs, members = 6, 4, 8, 5, 3
x, given = leaf(batch, inputs), data(batch, inputs)
up, down = product(batch, inputs, hidden), product(batch, hidden, outputs)
trained, inference = Family("running").trained, Family("running").inference


def perceptron() -> nn.Sequential:
    """Two products, and between them something that has a curvature."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class Run(nn.Module):
    """A perceptron that is run by a function."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.model = perceptron()
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self.model, x)


def by(run: Callable[[nn.Module, Tensor], Any]) -> Callable[[], nn.Module]:
    """A maker of such models."""
    return lambda: Run(run)


def in_inference(model: nn.Module, x: Tensor) -> Tensor:
    """What composes other operators then reaches lflops whole."""
    with torch.inference_mode():
        return model(x)


def without_gradients(model: nn.Module, x: Tensor) -> Tensor:
    """Only the second layer is trained."""
    with torch.no_grad():
        x = model[:2](x)
    return model[2](x)


def cast(model: nn.Module, x: Tensor) -> Tensor:
    """In bfloat16 where that is as good."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x)


def checkpointed(model: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    """Forward again when backward comes."""
    return checkpoint(model, x, use_reentrant=reentrant)


def selected(model: nn.Module, x: Tensor, *, products: bool) -> Tensor:
    """Forward again but for what a policy keeps: the products, or nothing."""
    keep = torch.ops.aten.addmm.default

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE
            if products and operator is keep
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return checkpoint(
        model,
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    """The square of the input's gradient, which is differentiated once more."""
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().sum()


def called(model: nn.Module, x: Tensor) -> Tensor:
    """With parameters from elsewhere."""
    return functional_call(
        model, {name: 2 * value for name, value in model.named_parameters()}, (x,)
    )


def optimised(x: Tensor, weight: Tensor) -> Tensor:
    """A function that is compiled outside of the counted pass."""
    return torch.compile(torch.mm, backend="eager")(x, weight)


class Ensemble(nn.Module):
    """Several perceptrons at once, by a batch of their weights."""

    def __init__(self) -> None:
        super().__init__()
        parameters, _ = stack_module_state([perceptron() for _ in range(members)])
        self.names = list(parameters)
        self.stacked = nn.ParameterList(parameters.values())
        self.skeleton = [perceptron().to("meta")]

    def forward(self, x: Tensor) -> Tensor:
        return vmap(lambda parameters: functional_call(self.skeleton[0], parameters, (x,)))(
            dict(zip(self.names, self.stacked, strict=True))
        )


class Jacobian(nn.Module):
    """The Jacobian of one row, by a batch of backward passes; only its scale is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.model = [perceptron()]
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * jacrev(self.model[0])(x).detach()


class Product(torch.autograd.Function):
    """A product whose gradients somebody wrote."""

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
    """A product by an operator that torch does not know, and whose cost lflops is told.

    Its gradients are torch's own products.
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
    # It stops as soon as it has what backward needs: the last product's input, and not what comes
    # of it.
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
        # Back to the input; from there through that way back, on which ones multiply the second
        # weight; and through the first layer.
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

channels, size, kernel, heads, width = 4, 8, 3, 2, 6


class InAutocast(nn.Module):
    """A convolution, attention and a product, none of them in the dtype of its weights."""

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
