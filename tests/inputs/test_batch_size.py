"""Test that the numbers of samples and tokens of a batch are found, or unknown if ambiguous.

The batches look like batches of widely used packages for detection, graphs, sentence pairs, tables
and sequences. The true numbers are written by hand.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import lflops
from lflops.inputs.batch import BatchReader
from lflops.inputs.batch_size import BatchSize, BatchSizes, loader_batch_size, tokens_of_shapes


def size_of(batch: Any, loader_size: int | None = None) -> BatchSize:
    """Return the size of a batch, read in the same way as by the step timer."""
    found = BatchReader().read(batch)
    sizes = BatchSizes(lambda: loader_size)
    if found is None:
        return sizes.read(batch, (), [])
    return sizes.read(batch, found.names, found.tensors)


def integers(*sizes: int) -> Tensor:
    """Return random integers below 9."""
    return torch.randint(0, 9, sizes)


def boxes(number: int) -> dict[str, Tensor]:
    """Return the detection target of an image with this number of objects."""
    return {"boxes": torch.rand(number, 4), "labels": torch.ones(number, dtype=torch.long)}


IMAGES = [torch.rand(3, 64, 64) for _ in range(5)]
SMALLER_IMAGES = [torch.rand(3, 40 + number, 64) for number in range(5)]


class Molecules(NamedTuple):
    """A batch of molecules, with 29 atoms and 54 directed bonds in total."""

    atoms: Tensor
    bonds: Tensor
    edge_index: Tensor
    targets: Tensor


def molecules(number: int = 4) -> Molecules:
    """Return a batch with this number of targets, one for each molecule."""
    return Molecules(torch.rand(29, 72), torch.rand(54, 14), integers(2, 54), torch.rand(number, 1))


class Graphs:
    """A batch of a graph package: an object with tensors and the property `num_graphs`."""

    def __init__(self, number: int) -> None:
        self.x = torch.rand(500, 32)
        self.edge_index = integers(2, 3000)
        self._number = number

    @property
    def num_graphs(self) -> int:
        """The number of graphs, which the package computes in a property."""
        return self._number


@dataclass
class OneGraph:
    """A single graph, without the attribute `num_graphs`."""

    x: Tensor
    edge_index: Tensor
    y: Tensor


PAIRS = {
    "anchor_input_ids": integers(8, 14),
    "anchor_attention_mask": integers(8, 14),
    "positive_input_ids": integers(8, 13),
    "positive_attention_mask": integers(8, 13),
}

BATCHES: dict[str, tuple[Any, int | None, int | None]] = {
    "images in a list, two objects each": ((IMAGES, [boxes(2)] * 5), 5, None),
    "images in a tuple, one object each": ((tuple(IMAGES), (boxes(1),) * 5), 5, None),
    "images of several sizes": ((SMALLER_IMAGES, [boxes(2)] * 5), 5, None),
    "pairs of an image and its target": ([(image, boxes(2)) for image in IMAGES], 5, None),
    "a single image in a list": (([torch.rand(3, 64, 64)], [boxes(2)]), 1, None),
    "images alone in a list": (IMAGES, None, None),
    "molecules": (molecules(), None, None),
    "nodes, edges and classes": (
        (torch.rand(500, 32), integers(2, 3000), integers(500)),
        None,
        None,
    ),
    "a graph": (OneGraph(torch.rand(500, 32), integers(2, 3000), integers(500)), None, None),
    "graphs": (Graphs(16), 16, None),
    "graphs beside a number": ((Graphs(16), 3), 16, None),
    "sentence pairs": (PAIRS, 8, 8 * 14 + 8 * 13),
    "a sentence and its summary": (
        {
            "input_ids": integers(8, 40),
            "attention_mask": integers(8, 40),
            "labels": integers(8, 10),
        },
        8,
        320,
    ),
    "a mask before the ids": (
        {"attention_mask": integers(8, 40), "input_ids": integers(8, 40)},
        8,
        320,
    ),
    "ids, and patches of images": (
        {"input_ids": integers(2, 40), "pixel_values": torch.rand(700, 1176)},
        2,
        80,
    ),
    "cells": (
        {"X": torch.rand(64, 100), "batch": integers(64, 1), "labels": integers(64, 1)},
        64,
        None,
    ),
    "images with several labels": ((torch.rand(16, 3, 8, 8), integers(16, 20)), 16, None),
    "a table": (
        {"categorical": integers(32, 5), "continuous": torch.rand(32, 7), "y": torch.rand(32, 1)},
        32,
        None,
    ),
    "two views of images": ([[torch.rand(8, 3, 32, 32)] * 2, integers(8), ["a"] * 8], 8, None),
    "ids and their successors": ((integers(4, 32), integers(4, 32)), 4, None),
    "sequences over time, flat targets": ((integers(35, 20), integers(700)), None, None),
    "prompts": ([{"prompt": "Say something."}, {"prompt": "Say nothing."}], 2, None),
    "one tensor": (torch.rand(6, 3), 6, None),
    "no tensor": ({"step": 3}, None, None),
    "a number": (torch.tensor(3.0), None, None),
}


@pytest.mark.parametrize(("batch", "samples", "tokens"), BATCHES.values(), ids=BATCHES)
def test_a_batch_has_its_true_size_or_none(
    batch: Any, samples: int | None, tokens: int | None
) -> None:
    """No loader states the batch size here, so it follows from the batch alone."""
    size = size_of(batch)
    assert (samples, tokens) == (size.samples, size.tokens)
    assert (samples is None) == (size.samples_from is None)
    assert (tokens is None) == (size.tokens_from == ())


@pytest.mark.parametrize(
    ("batch", "source"),
    [
        ((IMAGES, [boxes(2)] * 5), "the number of entries in input 0"),
        ({"images": IMAGES}, "the number of entries in images"),
        (PAIRS, "dimension 0 of anchor_input_ids"),
        (torch.rand(6, 3), "dimension 0 of the batch"),
        ([torch.rand(6, 3), torch.rand(6)], "dimension 0 of input 0"),
        (Graphs(16), "the attribute num_graphs of the batch"),
    ],
)
def test_a_number_of_samples_has_a_source(batch: Any, source: str) -> None:
    """The summary states where the number of samples comes from."""
    assert source == size_of(batch).samples_from


def test_tokens_name_all_of_their_tensors() -> None:
    """The tokens of a sentence pair come from the ids of both sentences."""
    assert ("anchor_input_ids", "positive_input_ids") == size_of(PAIRS).tokens_from


@pytest.mark.parametrize(
    ("batch", "loaded", "expected", "source"),
    [
        # Only the targets have 4 rows, one for each molecule.
        (molecules(), 4, 4, "dimension 0 of 3"),
        ((integers(35, 20), integers(700)), 20, 20, "dimension 1 of input 0"),
        # Two rows for each pair of answers.
        ({"input_ids": integers(8, 40)}, 4, 4, "the batch size of the DataLoader"),
        # The last batch of a data set.
        ((torch.rand(5, 3), torch.rand(5)), 64, 5, "dimension 0 of input 0"),
        ((IMAGES, [boxes(2)] * 5), 5, 5, "the number of entries in input 0"),
        ((IMAGES[:2], [boxes(2)] * 2), 5, 2, "the number of entries in input 0"),
        (Graphs(16), 20, 16, "the attribute num_graphs of the batch"),
        (object(), 20, 20, "the batch size of the DataLoader"),
    ],
)
def test_the_loader_knows_better(batch: Any, loaded: int, expected: int, source: str) -> None:
    """The batch size of the loader decides which dimension holds the samples.

    A batch may be smaller than that, such as the last one of a data set. Its lists, tensors or
    `num_graphs` then show the true number.
    """
    size = size_of(batch, loaded)
    assert expected == size.samples
    assert size.samples_from is not None
    assert size.samples_from.replace("input 3", "3") == source


def test_the_dimension_of_the_samples_is_remembered() -> None:
    """The dimension found in the first batch also gives the size of a smaller last batch.

    The last batch has 3 molecules, and only the remembered dimension has this size.
    """
    sizes = BatchSizes(lambda: 4)
    read = [sizes.read(batch, batch._fields, list(batch)) for batch in (molecules(), molecules(3))]
    assert [4, 3] == [size.samples for size in read]


def test_the_batch_size_of_a_loader() -> None:
    """The size comes from `batch_size` or from the batch sampler. Without either, it is unknown."""
    data = list(range(8))
    sampler = BatchSampler(SequentialSampler(data), 4, drop_last=False)
    assert 2 == loader_batch_size(DataLoader(data, batch_size=2))  # type: ignore[arg-type]
    assert 4 == loader_batch_size(DataLoader(data, batch_sampler=sampler))  # type: ignore[arg-type]
    assert None is loader_batch_size(DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    assert None is loader_batch_size([1, 2])


def test_tokens_follow_from_shapes_once_their_input_is_known() -> None:
    """The name of the input finds its shape in dictionaries, sequences and single tensors."""
    read = BatchReader().shapes
    assert 20 == tokens_of_shapes(read({"ids": integers(4, 5), "y": integers(4)}), ("ids",))
    assert 20 == tokens_of_shapes(read((integers(4, 5), integers(4))), ("0",))
    assert 20 == tokens_of_shapes(read(integers(4, 5)), ("0",))
    assert None is tokens_of_shapes(read({"y": integers(4)}), ("ids",))
    assert None is tokens_of_shapes(None, ("ids",))


class Language(nn.Module):
    """A language model: it predicts the next token from the features of each position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9)

    def forward(self, ids: Tensor, *_: Tensor) -> Tensor:
        """Return the scores of all positions."""
        return self.head(self.table(ids))  # type: ignore[no-any-return]


class Table(nn.Module):
    """A model of a table: it joins the features of 5 categorical columns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.head = nn.Linear(20, 2)

    def forward(self, columns: Tensor, *_: Tensor) -> Tensor:
        """Return the scores of each row."""
        return self.head(self.table(columns).flatten(1))  # type: ignore[no-any-return]


class Columns(nn.Module):
    """A model of several time series: only a slice of the input is looked up in the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, series: Tensor, *_: Tensor) -> Tensor:
        """Return the scores of each moment."""
        return self.head(self.table(series[..., 0]))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM over sequences, with time as the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.cells = nn.LSTM(4, 8)

    def forward(self, ids: Tensor, *_: Tensor) -> Tensor:
        """Return the states of all moments."""
        return self.cells(self.table(ids))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "batch", "tokens"),
    [
        (Language, (integers(4, 32), integers(4, 32)), 128),
        (Recurrent, (integers(35, 20), integers(700)), 700),
        (Table, (integers(32, 5), integers(32)), None),
        (Columns, (integers(8, 12, 3), integers(8, 12)), None),
        (nn.Linear, (torch.rand(16, 4), integers(16, 20)), None),
    ],
)
def test_an_embedding_of_sequences_looks_up_tokens(
    model: Any, batch: tuple[Tensor, ...], tokens: int | None, tmp_path: Path
) -> None:
    """The ids that an embedding looks up are tokens, but table columns, slices and labels are not.

    The number is the same in `lflops.count` and in every step of a training run, also before the
    counting step.
    """
    trained = model(4, 2) if model is nn.Linear else model()
    arguments = batch[:1] if model is nn.Linear else batch
    counted = lflops.count(trained, arguments)
    assert tokens == counted.run.tokens_per_step
    profile = profiled(trained, batch, arguments, tmp_path)
    assert tokens == profile.run.tokens_per_step
    assert {tokens} == {step.tokens for step in profile.steps}
    assert (() if tokens is None else ("0",)) == profile.run.tokens_from


def profiled(
    model: nn.Module, batch: Any, arguments: tuple[Any, ...], folder: Path, **settings: Any
) -> lflops.Profile:
    """Train for 6 steps, and return the profile of the only window."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lflops.Schedule(wait=2, warmup=1, active=1, repeat=1)
    asked = {"hardware": None, "trace": False, "ledger": False, "on_error": "raise"} | settings
    with lflops.monitor(
        model, optimizer, log=lambda _: None, schedule=schedule, dirpath=folder, **asked
    ) as monitor:
        for _ in range(6):
            with monitor.step(batch):
                model(*arguments).sum().backward()
                optimizer.step()
    (profile,) = monitor.profiles
    return profile


def test_a_function_of_the_user_is_asked_first(tmp_path: Path) -> None:
    """The samples come from the user's function, and the tokens still come from the batch."""
    batch = (integers(4, 32), integers(4, 32))
    run = profiled(Language(), batch, batch, tmp_path, units=lambda _: {"samples": 2}).run
    assert (2, "units=", 128) == (run.samples_per_step, run.samples_from, run.tokens_per_step)


def test_a_batch_that_cannot_be_read_disturbs_one_step(tmp_path: Path) -> None:
    """If shapes cannot be read, only the first step is marked as having new shapes."""
    profile = profiled(nn.Linear(4, 2), Graphs(16), (torch.rand(4, 4),), tmp_path)
    assert {16} == {step.samples for step in profile.steps}
    assert [0] == [step.index for step in profile.steps if "new_shapes" in step.marks]
