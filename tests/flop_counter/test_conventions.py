"""Test the convention for operators that are no multiply-accumulates.

They cost a fixed number of FLOPs per element, and no MACs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lflops
from lflops.formulas.conventions import FREE, MOVES, PER_INPUT, PER_OUTPUT
from tests.support.count_function import count, fixed, flops, macs, of

ROWS, COLUMNS = 4, 6
n = ROWS * COLUMNS
"""Number of elements of a tensor, if a test does not say otherwise."""


def x() -> Tensor:
    """Return numbers between 0 and 1, where every function is defined."""
    return (torch.rand(ROWS, COLUMNS) * 0.8 + 0.1).requires_grad_()


X = x()


def forward(function: Callable[..., Any], *args: Any) -> int:
    """Return the FLOPs of forward, which must have no MACs."""
    profile = count(function, *args)
    assert {} == macs(profile)
    assert () == profile.unsupported
    return flops(profile).get("forward", 0)


def backward(function: Callable[..., Any], *args: Any) -> int:
    """Return the FLOPs of backward; forward and backward must have no MACs."""
    profile = count(function, *args, backward=True)
    assert {} == macs(profile)
    assert () == profile.unsupported
    return flops(profile).get("backward", 0)


ONE_EACH = (
    "abs acos asin atan ceil cos cosh digamma erf exp expm1 floor lgamma log log10 log1p log2 neg reciprocal round rsqrt sigmoid sign sin"
    " sinh sqrt square tan tanh trunc relu relu_ selu nan_to_num logit"
)
ACTIVATIONS = "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 rrelu silu softplus softshrink"


@pytest.mark.parametrize("name", [*ONE_EACH.split(), *ACTIVATIONS.split()])
def test_a_function_of_each_element_is_one_operation(name: str) -> None:
    """Every pointwise function costs one FLOP per element, be it `exp` or `sign`."""
    function = getattr(torch, name) if name in ONE_EACH.split() else getattr(F, name)
    assert n == forward(function, x().detach())


TWO_OPERANDS = (
    "add sub mul div pow atan2 maximum minimum fmod remainder hypot logaddexp floor_divide copysign"
)


@pytest.mark.parametrize("name", TWO_OPERANDS.split())
def test_a_function_of_two_elements_is_one_operation(name: str) -> None:
    """A function of two operands costs one FLOP per element of its result.

    This also holds if one of the operands is broadcast.
    """
    function = getattr(torch, name)
    assert (
        n
        == forward(function, x(), x())
        == forward(function, x()[:1], x())
        == forward(function, x()[:1], x()[:, :1])
    )


TWO_EACH: dict[str, tuple[Callable[..., Any], int]] = {
    "addcmul": (lambda: torch.addcmul(X, X, X), 2 * n),
    "addcdiv": (lambda: torch.addcdiv(X, X, X), 2 * n),
    "lerp": (lambda: torch.lerp(X, X, 0.5), 2 * n),
    "addr": (lambda: torch.addr(X, X[:, 0], X[0]), 2 * n),
    "gated": (partial(F.glu, X), 2 * n // 2),
    "lists": (lambda: torch._foreach_addcmul([X, X], [X, X], [X, X]), 2 * 2 * n),
    "lists in place": (
        lambda: torch._foreach_lerp_([fixed(ROWS), fixed(3)], [fixed(ROWS), fixed(3)], 0.5),
        2 * (ROWS + 3),
    ),
    "lists by a number": (lambda: torch._foreach_mul([X, X], 2.0), 2 * n),
}


@pytest.mark.parametrize("name", TWO_EACH)
def test_a_function_that_is_several_at_once_is_as_many_operations(name: str) -> None:
    """A fused function such as `addcmul` costs as many FLOPs as the functions it combines.

    For a list, the elements of all tensors count.
    """
    function, expected = TWO_EACH[name]
    assert expected == forward(function)


NONE: dict[str, Callable[[], Any]] = {
    "comparing": lambda: (X > 0.5, X > X.flip(0)),
    "testing": partial(torch.isnan, X),
    "whether any": lambda: ((X > 0).any(), (X > 0).all()),
    "selecting": lambda: torch.where(X > 0, X, X),
    "masking": lambda: X.masked_fill(X > 0, 0.0),
    "converting": lambda: (X.to(torch.bfloat16), X.double()),
    "whole numbers": lambda: ((torch.arange(9) * 2).sum(), torch.arange(9).cumsum(0)),
    "logic": lambda: (X > 0) & (X < 1),
    "copying": lambda: (X.clone(), torch.cat([X, X]), X.flip(0), X.repeat(2, 2)),
    "sorting": lambda: (X.sort(), X.topk(2), X.argsort(), X.median(), X.unique()),
    "gathering": lambda: (
        X[torch.tensor([1, 2])],
        F.embedding(torch.tensor([1]), X),
        X.gather(0, torch.tensor([[1]])),
    ),
    "filling": lambda: (
        torch.zeros(3),
        torch.rand(3),
        torch.full((3,), 2.0),
        torch.eye(3),
        torch.arange(3.0),
    ),
    "viewing": lambda: (X.t(), X[0], X.view(-1), X.expand(2, -1, -1), X.detach()),
    "padding": lambda: (F.pad(X, (1, 1)), F.pad(X[None], (1, 1), mode="reflect")),
}


@pytest.mark.parametrize("name", NONE)
def test_what_computes_nothing_costs_no_operation(name: str) -> None:
    """Comparisons, casts, integer arithmetic, copies and fills cost no FLOPs.

    They may move bytes, but they are no floating-point arithmetic.
    """
    assert 0 == forward(NONE[name])


REDUCTIONS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "sum": (torch.sum, n),
    "sum of columns": (lambda x: x.sum(0), n),
    "mean": (torch.mean, n),
    "product": (torch.prod, n),
    "largest": (torch.amax, n),
    "largest of a row": (lambda x: x.max(1), n),
    "where the largest is": (torch.argmax, n),
    "running sum": (lambda x: x.cumsum(0), n),
    "smallest and largest": (torch.aminmax, 2 * n),
    "norm": (torch.linalg.vector_norm, 2 * n),
    "norms of a list": (lambda x: torch._foreach_norm([x, x]), 2 * 2 * n),
    "distance": (lambda x: torch.dist(x, x), 3 * n),
    "variance": (torch.var, 4 * n),
    "deviation of a row": (lambda x: x.std(1), 4 * n),
    "deviation and mean": (torch.std_mean, 4 * n),
    "logarithm of a sum of exponentials": (lambda x: torch.logsumexp(x, 1), 4 * n),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_is_so_many_operations_an_element_that_goes_in(name: str) -> None:
    """A reduction costs a fixed number of FLOPs per element of its input.

    The shape of the result does not matter.
    """
    function, expected = REDUCTIONS[name]
    assert expected == forward(function, x())


def test_a_maximum_of_two_tensors_is_no_reduction() -> None:
    """`torch.max` of two tensors costs one FLOP per element of the result, like `torch.maximum`."""
    assert n == forward(torch.max, x()[:1], x())


NORMS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "layer": (lambda x, w, b: F.layer_norm(x, (COLUMNS,), w, b), 7),
    "layer without weights": (lambda x, _w, _b: F.layer_norm(x, (COLUMNS,)), 5),
    "batch": (
        lambda x, w, b: F.batch_norm(
            x, torch.zeros(COLUMNS), torch.ones(COLUMNS), w, b, training=True
        ),
        7,
    ),
    "batch, known": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(COLUMNS), torch.ones(COLUMNS), w, b),
        4,
    ),
    "group": (lambda x, w, b: F.group_norm(x, 2, w, b), 7),
    "instance": (lambda x, _w, _b: F.instance_norm(x[None]), 5),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_normalisation_is_by_what_it_does_and_its_gradient_twice_that(name: str) -> None:
    """A norm costs 5 FLOPs per element: sum, subtract, square, sum, scale.

    With known statistics only two of them remain, the subtraction and the scale. A weight and a
    bias cost one FLOP each. The gradient costs twice as much as forward.
    """
    function, each = NORMS[name]
    args = (of(ROWS, COLUMNS), of(COLUMNS), of(COLUMNS))
    assert each * n == forward(function, *args)
    assert 2 * each * n == backward(function, *args)


def test_a_root_mean_square_without_a_kernel_of_its_own_is_what_its_operators_are() -> None:
    """On the CPU `rms_norm` costs what its operators cost.

    Square, mean and scale cost one FLOP per element; addition and root cost one per row. On a GPU
    it is one kernel with 3 FLOPs per element.
    """
    assert 3 * n + 2 * ROWS == forward(lambda x: F.rms_norm(x, (COLUMNS,)), x())


def test_a_softmax_is_five_operations_and_its_gradient_four() -> None:
    """Softmax costs 5 FLOPs per element: maximum, subtract, exponential, sum, divide.

    Its gradient costs 4.
    """
    for function in (F.softmax, F.log_softmax):
        assert 5 * n == forward(function, x(), -1)
        assert 4 * n == backward(function, x(), -1)


def test_a_cross_entropy_adds_one_operation_a_target() -> None:
    """Cross entropy costs as much as softmax, plus one FLOP per target.

    Only the target class of each row needs more work.
    """
    target = torch.tensor([0, 2, 5, 1])
    assert 5 * n + ROWS == forward(F.cross_entropy, x(), target)
    assert 4 * n + ROWS == backward(F.cross_entropy, x(), target)


LOSSES: dict[str, tuple[Callable[..., Tensor], int, int]] = {
    "mean square": (F.mse_loss, 3, 2),
    "smooth": (F.smooth_l1_loss, 4, 2),
    "Huber": (F.huber_loss, 4, 2),
    "binary": (F.binary_cross_entropy, 5, 3),
    "soft margin": (F.soft_margin_loss, 4, 3),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_so_many_operations_an_element(name: str) -> None:
    """A loss costs a fixed number of FLOPs per element, for example difference, square and sum."""
    function, in_forward, in_backward = LOSSES[name]
    target = torch.rand(ROWS, COLUMNS)
    assert in_forward * n == forward(function, x(), target)
    assert in_backward * n == backward(function, x(), target)


def image(*size: int) -> Tensor:
    """Return two images of three channels."""
    return of(2, 3, *size)


POOLS: dict[str, tuple[Callable[[], Tensor], int]] = {
    "max": (lambda: F.max_pool2d(image(8, 8), 2), 2 * 3 * 4 * 4 * 2 * 2),
    "max, overlapping": (lambda: F.max_pool2d(image(8, 8), 3, stride=1), 2 * 3 * 6 * 6 * 3 * 3),
    "max of a line": (lambda: F.max_pool1d(image(8), 2), 2 * 3 * 4 * 2),
    "max of a block": (lambda: F.max_pool3d(image(4, 4, 4), 2), 2 * 3 * 2**3 * 2**3),
    "mean": (lambda: F.avg_pool2d(image(8, 8), (2, 4)), 2 * 3 * 4 * 2 * 2 * 4),
    "mean of a block": (lambda: F.avg_pool3d(image(4, 4, 4), 2), 2 * 3 * 2**3 * 2**3),
    "to a size": (lambda: F.adaptive_avg_pool2d(image(8, 8), 2), 2 * 3 * 8 * 8),
    "to one": (lambda: F.adaptive_avg_pool2d(image(8, 8), 1), 2 * 3 * 8 * 8),
    "max to a size": (lambda: F.adaptive_max_pool2d(image(8, 8), 2), 2 * 3 * 8 * 8),
    "nearest": (lambda: F.interpolate(image(4, 4), scale_factor=2), 0),
    "linear": (lambda: F.interpolate(image(4), scale_factor=2, mode="linear"), 2 * 3 * 8 * 2 * 2),
    "bilinear": (
        lambda: F.interpolate(image(4, 4), scale_factor=2, mode="bilinear"),
        2 * 3 * 8 * 8 * 4 * 2,
    ),
    "trilinear": (
        lambda: F.interpolate(image(4, 4, 4), scale_factor=2, mode="trilinear"),
        2 * 3 * 8**3 * 8 * 2,
    ),
    "bicubic": (
        lambda: F.interpolate(image(4, 4), scale_factor=2, mode="bicubic"),
        2 * 3 * 8 * 8 * 16 * 2,
    ),
    "by a grid": (
        lambda: F.grid_sample(image(4, 4), torch.rand(2, 8, 8, 2), align_corners=False),
        2 * 3 * 8 * 8 * 4 * 2,
    ),
    "weight norm": (lambda: torch._weight_norm(of(ROWS, COLUMNS), of(ROWS, 1), 0), 3 * n),
}


@pytest.mark.parametrize("name", POOLS)
def test_windows_and_neighbours_are_counted_one_by_one(name: str) -> None:
    """Pooling costs one FLOP per element of a window.

    Interpolation costs two FLOPs per weighted neighbor.
    """
    function, expected = POOLS[name]
    assert expected == forward(function)


def test_dropout_draws_scales_and_masks() -> None:
    """Dropout costs 2 FLOPs per element in forward and one in backward.

    The mask is scaled and multiplied with the input, which a GPU kernel does at once. Drawing
    random numbers costs none.
    """
    assert 2 * n == forward(F.dropout, x())
    assert n == backward(F.dropout, x())
    assert 2 * n == forward(lambda x: torch.native_dropout(x, 0.5, train=True), x())


@pytest.mark.parametrize(
    ("unitriangular", "each"),
    [(False, 5 * 5), (True, 5 * 5 - 5)],
    ids=["divided", "ones on the diagonal"],
)
def test_solving_with_a_triangle_is_no_product(unitriangular: bool, each: int) -> None:
    """A triangular solve of 5 unknowns has 10 multiplications, 10 subtractions and 5 divisions.

    There are no divisions if the diagonal is ones. Each of 2 batches has 3 right-hand sides.
    """
    solve = partial(torch.linalg.solve_triangular, upper=False, unitriangular=unitriangular)
    a = torch.eye(5) + torch.rand(2, 5, 5).tril()
    assert (
        2 * 3 * each == forward(solve, a, fixed(2, 5, 3)) == forward(solve, a[:1], fixed(2, 5, 3))
    )
    assert 2 * 3 * each == forward(partial(solve, left=False), a, fixed(2, 3, 5))


def test_solving_with_a_triangle_goes_back_through_another_and_one_product() -> None:
    """The gradient of a triangular solve is another triangular solve and a matmul.

    The solve gives the gradient of the right-hand sides. Its product with the solution gives the
    gradient of the matrix, with 5 * 3 * 5 MACs.
    """
    profile = count(
        partial(torch.linalg.solve_triangular, upper=False),
        (torch.eye(5) + of(5, 5).tril()),
        of(5, 3),
        backward=True,
    )
    assert {"backward": 5 * 3 * 5} == macs(profile)
    assert () == profile.unsupported
    assert [("backward", 1, 75), ("forward", 1, 75)] == sorted(
        (cell.phase, cell.calls, cell.flops)
        for cell in profile.op_counts
        if cell.operator == "linalg_solve_triangular"
    )


Build = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Build, dict[str, Any], int]] = {
    "Adam": (torch.optim.Adam, {}, 10),
    "Adam that decays": (torch.optim.Adam, {"weight_decay": 0.1}, 11),
    "Adam of maxima": (torch.optim.Adam, {"amsgrad": True}, 11),
    "AdamW": (torch.optim.AdamW, {}, 11),
    "AdamW without a decay": (torch.optim.AdamW, {"weight_decay": 0}, 10),
    "descent": (torch.optim.SGD, {}, 1),
    "descent that decays": (torch.optim.SGD, {"weight_decay": 0.1}, 2),
    "descent with momentum": (torch.optim.SGD, {"momentum": 0.9}, 3),
    "Nesterov's": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, 4),
    "Adagrad": (torch.optim.Adagrad, {}, 6),
}


def step(build: Build, options: dict[str, Any]) -> int:
    """Return the FLOPs of an optimizer's second step, without those of its step counters."""
    model = torch.nn.Linear(100, 50)
    optimizer = build(model.parameters(), lr=0.1, **options)
    model(fixed(3, 100)).sum().backward()
    optimizer.step()
    with lflops.counting(model) as counted:
        optimizer.step()
    assert () == counted.profile.unsupported
    steps = sum("step" in state for state in optimizer.state.values())
    return counted.profile.modules[""].optimizer.flops - steps


@pytest.mark.parametrize(
    "how",
    [{"foreach": False}, {"foreach": True}, {"fused": True}],
    ids=["in a loop", "in lists", "fused"],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_the_same_work_however_it_is_run(name: str, how: dict[str, bool]) -> None:
    """An optimizer step costs the same in a loop, on lists and fused.

    The only exception is Adagrad on lists, which multiplies by the learning rate before it divides.
    """
    build, options, each = OPTIMIZERS[name]
    more = name == "Adagrad" and how.get("foreach", False)
    assert (each + more) * (100 * 50 + 50) == step(build, options | how)


def test_work_on_parameters_after_the_update_is_no_forward_pass() -> None:
    """Statistics of the weights are often logged after the optimizer's step.

    A mean over 100 × 50 weights adds them up. Before the model is called, and after the update, it
    counts as `other`. The loss after a second call counts as forward again.
    """
    model = torch.nn.Linear(100, 50, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward_calls(*, logs: bool, calls_again: bool) -> int:
        with lflops.counting(model) as counted:
            model(fixed(3, 100)).sum().backward()
            optimizer.step()
            if logs:
                model.weight.mean()
            if calls_again:
                model(fixed(3, 100)).sum()
        return counted.profile.modules[""].forward.calls

    once = forward_calls(logs=False, calls_again=False)
    assert once == forward_calls(logs=True, calls_again=False)
    twice = forward_calls(logs=False, calls_again=True)
    assert once < twice
    assert twice == forward_calls(logs=True, calls_again=True)


def test_the_optimizer_with_the_most_parameters_is_listed_first() -> None:
    """Advice is about the first optimizer that can be improved, so it must be the largest.

    Together, the two optimizers update the parameters of both.
    """
    model = torch.nn.Linear(100, 50)
    weight = torch.nn.Parameter(torch.ones(5))
    small = torch.optim.SGD([weight], lr=0.1)
    large = torch.optim.Adam(model.parameters())
    with lflops.counting(model) as counted:
        (model(fixed(3, 100)).sum() * weight.sum()).backward()
        small.step()
        large.step()
    run = counted.profile.run
    assert ["Adam", "SGD"] == [each.class_name for each in run.optimizers]
    assert 100 * 50 + 50 + 5 == run.optimized_parameters


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "linalg__powsum"), reason="older than what the convention speaks of"
)
def test_the_convention_speaks_of_operators_that_there_are() -> None:
    """All operators in the convention exist in torch, so none is misspelled.

    The operators of FSDP are only created when FSDP is imported.
    """
    copies = (
        "all_gather_copy_in",
        "chunk_cat",
        "chunk_cat_mixed_dtype",
        "copy_",
        "split_with_sizes_copy",
    )
    of_fsdp = {f"fsdp::{name}" for name in (*copies, "record_grad_output_stream")}
    assert of_fsdp == {
        name
        for name in (*FREE, *MOVES, *PER_INPUT, *PER_OUTPUT)
        if not hasattr(torch.ops.aten, name)
    }


def test_no_operator_is_in_two_classes() -> None:
    """No operator is in two classes, so its cost does not depend on the order of the classes."""
    classes = [FREE, MOVES, PER_INPUT.keys(), PER_OUTPUT.keys()]
    assert sum(map(len, classes)) == len(set().union(*classes))
