"""Test that every operator in torch's `flop_registry` has a formula in lflops.

This includes all torch releases that lflops supports.
"""

import contextlib

import pytest
import torch
from torch.utils.flop_counter import flop_registry

import lflops.flop_counter.operators  # noqa: F401 - the import registers all formulas
from lflops.flop_counter.operator_costs import all_formulas

# The import adds the operators of variable-length attention to torch's registry.
with contextlib.suppress(ImportError):
    import torch.nn.attention.varlen

OURS = {name for name, _ in all_formulas()}

ATTENTION = [f"_scaled_dot_product_{kind}_attention" for kind in ("efficient", "flash", "cudnn")]
KERNELS = [
    "_flash_attention_forward",
    "_flash_attention_backward",
    "_efficient_attention_forward",
    "_efficient_attention_backward",
]
PRODUCTS = [
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "convolution",
    "_convolution",
    "convolution_backward",
]
OF_2_8 = {
    f"aten::{name}"
    for name in (*PRODUCTS, *ATTENTION, *(f"{name}_backward" for name in ATTENTION), *KERNELS)
}
OF_2_11 = OF_2_8 | {
    "aten::cudnn_convolution",
    "aten::convolution_overrideable",
    "aten::_slow_conv2d_forward",
}
OF_2_13 = OF_2_11 | {
    *("flex_attention", "flex_attention_backward"),
    *(f"torch_attn::_varlen_attn{kind}" for kind in ("", "_out", "_backward")),
}
OF_2_15 = OF_2_13 | {
    f"aten::_scaled_dot_product_flash_attention_for_cpu{kind}" for kind in ("", "_backward")
}

BY_HAND = {"2.8": OF_2_8, "2.11": OF_2_11, "2.13": OF_2_13, "2.15": OF_2_15}
"""The keys of each release's registry, read from its source code."""


def keys_here() -> set[str]:
    """Return the keys of the registry in the running torch."""
    return {str(getattr(key, "_qualified_op_name", None) or key.name()) for key in flop_registry}


def test_every_key_of_the_registry_has_a_formula() -> None:
    """Every operator in the registry of the running torch has a formula."""
    assert set() == keys_here() - OURS


@pytest.mark.parametrize("version", BY_HAND)
def test_every_key_of_other_releases_has_a_formula(version: str) -> None:
    """Every operator in the registry of another release has a formula, too."""
    assert set() == BY_HAND[version] - OURS


def test_the_lists_by_hand_are_what_torch_has() -> None:
    """The list for the running release equals the registry, if there is a list for it."""
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in BY_HAND:
        pytest.skip(f"there is no list for torch {version}")
    assert BY_HAND[version] == keys_here()
