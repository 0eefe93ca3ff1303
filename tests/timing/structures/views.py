"""Outputs that are changed in place, and outputs that are views."""

import torch
from torch import Tensor, nn

from tests.support.fake_clock import StillClock
from tests.support.timed_modules import Itself, Part
from tests.timing.structures.harness import Training, model_case


@model_case(forward={"attention": 1, "last": 4}, backward={"attention": 2, "last": 8})
def residual_added_to_attention(clock: StillClock) -> Training:
    """Attention returns a transposed view, and the block adds its input to it in place."""

    class Attention(Part):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(2, 2, 2).transpose(0, 1)

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            attended = self.attention(x)
            attended += x.view(2, 2, 2)
            return self.last(attended)

    return Training(Model(clock, attention=Attention(clock, 1, 2), last=Part(clock, 4, 8)))


@model_case(forward={"patches": 1, "last": 4}, backward={"patches": 2, "last": 8})
def positions_added_to_patches(clock: StillClock) -> Training:
    """The patch embedding returns a view, and the model adds a parameter to it in place."""

    class Patches(Itself):
        def forward(self, image: Tensor) -> Tensor:
            return self.take(self.projection(image), 1, 2).flatten(2).transpose(1, 2)

    class Model(Itself):
        def __init__(self, clock: StillClock, **parts: nn.Module) -> None:
            super().__init__(clock, **parts)
            self.positions = nn.Parameter(torch.zeros(1, 4, 8))

        def forward(self, image: Tensor) -> Tensor:
            x = self.patches(image)
            x += self.positions
            return self.last(x)

    model = Model(
        clock,
        patches=Patches(clock, projection=nn.Conv2d(3, 8, kernel_size=4, stride=4)),
        last=Part(clock, 4, 8),
    )
    return Training(model, (torch.ones(2, 3, 8, 8),))


@model_case(forward={"heads": 1, "last": 4}, backward={"heads": 2, "last": 8})
def heads_scaled_in_place(clock: StillClock) -> Training:
    """A module splits its output into heads, and its caller scales and masks them in place."""

    class Heads(Part):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(2, 2, 2)

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            heads = self.heads(x)
            heads *= 0.5
            heads.masked_fill_(heads < 0, 0.0)
            return self.last(heads)

    return Training(Model(clock, heads=Heads(clock, 1, 2), last=Part(clock, 4, 8)))


@model_case(forward={"0": 1, "1": 4, "4": 16}, backward={"0": 2, "1": 8, "4": 32})
def relu_in_place_after_a_view(clock: StillClock) -> Training:
    """A module returns a view, and the next module, torch's ReLU, changes it in place."""

    class Transposes(Part):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).unsqueeze(1).transpose(1, 2)

    return Training(
        nn.Sequential(
            Part(clock, 1, 2),
            Transposes(clock, 4, 8),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            Part(clock, 16, 32),
        )
    )


@model_case(
    forward={"left": 1, "right": 4, "last": 16}, backward={"left": 2, "right": 8, "last": 32}
)
def outputs_written_into_a_buffer(clock: StillClock) -> Training:
    """The outputs of two modules are written into slices of one tensor."""

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            buffer = x.new_zeros(2, 8)
            buffer[:, :4] = self.left(x)
            buffer[:, 4:] = self.right(x)
            return self.last(buffer)

    return Training(
        Model(clock, left=Part(clock, 1, 2), right=Part(clock, 4, 8), last=Part(clock, 16, 32))
    )
