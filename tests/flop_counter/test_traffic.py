"""Test bytes moved: inputs are read once and results are written once.

Operators that use only a part of an input read only this part.
"""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lflops
from lflops.flop_counter.accumulator import CountOptions
from lflops.flop_counter.count import Counting
from lflops.flop_counter.operators import known_operators
from lflops.profile.records import Phase
from tests.support.count_function import count, fixed, of, the_cell

ROWS, COLUMNS = 4, 6
n = ROWS * COLUMNS
FLOAT, INDEX = 4, 8
"""Bytes of a number and of an index."""


def x() -> Tensor:
    """Return a matrix of ROWS by COLUMNS numbers."""
    return fixed(ROWS, COLUMNS)


def moved(function: Callable[..., Any], *args: Any) -> int:
    """Return the bytes of all operators in a call."""
    return count(function, *args).modules[""].forward.bytes_moved


def moved_by(name: str, function: Callable[..., Any], *args: Any, phase: Phase = "forward") -> int:
    """Return the bytes of one operator in a call."""
    return the_cell(count(function, *args, backward=phase == "backward"), name, phase).bytes_moved


PLAIN: dict[str, tuple[Callable[[], int], int]] = {
    "one in, one out": (lambda: moved(torch.exp, x()), 2 * n * FLOAT),
    "two in, one out": (lambda: moved(torch.add, x(), x()), 3 * n * FLOAT),
    "one twice, one out": (lambda: moved(lambda a: a * a, x()), 2 * n * FLOAT),
    "a number in": (lambda: moved(lambda a: a * 2, x()), 2 * n * FLOAT),
    "a reduction": (lambda: moved(torch.sum, x()), n * FLOAT + FLOAT),
    "two out": (lambda: moved(lambda a: a.max(1), x()), n * FLOAT + ROWS * (FLOAT + INDEX)),
    "a comparison": (lambda: moved(torch.gt, x(), x()), 2 * n * FLOAT + n),
    "half in, whole out": (lambda: moved(lambda a: a.float(), x().half()), n * 2 + n * FLOAT),
    "a list in": (lambda: moved(torch.cat, [x(), x()]), 4 * n * FLOAT),
    "a product": (
        lambda: moved(torch.mm, fixed(3, 5), fixed(5, 7)),
        (3 * 5 + 5 * 7 + 3 * 7) * FLOAT,
    ),
    "a convolution": (
        lambda: moved(F.conv1d, fixed(2, 3, 9), fixed(4, 3, 2), fixed(4)),
        (54 + 24 + 4 + 2 * 4 * 8) * FLOAT,
    ),
    "a result that is given": (
        lambda: moved(lambda a, b, out: torch.add(a, b, out=out), x(), x(), x()),
        3 * n * FLOAT,
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_everything_that_goes_in_is_read_and_everything_that_comes_out_written(name: str) -> None:
    """Each input is read once, and each result is written once."""
    measure, expected = PLAIN[name]
    assert expected == measure()


FREE: dict[str, Callable[[Tensor], Any]] = {
    "views": lambda a: (
        a.t(),
        a[0],
        a.view(-1),
        a.expand(2, -1, -1),
        a.detach(),
        a.unsqueeze(0),
        a.split(2),
        a.unbind(),
        a.real,
    ),
    "views in place": lambda a: a.clone().detach_().t_().squeeze_(0).unsqueeze_(0).transpose_(0, 1),
    "reshaping": lambda a: (a.reshape(-1), a.flatten(), a.contiguous()),
    "room for results": lambda a: (
        torch.empty(9),
        torch.empty_like(a),
        a.new_empty(3),
        torch.empty_strided((2, 2), (2, 1)),
    ),
    "questions": lambda a: (a.is_contiguous(), a.sum().item()),
}


@pytest.mark.parametrize("name", FREE)
def test_views_and_allocations_move_nothing(name: str) -> None:
    """Views and allocations are not even calls of an operator.

    Only the operators that make their arguments are counted.
    """
    cells = {cell.operator for cell in count(FREE[name], x()).op_counts}
    assert cells <= {"clone", "sum"}


def test_what_is_only_repeated_is_read_once() -> None:
    """With a stride of 0 an expanded dimension is one element in memory, so it is read once."""
    assert (COLUMNS + n) * FLOAT + n * FLOAT == moved(
        lambda a, b: a + b, fixed(1, COLUMNS).expand(ROWS, COLUMNS), x()
    )
    assert FLOAT + FLOAT == moved(torch.sum, torch.ones(()).expand(100))


def test_of_a_strided_view_its_own_elements_are_read() -> None:
    """Only the elements of a strided view are read, not the elements between them."""
    assert n // 2 * FLOAT + FLOAT == moved(lambda a: a[:, ::2].sum(), x())


GATHERED: dict[str, tuple[Callable[[], int], int]] = {
    "rows": (
        lambda: moved(lambda a, i: a[i], fixed(1000, 8), torch.tensor([1, 5])),
        2 * INDEX + 2 * 2 * 8 * FLOAT,
    ),
    "rows by name": (
        lambda: moved(lambda a, i: a.index_select(0, i), fixed(1000, 8), torch.tensor([1, 5])),
        2 * INDEX + 2 * 2 * 8 * FLOAT,
    ),
    "vectors": (
        lambda: moved(F.embedding, torch.tensor([[1, 5]]), fixed(1000, 8)),
        2 * INDEX + 2 * 2 * 8 * FLOAT,
    ),
    "elements": (
        lambda: moved(lambda a, i: a.gather(1, i), x(), torch.zeros(ROWS, 2).long()),
        2 * ROWS * (INDEX + 2 * FLOAT),
    ),
    "places": (lambda: moved(torch.take, x(), torch.tensor([1, 5])), 2 * (INDEX + 2 * FLOAT)),
    "what a mask shows": (
        lambda: moved(lambda a, m: a[m], x(), torch.arange(n).view(ROWS, COLUMNS) < 3),
        n + 2 * 3 * FLOAT,
    ),
    "targets": (
        # It reads the targets and the elements they select; it writes the mean and the number of
        # targets.
        lambda: moved(F.nll_loss, x(), torch.tensor([0, 1, 2, 3])),
        ROWS * FLOAT + ROWS * INDEX + 2 * FLOAT,
    ),
}


@pytest.mark.parametrize("name", GATHERED)
def test_a_gather_reads_what_it_takes_and_not_the_table(name: str) -> None:
    """A gather reads the indices and the selected elements, and writes the result.

    It does not read the whole table.
    """
    measure, expected = GATHERED[name]
    assert expected == measure()


def test_a_bag_reads_the_rows_that_it_adds_up() -> None:
    """Three bags of five vectors read 15 rows and write 3.

    The difference between two widths removes the indices and the data that backward needs.
    """

    def moved_with(width: int) -> int:
        return moved_by(
            "_embedding_bag_forward_only",
            lambda i, w: F.embedding_bag(i, w, mode="sum"),
            torch.zeros(3, 5).long(),
            fixed(100, width),
        )

    assert (15 + 3) * 8 * FLOAT == moved_with(16) - moved_with(8)


places = torch.tensor([1, 2])
columns = torch.zeros(ROWS, 2).long()
SCATTERED: dict[str, tuple[str, Callable[[Tensor], Any], int]] = {
    "rows": (
        "index_put_",
        lambda a: a.index_put_((places,), fixed(2, COLUMNS)),
        2 * INDEX + 2 * 2 * COLUMNS * FLOAT,
    ),
    "one number": (
        "index_put_",
        lambda a: a.index_put_((places,), torch.zeros(())),
        2 * INDEX + FLOAT + 2 * COLUMNS * FLOAT,
    ),
    "columns": (
        "index_put_",
        lambda a: operator.setitem(a, (slice(None), places), torch.zeros(())),
        2 * INDEX + FLOAT + 2 * ROWS * FLOAT,
    ),
    "elements": (
        "index_put_",
        lambda a: a.index_put_((places, places), fixed(2)),
        2 * INDEX + 2 * 2 * FLOAT,
    ),
    "under a mask": (
        "index_put_",
        lambda a: a.index_put_((a > 9,), torch.zeros(())),
        n + 2 * FLOAT,
    ),
    "copies": (
        "index_copy_",
        lambda a: a.index_copy_(0, places, fixed(2, COLUMNS)),
        2 * INDEX + 2 * 2 * COLUMNS * FLOAT,
    ),
    "a filling": (
        "index_fill_",
        lambda a: a.index_fill_(0, places, 1.0),
        2 * INDEX + 2 * COLUMNS * FLOAT,
    ),
    "numbers": ("scatter_", lambda a: a.scatter_(1, columns, 1.0), 2 * ROWS * (INDEX + FLOAT)),
    "a source": (
        "scatter_",
        lambda a: a.scatter_(1, columns, fixed(ROWS, COLUMNS)),
        2 * ROWS * (INDEX + FLOAT) + n * FLOAT,
    ),
    "sums": (
        "scatter_add_",
        lambda a: a.scatter_add_(1, columns, fixed(ROWS, 2)),
        2 * ROWS * (INDEX + 3 * FLOAT),
    ),
    "sums of rows": (
        "index_add_",
        lambda a: a.index_add_(0, places, fixed(2, COLUMNS)),
        2 * INDEX + 3 * 2 * COLUMNS * FLOAT,
    ),
    "rows added": (
        "index_put_",
        lambda a: a.index_put_((places,), fixed(2, COLUMNS), accumulate=True),
        2 * INDEX + 3 * 2 * COLUMNS * FLOAT,
    ),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_a_scatter_in_place_touches_what_it_sets(name: str) -> None:
    """A scatter reads the indices and the source, and writes the selected elements.

    If it adds to these elements, it reads them too.
    """
    packet, function, expected = SCATTERED[name]
    assert expected == moved_by(packet, function, x())


IN_PLACE: dict[str, tuple[str, Callable[[Tensor], Any], int]] = {
    "a filling": ("fill_", lambda a: a.fill_(1.0), n * FLOAT),
    "zeros": ("zero_", lambda a: a.zero_(), n * FLOAT),
    "random numbers": ("normal_", lambda a: a.normal_(), n * FLOAT),
    "a copy": ("copy_", lambda a: a.copy_(x()), 2 * n * FLOAT),
    "a copy of one row": ("copy_", lambda a: a.copy_(fixed(COLUMNS)), COLUMNS * FLOAT + n * FLOAT),
    "a copy of half the bytes": ("copy_", lambda a: a.copy_(x().half()), n * 2 + n * FLOAT),
    "an addition": ("add_", lambda a: a.add_(1), 2 * n * FLOAT),
    "an addition of another": ("add_", lambda a: a.add_(x()), 3 * n * FLOAT),
    "an addition of itself": ("add_", lambda a: a.add_(a), 2 * n * FLOAT),
    "a product of lists": (
        "_foreach_mul_",
        lambda a: torch._foreach_mul_([a, x()], 2.0),
        4 * n * FLOAT,
    ),
    "an addition of lists": (
        "_foreach_add_",
        lambda a: torch._foreach_add_([a, x()], [x(), x()]),
        6 * n * FLOAT,
    ),
    "copies of lists": (
        "_foreach_copy_",
        lambda a: torch._foreach_copy_([a, x()], [x(), x()]),
        4 * n * FLOAT,
    ),
    "zeros of lists": ("_foreach_zero_", lambda a: torch._foreach_zero_([a, x()]), 2 * n * FLOAT),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_what_is_changed_is_read_and_what_is_overwritten_is_not(name: str) -> None:
    """An in-place operator reads its tensor only if the result depends on the old values.

    For a list of tensors all tensors count, although the operator returns nothing.
    """
    packet, function, expected = IN_PLACE[name]
    assert expected == moved_by(packet, function, x())


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda _: torch.zeros(ROWS, COLUMNS),
    "zeros like another": torch.zeros_like,
    "ones like another": torch.ones_like,
    "random numbers like another's": torch.randn_like,
    "a number, as often as another has elements": lambda a: torch.full_like(a, 2.0),
    "new zeros": lambda a: a.new_zeros(ROWS, COLUMNS),
    "new ones": lambda a: a.new_ones(ROWS, COLUMNS),
    "a new filling": lambda a: a.new_full((ROWS, COLUMNS), 1.0),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_is_written_and_the_likeness_not_read(name: str) -> None:
    """A factory such as `zeros_like` writes its result and reads only the shape of its argument."""
    assert n * FLOAT == moved(MADE[name], x())


UNREAD: dict[str, tuple[str, Callable[..., Tensor], int]] = {
    # The gradient of the sum is one expanded number. Max pooling also reads the indices of the
    # largest elements; mean pooling and padding read nothing else.
    "max pooling": (
        "max_pool2d_with_indices_backward",
        lambda a: F.max_pool2d(a, 2),
        FLOAT + 16 * INDEX + 64 * FLOAT,
    ),
    "mean pooling": ("avg_pool2d_backward", lambda a: F.avg_pool2d(a, 2), FLOAT + 64 * FLOAT),
    "pooling to a size": (
        "_adaptive_avg_pool2d_backward",
        lambda a: F.adaptive_avg_pool2d(a, 2),
        FLOAT + 64 * FLOAT,
    ),
    "padding": (
        "reflection_pad2d_backward",
        lambda a: F.pad(a, (1, 1, 1, 1), mode="reflect"),
        FLOAT + 64 * FLOAT,
    ),
    # The loss also reads the targets and their number, the total of the class weights.
    "a likelihood": (
        "nll_loss2d_backward",
        lambda a: F.nll_loss(a, torch.zeros(1, 8, 8).long()),
        FLOAT + 64 * INDEX + FLOAT + 64 * FLOAT,
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_gradient_that_asks_only_for_the_inputs_shape_does_not_read_it(name: str) -> None:
    """A backward operator that needs only the shape of the 8 x 8 input does not read the input."""
    packet, function, expected = UNREAD[name]
    assert expected == moved_by(packet, function, of(1, 1, 8, 8), phase="backward")


def test_a_fused_update_reads_the_gradient_and_does_not_write_it() -> None:
    """Fused Adam reads parameter, gradient and two averages, and writes all but the gradient.

    It also reads and writes the number of the step.
    """
    model = torch.nn.Linear(100, 50, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    model(fixed(3, 100)).sum().backward()
    with lflops.counting(model) as counted:
        optimizer.step()
    update = the_cell(counted.profile, "_fused_adam_", "optimizer")
    assert (4 + 3) * 100 * 50 * FLOAT + FLOAT == update.bytes_moved


# torch 2.11 warns although the test passes `check_invariants`.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_tensor_is_its_places_and_its_values() -> None:
    """A sparse tensor moves its indices and values only.

    Each of 3 elements of a 100 x 100 matrix has two indices and a value, read and written.
    """
    filled = torch.tensor([[0, 5, 9], [1, 5, 7]])
    sparse = torch.sparse_coo_tensor(
        filled, torch.ones(3), (100, 100), check_invariants=True, is_coalesced=True
    )
    profile = count(lambda a: a * 2, sparse)
    assert 2 * 3 * (2 * INDEX + FLOAT) == sum(
        cell.bytes_moved for cell in profile.op_counts if cell.operator == "mul"
    )


def test_a_count_without_bytes_leaves_none_to_the_next() -> None:
    """Cached costs of calls are correct for later counts, with and without bytes."""
    model = nn.ReLU()
    counted = []
    for traffic in (True, False, True):
        with Counting({"": model}, options=CountOptions(traffic=traffic, memory=False)) as counting:
            model(x())
        counted.append(counting.profile.total(metric="bytes_moved"))
    assert [2 * n * FLOAT, 0, 2 * n * FLOAT] == counted


def test_ever_new_shapes_do_not_fill_the_memory() -> None:
    """With ever new shapes, the cache of costs stays limited, and each cost is right."""
    model, lengths = nn.ReLU(), range(1, 1101)
    batches = [torch.zeros(length) for length in lengths]
    with Counting({"": model}) as counting:
        for batch in batches:
            model(batch)
    assert 2 * FLOAT * sum(lengths) == counting.profile.by_module(metric="bytes_moved")[""]
    kept = [len(known.costs) for _, known in known_operators().values() if known.name == "relu"]
    assert all(0 < each <= 1000 for each in kept)
