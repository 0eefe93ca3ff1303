"""Training loops with several models, several losses, or several passes in a step."""

from threading import Thread

import torch
from torch import Tensor, nn

from tests.support.fake_clock import StillClock
from tests.support.timed_modules import Itself, Part
from tests.timing.structures.harness import Loop, batch, loop_case, sgd, update


@loop_case(
    forward={"generator": 1, "discriminator": 3 * 4},
    backward={"generator": 2, "discriminator": 3 * 8},
)
def generator_after_discriminator(clock: StillClock) -> Loop:
    """As in DCGAN, the generator's graph waits until the discriminator has been trained with it."""
    generator = Part(clock, 1, 2)
    discriminator = Part(clock, 4, 8)
    of_generator = sgd(generator)
    of_discriminator = sgd(discriminator)

    def step() -> None:
        discriminator(batch()).sum().backward()
        fake = generator(batch())
        discriminator(fake.detach()).sum().backward()
        update(of_discriminator)
        discriminator(fake).sum().backward()
        update(of_generator)

    models = {"generator": generator, "discriminator": discriminator}
    return Loop(models, [of_generator, of_discriminator], step)


@loop_case(
    forward={"encoder": 1, "probe": 4, "head": 16},
    backward={"encoder": 2, "probe": 8, "head": 32},
)
def two_heads_with_their_own_optimizers(clock: StillClock) -> Loop:
    """A probe is trained on detached features, and then the encoder with its head."""
    encoder = Part(clock, 1, 2)
    probe = Part(clock, 4, 8)
    head = Part(clock, 16, 32)
    of_probe = sgd(probe)
    of_encoder = sgd(encoder, head)

    def step() -> None:
        features = encoder(batch())
        probe(features.detach()).sum().backward()
        update(of_probe)
        head(features).sum().backward()
        update(of_encoder)

    return Loop({"encoder": encoder, "probe": probe, "head": head}, [of_probe, of_encoder], step)


@loop_case(
    forward={"encoder": 1, "first": 4, "second": 16},
    backward={"encoder": 2 + 2, "first": 8, "second": 32},
)
def head_that_is_called_after_backward(clock: StillClock) -> Loop:
    """A second head is called after the backward of the first, with the same features."""
    encoder = Part(clock, 1, 2)
    first = Part(clock, 4, 8)
    second = Part(clock, 16, 32)
    optimizer = sgd(encoder, first, second)

    def step() -> None:
        features = encoder(batch())
        first(features).sum().backward(retain_graph=True)
        second(features).sum().backward()
        update(optimizer)

    return Loop({"encoder": encoder, "first": first, "second": second}, [optimizer], step)


@loop_case(
    forward={"encoder": 1, "first": 4, "second": 16},
    backward={"encoder": 2 + 2, "first": 8, "second": 32},
)
def one_model_called_for_each_part(clock: StillClock) -> Loop:
    """One model is called with the name of the part that it runs, before and after backward."""

    class Model(Itself):
        def forward(self, part: str, x: Tensor) -> Tensor:
            return self.get_submodule(part)(x)

    model = Model(
        clock, encoder=Part(clock, 1, 2), first=Part(clock, 4, 8), second=Part(clock, 16, 32)
    )
    optimizer = sgd(model)

    def step() -> None:
        features = model("encoder", batch())
        model("first", features).sum().backward(retain_graph=True)
        model("second", features).sum().backward()
        update(optimizer)

    return Loop(model, [optimizer], step)


class TwoTowers(Itself):
    """A model that returns two outputs, which have no module in common."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


@loop_case(forward={"left": 1, "right": 4}, backward={"left": 2, "right": 8})
def a_backward_for_each_loss(clock: StillClock) -> Loop:
    """A model returns two outputs, and each has its own backward."""
    model = TwoTowers(clock, left=Part(clock, 1, 2), right=Part(clock, 4, 8))
    optimizer = sgd(model)

    def step() -> None:
        left, right = model(batch())
        left.sum().backward()
        right.sum().backward()
        update(optimizer)

    return Loop(model, [optimizer], step)


@loop_case(forward={"": 16 + 16, "first": 1, "second": 4}, backward={"first": 2, "second": 8})
def backward_in_forward(clock: StillClock) -> Loop:
    """Each layer has a separate loss, and the model's forward runs its backward."""

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.first, self.second):
                x = layer(x.detach())
                x.sum().backward()
                self.clock.advance(16)
            return x

    model = Model(clock, first=Part(clock, 1, 2), second=Part(clock, 4, 8))
    optimizer = sgd(model)

    def step() -> None:
        model(batch())
        update(optimizer)

    return Loop(model, [optimizer], step)


@loop_case(
    forward={"trunk": 1, "left": 4, "right": 16},
    backward={"trunk": 2 + 2, "left": 8, "right": 32},
)
def retained_graph(clock: StillClock) -> Loop:
    """Two losses go backward one after the other through the trunk that they share."""

    class Model(Itself):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.trunk(x)
            return self.left(x), self.right(x)

    model = Model(clock, trunk=Part(clock, 1, 2), left=Part(clock, 4, 8), right=Part(clock, 16, 32))
    optimizer = sgd(model)

    def step() -> None:
        left, right = model(batch())
        left.sum().backward(retain_graph=True)
        right.sum().backward()
        update(optimizer)

    return Loop(model, [optimizer], step)


@loop_case(forward={"0": 1 + 1, "1": 4 + 4}, backward={"0": 2 + 2, "1": 8 + 8})
def accumulated_gradients(clock: StillClock) -> Loop:
    """An optimizer step is trained on two batches of the loop. Its time is the sum of both."""
    model = nn.Sequential(Part(clock, 1, 2), Part(clock, 4, 8))
    optimizer = sgd(model)
    batches = 0

    def step() -> None:
        nonlocal batches
        model(batch()).sum().backward()
        batches += 1
        if batches % 2 == 0:
            update(optimizer)

    return Loop(model, [optimizer], step, accumulation=2)


@loop_case(forward={"actor": 1 + 1, "critic": 4 + 4}, backward={"actor": 2, "critic": 8 + 8})
def actor_and_critic(clock: StillClock) -> Loop:
    """The critic is trained on a detached action, and then the actor with the critic."""
    actor = Part(clock, 1, 2)
    critic = Part(clock, 4, 8)
    of_actor = sgd(actor)
    of_critic = sgd(critic)

    def step() -> None:
        action = actor(batch())
        critic(action.detach()).square().sum().backward()
        update(of_critic)
        (-critic(actor(batch())).sum()).backward()
        update(of_actor)

    return Loop({"actor": actor, "critic": critic}, [of_actor, of_critic], step)


@loop_case(forward={"0": 4 * 1, "1": 4 * 4}, backward={"0": 2 * 2, "1": 2 * 8})
def gradient_cache(clock: StillClock) -> Loop:
    """A contrastive loss of two chunks: each chunk runs without a graph, and again with one."""
    model = nn.Sequential(Part(clock, 1, 2), Part(clock, 4, 8))
    optimizer = sgd(model)

    def step() -> None:
        chunks = [batch(), batch()]
        with torch.no_grad():
            embeddings = [model(chunk) for chunk in chunks]
        for embedding in embeddings:
            embedding.requires_grad_()
        torch.cat(embeddings).square().sum().backward()
        for chunk, embedding in zip(chunks, embeddings, strict=True):
            model(chunk).backward(embedding.grad)
        update(optimizer)

    return Loop(model, [optimizer], step)


@loop_case(forward={"0": 1 + 1, "2": 4 + 4}, backward={"0": 2 + 2, "2": 8 + 8})
def sharpness_aware_minimization(clock: StillClock) -> Loop:
    """A first pass moves the weights, and a second pass trains them."""
    model = nn.Sequential(Part(clock, 1, 2), nn.Linear(4, 4), Part(clock, 4, 8))
    optimizer = sgd(model)

    def step() -> None:
        model(batch()).sum().backward()
        with torch.no_grad():
            for weight in model[1].parameters():
                weight.add_(weight.grad, alpha=0.01)
        optimizer.zero_grad()
        model(batch()).sum().backward()
        update(optimizer)

    return Loop(model, [optimizer], step)


@loop_case(forward={"0": 1 + 1, "2": 4 + 4}, backward={"0": 2 + 2, "2": 8 + 8})
def closure_of_an_optimizer(clock: StillClock) -> Loop:
    """LBFGS runs forward and backward twice in its step."""
    model = nn.Sequential(Part(clock, 1, 2), nn.Linear(4, 4), Part(clock, 4, 8))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch()).sum()
        loss.backward()
        return loss

    return Loop(model, [optimizer], lambda: optimizer.step(closure))


@loop_case(forward={"0": 3 * 1, "1": 3 * 4}, backward={"0": 3 * 2, "1": 3 * 8})
def truncated_backward(clock: StillClock) -> Loop:
    """The state of a recurrent model is detached, and each time step has its own update."""
    model = nn.Sequential(Part(clock, 1, 2), Part(clock, 4, 8))
    optimizer = sgd(model)

    def step() -> None:
        state = batch()
        for _ in range(3):
            state = model(state.detach())
            state.sum().backward()
            update(optimizer)

    return Loop(model, [optimizer], step)


@loop_case(forward={"0": 1, "1": 4}, backward={"0": 2, "1": 8})
def backward_on_another_thread(clock: StillClock) -> Loop:
    """A step starts a thread for backward, and waits for it."""
    model = nn.Sequential(Part(clock, 1, 2), Part(clock, 4, 8))
    optimizer = sgd(model)

    def step() -> None:
        loss = model(batch()).sum()
        thread = Thread(target=loss.backward)
        thread.start()
        thread.join()
        update(optimizer)

    return Loop(model, [optimizer], step)


@loop_case(forward={"first": 1, "last": 4}, backward={"first": 2, "last": 8})
def method_that_returns_the_loss(clock: StillClock) -> Loop:
    """The loop never calls the model, but a method that returns its loss."""

    class Model(Itself):
        def loss(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)).sum()

    model = Model(clock, first=Part(clock, 1, 2), last=Part(clock, 4, 8))
    optimizer = sgd(model)

    def step() -> None:
        model.loss(batch()).backward()
        update(optimizer)

    return Loop(model, [optimizer], step)


@loop_case(
    forward={"first": 1 + 1, "dropped": 4, "last": 16 + 16},
    backward={"first": 2 + 2, "dropped": 8, "last": 32 + 32},
)
def dropped_layer(clock: StillClock) -> Loop:
    """A step has two microbatches, and a layer runs only for the second of them."""

    class Model(Itself):
        def forward(self, x: Tensor, *, drops: bool) -> Tensor:
            x = self.first(x)
            if not drops:
                x = self.dropped(x)
            return self.last(x)

    model = Model(
        clock, first=Part(clock, 1, 2), dropped=Part(clock, 4, 8), last=Part(clock, 16, 32)
    )
    optimizer = sgd(model)

    def step() -> None:
        model(batch(), drops=True).sum().backward()
        model(batch(), drops=False).sum().backward()
        update(optimizer)

    return Loop(model, [optimizer], step)
