"""Small models, batches and losses, ordinary and unusual ones, that any loop can train."""

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["TASKS", "Task"]

ROWS = 4
WIDTH = 8
CLASSES = 3


def tensors(index: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and classes of the batch with this number, the same in each run."""
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    y = torch.randint(CLASSES, (ROWS,), generator=generator)
    return x, y


def crossentropy(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch that is a pair of inputs and classes."""
    x, y = batch
    return F.cross_entropy(model(x), y)


class Task(NamedTuple):
    """Functions that make a model, make the batch with a number, and compute a batch's loss."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any] = tensors
    loss: Callable[[Any, Any], Tensor] = crossentropy


class Net(nn.Module):
    """A model of two layers with dropout, which counts its calls. Subclasses override `middle`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.middle(self.body(x)))

    def middle(self, x: Tensor) -> Tensor:
        """Compute the features between body and head."""
        return x


class Normed(Net):
    """Batch norm, which has buffers that change in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Cond(Net):
    """`torch.cond`, a branch that torch.compile supports."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))


class Scan(Net):
    """A recurrence with `scan`."""

    def middle(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops import scan

        return scan(lambda carry, row: (carry + row, carry * row), torch.zeros(WIDTH), x)[1]


class Map(Net):
    """The same function of each row, with `map`."""

    def middle(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops import map as each_row

        return each_row(lambda row: row.sin(), x)


class While(Net):
    """A loop with a condition on data. torch supports it only without gradients."""

    def middle(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops import while_loop

        with torch.no_grad():
            times, _ = while_loop(
                lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.9), (torch.tensor(0), x)
            )
        return x * times


class Recomputed(Net):
    """Activation checkpointing without reentrant autograd."""

    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: F.dropout(y.sin()), x, use_reentrant=False)


class RecomputedReentrant(Net):
    """Activation checkpointing with reentrant autograd, the older kind."""

    def middle(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: F.dropout(y.sin()), x, use_reentrant=True)


class Doubled(torch.autograd.Function):
    """A function with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Custom(Net):
    """A call of an autograd function with its own backward."""

    def middle(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)


class Vmapped(Net):
    """`torch.func` inside forward."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x) + x


class Penalised(Net):
    """A gradient that is computed inside forward, as for a gradient penalty."""

    def middle(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            if not x.requires_grad:
                x = x.detach().requires_grad_()
            return x + torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]


class Recurrent(Net):
    """An LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0][:, 0]


class Attention(Net):
    """A layer of a transformer encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        return self.layer(x[None])[0]


class Twice(Net):
    """A module that is called twice, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.body
        self.tied = nn.Linear(WIDTH, CLASSES)
        self.tied.weight = self.head.weight

    def middle(self, x: Tensor) -> Tensor:
        return self.again(x) + self.tied(x).sum()


class Parametrised(Net):
    """Spectral norm and weight norm, which have buffers that change in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        return self.weighted(self.spectral(x))


class Copied(Net):
    """A copy of a module in forward, as some averaging does."""

    def middle(self, x: Tensor) -> Tensor:
        return x + copy.deepcopy(self.head)(x).mean().detach()


class InPlace(Net):
    """In-place operators on a copy of the input."""

    def middle(self, x: Tensor) -> Tensor:
        return x.clone().mul_(2).add_(1)


class Odd(nn.Module):
    """A layer that returns its result in an unusual object, which `make` creates."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


class Ordered(collections.OrderedDict[str, Any]):
    """A dict that cannot be created from one argument, as some libraries have."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(first=first, second=second)


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A frozen dataclass with slots."""

    hidden: Any
    name: str


class Pair(NamedTuple):
    """A named tuple."""

    hidden: Any
    name: str


class Opaque:
    """An object that fails if anything but its model reads, compares or iterates over it."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the attribute {name} was read")

    def __bool__(self) -> bool:
        raise RuntimeError("the truth value was read")

    def __len__(self) -> int:
        raise RuntimeError("the length was read")

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("the contents were read")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("the object was compared")

    __hash__ = None  # type: ignore[assignment]


class WithOdd(Net):
    """A layer with an unusual output, from which `unmake` returns the tensor."""

    def __init__(self, make: Callable[[Tensor], Any], unmake: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.odd = Odd(make)
        self.unmake = unmake

    def middle(self, x: Tensor) -> Tensor:
        return self.unmake(self.odd(x))


class Forgetful(Net):
    """A layer that returns `None` and keeps its result."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Module()
        self.part.layer = nn.Linear(WIDTH, WIDTH)
        self.kept: list[Tensor] = []
        self.odd = Odd(self.kept.append)

    def middle(self, x: Tensor) -> Tensor:
        self.odd(x)
        return self.kept.pop()


def recursive(x: Tensor) -> list[Any]:
    """Return a list that contains itself."""
    made: list[Any] = [x]
    made.append(made)
    return made


# Each output has a function that makes it from a tensor, and one that returns the tensor.
ODD_OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "string": (lambda x: ("text", x), lambda made: made[1]),
    "dict": (lambda x: {"a": x, 3: None, None: "b"}, lambda made: made["a"]),
    "dict subclass": (lambda x: Ordered(x, x * 2), lambda made: made["first"] + made["second"]),
    "frozen dataclass": (lambda x: Output(x, "name"), lambda made: made.hidden),
    "named tuple": (lambda x: Pair(x, "name"), lambda made: made.hidden),
    "opaque object": (Opaque, lambda made: made.hidden),
    "generator": (lambda x: (row for row in x), lambda made: torch.stack(list(made))),
    "iterator": (lambda x: iter(x.unbind()), lambda made: torch.stack(list(made))),
    "nested lists": (lambda x: [[x], [[x * 2]]], lambda made: made[0][0] + made[1][0][0]),
    "number": (lambda x: (float(x.sum()), x), lambda made: made[1] * made[0]),
    "function": (lambda x: lambda: x, lambda made: made()),
    "list that holds itself": (recursive, lambda made: made[0]),
    "distribution": (lambda x: torch.distributions.Normal(x, 1.0), lambda made: made.mean),
    "sparse tensor": (lambda x: x.to_sparse(), lambda made: made.to_dense()),
    "set of texts": (lambda x: ({"a", "b"}, x), lambda made: made[1]),
}


@dataclasses.dataclass
class Batch:
    """A dataclass with two tensors and a name."""

    x: Tensor
    y: Tensor
    name: str = "batch"


class Loads:
    """A lazy batch, which reads from its data set when it is accessed. Accesses are counted."""

    looks = 0

    def __init__(self, index: int) -> None:
        self.index = index
        self.dataset = [tensors(each) for each in range(3)]

    def to(self, *_: Any, **__: Any) -> "Loads":
        """Return the batch unchanged."""
        return self

    def load(self) -> tuple[Tensor, Tensor]:
        """Return the tensors. The loss calls this, and it is not counted."""
        return tensors(self.index)

    def __iter__(self) -> Iterator[Any]:
        Loads.looks += 1
        return iter(self.load())

    def __len__(self) -> int:
        Loads.looks += 1
        return 10**9

    def __getitem__(self, key: Any) -> Any:
        Loads.looks += 1
        return self.load()[key]

    def __getattr__(self, name: str) -> Any:
        Loads.looks += not name.startswith("__")
        raise AttributeError(name)


def with_parts(**parts: Callable[[Tensor, Tensor], Any]) -> Callable[[int], Any]:
    """Return a function that makes batches with these additional entries."""

    def make(index: int) -> dict[str, Any]:
        x, y = tensors(index)
        return {"x": x, "y": y} | {name: part(x, y) for name, part in parts.items()}

    return make


def of_dict(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch that is a dict."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def integers(x: Tensor, layout: str) -> Tensor:
    """Return a sparse tensor of integers."""
    whole = (x * 3).to(torch.int64)
    return whole.to_sparse() if layout == "COO" else whole.to_sparse_csr()


# Each kind of batch has a function that makes the batch with a number, and its loss.
ODD_BATCHES: dict[str, tuple[Callable[[int], Any], Callable[[Any, Any], Tensor]]] = {
    "dict": (with_parts(), of_dict),
    "nested": (
        lambda index: {"in": [{"x": tensors(index)[0]}], "out": (tensors(index)[1],)},
        lambda model, batch: F.cross_entropy(model(batch["in"][0]["x"]), batch["out"][0]),
    ),
    "dataclass": (
        lambda index: Batch(*tensors(index)),
        lambda model, batch: F.cross_entropy(model(batch.x), batch.y),
    ),
    "strings": (with_parts(names=lambda x, y: ["a"] * ROWS, empty=lambda x, y: ""), of_dict),
    "None": (with_parts(nothing=lambda x, y: None, more=lambda x, y: [None, x]), of_dict),
    "sparse COO": (with_parts(graph=lambda x, y: x.relu().to_sparse()), of_dict),
    "integer COO": (with_parts(graph=lambda x, y: integers(x, "COO")), of_dict),
    "integer CSR": (with_parts(graph=lambda x, y: integers(x, "CSR")), of_dict),
    "integer COO as input_ids": (with_parts(input_ids=lambda x, y: integers(x, "COO")), of_dict),
    "0-d attention_mask": (
        with_parts(input_ids=lambda x, y: y[None], attention_mask=lambda x, y: torch.tensor(1)),
        of_dict,
    ),
    "0-d position_ids": (
        with_parts(input_ids=lambda x, y: y[None], position_ids=lambda x, y: torch.tensor(0)),
        of_dict,
    ),
    "position_ids": (
        with_parts(
            position_ids=lambda x, y: torch.arange(ROWS)[None],
            cu_seqlens=lambda x, y: torch.tensor([0, 2, 4]),
        ),
        of_dict,
    ),
    "nested tensors": (
        with_parts(jagged=lambda x, y: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)),
        of_dict,
    ),
    "packed sequence": (
        with_parts(packed=lambda x, y: nn.utils.rnn.pack_sequence([x, x[:2]])),
        of_dict,
    ),
    "complex and bool": (
        with_parts(c=lambda x, y: x.to(torch.complex64), b=lambda x, y: x > 0),
        of_dict,
    ),
    "empty": (
        with_parts(empty=lambda x, y: x[:0], none=lambda x, y: [], no=lambda x, y: {}),
        of_dict,
    ),
    "lazy": (Loads, lambda model, batch: crossentropy(model, batch.load())),
    "opaque": (with_parts(opaque=lambda x, y: Opaque(x)), of_dict),
    "recursive": (with_parts(recursive=lambda x, y: recursive(x)), of_dict),
    "meta": (with_parts(meta=lambda x, y: torch.empty(4, device="meta")), of_dict),
    "numbers": (with_parts(n=lambda x, y: 4, f=lambda x, y: 0.5, k=lambda x, y: {1: 2}), of_dict),
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "batch norm": Normed,
    "cond": Cond,
    "scan": Scan,
    "map": Map,
    "while_loop": While,
    "recomputed": Recomputed,
    "recomputed, reentrant": RecomputedReentrant,
    "autograd function": Custom,
    "vmap and grad": Vmapped,
    "gradient penalty": Penalised,
    "LSTM": Recurrent,
    "attention": Attention,
    "tied and called twice": Twice,
    "parametrized": Parametrised,
    "copies itself": Copied,
    "in place": InPlace,
    "output None": Forgetful,
}

TASKS: dict[str, Task] = {name: Task(model) for name, model in MODELS.items()}
for name, (make, unmake) in ODD_OUTPUTS.items():
    TASKS[f"output {name}"] = Task(functools.partial(WithOdd, make, unmake))
for name, (batch, loss) in ODD_BATCHES.items():
    TASKS[f"batch {name}"] = Task(Net, batch, loss)
