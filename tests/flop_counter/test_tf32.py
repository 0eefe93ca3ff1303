"""Test that matmuls in TF32 on an NVIDIA GPU are counted as TF32.

By default convolutions use TF32, and other matmuls use it only if the user allows it.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import lflops
from lflops.flop_counter import count
from lflops.inputs.devices import multiplies_in_tf32
from lflops.inputs.run_info import run_of
from lflops.profile.profile import Profile
from lflops.profile.series import summed


class Net(nn.Module):
    """A convolution of 4 channels and 9 weights at 16 positions, and a layer of 64 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.linear = nn.Linear(64, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(self.conv(x).flatten(1))
        return found


CONVOLUTION = 4 * 9 * 16
PRODUCT = 64
CUDNN: Any = torch.backends.cudnn
CUDA: Any = torch.backends.cuda


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that a GPU with TF32 runs, with torch's default settings."""
    monkeypatch.setattr(count, "run_of", lambda *given: replace(run_of(*given), device_type="cuda"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    before = CUDNN.conv.fp32_precision, CUDA.matmul.fp32_precision
    yield
    CUDNN.conv.fp32_precision, CUDA.matmul.fp32_precision = before


def counted() -> Profile:
    """Count a forward pass of the model."""
    return lflops.count(Net(), torch.randn(1, 1, 4, 4))


def macs(profile: Profile) -> dict[str, int]:
    """Return the MACs of each dtype."""
    return summed((cell.dtype, cell.macs) for cell in profile.op_counts if cell.macs)


@pytest.mark.usefixtures("_on_a_gpu")
def test_convolutions_are_in_tf32_and_other_products_where_that_is_allowed() -> None:
    """The settings of cuDNN and of matmuls decide separately; the run's dtype has the most MACs."""
    profile = counted()
    assert {"tf32": CONVOLUTION, "float32": PRODUCT} == macs(profile)
    assert "tf32" == profile.run.dtype
    CUDNN.conv.fp32_precision = "ieee"
    CUDA.matmul.fp32_precision = "tf32"
    profile = counted()
    assert {"float32": CONVOLUTION, "tf32": PRODUCT} == macs(profile)
    assert "float32" == profile.run.dtype
    half = torch.randn(1, 1, 4, 4, dtype=torch.bfloat16)
    assert {"bfloat16"} == set(macs(lflops.count(Net().bfloat16(), half)))


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(
    ("cuda", "is_available", "capability"),
    [(None, True, (9, 0)), ("13.0", False, (9, 0)), ("13.0", True, (7, 5))],
)
def test_elsewhere_nothing_is(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    is_available: bool,
    capability: tuple[int, int],
) -> None:
    """AMD GPUs, counts without a device, and GPUs older than Ampere do not use TF32."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert {"float32"} == set(macs(counted()))


def test_a_cpu_multiplies_float32_as_it_is() -> None:
    """On a CPU nothing is counted as TF32."""
    assert {"float32"} == set(macs(counted()))


@pytest.mark.usefixtures("_on_a_gpu")
def test_torch_2_8_has_one_setting_for_all_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch 2.8, cuDNN and matmuls each have one `allow_tf32`.

    Later versions have a setting in submodules, such as `cudnn.conv`, which in torch 2.8 have none.
    """
    monkeypatch.setattr(
        torch.backends,
        "cudnn",
        SimpleNamespace(conv=SimpleNamespace(), enabled=True, allow_tf32=True),
    )
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    assert multiplies_in_tf32("convolution")
    assert not multiplies_in_tf32("addmm")


@pytest.mark.parametrize(
    ("hardware", "dtype"),
    [("H100 SXM", "tf32"), ("V100 SXM2 32GB", "float32"), ("MI300X", "float32"), (None, "float32")],
)
def test_an_estimate_is_for_its_chip(hardware: str | None, dtype: str) -> None:
    """An estimate uses the dtypes of its chip, not of the machine on which it runs.

    So the minimum time of a step on a chip is not higher than its real time there.
    """
    found = macs(lflops.estimate(Net, (torch.randn(1, 1, 4, 4),), hardware=hardware))
    if dtype == "tf32":
        assert {"tf32": CONVOLUTION, "float32": PRODUCT} == found
    else:
        assert {"float32": CONVOLUTION + PRODUCT} == found


@pytest.mark.gpu
def test_on_cuda_a_convolution_is_in_tf32(cuda: torch.device) -> None:
    """On Ampere and later GPUs, a convolution is counted as TF32."""
    if torch.cuda.get_device_capability(cuda) < (8, 0):
        pytest.skip("TF32 needs Ampere or later")
    profile = lflops.count(Net().to(cuda), torch.randn(1, 1, 4, 4, device=cuda))
    assert {"tf32": CONVOLUTION, "float32": PRODUCT} == macs(profile)
    assert "tf32" == profile.run.dtype
