"""Test that reading a batch disturbs no training run, whatever the batch contains.

Reading takes a bounded time, and does not run the user's code.
"""

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
    """Raised by the user's code that lflops must not run."""


class Raises(Tensor):
    """A tensor for which every torch function raises an exception."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """Raise."""
        raise UserError


class RaisesShape(Tensor):
    """A tensor whose `shape` is a property that raises an exception."""

    @property
    def shape(self) -> Any:
        """Raise."""
        raise UserError


class RaisesSizes(Tensor):
    """A tensor that calls `__torch_dispatch__` for its sizes, which raises an exception."""

    @staticmethod
    def __new__(cls: Any) -> Any:
        """Create a tensor without a storage."""
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, (2, 3), dispatch_sizes_strides_policy="sizes")

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        """Raise."""
        raise UserError


def of_integers() -> Tensor:
    """Return an attention mask for two sequences with the lengths 2 and 1."""
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
"""A tensor of every kind, and the shape that is read from it. `None` means that it is unknown."""

NAMES = ("attention_mask", "position_ids", "cu_seqlens", "lengths", "seq_idx", "x", "0")
"""Names of entries of a batch.

Under the first five names, integers may describe the lengths of sequences; under the last two, they
need not.
"""


@pytest.mark.filterwarnings(
    "ignore:.*prototype:UserWarning", "ignore:Sparse CSR tensor support", "ignore:.*quantize"
)
@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_of_any_kind_is_read_or_unknown(kind: str) -> None:
    """The shape of a tensor is read. If it cannot be read, the shapes of the batch are unknown.

    No exception is raised.
    """
    make, shape = TENSORS[kind]
    for name in NAMES:
        reader = BatchReader()
        # The first call searches the batch; the second reads only the remembered positions.
        shapes = [reader.shapes({name: make(), "y": torch.zeros(2)}) for _ in range(2)]
        expected = None
        if shape is not None:
            expected = ((name, "y"), (shape, (2,)))
        assert shapes == [expected] * 2
        reader.read({name: make()})


@pytest.mark.filterwarnings(
    "ignore:.*prototype:UserWarning", "ignore:Sparse CSR tensor support", "ignore:.*quantize"
)
@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_of_any_kind_ends_no_training(kind: str) -> None:
    """A training run continues whatever tensors its batches contain.

    The run has `on_error="raise"`, so an error of lflops would end it.
    """
    tensor = TENSORS[kind][0]()
    profiles = trained(
        [{"x": torch.zeros(2, 4), **dict.fromkeys(NAMES[:5], tensor)} for _ in range(6)]
    )
    samples = {step.samples for step in profiles[0].steps}
    assert samples <= {None, 0, 1, 2}
    # An empty tensor has 0 rows, but the other tensor of the batch has 2 rows.
    is_unknown = kind in {"a class whose sizes raise", "empty"}
    assert is_unknown == (samples == {None})


def trained(batches: list[Any]) -> list[Profile]:
    """Train on the entry `x` of each batch, raise errors of lflops, and return the profiles."""
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
    """A logger that keeps nothing. With a logger, the work of each batch is needed for curves."""

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Do nothing."""


class Graph:
    """A plain object, like the batches of PyTorch Geometric."""

    def __init__(self, **stored: Any) -> None:
        """Store attributes."""
        self.__dict__.update(stored)

    @property
    def loaded(self) -> Any:
        """Raise an exception, because lflops must not read this property."""
        raise UserError


class Lazy(dict[str, Any]):
    """A dictionary that loads an entry when it is read, which lflops must not do."""

    def __getitem__(self, key: str) -> Any:
        raise UserError

    items = __getitem__  # type: ignore[assignment]
    values = __getitem__  # type: ignore[assignment]
    __iter__ = __getitem__  # type: ignore[assignment]
    get = __getitem__  # type: ignore[assignment]


class LazyMapping(Mapping[str, Any]):
    """A mapping that is no `dict`, and loads an entry when it is read."""

    def __getitem__(self, key: str) -> Any:
        raise UserError

    def __iter__(self) -> Iterator[str]:
        raise UserError

    def __len__(self) -> int:
        raise UserError


class LazyList(list[Any]):
    """A list that loads an entry when it is read."""

    def __getitem__(self, index: Any) -> Any:
        raise UserError

    __iter__ = __getitem__  # type: ignore[assignment]
    __len__ = __getitem__  # type: ignore[assignment]


class Proxy:
    """An object that would have to load another object to return its `__class__`."""

    @property
    def __class__(self) -> Any:
        """Raise."""
        raise UserError


@dataclass
class Sample:
    """Two tensors, and the data that they were made from."""

    x: Tensor
    y: Tensor
    source: Any = None


@dataclass(slots=True)
class Slotted:
    """A dataclass without a `__dict__`."""

    x: Tensor
    y: Tensor


Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024 - as users write it

X = torch.zeros(2, 4)
Y = torch.zeros(2)
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
    """The tensors of a batch are found in its stored values.

    No method or property of the user is called, neither in the first call nor later.
    """
    batch, names = READ[kind]
    reader = BatchReader()
    assert [reader.shapes(batch) for _ in range(2)] == [(names, ((2, 4), (2,)))] * 2


@pytest.mark.parametrize("kind", {**NOT_READ})
def test_other_batches_are_unknown(kind: str) -> None:
    """The shapes of other batches are unknown, and none of their code is run.

    An iterator stores no tensors, so its shapes are empty instead.
    """
    reader = BatchReader()
    expected = None
    if kind == "an iterator":
        expected = ((), ())
    assert [reader.shapes(NOT_READ[kind]) for _ in range(2)] == [expected] * 2


def test_a_batch_of_unknown_shapes_has_no_samples_and_no_work() -> None:
    """For batches of unknown shapes, the number of samples is unknown in every step.

    Only the counting step has work: 2 samples with 4 x 4 MACs each.
    """
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
    """A batch with another structure than the last batch is searched again.

    The remembered positions are valid only for batches with the same types at the same positions.
    """
    reader = BatchReader()
    assert names != reader.shapes(before)[0]  # type: ignore[index]
    assert names == reader.shapes(after)[0]  # type: ignore[index]


class Visited(int):
    """An item of a data set."""


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list of all values that are searched for tensors from now on."""
    seen: list[object] = []
    real = batch_file.storage_of

    def recorded(value: Any) -> Any:
        seen.append(value)
        return real(value)

    monkeypatch.setattr(batch_file, "storage_of", recorded)
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
    """The first read of a batch searches a bounded number of values.

    A later read opens only the containers that have tensors; here, this is the batch itself.
    """
    reader = BatchReader()
    assert shapes == reader.shapes(batch)
    assert len(visits) <= 2 * batch_file.MOST_VALUES
    visits.clear()
    assert shapes == reader.shapes(batch)
    assert len(visits) == 1


def test_without_a_bound_a_data_set_is_searched(
    visits: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the limits, a large data set in a batch is searched completely.

    This shows that the test above would fail if the limits had no effect.
    """
    monkeypatch.setattr(batch_file, "MOST_VALUES", 10**6)
    monkeypatch.setattr(batch_file, "LONG", 10**6)
    BatchReader().shapes(Sample(X, Y, ITEMS))
    assert len(visits) > 20_000


def test_no_function_mode_of_the_users_sees_a_look_at_a_batch() -> None:
    """Reading a batch calls no torch function that a function mode of the user could see.

    `torch.set_default_device` is such a mode. It may be active during the whole run.
    """
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
        # This call is seen, which shows that the mode is active.
        assert Tensor.size(X) == X.shape
    assert called


def test_outputs_are_searched_in_a_bounded_time_and_run_no_property() -> None:
    """The tensors of a plain object are found although the object refers to a large data set.

    The data set is not searched completely, and no method or property of the user is called.
    """
    data_set = [Graph(number=number) for number in range(20_000)]
    output = Graph(x=X, source=Lazy(y=Y), dataset=data_set, z=Y)
    assert [X, Y] == list(tensors_in(output))[:2]
    assert ["x", "source.y"] == [name for name, _ in named_tensors_in(output)]
    assert [X] * 3_000 == list(tensors_in([X] * 3_000))
    assert not list(tensors_in([Proxy(), LazyMapping()]))


def test_a_node_is_found_without_the_users_code() -> None:
    """The autograd node of a tensor is found even if all functions of the tensor raise."""
    computed = (torch.ones(2, requires_grad=True) * 2).as_subclass(Raises)
    (node,) = nodes_of([computed])
    assert node is not None
