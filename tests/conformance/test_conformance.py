"""Test that lflops counts the MACs that are worked out by hand, for every case of the suite.

Also test that an error in any formula is detected by a case.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import lflops
from lflops.flop_counter import operator_costs
from lflops.flop_counter.operators import classify
from lflops.formulas import table
from lflops.formulas.table import Cost
from lflops.profile.profile import Profile
from tests.conformance import CASES
from tests.conformance.at_hand import LACKING
from tests.conformance.case import Case
from tests.conformance.guards import ELSEWHERE, GUARDS
from tests.conformance.language_models import of_bert
from tests.support.formula_cases import CASES as CORE_CASES
from tests.support.formula_family_cases import CASES as FAMILY_CASES
from tests.support.linear_algebra_cases import CASES as LINEAR_ALGEBRA_CASES
from tests.support.package_cases import CASES as PACKAGE_CASES
from tests.support.packed_formula_cases import CASES as PACKED_CASES
from tests.support.profile_checks import consistent

# The cases use prototypes, deprecated functions and odd sizes on purpose, of which torch warns.
pytestmark = pytest.mark.filterwarnings("ignore")

BY_NAME = {case.name: case for case in CASES}


def profile_of(case: Case) -> Profile:
    """Count a case with lflops. Skip the test if this version of torch cannot run the case."""
    if case.name in LACKING:
        pytest.skip(LACKING[case.name])
    torch.manual_seed(0)
    with case.setting():
        model, args, kwargs = case.build()
        with torch.set_grad_enabled(case.grad):
            return lflops.count(model, args, kwargs, backward=case.backward is not None)


def counted(profile: Profile) -> dict[str, int]:
    """Return the counted MACs of each phase, and the executed MACs of forward."""
    root = profile.modules[""]
    return {
        "forward": root.forward.macs,
        "backward": root.backward.macs,
        "recompute": root.recompute.macs,
        "executed": root.forward.executed_macs,
    }


def expected(case: Case) -> dict[str, int]:
    """Return the MACs that were worked out by hand, in the same form as `counted`."""
    executed = case.forward if case.executed is None else case.executed
    return {
        "forward": case.forward,
        "backward": case.backward or 0,
        "recompute": case.recompute,
        "executed": executed,
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_counted_is_what_the_pencil_says(case: Case) -> None:
    """The MACs of all phases are right, and modules and operators add up to them.

    All operators are supported, and no formula fails.
    """
    profile = consistent(profile_of(case))
    assert expected(case) == counted(profile)
    assert () == profile.unsupported
    assert "formula_failed" not in {note.code for note in profile.notes}


def test_every_case_has_a_name_of_its_own() -> None:
    """The names are unique, and there are at least 130 cases."""
    assert len(BY_NAME) == len(CASES) >= 130
    assert LACKING.keys() <= BY_NAME.keys()


def test_every_formula_is_held_by_a_case_or_has_a_reason_why_not() -> None:
    """Each formula is in exactly one of `GUARDS` and `ELSEWHERE`, and these have no other names."""
    operators = {
        operator.removeprefix("aten::") for operator in (*table.FORMULAS, *operator_costs._COSTS)
    }
    listed = GUARDS.keys() | ELSEWHERE.keys()
    where = (
        "GUARDS (with the case that it would break) or ELSEWHERE (with the reason why no case runs "
        "it) in tests/conformance/guards.py"
    )
    assert not operators - listed, (
        f"formulas without a guard: {sorted(operators - listed)}; add them to {where}"
    )
    assert not listed - operators, (
        f"no formula for {sorted(listed - operators)}; remove them from {where}"
    )
    assert not GUARDS.keys() & ELSEWHERE.keys()


def with_one_more(formula: Callable[..., Any]) -> Callable[..., Cost]:
    """Return a wrong formula, which returns one MAC more."""

    @functools.wraps(formula)
    def wrong(*args: Any, **kwargs: Any) -> Cost:
        result = formula(*args, **kwargs)
        cost = result if isinstance(result, Cost) else Cost(result)
        return cost._replace(macs=cost.macs + 1)

    return wrong


@pytest.mark.parametrize("operator", GUARDS)
def test_one_mac_more_in_a_formula_is_noticed(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a formula returns one MAC more, the operator's case in `GUARDS` has wrong counts."""
    case = BY_NAME[GUARDS[operator]]
    formulas: dict[str, Any] = table.FORMULAS
    if operator in operator_costs._COSTS:
        formulas = operator_costs._COSTS
    name = operator if operator in formulas else f"aten::{operator}"
    monkeypatch.setitem(formulas, name, with_one_more(formulas[name]))
    assert expected(case) != counted(profile_of(case))


def test_what_no_case_reaches_is_held_by_shapes() -> None:
    """Each formula in `ELSEWHERE` is tested with shapes and costs that are worked out by hand.

    The backward of flex attention needs more than shapes. It has the next test.
    """
    cases = (*CORE_CASES, *FAMILY_CASES, *LINEAR_ALGEBRA_CASES, *PACKED_CASES, *PACKAGE_CASES)
    held: set[str] = set()
    for case in cases:
        held.update(case.operators.split())
    assert {"flex_attention_backward"} == ELSEWHERE.keys() - held


def test_flex_attention_goes_backward_on_the_blocks_that_ran() -> None:
    """The backward of flex attention only executes the blocks that its mask leaves.

    It has two matmuls for each of the two matmuls of forward, and computes the scores again. A
    causal mask leaves 1 + 2 + 3 + 4 of 4 x 4 blocks.
    """
    batch = 1
    heads = 2
    length = 256
    width = 8
    block = 64
    mask = create_block_mask(
        lambda _b, _h, i, j: i >= j, None, None, length, length, device="cpu", BLOCK_SIZE=block
    )
    x = torch.empty(batch, heads, length, width, device="meta")
    backward = classify(torch.ops.higher_order.flex_attention_backward)
    cost = backward.cost(
        (x, x, x, x, None, x, None, None, None, mask.as_tuple(), 1.0, {}), {}, (x, x, x)
    )
    square = batch * heads * length**2
    ran = batch * heads * (1 + 2 + 3 + 4) * block**2
    again = cost.recompute or Cost()
    assert (4 * square * width, 4 * ran * width, square * width, ran * width) == (
        cost.macs,
        cost.executed_macs,
        again.macs,
        again.executed_macs,
    )


def test_the_pencil_knows_bert_large() -> None:
    """The hand-worked MACs of BERT Large at length 128 are 340,592,656 per token.

    This is also the result of DeepSpeed, and of torch's counter without fused attention.
    """
    large = of_bert(
        fused=False,
        batch=4,
        length=128,
        layers=24,
        hidden=1024,
        heads=16,
        wide=4096,
        vocabulary=30522,
    )
    assert 4 * 128 * 340_592_656 == large.forward


ONLY_HERE = ("flex", "conv_tbc", "TransformerEncoder in one kernel a layer, which")
"""Beginnings of the names of cases that do not run on a GPU.

They need other sizes there, use other operators, or do not work with a device as a context.
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family", ["matmul", "einsum", "convolution", "attention", "transformer", "recurrent"]
)
def test_a_gpu_counts_the_same_forward(family: str, cuda: torch.device) -> None:
    """Forward has the same MACs on a GPU, although other kernels run.

    Backward and recompute are not compared, because they depend on the kernels.
    """
    cases = [
        case for case in CASES if case.family == family and not case.name.startswith(ONLY_HERE)
    ]
    with cuda:
        profiles = {case.name: consistent(profile_of(case)) for case in cases}
    by_hand = {case.name: case.forward for case in cases}
    on_gpu = {name: counted(profile)["forward"] for name, profile in profiles.items()}
    assert by_hand == on_gpu
    unsupported = {name: each.unsupported for name, each in profiles.items() if each.unsupported}
    assert {} == unsupported


@pytest.mark.gpu
def test_a_gpu_counts_heads_of_half_precision_as_wide_as_it_makes_them(cuda: torch.device) -> None:
    """Flash attention pads heads of 4 features to 8 features, and the padded features count.

    2 x 6 heads with 5 queries and 5 keys have 300 scores, each with 8 + 8 MACs instead of 4 + 4.
    """

    class Attends(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.zeros(2, 6, 5, 4, dtype=torch.bfloat16, device=cuda)
    assert 300 * (8 + 8) == lflops.count(Attends(), (x,)).total()
