"""Scratch memory of kernels: by hand, and by the CPU's allocator."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lflops
from lflops.flop_counter.cpu_kernels import SCRATCH
from tests.support.cpu_allocator import allocated

FLOAT, PAGE = 4, 4096


def test_the_scratchpad_of_an_lstm_by_hand() -> None:
    """64 steps of 48 samples, 128 wide, of 256 cells.

    Rows of 1024 gates take 1040 numbers, of 256 cells 272, of 128 numbers 128.

    Sums of the gates are 3120 pages, and two gradients of a state 13 pages each. A page and 568
    bytes are oneDNN's own.
    """
    x, weight = torch.empty(64, 48, 128), torch.empty(1024, 128)
    scratchpad = (3120 + 2 * 13 + 1) * PAGE + 568
    forward = scratchpad + 1024 * FLOAT + (128 + 256) * 1040 * FLOAT
    assert forward == SCRATCH["mkldnn_rnn_layer"]((x, weight))
    gradient = torch.empty(48, 64, 256).transpose(0, 1)
    backward: list[Any] = [x, weight, *[None] * 8, gradient]
    assert forward + 1024 * 272 * FLOAT + gradient.numel() * FLOAT == SCRATCH[
        "mkldnn_rnn_layer_backward"
    ](backward)


class Recurrent(nn.Module):
    """An LSTM, of which the last step's result is used."""

    def __init__(self, wide: int, cells: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(wide, cells, num_layers=layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]


@pytest.mark.parametrize(("wide", "cells", "layers"), [(128, 256, 2), (300, 64, 1), (16, 200, 1)])
def test_the_peak_of_an_lstm_is_the_allocators(
    wide: int, cells: int, layers: int, tmp_path: Path
) -> None:
    """Within 1 %, of which a part are the states that backward begins from.

    17 % are missing without the scratchpad.
    """
    x = torch.ones(24, 32, wide)

    def begin() -> Callable[[], None]:
        model = Recurrent(wide, cells, layers)

        def step() -> None:
            model(x).sum().backward()
            model.zero_grad()

        return step

    real = max(allocated(begin, tmp_path)) + x.untyped_storage().nbytes()
    found = lflops.estimate(
        lambda: Recurrent(wide, cells, layers), x, backward=True, loss=lambda out: out.sum()
    ).memory
    assert found is not None
    assert real == pytest.approx(found.peak_bytes, rel=0.01)
    assert found.peak_bytes == sum(found.by_category.values())
