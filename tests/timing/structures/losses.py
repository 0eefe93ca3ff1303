"""Losses that use more than the output of the model."""

from typing import Any

from torch import Tensor, nn

from tests.support.fake_clock import StillClock
from tests.support.timed_modules import Itself, Part
from tests.timing.structures.harness import Training, model_case


class Router(Itself):
    """A module that computes an auxiliary loss after its output, and keeps it as an attribute."""

    auxiliary: Tensor

    def forward(self, x: Tensor) -> Tensor:
        output = self.take(x, 1, 2)
        self.auxiliary = self.take(output, 4, 8).sum()
        return output


@model_case(forward={"0": 1 + 4, "1": 16}, backward={"0": 2 + 8, "1": 32})
def auxiliary_loss_on_an_attribute(clock: StillClock) -> Training:
    """The training step adds the auxiliary loss of a router to the loss of the output."""
    router = Router(clock)
    model = nn.Sequential(router, Part(clock, 16, 32))
    return Training(model, loss=lambda output: output.sum() + router.auxiliary)


@model_case(forward={"0": 16, "1": 1 + 4, "2": 64}, backward={"0": 32, "1": 8 + 2, "2": 128})
def output_is_detached(clock: StillClock) -> Training:
    """After a router, the gradient stops: only its auxiliary loss leads back to it."""

    class Detaches(Part):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.detach())

    router = Router(clock)
    model = nn.Sequential(Part(clock, 16, 32), router, Detaches(clock, 64, 128))
    return Training(model, loss=lambda output: output.sum() + router.auxiliary)


@model_case(forward={"0": 16, "1": 1 + 4, "2": 64}, backward={"0": 32, "1": 8 + 2})
def output_is_ignored(clock: StillClock) -> Training:
    """The loss is only the auxiliary loss, so the last module has no backward."""
    router = Router(clock)
    model = nn.Sequential(Part(clock, 16, 32), router, Part(clock, 64, 128))
    return Training(model, loss=lambda _output: router.auxiliary)


@model_case(
    forward={"first": 1 + 4, "second": 16 + 64, "head": 256},
    backward={"first": 2 + 8, "second": 32 + 128, "head": 512},
)
def router_logits_in_a_list(clock: StillClock) -> Training:
    """Each block appends its router's logits to a list, which the model returns for the loss."""

    class Block(Itself):
        def __init__(
            self, clock: StillClock, output: tuple[float, float], logits: tuple[float, float]
        ) -> None:
            super().__init__(clock)
            self.output_seconds = output
            self.logits_seconds = logits

        def forward(self, x: Tensor, all_logits: list[Tensor]) -> Tensor:
            output = self.take(x, *self.output_seconds)
            all_logits.append(self.take(output, *self.logits_seconds))
            return output

    class Model(Itself):
        def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
            all_logits: list[Tensor] = []
            x = self.first(x, all_logits)
            x = self.second(x, all_logits)
            return self.head(x), all_logits

    def loss(outputs: tuple[Tensor, list[Tensor]]) -> Tensor:
        output, (first, second) = outputs
        return output.sum() + first.sum() + second.sum()

    model = Model(
        clock,
        first=Block(clock, (1, 2), (4, 8)),
        second=Block(clock, (16, 32), (64, 128)),
        head=Part(clock, 256, 512),
    )
    return Training(model, loss=loss)


@model_case(forward={"0": 1, "1": 4 + 16, "2": 64}, backward={"0": 2, "1": 8 + 32, "2": 128})
def features_in_a_list_of_the_loss(clock: StillClock) -> Training:
    """A module appends a feature to a list outside the model, and the loss reads the list."""
    features: list[Tensor] = []

    class Appends(Itself):
        def forward(self, x: Tensor) -> Tensor:
            output = self.take(x, 4, 8)
            features.append(self.take(output, 16, 32))
            return output

    def loss(output: Tensor) -> Tensor:
        return output.sum() + features.pop().sum()

    model = nn.Sequential(Part(clock, 1, 2), Appends(clock), Part(clock, 64, 128))
    return Training(model, loss=loss)


@model_case(forward={"0": 1, "1": 4, "2": 16}, backward={"0": 2, "1": 8})
def features_of_a_forward_hook(clock: StillClock) -> Training:
    """The loss uses only the output of the middle module, which a user's hook has kept."""
    features: list[Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:
        features.append(output)

    model = nn.Sequential(Part(clock, 1, 2), Part(clock, 4, 8), Part(clock, 16, 32))
    model[1].register_forward_hook(keep)
    return Training(model, loss=lambda _output: features.pop().sum())


@model_case(
    forward={"layers.0": 1, "exits.0": 4, "layers.1": 16, "exits.1": 64},
    backward={"layers.0": 2, "exits.0": 8, "layers.1": 32, "exits.1": 128},
)
def deep_supervision(clock: StillClock) -> Training:
    """Each layer has an exit, and the loss is the sum of all exits."""
    return Training(exits(clock), loss=lambda outputs: outputs[0].sum() + outputs[1].sum())


@model_case(
    forward={"layers.0": 1, "exits.0": 4, "layers.1": 16, "exits.1": 64},
    backward={"layers.0": 2, "exits.0": 8},
)
def early_exit(clock: StillClock) -> Training:
    """Each layer has an exit, and the loss uses only the first exit."""
    return Training(exits(clock), loss=lambda outputs: outputs[0].sum())


def exits(clock: StillClock) -> nn.Module:
    """Return a model with two layers and an exit after each layer."""

    class Model(Itself):
        def forward(self, x: Tensor) -> list[Tensor]:
            outputs = []
            for layer, leave in zip(self.layers, self.exits, strict=True):
                x = layer(x)
                outputs.append(leave(x))
            return outputs

    return Model(
        clock,
        layers=nn.ModuleList([Part(clock, 1, 2), Part(clock, 16, 32)]),
        exits=nn.ModuleList([Part(clock, 4, 8), Part(clock, 64, 128)]),
    )
