"""Test the cost of an operator in a trace. Expected values are worked out by hand, or unknown."""

import json
from typing import Any

import pytest

from lflops.trace.analysis.operator_cost import TracedCost, cost_of
from lflops.trace.recorded import Inputs

HALF = "c10::BFloat16"


def cost(name: str, *given: tuple[Any, str] | str, recorded: bool = True) -> TracedCost | None:
    """Return the cost of a call.

    Args:
        name: The name of the operator.
        given: Its arguments: a shape and a type for a tensor, and the text of any other value.
        recorded: Whether the trace has the values.
    """
    shapes: list[Any] = []
    types = []
    values = []
    for each in given:
        if isinstance(each, tuple):
            shapes.append(each[0])
            types.append(each[1])
            values.append("")
        else:
            shapes.append([])
            types.append("Scalar" if each else "")
            values.append(each)
    if not recorded:
        values = []
    inputs = Inputs(
        json.dumps(shapes).encode(), json.dumps(types).encode(), json.dumps(values).encode()
    )
    return cost_of(name, inputs)


def bf16(*shape: int) -> tuple[list[int], str]:
    """Return a tensor with two bytes per element."""
    return list(shape), HALF


def fp32(*shape: int) -> tuple[list[int], str]:
    """Return a tensor with four bytes per element."""
    return list(shape), "float"


def test_a_product_reads_both_and_writes_one() -> None:
    """A matmul reads both inputs and writes one output.

    [2, 3] x [3, 5] has 30 MACs and moves 6 + 15 + 10 elements of 2 bytes. A bias adds 10 operations
    and reads 5 elements.
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
    """The cost of a matmul is known without values, because older torch recorded only shapes."""
    found = cost("aten::addmm", bf16(5), bf16(2, 3), bf16(3, 5), "", "", recorded=False)
    assert found == TracedCost(30, 30, 70, 72)


GEOMETRY = "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "2"


def test_a_convolution_is_as_large_as_its_geometry_says() -> None:
    """The cost of a convolution follows from its geometry.

    It has 4 input channels, 6 output channels, 2 groups, a 9 x 9 input, padding 1, kernel size 3
    and stride 2. So it has 5 x 5 outputs per channel, and 6 * 2 * 9 MACs for each position.
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
    """The cost of a dilated and of a transposed convolution follows from their geometry.

    With dilation 2, a kernel of size 3 covers 5 positions, so an input of length 9 has 5 outputs. A
    transposed convolution has the MACs of a kernel for each of 4 input positions.
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
    """The cost of a convolution without values is unknown, because its output size is unknown."""
    inputs = (fp32(1, 4, 9, 9), fp32(6, 2, 3, 3))
    assert cost("aten::convolution", *inputs, *[""] * 7, recorded=False) is None


@pytest.mark.parametrize(
    ("mask", "products"), [("[True, True, False]", 2), ("[False, True, True]", 1), ("[1, 1, 1]", 2)]
)
def test_a_backward_has_the_gradients_that_were_asked_for(mask: str, products: int) -> None:
    """Backward of a convolution has the cost of the gradients that were requested.

    The gradients of the input and of the weight have 5 x 5 positions with 6 * 4 * 9 MACs each. The
    gradient of the bias is a sum.
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
    of_bias = 0 if mask.endswith("False]") else 6 * 25
    assert 2 * found.macs + of_bias == found.flops


def test_attention_counts_the_square_and_executes_what_the_mask_leaves() -> None:
    """Attention counts all scores, and executes only those that the mask leaves.

    There are 2 heads of width 8 and 4 queries, so each head has 16 scores with 8 + 8 MACs and 5
    operations. A causal mask leaves 10 of the 16 scores.
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
    """The cost of attention without values is unknown, because it may be causal."""
    name = "aten::_scaled_dot_product_flash_attention"
    assert cost(name, *[bf16(1, 2, 4, 8)] * 3, *[""] * 4, recorded=False) is None


def test_a_backward_of_attention_does_the_scores_again() -> None:
    """Backward of attention computes the scores again.

    It has 4 matmuls with 16 scores, 2 heads and width 8. A fifth matmul computes the scores again;
    it is executed, but not included in the MACs.
    """
    given = [bf16(1, 2, 4, 8)] * 4
    rest = [bf16(1, 2, 4, 8), fp32(1, 2, 4), "0.", "False"]
    found = cost(
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward", *given, *rest, "", ""
    )
    assert found is not None
    assert (4 * 256, 5 * 256) == (found.macs, found.executed_macs)
    assert 2 * 5 * 256 + 32 * (4 + 2) == found.flops
    assert found.flops == found.executed_flops


def test_packed_sequences_are_unknown() -> None:
    """The cost of attention on packed sequences is unknown.

    The lengths of the sequences are in a tensor, and a trace has only its shape.
    """
    packed = [bf16(12, 2, 8)] * 3
    arguments = [([4], "int"), ([4], "int"), "5", "5", "0.", "False", "False", "", "", "", "", ""]
    assert cost("aten::_flash_attention_forward", *packed, *arguments) is None


def test_pointwise_operators_and_reductions_follow_the_convention() -> None:
    """The cost of other operators follows the documented convention.

    A pointwise operator has one operation per element of the broadcast result. A softmax has 5 per
    element of its input. Comparisons, selections and copies have none.
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
    """The cost of a call with invalid arguments is unknown; a trace may be from anywhere."""
    assert cost(*given) is None


@pytest.mark.parametrize(
    "inputs",
    [Inputs(b"{}", b"[]", b"[]"), Inputs(b"[1, 2]", b"[1, 2]", b"[]"), Inputs(b"null", b"", b"")],
)
def test_inputs_that_are_none_of_torchs_are_unknown(inputs: Inputs) -> None:
    """The cost is unknown if the recorded inputs are not in torch's format."""
    assert cost_of("aten::mm", inputs) is None
    assert cost_of("aten::mm", None) is None
