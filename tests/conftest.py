"""What tests ask for by name."""

import pytest
import torch


@pytest.fixture
def cuda() -> torch.device:
    """A CUDA device; a test that asks for one is skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
