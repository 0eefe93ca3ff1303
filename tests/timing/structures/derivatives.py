"""Gradients in forward, gradients of gradients, and the function transforms of `torch.func`."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.fake_clock import StillClock
from tests.support.timed_modules import Itself, Part, Square
from tests.timing.structures.harness import (
    Loop,
    Saves,
    Training,
    batch,
    loop_case,
    model_case,
    sgd,
    update,
)


@loop_case(
    forward={"1": 1, "2": 8},
    backward={"1": 2 + 4 + 2, "2": 16 + 32 + 16},
)
def gradient_penalty(clock: StillClock) -> Loop:
    """The loss is the output and the squared gradient of the input.

    Each square runs its first derivative for the gradient, and then its second derivative and again
    its first derivative for the loss.
    """
    model = nn.Sequential(nn.Linear(4, 4), Square(clock, 1, 2, 4), Square(clock, 8, 16, 32))
    optimizer = sgd(model)

    def step() -> None:
        x = batch().requires_grad_()
        output = model(x).sum()
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        loss = output + gradient.square().sum()
        loss.backward()
        update(optimizer)

    return Loop(model, [optimizer], step)


@loop_case(
    forward={"generator": 1 + 1, "critic.1": 4 + 4 + 4},
    backward={"generator": 2, "critic.1": 8 + 8 + 16 + 8},
)
def wasserstein_gan(clock: StillClock) -> Loop:
    """A critic is trained with a gradient penalty, and then a generator with the critic.

    The critic runs its first derivative for the penalty, its first and second derivative for its
    loss, and its first derivative for the loss of the generator.
    """
    generator = Part(clock, 1, 2)
    critic = nn.Sequential(nn.Linear(4, 4), Square(clock, 4, 8, 16))
    of_generator = sgd(generator)
    of_critic = sgd(critic)

    def step() -> None:
        fake = generator(batch()).detach()
        mixed = fake.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        loss = critic(fake).sum() + gradient.square().sum()
        loss.backward()
        update(of_critic)
        critic(generator(batch())).sum().backward()
        update(of_generator)

    return Loop({"generator": generator, "critic": critic}, [of_generator, of_critic], step)


@loop_case(forward={"1": 1}, backward={"1": 2 + 4 + 2})
def differential_equation(clock: StillClock) -> Loop:
    """A physics-informed network learns that its output equals its second derivative.

    The square runs its first derivative, then its second derivative, and again its first derivative
    for the part of the loss with the output.
    """
    model = nn.Sequential(nn.Linear(4, 4), Square(clock, 1, 2, 4))
    optimizer = sgd(model)

    def step() -> None:
        x = batch().requires_grad_()
        output = model(x)
        (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        residual = second - output
        residual.square().sum().backward()
        update(optimizer)

    return Loop(model, [optimizer], step)


@loop_case(forward={"1": 1 + 1}, backward={"1": 2 + 2 + 4})
def meta_learning(clock: StillClock) -> Loop:
    """MAML trains the weights from which a step of gradient descent starts.

    The square runs its first derivative for this step, and for the loss the first derivative of its
    second call and the second derivative of its first call.
    """
    model = nn.Sequential(nn.Linear(4, 4), Square(clock, 1, 2, 4))
    optimizer = sgd(model)

    def step() -> None:
        weights = dict(model.named_parameters())
        inner_loss = torch.func.functional_call(model, weights, (batch(),)).sum()
        gradients = torch.autograd.grad(inner_loss, list(weights.values()), create_graph=True)
        adapted = {}
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            adapted[name] = weight - 0.1 * gradient
        torch.func.functional_call(model, adapted, (batch(),)).sum().backward()
        update(optimizer)

    return Loop(model, [optimizer], step)


@model_case(
    forward={"body": 1, "head": 8, "": 64},
    backward={"body": 2 + 4 + 2, "head": 16 + 32 + 16, "": 128},
)
def energy_and_forces(clock: StillClock) -> Training:
    """A force field returns an energy and its gradient, and then does more work in forward.

    Each square runs its first derivative in forward, and then its second derivative and again its
    first derivative in backward.
    """

    class ForceField(Itself):
        def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
            positions = positions.detach().requires_grad_()
            energy = self.head(self.body(self.embedding(positions))).sum()
            (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
            return energy, self.take(forces, 64, 128)

    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        energy, forces = outputs
        return energy + forces.square().sum()

    model = ForceField(
        clock,
        embedding=nn.Linear(4, 4),
        body=Square(clock, 1, 2, 4),
        head=Square(clock, 8, 16, 32),
    )
    return Training(model, loss=loss)


def sampler(clock: StillClock, steps: int) -> Training:
    """Return a model that follows the gradient of an energy for some steps in its forward."""

    class Sampler(Itself):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(steps):
                sample = x.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(self.energy(sample).sum(), sample)
                self.clock.advance(16)
                x = x - gradient
            return self.take(x, 64, 128)

    return Training(
        nn.Sequential(
            Part(clock, 1, 2), Sampler(clock, energy=Part(clock, 4, 8)), Part(clock, 256, 512)
        )
    )


@model_case(
    forward={"0": 1, "1": 16 + 64, "1.energy": 4, "2": 256},
    backward={"0": 2, "1": 128, "1.energy": 8, "2": 512},
)
def gradient_in_forward(clock: StillClock) -> Training:
    """A module computes a gradient in its forward, and then continues its forward."""
    return sampler(clock, steps=1)


@model_case(
    forward={"0": 1, "1": 2 * 16 + 64, "1.energy": 2 * 4, "2": 256},
    backward={"0": 2, "1": 128, "1.energy": 2 * 8, "2": 512},
)
def two_gradients_in_forward(clock: StillClock) -> Training:
    """A module computes two gradients, and continues its forward after each of them."""
    return sampler(clock, steps=2)


@model_case(
    forward={"0": 1, "1": 3 * 16 + 64, "1.energy": 3 * 4, "2": 256},
    backward={"0": 2, "1": 128, "1.energy": 3 * 8, "2": 512},
)
def three_gradients_in_forward(clock: StillClock) -> Training:
    """A module computes three gradients, and continues its forward after each of them."""
    return sampler(clock, steps=3)


@model_case(
    forward={"": 16, "encoder": 1 + 1, "head": 4 + 4},
    backward={"encoder": 2 + 2, "head": 8 + 8},
)
def adversarial_example_in_forward(clock: StillClock) -> Training:
    """Forward computes a gradient of all its modules, and then calls them with another input."""

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            probe = x.detach().requires_grad_()
            output = self.head(self.encoder(probe))
            (gradient,) = torch.autograd.grad(output.sum(), probe)
            self.clock.advance(16)
            return self.head(self.encoder(x + gradient.sign()))

    return Training(Model(clock, encoder=Part(clock, 1, 2), head=Part(clock, 4, 8)))


@loop_case(forward={"0": 1, "1": 4}, backward={"0": 2, "1": 8})
def gradients_by_autograd(clock: StillClock) -> Loop:
    """A step never calls `backward`: it stores the gradients of `autograd.grad` itself."""
    model = nn.Sequential(Saves(clock, 1, 2), Saves(clock, 4, 8))
    weights = list(model.parameters())
    optimizer = sgd(model)

    def step() -> None:
        gradients = torch.autograd.grad(model(batch()).sum(), weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        update(optimizer)

    return Loop(model, [optimizer], step)


class TakesWithRules(torch.autograd.Function):
    """Return a copy of the input and advance a clock, also in transforms of `torch.func`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, clock: StillClock, seconds: tuple[float, float]) -> Tensor:
        forward_seconds, _backward_seconds = seconds
        clock.advance(forward_seconds)
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _x, ctx.clock, ctx.seconds = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _forward_seconds, backward_seconds = ctx.seconds
        ctx.clock.advance(backward_seconds)
        return gradients[0].clone(), None, None


class Transformed(Part):
    """A part for transforms of `torch.func`. It returns a square, which has a second derivative."""

    def forward(self, x: Tensor) -> Tensor:
        return TakesWithRules.apply(x * self.weight, self.clock, self.seconds).square()


@model_case(
    forward={"first": 1, "mapped": 4, "last": 16}, backward={"first": 2, "mapped": 8, "last": 32}
)
def module_in_vmap(clock: StillClock) -> Training:
    """`torch.vmap` calls a module once for all samples."""

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.vmap(self.mapped)(self.first(x)))

    return Training(
        Model(
            clock,
            first=Part(clock, 1, 2),
            mapped=Transformed(clock, 4, 8),
            last=Part(clock, 16, 32),
        )
    )


@model_case(
    forward={"first": 1, "energy": 4, "last": 16},
    backward={"first": 2, "energy": 8 + 8, "last": 32},
)
def functional_gradient_in_forward(clock: StillClock) -> Training:
    """Forward calls `torch.func.grad`, and backward goes through its result."""

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            gradient = torch.func.grad(self.total_energy)(self.first(x))
            return self.last(gradient)

        def total_energy(self, x: Tensor) -> Tensor:
            return self.energy(x).sum()

    return Training(
        Model(
            clock,
            first=Part(clock, 1, 2),
            energy=Transformed(clock, 4, 8),
            last=Part(clock, 16, 32),
        )
    )


@loop_case(forward={"0": 1, "1": 4}, backward={"0": 2, "1": 8})
def functional_gradients_of_weights(clock: StillClock) -> Loop:
    """A step computes all gradients with `torch.func.grad`."""
    model = nn.Sequential(Transformed(clock, 1, 2), Transformed(clock, 4, 8))
    optimizer = sgd(model)

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (batch(),)).sum()

    def step() -> None:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        gradients = torch.func.grad(loss)(weights)
        for name, weight in model.named_parameters():
            weight.grad = gradients[name]
        update(optimizer)

    return Loop(model, [optimizer], step)
