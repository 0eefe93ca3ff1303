"""What tests ask for by name."""

import pytest
import torch
from browsing import browser, opening, page_of

__all__ = ["browser", "cuda", "opening", "page_of"]


@pytest.fixture
def cuda() -> torch.device:
    """A CUDA device; a test that asks for one is skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def _usual_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is as wide as where nobody says otherwise; whoever runs the tests may have said so."""
    monkeypatch.delenv("COLUMNS", raising=False)
