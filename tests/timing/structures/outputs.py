"""Modules whose outputs are in containers, on attributes, or in their inputs."""

from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

from torch import Tensor

from tests.support.fake_clock import StillClock
from tests.support.timed_modules import Itself, Part
from tests.timing.structures.harness import Training, model_case


def packed(
    clock: StillClock, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Training:
    """Return a model whose first part packs its output into an object."""

    class Packs(Part):
        def forward(self, x: Tensor) -> Any:
            return pack(super().forward(x))

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(unpack(self.first(x)))

    return Training(Model(clock, first=Packs(clock, 1, 2), last=Part(clock, 4, 8)))


@model_case(forward={"first": 1, "last": 4}, backward={"first": 2, "last": 8})
def returns_a_generator(clock: StillClock) -> Training:
    """A module returns a generator of its outputs."""
    return packed(clock, lambda output: (each for each in [output]), next)


@model_case(forward={"first": 1, "last": 4}, backward={"first": 2, "last": 8})
def returns_a_read_only_mapping(clock: StillClock) -> Training:
    """A module returns a mapping that is no dict."""
    return packed(clock, lambda output: MappingProxyType({"y": output}), lambda packed: packed["y"])


@model_case(forward={"first": 1, "last": 4}, backward={"first": 2, "last": 8})
def returns_a_function(clock: StillClock) -> Training:
    """A module returns a function that returns its output."""
    return packed(clock, lambda output: lambda: output, lambda function: function())


@model_case(forward={"first": 1, "last": 4}, backward={"first": 2, "last": 8})
def returns_three_chunks(clock: StillClock) -> Training:
    """A module returns query, key and value as chunks of one tensor, and only the key is used."""
    return packed(clock, lambda output: output.chunk(3, dim=-1), lambda chunks: chunks[1])


@model_case(
    forward={"backbone": 1 + 4, "boxes": 16, "classes": 64},
    backward={"backbone": 2 + 8, "boxes": 32, "classes": 128},
)
def returns_outputs_for_two_modules(clock: StillClock) -> Training:
    """A backbone returns two outputs, and each head uses one of them."""

    class Backbone(Itself):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.take(x, 1, 2), self.take(x, 4, 8)

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            for_boxes, for_classes = self.backbone(x)
            return self.boxes(for_boxes) + self.classes(for_classes)

    return Training(
        Model(
            clock, backbone=Backbone(clock), boxes=Part(clock, 16, 32), classes=Part(clock, 64, 128)
        )
    )


@model_case(
    forward={"first": 1, "middle": 4, "last": 16}, backward={"first": 2, "middle": 8, "last": 32}
)
def keeps_its_output(clock: StillClock) -> Training:
    """A module returns nothing and keeps its output as an attribute, which its caller reads."""

    class Keeps(Part):
        def forward(self, x: Tensor) -> None:
            self.output = super().forward(x)

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            self.middle(self.first(x))
            return self.last(self.middle.output)

    return Training(
        Model(clock, first=Part(clock, 1, 2), middle=Keeps(clock, 4, 8), last=Part(clock, 16, 32))
    )


@model_case(
    forward={"first": 1, "middle": 4, "last": 16}, backward={"first": 2, "middle": 8, "last": 32}
)
def changes_an_attribute_of_its_input(clock: StillClock) -> Training:
    """Modules return nothing and write to an attribute of the object that they are passed."""

    class Changes(Part):
        def forward(self, graph: Any) -> None:
            graph.nodes = super().forward(graph.nodes)

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            graph = SimpleNamespace(nodes=x)
            self.first(graph)
            self.middle(graph)
            self.last(graph)
            return graph.nodes

    return Training(
        Model(
            clock,
            first=Changes(clock, 1, 2),
            middle=Changes(clock, 4, 8),
            last=Changes(clock, 16, 32),
        )
    )


@model_case(
    forward={"first": 1, "middle": 4, "last": 16}, backward={"first": 2, "middle": 8, "last": 32}
)
def overwrites_its_input(clock: StillClock) -> Training:
    """A module returns nothing and copies its output into the tensor that it is passed."""

    class Overwrites(Part):
        def forward(self, x: Tensor) -> None:
            x.copy_(super().forward(x.clone()))

    class Model(Itself):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            self.middle(x)
            return self.last(x)

    return Training(
        Model(
            clock,
            first=Part(clock, 1, 2),
            middle=Overwrites(clock, 4, 8),
            last=Part(clock, 16, 32),
        )
    )
