"""What a GPU of NVIDIA's multiplies in TF32 is counted as that.

Convolutions by default, other products where the user allows it.
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
        self.conv, self.linear = (
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.Linear(64, 1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(self.conv(x).flatten(1))
        return found


CONVOLUTION, PRODUCT = 4 * 9 * 16, 64
CUDNN: Any = torch.backends.cudnn
CUDA: Any = torch.backends.cuda


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As torch would say there, with its settings as they are by default."""
    monkeypatch.setattr(count, "run_of", lambda *given: replace(run_of(*given), device_type="cuda"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    before = CUDNN.conv.fp32_precision, CUDA.matmul.fp32_precision
    yield
    CUDNN.conv.fp32_precision, CUDA.matmul.fp32_precision = before


def counted() -> Profile:
    """One pass of it."""
    return lflops.count(Net(), torch.randn(1, 1, 4, 4))


def macs(profile: Profile) -> dict[str, int]:
    """By dtype."""
    return summed((cell.dtype, cell.macs) for cell in profile.op_counts if cell.macs)


@pytest.mark.usefixtures("_on_a_gpu")
def test_convolutions_are_in_tf32_and_other_products_where_that_is_allowed() -> None:
    """And the run's dtype is that of most of them."""
    profile = counted()
    assert ({"tf32": CONVOLUTION, "float32": PRODUCT}, "tf32") == (macs(profile), profile.run.dtype)
    CUDNN.conv.fp32_precision, CUDA.matmul.fp32_precision = "ieee", "tf32"
    profile = counted()
    assert ({"float32": CONVOLUTION, "tf32": PRODUCT}, "float32") == (
        macs(profile),
        profile.run.dtype,
    )
    assert {"bfloat16"} == set(
        macs(lflops.count(Net().bfloat16(), torch.randn(1, 1, 4, 4, dtype=torch.bfloat16)))
    )


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
    """On AMD's GPUs, where a count is of tensors without a device, and on GPUs older than Ampere."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert {"float32"} == set(macs(counted()))


def test_a_cpu_multiplies_float32_as_it_is() -> None:
    """As far as lflops knows."""
    assert {"float32"} == set(macs(counted()))


@pytest.mark.usefixtures("_on_a_gpu")
def test_torch_2_8_has_one_setting_for_all_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has modules without a setting where newer ones have some, and another one for products."""
    monkeypatch.setattr(
        torch.backends,
        "cudnn",
        SimpleNamespace(conv=SimpleNamespace(), enabled=True, allow_tf32=True),
    )
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    assert [True, False] == [multiplies_in_tf32(operator) for operator in ("convolution", "addmm")]


@pytest.mark.parametrize(
    ("hardware", "dtype"),
    [("H100 SXM", "tf32"), ("V100 SXM2 32GB", "float32"), ("MI300X", "float32"), (None, "float32")],
)
def test_an_estimate_is_for_its_chip(hardware: str | None, dtype: str) -> None:
    """Whatever machine it is made on.

    So what a step takes at least on a chip is no more than it takes there.
    """
    found = macs(lflops.estimate(Net, (torch.randn(1, 1, 4, 4),), hardware=hardware))
    assert (
        {"tf32": CONVOLUTION, "float32": PRODUCT}
        if dtype == "tf32"
        else {"float32": CONVOLUTION + PRODUCT}
    ) == found


@pytest.mark.gpu
def test_on_cuda_a_convolution_is_in_tf32(cuda: torch.device) -> None:
    """A kernel's name tells so too, on Ampere and later."""
    if torch.cuda.get_device_capability(cuda) < (8, 0):
        pytest.skip("TF32 needs Ampere or later")
    profile = lflops.count(Net().to(cuda), torch.randn(1, 1, 4, 4, device=cuda))
    assert ({"tf32": CONVOLUTION, "float32": PRODUCT}, "tf32") == (macs(profile), profile.run.dtype)
