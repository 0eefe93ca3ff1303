"""Work that could belong to several modules. The cases document which module has its time."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.fake_clock import StillClock
from tests.support.timed_modules import Itself, Part, Takes
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


def two_parts(clock: StillClock) -> nn.Sequential:
    """Return the model of most cases in this file."""
    return nn.Sequential(Saves(clock, 1, 2), Saves(clock, 4, 8))


@model_case(forward={"0": 1, "1": 4, "": 16}, backward={"0": 2, "1": 8, "": 32})
def forward_hook(clock: StillClock) -> Training:
    """The time of a user's forward hook belongs to the parent of the module."""

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return Takes.apply(output, None, clock, (16, 32))

    model = two_parts(clock)
    model[1].register_forward_hook(hook)
    return Training(model)


@model_case(forward={"0": 1, "1": 4 + 16}, backward={"0": 2, "1": 8 + 32})
def forward_pre_hook_and_backward_hook(clock: StillClock) -> Training:
    """The time of a user's forward pre-hook and full backward hook belongs to the module itself."""
    model = two_parts(clock)
    model[1].register_forward_pre_hook(lambda *_: clock.advance(16))
    model[1].register_full_backward_hook(lambda *_: clock.advance(32))
    return Training(model)


@model_case(forward={"0": 1, "1": 4}, backward={"0": 2, "1": 8 + 32})
def hook_of_a_tensor(clock: StillClock) -> Training:
    """The time of a tensor's hook belongs to the module that uses the tensor."""

    class Hooked(Saves):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            if output.requires_grad:
                output.register_hook(lambda _gradient: clock.advance(32))
            return output

    return Training(nn.Sequential(Hooked(clock, 1, 2), Saves(clock, 4, 8)))


@model_case(forward={"0": 1, "1": 4}, backward={"0": 2, "1": 8 + 32})
def hook_of_a_gradient(clock: StillClock) -> Training:
    """The time of a hook that runs after a gradient is ready belongs to the weight's module."""
    model = two_parts(clock)
    model[1].weight.register_post_accumulate_grad_hook(lambda _weight: clock.advance(32))
    return Training(model)


@model_case(forward={"0": 1, "1": 4 + 16 + 16}, backward={"0": 2, "1": 8 + 32 + 32})
def hooks_of_saved_tensors(clock: StillClock) -> Training:
    """The time to offload and to reload two saved tensors belongs to the module that saves them."""

    def offload(tensor: Tensor) -> Tensor:
        clock.advance(16)
        return tensor

    def reload(tensor: Tensor) -> Tensor:
        clock.advance(32)
        return tensor

    class Offloads(Saves):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(offload, reload):
                return super().forward(x)

    return Training(nn.Sequential(Saves(clock, 1, 2), Offloads(clock, 4, 8)))


@model_case(
    forward={"": 16, "generator.layer": 1 + 1, "last": 4},
    backward={"generator.layer": 2 + 2, "last": 8},
)
def forward_that_yields(clock: StillClock) -> Training:
    """If forward is a generator function, its code runs in the caller and has the caller's time."""

    class Yields(Itself):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            x = self.layer(x)
            yield x
            self.clock.advance(16)
            yield self.layer(x)

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            _first, second = self.generator(x)
            return self.last(second)

    return Training(
        Model(clock, generator=Yields(clock, layer=Part(clock, 1, 2)), last=Part(clock, 4, 8))
    )


@model_case(forward={"first": 1, "": 4 + 16}, backward={"first": 2, "": 8 + 32})
def modules_in_a_thread_pool(clock: StillClock) -> Training:
    """Modules on other threads have no time. It belongs to the module that waits for them."""

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with ThreadPoolExecutor(max_workers=1) as threads:
                left = threads.submit(self.left, x)
                right = threads.submit(self.right, x)
            return left.result() + right.result()

    return Training(
        Model(clock, first=Part(clock, 1, 2), left=Part(clock, 4, 8), right=Part(clock, 16, 32))
    )


@loop_case(forward={"0": 1, "1": 4, "": 16}, backward={"0": 2, "1": 8})
def teacher_that_is_not_watched(clock: StillClock) -> Loop:
    """The time of a model that is not watched belongs to forward of the root."""
    student = two_parts(clock)
    teacher = Part(clock, 16, 32)
    optimizer = sgd(student)

    def step() -> None:
        output = student(batch())
        with torch.no_grad():
            target = teacher(batch())
        (output - target).square().sum().backward()
        update(optimizer)

    return Loop(student, [optimizer], step)
