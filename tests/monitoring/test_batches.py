"""A training is not disturbed by what its batches hold, and a batch is looked at in a bounded time, without running the user's code."""

import itertools
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

import lflops
from lflops import Profile, Schedule
from lflops.inputs import batch as batch_file
from lflops.inputs.batch import BatchReader
from lflops.inputs.tensors import named_tensors_in, nodes_of, tensors_in


class UserError(Exception):
    """Raised by a user's code that nobody but the user may run."""


class Raises(Tensor):
    """Every function of torch raises on it."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """Raise."""
        raise UserError


class RaisesShape(Tensor):
    """Its shape is a property that raises."""

    @property
    def shape(self) -> Any:
        """Raise."""
        raise UserError


class RaisesSizes(Tensor):
    """Asks its class for its sizes, which raises."""

    @staticmethod
    def __new__(cls: Any) -> Any:
        """Make one without a storage."""
        return Tensor._make_wrapper_subclass(cls, (2, 3), dispatch_sizes_strides_policy="sizes")  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        """Raise."""
        raise UserError


def of_integers() -> Tensor:
    """Two sequences of 2 and 1."""
    return torch.tensor([[1, 1, 0], [1, 0, 0]])


TENSORS: dict[str, tuple[Callable[[], Tensor], Any]] = {
    "sparse COO": (lambda: of_integers().to_sparse(), (2, 3)),
    "sparse CSR": (lambda: of_integers().to_sparse_csr(), (2, 3)),
    "0-d": (lambda: torch.tensor(1), ()),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.zeros(2, 3), 0.1, 0, torch.quint8),
        (2, 3),
    ),
    "complex": (lambda: torch.zeros(2, 3, dtype=torch.complex64), (2, 3)),
    "empty": (lambda: torch.empty(0, 3, dtype=torch.long), (0, 3)),
    "meta": (lambda: torch.empty(2, 3, dtype=torch.long, device="meta"), (2, 3)),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), ("nested", 5)),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        ("nested", 5),
    ),
    "a class whose functions raise": (lambda: of_integers().as_subclass(Raises), (2, 3)),
    "a class whose shape raises": (lambda: of_integers().as_subclass(RaisesShape), (2, 3)),
    "a class whose sizes raise": (RaisesSizes, None),
}
"""Tensors of every kind, and what is known of their shapes."""

NAMES = ("attention_mask", "position_ids", "cu_seqlens", "lengths", "seq_idx", "x", "0")
"""Names under which a batch's integers may mean the lengths of sequences, and two under which they need not."""


@pytest.mark.filterwarnings(
    "ignore:.*prototype:UserWarning", "ignore:Sparse CSR tensor support", "ignore:.*quantize"
)
@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_of_any_kind_is_read_or_unknown(kind: str) -> None:
    """Its shape is known, or it has none.

    The shapes of the batch are unknown then, and nothing is raised.
    """
    make, shape = TENSORS[kind]
    for name in NAMES:
        reader = BatchReader()
        shapes = [
            reader.shapes({name: make(), "y": torch.zeros(2)}) for _ in range(2)
        ]  # found, and found again where it was
        assert shapes == [None if shape is None else ((name, "y"), (shape, (2,)))] * 2
        reader.read({name: make()})


@pytest.mark.filterwarnings(
    "ignore:.*prototype:UserWarning", "ignore:Sparse CSR tensor support", "ignore:.*quantize"
)
@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_of_any_kind_ends_no_training(kind: str) -> None:
    """It lies in the batches of a training in which an error of the monitor's own would be raised."""
    tensor = TENSORS[kind][0]()
    profiles = trained(
        [{"x": torch.zeros(2, 4), **dict.fromkeys(NAMES[:5], tensor)} for _ in range(6)]
    )
    samples = {step.samples for step in profiles[0].steps}
    assert samples <= {None, 0, 1, 2}
    # An empty tensor has 0 rows, where another one has 2.
    is_unknown = kind in {"a class whose sizes raise", "empty"}
    assert is_unknown == (samples == {None})


def trained(batches: list[Any]) -> list[Profile]:
    """Train on the entry `x` of each batch."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    schedule = Schedule(wait=1, warmup=1, active=2, repeat=1)
    settings: dict[str, Any] = {
        "schedule": schedule,
        "on_error": "raise",
        "trace": False,
        "hardware": None,
    }
    logger = Points()
    with lflops.monitor(
        model, optimizer, logger=logger, log_every=1, log=lambda _: None, **settings
    ) as monitor:
        for batch in monitor.data(batches):
            with monitor.step(batch):
                model(batch["x"]).sum().backward()
                optimizer.step()
    return monitor.profiles


class Points:
    """A logger, so that the curves need the work of each batch."""

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Keep nothing."""


class Graph:
    """A plain object, as the batches of PyTorch Geometric are."""

    def __init__(self, **stored: Any) -> None:
        """Store attributes."""
        self.__dict__.update(stored)

    @property
    def loaded(self) -> Any:
        """Raise: nobody may ask."""
        raise UserError


class Lazy(dict[str, Any]):
    """A dictionary that loads what is asked for."""

    def __getitem__(self, key: str) -> Any:
        """Raise: nobody may load."""
        raise UserError

    items = values = __iter__ = get = __getitem__  # type: ignore[assignment]


class LazyMapping(Mapping[str, Any]):
    """The same, without being a dictionary."""

    def __getitem__(self, key: str) -> Any:
        """Raise."""
        raise UserError

    def __iter__(self) -> Iterator[str]:
        """Raise."""
        raise UserError

    def __len__(self) -> int:
        """Raise."""
        raise UserError


class LazyList(list[Any]):
    """A list that loads what is asked for."""

    def __getitem__(self, index: Any) -> Any:
        """Raise."""
        raise UserError

    __iter__ = __len__ = __getitem__  # type: ignore[assignment]


class Proxy:
    """Claims the class of an object that it would have to load."""

    @property
    def __class__(self) -> Any:
        """Raise."""
        raise UserError


@dataclass
class Sample:
    """Two tensors, and what they were made from."""

    x: Tensor
    y: Tensor
    source: Any = None


@dataclass(slots=True)
class Slotted:
    """Its attributes are in no `__dict__`."""

    x: Tensor
    y: Tensor


Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024 - as users write it

X, Y = torch.zeros(2, 4), torch.zeros(2)
READ = {
    "tuple": ((X, Y), ("0", "1")),
    "namedtuple": (Pair(X, Y), ("0", "1")),
    "dict": ({"x": X, "y": Y}, ("x", "y")),
    "OrderedDict": (OrderedDict(x=X, y=Y), ("x", "y")),
    "UserDict": (UserDict(x=X, y=Y), ("x", "y")),
    "BatchEncoding": (BatchEncoding({"x": X, "y": Y}), ("x", "y")),
    "ModelOutput": (
        BaseModelOutput(last_hidden_state=X, hidden_states=(Y,)),
        ("last_hidden_state", "hidden_states.0"),
    ),  # type: ignore[arg-type]
    "dataclass": (Sample(X, Y), ("x", "y")),
    "slots": (Slotted(X, Y), ("x", "y")),
    "a stored dictionary of a lazy one": (Lazy(x=X, y=Y), ("x", "y")),
    "a stored list of a lazy one": (LazyList([X, Y]), ("0", "1")),
    "nested": ({"in": [{"x": X}], "text": ["a", "b"], "out": (None, 1, Y)}, ("in.0.x", "out.2")),
}
NOT_READ = {
    "a plain object": Graph(x=X, y=Y),
    "a plain object among tensors": (X, Graph(y=Y)),
    "a mapping that is no dictionary": LazyMapping(),
    "a set": {X, Y},
    "a proxy": Proxy(),
    "an iterator": itertools.count(),
    "keys of the user's": {Graph(): X},
}


@pytest.mark.parametrize("kind", READ)
def test_batches_are_read_through_mappings_sequences_and_dataclasses(kind: str) -> None:
    """By what these store: no method or property of the user's is called, the first time or later."""
    batch, names = READ[kind]
    reader = BatchReader()
    assert [reader.shapes(batch) for _ in range(2)] == [(names, ((2, 4), (2,)))] * 2


@pytest.mark.parametrize("kind", {**NOT_READ})
def test_other_batches_are_unknown(kind: str) -> None:
    """An iterator holds no tensor that anybody could see.

    Of all the others the shapes are unknown, and no code of theirs is run.
    """
    reader = BatchReader()
    expected = ((), ()) if kind == "an iterator" else None
    assert [reader.shapes(NOT_READ[kind]) for _ in range(2)] == [expected] * 2


def test_a_batch_of_unknown_shapes_has_no_samples_and_no_work() -> None:
    """Rather than those of another one."""
    graphs = [
        {"x": torch.zeros(2, 4), "graph": Graph(y=torch.zeros(number))} for number in range(6)
    ]
    (profile,) = trained(graphs)
    assert {None} == {step.samples for step in profile.steps}
    assert 2 * 4 * 4 == profile.modules[""].forward.macs


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ({"x": X, "boxes": []}, {"x": X, "boxes": [Y]}, ("x", "boxes.0")),
        ({"x": X, "y": None}, {"x": X, "y": Y}, ("x", "y")),
        ([X], [X, Y], ("0", "1")),
        ({"x": X, "y": Y}, {"y": Y, "z": X}, ("y", "z")),
        ((X, {"y": 1}), (X, {"y": Y}), ("0", "1.y")),
        (Sample(X, Y), Sample(X, Y, [X]), ("x", "y", "source.0")),
    ],
)
def test_another_structure_is_read_anew(before: Any, after: Any, names: tuple[str, ...]) -> None:
    """What is remembered of the last batch is true of those alone that have the same types at the same places."""
    reader = BatchReader()
    assert names != reader.shapes(before)[0]  # type: ignore[index]
    assert names == reader.shapes(after)[0]  # type: ignore[index]


class Visited(int):
    """An item of a data set."""


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every value that is searched for tensors, and not passed over."""
    seen: list[object] = []
    real = batch_file.storage_of
    monkeypatch.setattr(batch_file, "storage_of", lambda value: seen.append(value) or real(value))  # type: ignore[func-returns-value]
    return seen


ITEMS = [(number, str(number)) for number in range(20_000)]


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        (Sample(X, Y, ITEMS), (("x", "y"), ((2, 4), (2,)))),
        (Graph(x=X, dataset=ITEMS), None),
        ([torch.zeros(2)] * 5_000, None),
        ({"x": X, "y": Y, "texts": ["a"] * 5_000}, (("x", "y"), ((2, 4), (2,)))),
        ([[[0] * 60] * 60] * 60, None),
    ],
)
def test_a_look_at_a_batch_is_bounded(batch: Any, shapes: Any, visits: list[object]) -> None:
    """The first at so many values; after it only the containers that have tensors are opened."""
    reader = BatchReader()
    assert shapes == reader.shapes(batch)
    assert len(visits) <= 2 * batch_file.MOST_VALUES
    visits.clear()
    assert shapes == reader.shapes(batch)
    assert len(visits) == 1


def test_without_a_bound_a_data_set_is_searched(
    visits: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted culprit of the test above."""
    monkeypatch.setattr(batch_file, "MOST_VALUES", 10**6)
    monkeypatch.setattr(batch_file, "LONG", 10**6)
    BatchReader().shapes(Sample(X, Y, ITEMS))
    assert len(visits) > 20_000


def test_no_function_mode_of_the_users_sees_a_look_at_a_batch() -> None:
    """`torch.set_default_device` is such a mode, and is on for the whole training."""
    called: list[Any] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(function)
            return function(*args, **(kwargs or {}))

    batch = {"x": X, "lengths": torch.tensor([1, 2]), "y": nn.Parameter(Y)}
    with Watch():
        reader = BatchReader()
        reader.shapes(batch)
        reader.read(batch)
        list(nodes_of(batch))
        assert not called
        assert Tensor.size(X) == X.shape  # the planted culprit
    assert called


def test_outputs_are_searched_in_a_bounded_time_and_run_no_property() -> None:
    """Of a plain object that refers to a data set, the tensors are found that it has itself."""
    output = Graph(
        x=X, source=Lazy(y=Y), dataset=[Graph(number=number) for number in range(20_000)], z=Y
    )
    assert [X, Y] == list(tensors_in(output))[:2]
    assert ["x", "source.y"] == [name for name, _ in named_tensors_in(output)]
    assert [X] * 3_000 == list(tensors_in([X] * 3_000))
    assert not list(tensors_in([Proxy(), LazyMapping()]))


def test_a_node_is_found_without_the_users_code() -> None:
    """Of a tensor whose functions raise."""
    computed = (torch.ones(2, requires_grad=True) * 2).as_subclass(Raises)
    (node,) = nodes_of([computed])
    assert node is not None
