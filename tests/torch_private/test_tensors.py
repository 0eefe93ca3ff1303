"""Test the functions about internals of tensors."""

import copy

import pytest
import torch

from lflops.torch_private.tensors import FakeTensor, fake_mode


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_deep_copy_of_a_fake_tensor_has_the_same_mode() -> None:
    """A copied mode would free memory twice, and the process would crash at any later time."""
    with fake_mode() as mode:
        copied = copy.deepcopy(torch.zeros(2))
    assert isinstance(copied, FakeTensor)
    assert copied.fake_mode is mode
