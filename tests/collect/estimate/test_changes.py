"""Changes to a model by the names that people give them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lflops
from lflops.collect.estimate.changes import Changes, Policy
from lflops.collect.estimate.estimate import Estimator, Subject
from lflops.hardware.chips import lookup, named

WIDTH, ROWS, BLOCKS = 64, 32, 3


def estimated(policy: Policy) -> lflops.Profile:
    """Blocks of four products each."""

    def build() -> Subject:
        layers = lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))  # noqa: E731
        model = nn.Sequential(*(layers() for _ in range(BLOCKS)))
        return Changes(policy=policy).applied("estimate", Subject(model, (torch.zeros(ROWS, WIDTH, requires_grad=True),), {}, Tensor.sum))

    return Estimator(caller="estimate", backward=True).run(build)


@pytest.mark.parametrize(("policy", "again"), [("none", 0), ("selective", 0), ("selective-op", 1), ("full", 3)])
def test_every_second_product_is_computed_again(policy: Policy, again: int) -> None:
    """Of the four of each block: the second and the fourth. Torch stops before the fourth, whose result nothing needs."""
    assert BLOCKS * again * ROWS * WIDTH * WIDTH == estimated(policy).total(phase="recompute")


@pytest.mark.parametrize("name", ["bf16", "BF16", "bfloat16"])
def test_a_dtype_has_short_names(name: str) -> None:
    """In any letter case."""
    subject = Changes(dtype=name).applied("estimate", Subject(nn.Linear(2, 2), (), {}, None))
    assert torch.bfloat16 is subject.model.weight.dtype


@pytest.mark.parametrize(("asked", "taken"), [("H100", "H100 SXM"), ("a100", "A100 SXM 80GB"), ("V100", "V100 SXM2 32GB")])
def test_a_family_is_its_usual_chip(asked: str, taken: str) -> None:
    """Only where a person gives a name: a driver's is whole, and a wrong peak looks like a right one."""
    assert (taken, None) == (named(asked).name, lookup(asked))


def test_a_family_that_nobody_knows_is_refused() -> None:
    """As every unknown chip."""
    given: Any = "H1000"
    with pytest.raises(lflops.HardwareError, match="is not in the table of chips"):
        named(given)
