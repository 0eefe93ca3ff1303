"""What an operator of a trace computed, worked out by hand, or unknown."""

import json
from typing import Any

import pytest

from lflops.trace.analysis.operator_cost import TracedCost, cost_of
from lflops.trace.recorded import Inputs

HALF = "c10::BFloat16"


def cost(name: str, *given: tuple[Any, str] | str, recorded: bool = True) -> TracedCost | None:
    """The cost of a call: a tensor is a shape and a type, all else the text of its value."""
    shapes = [each[0] if isinstance(each, tuple) else [] for each in given]
    types = [each[1] if isinstance(each, tuple) else "Scalar" if each else "" for each in given]
    values = ["" if isinstance(each, tuple) else each for each in given]
    return cost_of(
        name,
        Inputs(
            *(json.dumps(each).encode() for each in (shapes, types, values if recorded else []))
        ),
    )


def bf16(*shape: int) -> tuple[list[int], str]:
    """A tensor of two bytes an element."""
    return list(shape), HALF


def fp32(*shape: int) -> tuple[list[int], str]:
    """A tensor of four bytes an element."""
    return list(shape), "float"


def test_a_product_reads_both_and_writes_one() -> None:
    """[2, 3] x [3, 5]: 30 MACs, 6 + 15 + 10 elements of 2 bytes.

    A bias adds 10 operations and reads 5 elements.
    """
    assert cost("aten::mm", bf16(2, 3), bf16(3, 5)) == TracedCost(30, 30, 60, 62)
    assert cost("aten::addmm", bf16(5), bf16(2, 3), bf16(3, 5), "1", "1") == TracedCost(
        30, 30, 70, 72
    )
    assert cost("aten::addmm", bf16(5), bf16(2, 3), bf16(3, 5), "0", "1") == TracedCost(
        30, 30, 60, 72
    )
    assert cost("aten::bmm", fp32(4, 2, 3), fp32(4, 3, 5)) == TracedCost(120, 120, 240, 4 * 4 * 31)


def test_a_product_needs_no_values() -> None:
    """Older torch recorded the shapes alone."""
    assert cost(
        "aten::addmm", bf16(5), bf16(2, 3), bf16(3, 5), "", "", recorded=False
    ) == TracedCost(30, 30, 70, 72)


GEOMETRY = "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "2"


def test_a_convolution_is_as_large_as_its_geometry_says() -> None:
    """4 to 6 channels in 2 groups, 9 x 9 with a border of 1, kernel 3, every second place.

    5 x 5 places, 6 * 2 * 9 MACs each.
    """
    macs = 25 * 6 * 2 * 9
    found = cost("aten::convolution", fp32(1, 4, 9, 9), fp32(6, 2, 3, 3), "", *GEOMETRY)
    assert found == TracedCost(macs, macs, 2 * macs, 4 * (4 * 81 + 6 * 18 + 6 * 25))
    found = cost("aten::convolution", fp32(1, 4, 9, 9), fp32(6, 2, 3, 3), fp32(6), *GEOMETRY)
    assert found == TracedCost(macs, macs, 2 * macs + 6 * 25, 4 * (4 * 81 + 6 * 18 + 6 + 6 * 25))
    cudnn = cost(
        "aten::cudnn_convolution",
        fp32(1, 4, 9, 9),
        fp32(6, 2, 3, 3),
        "[1, 1]",
        "[2, 2]",
        "[1, 1]",
        "2",
        "False",
        "False",
        "True",
    )
    assert cudnn is not None
    assert (macs, 2 * macs) == (cudnn.macs, cudnn.flops)


def test_a_dilated_and_a_transposed_convolution() -> None:
    """Dilated by 2 a kernel of 3 reaches over 5: 5 places of 9.

    Transposed, each of 4 places of the input has a kernel's products.
    """
    found = cost(
        "aten::convolution",
        fp32(1, 1, 9),
        fp32(1, 1, 3),
        "",
        "[1]",
        "[0]",
        "[2]",
        "False",
        "[0]",
        "1",
    )
    assert found == TracedCost(15, 15, 30, 4 * (9 + 3 + 5))
    found = cost(
        "aten::convolution",
        fp32(1, 2, 4),
        fp32(2, 3, 3),
        "",
        "[2]",
        "[0]",
        "[1]",
        "True",
        "[1]",
        "1",
    )
    assert found == TracedCost(4 * 18, 4 * 18, 8 * 18, 4 * (8 + 18 + 3 * 10))


def test_a_convolution_without_its_geometry_is_unknown() -> None:
    """Its inputs alone do not tell how large the result is."""
    assert (
        cost("aten::convolution", fp32(1, 4, 9, 9), fp32(6, 2, 3, 3), *[""] * 7, recorded=False)
        is None
    )


@pytest.mark.parametrize(
    ("mask", "products"), [("[True, True, False]", 2), ("[False, True, True]", 1), ("[1, 1, 1]", 2)]
)
def test_a_backward_has_the_gradients_that_were_asked_for(mask: str, products: int) -> None:
    """5 x 5 places with 6 * 4 * 9 MACs, for each gradient of the input and of the weight.

    A bias' is a sum.
    """
    arguments = "[6]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", mask
    found = cost(
        "aten::convolution_backward",
        fp32(1, 6, 5, 5),
        fp32(1, 4, 9, 9),
        fp32(6, 4, 3, 3),
        *arguments,
    )
    assert found is not None
    assert products * 25 * 6 * 4 * 9 == found.macs
    assert 2 * found.macs + (0 if mask.endswith("False]") else 6 * 25) == found.flops


def test_attention_counts_the_square_and_executes_what_the_mask_leaves() -> None:
    """2 heads of width 8, 4 queries.

    16 scores a head of 8 + 8 MACs and 5 operations; a causal mask leaves 10 of them.
    """
    inputs = [bf16(1, 2, 4, 8)] * 3
    name = "aten::_scaled_dot_product_flash_attention"
    assert cost(name, *inputs, "0.", "False", "False", "0.125") == TracedCost(
        512, 512, 1024 + 160, 4 * 64 * 2
    )
    causal = cost(name, *inputs, "0.", "True", "False", "0.125")
    assert causal == TracedCost(512, 2 * 10 * 16, 1024 + 160, 4 * 64 * 2)
    assert causal is not None
    assert 2 * 2 * 10 * 16 + 160 == causal.executed_flops


def test_attention_without_the_values_of_its_arguments_is_unknown() -> None:
    """Whether it was causal decides."""
    assert (
        cost(
            "aten::_scaled_dot_product_flash_attention",
            *[bf16(1, 2, 4, 8)] * 3,
            *[""] * 4,
            recorded=False,
        )
        is None
    )


def test_a_backward_of_attention_does_the_scores_again() -> None:
    """4 products of 16 scores and 2 heads of width 8, and one again.

    It is executed, and in no MAC of the model.
    """
    given = [bf16(1, 2, 4, 8)] * 4
    rest = [bf16(1, 2, 4, 8), fp32(1, 2, 4), "0.", "False"]
    found = cost(
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward", *given, *rest, "", ""
    )
    assert found is not None
    assert (4 * 256, 5 * 256, 2 * 5 * 256 + 32 * (4 + 2)) == (
        found.macs,
        found.executed_macs,
        found.flops,
    )
    assert found.flops == found.executed_flops


def test_packed_sequences_are_unknown() -> None:
    """Where each begins is in a tensor, of which a trace has the shape."""
    packed = [bf16(12, 2, 8)] * 3
    arguments = [([4], "int"), ([4], "int"), "5", "5", "0.", "False", "False", "", "", "", "", ""]
    assert cost("aten::_flash_attention_forward", *packed, *arguments) is None


def test_pointwise_operators_and_reductions_follow_the_convention() -> None:
    """One operation an element of the result that is broadcast.

    A softmax 5 of its input; comparing, selecting and copying none.
    """
    assert cost("aten::add", bf16(4, 1, 3), bf16(2, 3), "1") == TracedCost(
        0, 0, 24, 2 * (12 + 6 + 24)
    )
    assert cost("aten::mul_", fp32(4, 3), "2.") == TracedCost(0, 0, 12, 4 * 24)
    assert cost("aten::mul", bf16(4, 3), ([], "double")) == TracedCost(0, 0, 12, 2 * 24 + 8)
    assert cost("aten::_softmax", fp32(4, 3), "-1", "False") == TracedCost(0, 0, 60, 4 * 24)
    assert cost("aten::eq", fp32(4, 3), "1") == TracedCost(0, 0, 0, 48 + 12)
    assert cost("aten::where", ([4, 3], "bool"), fp32(4, 3), fp32(4, 3)) == TracedCost(
        0, 0, 0, 12 + 3 * 48
    )
    assert cost("aten::copy_", bf16(4, 3), fp32(4, 3), "False") == TracedCost(0, 0, 0, 24 + 48)
    assert cost("aten::mean", fp32(4, 3), "[1]", "True", "") == TracedCost(0, 0, 12, None)
    assert cost("aten::add", ([4, 3], "long int"), ([4, 3], "long int"), "1") == TracedCost(
        0, 0, 0, 3 * 96
    )


@pytest.mark.parametrize(
    "given",
    [
        ("aten::mm", fp32(2, 3)),
        ("aten::mm", "1", "2"),
        ("aten::mm", fp32(2, -3), fp32(-3, 5)),
        ("aten::mm", fp32(2, 1 << 60), fp32(1 << 60, 5)),
        ("aten::mm", ([2, "3"], "float"), fp32(3, 5)),
        ("aten::mm", ([2, 3], "c10::complex<float>"), ([3, 5], "c10::complex<float>")),
        (
            "aten::convolution",
            fp32(1, 4, 9, 9),
            fp32(6, 2, 3, 3),
            "",
            "[0, 0]",
            "x(",
            "()",
            "False",
            "[0, 0]",
            "2",
        ),
        (
            "aten::_scaled_dot_product_flash_attention",
            *[bf16(1, 2, 4, 8)] * 3,
            "0.",
            "__import__('os')",
            "False",
            "",
        ),
        ("my::op", fp32(2, 3)),
        ("aten::view", fp32(2, 3), "[6]"),
        ("aten::mm",),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_makes_no_sense_is_unknown(given: tuple[Any, ...]) -> None:
    """A trace is a file from anywhere."""
    assert cost(*given) is None


@pytest.mark.parametrize(
    "inputs",
    [Inputs(b"{}", b"[]", b"[]"), Inputs(b"[1, 2]", b"[1, 2]", b"[]"), Inputs(b"null", b"", b"")],
)
def test_inputs_that_are_none_of_torchs_are_unknown(inputs: Inputs) -> None:
    """Another program's text where torch has lists."""
    assert cost_of("aten::mm", inputs) is None
    assert cost_of("aten::mm", None) is None
