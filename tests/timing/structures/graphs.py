"""Models with branches, skips, shared modules and other graphs than a chain."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.support.fake_clock import StillClock
from tests.support.timed_modules import Itself, Part
from tests.timing.structures.harness import Training, batch, model_case


@model_case(
    forward={"encoder": 1 + 1, "head": 4},
    backward={"encoder": 2 + 2, "head": 8},
)
def siamese(clock: StillClock) -> Training:
    """One encoder runs on both inputs, and a head compares them."""

    class Model(Itself):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.head(self.encoder(left) - self.encoder(right))

    model = Model(clock, encoder=Part(clock, 1, 2), head=Part(clock, 4, 8))
    return Training(model, (batch(), batch()))


@model_case(
    forward={"encoder": 1, "first": 2, "first.key": 4, "second": 8, "second.key": 16},
    backward={"encoder": 32, "first": 64, "first.key": 128, "second": 256, "second.key": 512},
)
def encoder_decoder(clock: StillClock) -> Training:
    """Each decoder layer attends to the output of the encoder."""

    class Layer(Part):
        def __init__(self, clock: StillClock, forward: float, backward: float, key: Part) -> None:
            super().__init__(clock, forward, backward)
            self.key = key

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return x + super().forward(x * self.key(memory))

    class Model(Itself):
        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            memory = self.encoder(source)
            return self.second(self.first(target, memory), memory)

    model = Model(
        clock,
        encoder=Part(clock, 1, 32),
        first=Layer(clock, 2, 64, key=Part(clock, 4, 128)),
        second=Layer(clock, 8, 256, key=Part(clock, 16, 512)),
    )
    return Training(model, (batch(), batch()))


@model_case(
    forward={"down.0": 1, "down.1": 4, "middle": 16, "up.0": 64, "up.1": 256},
    backward={"down.0": 2, "down.1": 8, "middle": 32, "up.0": 128, "up.1": 512},
)
def u_net(clock: StillClock) -> Training:
    """The output of each module on the way down is also an input on the way up."""

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            skips = []
            for down in self.down:
                x = down(x)
                skips.append(x)
            x = self.middle(x)
            for up in self.up:
                x = up(torch.cat([x, skips.pop()]))
            return x

    return Training(
        Model(
            clock,
            down=nn.ModuleList([Part(clock, 1, 2), Part(clock, 4, 8)]),
            middle=Part(clock, 16, 32),
            up=nn.ModuleList([Part(clock, 64, 128), Part(clock, 256, 512)]),
        )
    )


@model_case(
    forward={"first": 1, "experts.0": 4, "experts.1": 16, "last": 64},
    backward={"first": 2, "experts.0": 8, "experts.1": 32, "last": 128},
)
def mixture_of_experts(clock: StillClock) -> Training:
    """A gate sends each sample to an expert, and the outputs are added to a buffer in place."""

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            weights = self.gate(x).softmax(dim=-1)
            mixed = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                samples = torch.tensor([index])
                mixed.index_add_(0, samples, expert(x[samples]) * weights[samples, index, None])
            return self.last(mixed)

    return Training(
        Model(
            clock,
            first=Part(clock, 1, 2),
            gate=nn.Linear(4, 2),
            experts=nn.ModuleList([Part(clock, 4, 8), Part(clock, 16, 32)]),
            last=Part(clock, 64, 128),
        )
    )


@model_case(
    forward={"0.base": 1, "0.down": 4, "0.up": 16, "1": 64},
    backward={"0.down": 8, "0.up": 32, "1": 128},
)
def low_rank_adapter(clock: StillClock) -> Training:
    """An adapter runs next to a frozen module, whose input requires no gradient."""

    class Adapted(Itself):
        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    base = Part(clock, 1, 2).requires_grad_(requires_grad=False)
    adapted = Adapted(clock, base=base, down=Part(clock, 4, 8), up=Part(clock, 16, 32))
    return Training(nn.Sequential(adapted, Part(clock, 64, 128)))


@model_case(
    forward={"online": 1, "predictor": 4, "target": 16},
    backward={"online": 2, "predictor": 8},
)
def bootstrapped_target(clock: StillClock) -> Training:
    """The target of BYOL runs without gradients, after the network that is trained."""

    class Model(Itself):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            prediction = self.predictor(self.online(left))
            with torch.no_grad():
                target = self.target(right)
            return (prediction - target).square()

    model = Model(
        clock, online=Part(clock, 1, 2), predictor=Part(clock, 4, 8), target=Part(clock, 16, 32)
    )
    return Training(model, (batch(), batch()))


@model_case(
    forward={"caller": 1, "called": 4, "last": 16}, backward={"caller": 2, "called": 8, "last": 32}
)
def called_by_a_stranger(clock: StillClock) -> Training:
    """A module calls a module of its parent, which is not its own submodule."""
    called = Part(clock, 4, 8)

    class Caller(Part):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(called(x))

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.caller(x))

    return Training(
        Model(clock, caller=Caller(clock, 1, 2), called=called, last=Part(clock, 16, 32))
    )


@model_case(forward={"0": 1 + 1 + 1, "0.leaf": 4 * 4}, backward={"0": 2 + 2 + 2, "0.leaf": 4 * 8})
def calls_itself_for_both_halves(clock: StillClock) -> Training:
    """A module calls itself for both halves of its input: 3 inner calls, 4 calls of the leaf."""

    class Tree(Itself):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] == 1:
                return self.leaf(x)
            left, right = x.chunk(2, dim=-1)
            return self.take(self(left) + self(right), 1, 2)

    return Training(nn.Sequential(Tree(clock, leaf=Part(clock, 4, 8))))


@model_case(
    forward={"encoder.layer": 1, "head": 4},
    backward={"encoder.layer": 2, "head": 8},
)
def calls_another_method_than_forward(clock: StillClock) -> Training:
    """The model calls the method `encode` of its encoder, whose forward never runs."""

    class Encoder(Itself):
        def encode(self, x: Tensor) -> Tensor:
            return self.layer(x)

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder.encode(x))

    return Training(
        Model(clock, encoder=Encoder(clock, layer=Part(clock, 1, 2)), head=Part(clock, 4, 8))
    )


PARAMETRIZATION = "0.parametrizations.weight.0"


@model_case(forward={PARAMETRIZATION: 1, "1": 4}, backward={PARAMETRIZATION: 2, "1": 8})
def parametrized_weight(clock: StillClock) -> Training:
    """A module computes the weight of a layer whenever the layer reads it."""
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Part(clock, 1, 2))
    return Training(nn.Sequential(layer, Part(clock, 4, 8)))


@model_case(
    forward={"first": 1, "weights": 4, "target.1": 16},
    backward={"first": 2, "weights": 8, "target.1": 32},
)
def weights_from_another_network(clock: StillClock) -> Training:
    """A network computes factors for the weights of another, which runs by `functional_call`."""

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            factor = self.weights(x).mean()
            weights = {}
            for name, weight in self.target.named_parameters():
                weights[name] = weight * factor
            return torch.func.functional_call(self.target, weights, (x,))

    return Training(
        Model(
            clock,
            first=Part(clock, 1, 2),
            weights=Part(clock, 4, 8),
            target=nn.Sequential(nn.Linear(4, 4), Part(clock, 16, 32)),
        )
    )


@model_case(forward={"first": 1, "last": 4}, backward={"first": 2, "last": 8})
def autocast(clock: StillClock) -> Training:
    """A part of the model runs in bfloat16, and autocast converts its inputs."""

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.last(self.layer(self.first(x)))
            return x.float()

    return Training(
        Model(clock, first=Part(clock, 1, 2), layer=nn.Linear(4, 4), last=Part(clock, 4, 8))
    )


@model_case(forward={"packs": 1, "last": 4}, backward={"packs": 2, "last": 8})
def packed_sequence(clock: StillClock) -> Training:
    """A module returns a packed sequence for an LSTM, whose output is padded again."""

    class Packs(Part):
        def forward(self, x: Tensor) -> Any:
            return pack_padded_sequence(super().forward(x), [3, 2], batch_first=True)

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            packed, _state = self.lstm(self.packs(x))
            padded, _lengths = pad_packed_sequence(packed, batch_first=True)
            return self.last(padded)

    model = Model(
        clock,
        packs=Packs(clock, 1, 2),
        lstm=nn.LSTM(4, 4, batch_first=True),
        last=Part(clock, 4, 8),
    )
    return Training(model, (torch.ones(2, 3, 4),))


@model_case(
    forward={"0": 1, "1": 2, "1.first": 4, "2": 16},
    backward={"0": 2, "1": 4, "1.first": 8, "2": 32},
)
def gate_before_a_long_loop(clock: StillClock) -> Training:
    """A gate is computed early, and is used after a loop that builds thousands of nodes."""

    class Gated(Itself):
        def forward(self, x: Tensor) -> Tensor:
            gate = self.take(x, 2, 4)
            x = self.first(x)
            for _ in range(2_100):
                x = x.tanh()
            return gate * x

    return Training(
        nn.Sequential(Part(clock, 1, 2), Gated(clock, first=Part(clock, 4, 8)), Part(clock, 16, 32))
    )
