"""What ran without a formula is listed and in no total; and of what people's models call, next to nothing does."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import everyday
import pytest
import torch
from functions import Function, fixed
from torch import Tensor
from torch.nn import functional as F

import lflops
from lflops.collect.counting.formulas import table
from lflops.collect.tensors import tensors_in
from lflops.profile import Profile

X = everyday.X


def expressions() -> Iterator[tuple[str, Callable[[], Any]]]:
    """All that this is about, by name."""
    for name in everyday.UNARY.split():
        yield name, lambda name=name: getattr(torch, name)(X)
    for name in everyday.SPECIAL.split():
        yield f"special.{name}", lambda name=name: getattr(torch.special, name)(X)
    for name in everyday.ACTIVATIONS.split():
        yield f"F.{name}", lambda name=name: getattr(F, name)(X)
    for name in everyday.BINARY.split():
        yield f"{name} of two", lambda name=name: getattr(torch, name)(X, X.flip(0))
    for name in everyday.REDUCTIONS.split():
        yield f"{name} of all", lambda name=name: getattr(torch, name)(X)
    for name in everyday.ALONG.split():
        yield f"{name} of a row", lambda name=name: getattr(torch, name)(X, dim=1) if name != "topk" else X.topk(2, 1)
    for kind, group in everyday.EXPRESSIONS.items():
        for name, function in group.items():
            yield f"{kind}: {name}", function


def unlisted(function: Callable[[], Any], mode: Callable[[], Any]) -> set[str]:
    """Operators of a call, and of going back where there is a way, that nothing is known about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mode():
            result = function()
            way_back = any(tensor.requires_grad for tensor in tensors_in(result))
            profile = lflops.count(Function(function), backward=way_back)
    assert () == profile.notes
    return {each.operator for each in profile.uncounted}


EXPRESSIONS = dict(expressions())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_what_models_call_is_known(name: str, mode: Callable[[], Any]) -> None:
    """There and back, under grad; and under inference mode, where operators arrive whole."""
    assert set() == unlisted(EXPRESSIONS[name], mode)


@pytest.mark.parametrize("name", everyday.UNKNOWN_YET)
def test_what_is_not_known_yet_is_pinned(name: str) -> None:
    """Once it has a formula, it belongs among the others."""
    function, expected = everyday.UNKNOWN_YET[name]
    assert expected == unlisted(function, torch.enable_grad)


@torch.library.custom_op("lflops_ledger::scan", mutates_args=())
def scan(x: Tensor, weight: Tensor) -> Tensor:
    """An operator of somebody's own."""
    return x * weight.sum()


@scan.register_kernel("cpu")
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.sum()


def figures(profile: Profile) -> tuple[int, int, int]:
    """What a total could have in it."""
    work = profile.modules[""].forward
    return work.macs, work.flops, work.bytes_moved


def test_an_operator_without_a_formula_is_listed_and_in_no_total() -> None:
    """Its calls, and the bytes of what it took and gave: 2 calls on 24 and 6 numbers that return 24."""
    x, weight = fixed(4, 6), fixed(6)

    def twice(x: Tensor) -> Tensor:
        return torch.ops.lflops_ledger.scan(torch.ops.lflops_ledger.scan(x, weight), weight)

    profile = lflops.count(Function(twice), x)
    (listed,) = profile.uncounted
    assert ("lflops_ledger::scan", "forward", 2, 2 * (24 + 6 + 24) * 4) == (listed.operator, listed.phase, listed.calls, listed.bytes)
    assert (0, 0, 0) == figures(profile)


def test_an_operator_is_off_the_ledger_once_it_has_a_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """MACs from shapes; and what it moved is counted then too."""
    monkeypatch.setattr(table, "_USERS", {})
    lflops.register_formula(torch.ops.lflops_ledger.scan, lambda x, weight, *, out: x[0] * x[1] * weight[0] + out[1])
    profile = lflops.count(Function(torch.ops.lflops_ledger.scan), (fixed(4, 6), fixed(6)))
    assert ((), (4 * 6 * 6 + 6, 2 * (4 * 6 * 6 + 6), (24 + 6 + 24) * 4)) == (profile.uncounted, figures(profile))


def test_an_operator_whose_formula_fails_is_listed_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A formula that cannot say is as good as none; the run goes on."""
    monkeypatch.setattr(table, "_USERS", {})
    lflops.register_formula(torch.ops.lflops_ledger.scan, lambda x, weight, *, out: x[7])
    with pytest.warns(UserWarning, match="lflops_ledger::scan"):
        profile = lflops.count(Function(torch.ops.lflops_ledger.scan), (fixed(4, 6), fixed(6)))
    (note,) = profile.notes
    assert ("formula_failed", "lflops_ledger::scan") == (note.code, note.subject)
    assert ([("lflops_ledger::scan", 1)], (0, 0, 0)) == ([(each.operator, each.calls) for each in profile.uncounted], figures(profile))
