"""Test cases, with costs calculated by hand, for matrix factorizations and losses.

The operations of a factorization often include a third of a product of sizes. The sizes are chosen
so that such a third is a whole number.
"""

from typing import Any

from lflops.formulas.table import Cost, Values
from tests.support.formula_cases import Case, case

# Number of matrices in a batch:
B = 2
# Rows and columns of a matrix:
M = 9
N = 6
# Right-hand sides:
K = 4
square = (B, N, N)
tall = (B, M, N)
wide = (B, N, M)
sides = (B, N, K)
of_all = (B, N)


def flops(operations: int) -> Cost:
    """Return the cost of a batch, for a number of operations per matrix."""
    return Cost(other_flops=B * operations)


# Operations per matrix. N cubed is 216, and a third of it is 72. Below, 36 is N squared and 81 is
# M squared.
lu_of_square = 144
lu_of_tall = 9 * 36 - 72
# A QR factorization first computes Householder reflections, and from them Q: either all of its
# columns, or as many as the matrix has.
reflections = 2 * 9 * 36 - 144
all_of_q = 4 * 81 * 6 - 2 * 18 * 36 + 4 * 72
thin_q = 4 * 9 * 36 - 2 * 15 * 36 + 4 * 72

factorisations: list[Case] = [
    # Five unknowns for each of three right-hand sides. Both elements of the batch have the same
    # matrix.
    case(
        "linalg_solve_triangular",
        (1, 5, 5),
        (2, 5, 3),
        out=(2, 5, 3),
        expected=Cost(other_flops=2 * 3 * 25),
    ),
    case(
        "linalg_solve_triangular",
        (5, 5),
        (3, 5),
        out=(3, 5),
        unitriangular=True,
        expected=Cost(other_flops=3 * 20),
    ),
    case(
        "triangular_solve",
        (2, 5, 3),
        (2, 5, 5),
        out=((2, 5, 3), (2, 5, 5)),
        expected=Cost(other_flops=2 * 3 * 25),
    ),
    case("linalg_cholesky_ex cholesky linalg_ldl_factor_ex", square, expected=flops(72)),
    case(
        "linalg_cholesky_ex cholesky linalg_ldl_factor_ex",
        (5, 5),
        expected=Cost(other_flops=125 // 3),
    ),
    case(
        "linalg_lu linalg_lu_factor_ex _linalg_det _linalg_slogdet",
        square,
        expected=flops(lu_of_square),
    ),
    case("linalg_lu linalg_lu_factor_ex", tall, expected=flops(lu_of_tall)),
    case("linalg_lu linalg_lu_factor_ex", wide, expected=flops(lu_of_tall)),
    case("linalg_inv_ex", square, expected=flops(2 * 216)),
    case("cholesky_inverse", square, expected=flops(144)),
    case(
        "_linalg_solve_ex", square, sides, out=(sides,), expected=flops(lu_of_square + 2 * 36 * K)
    ),
    case("_linalg_solve_ex", square, of_all, out=(of_all,), expected=flops(lu_of_square + 2 * 36)),
    case(
        "_cholesky_solve_helper cholesky_solve",
        sides,
        square,
        out=sides,
        expected=flops(2 * 36 * K),
    ),
    case(
        "linalg_lu_solve linalg_ldl_solve",
        square,
        of_all,
        sides,
        out=sides,
        expected=flops(2 * 36 * K),
    ),
    case("linalg_qr", tall, mode="r", out=((0,), square), expected=flops(reflections)),
    case("linalg_qr", tall, out=(tall, square), expected=flops(reflections + thin_q)),
    case(
        "linalg_qr",
        tall,
        mode="complete",
        out=((B, M, M), tall),
        expected=flops(reflections + all_of_q),
    ),
    case(
        "linalg_qr",
        wide,
        out=(square, wide),
        expected=flops(reflections + 4 * 216 - 2 * 12 * 36 + 4 * 72),
    ),
    case("geqrf", tall, expected=flops(reflections)),
    case("linalg_householder_product", tall, of_all, expected=flops(thin_q)),
    case("ormqr", tall, of_all, (B, M, K), expected=flops(4 * M * K * N - 2 * K * 36)),
    case("ormqr", tall, of_all, (B, K, M), left=False, expected=flops(4 * M * K * N - 2 * K * 36)),
    case("linalg_lstsq", tall, (B, M, K), expected=flops(reflections + (4 * M * N - 36) * K)),
    case("linalg_lstsq", tall, (B, M), expected=flops(reflections + 4 * M * N - 36)),
    case("_linalg_eigh", square, expected=flops(9 * 216)),
    case("_linalg_eigh", square, compute_v=False, expected=flops(4 * 72)),
    case("linalg_eig", square, expected=flops(25 * 216)),
    case("_linalg_eigvals", square, expected=flops(10 * 216)),
    case("_linalg_svd", tall, expected=flops(6 * 9 * 36 + 20 * 216)),
    case("_linalg_svd", wide, full_matrices=True, expected=flops(4 * 81 * 6 + 22 * 216)),
    case("_linalg_svd", tall, compute_uv=False, expected=flops(2 * 9 * 36 + 2 * 216)),
]

# A CTC loss of two sequences of 5 and 7 steps, with 2 and 3 labels. n labels have 2 n + 1 states,
# because there is a blank before, between and after the labels: here 5 and 7 states per step.
log_probs = (7, 2, 10)
states = 5 * 5 + 7 * 7
# Operations per state. In forward: a logsumexp of three states (4 operations each) and an addition.
forward = 13
# In backward: the same from the last step to the first, and in addition a logsumexp of two values
# and an addition.
backward = 13 + 9
lengths: list[dict[str, Any]] = [
    {"input_lengths": [5, 7], "target_lengths": [2, 3]},
    {"input_lengths": Values((5, 7)), "target_lengths": Values((2, 3))},
]
targets = Values((1, 2, -1, 0, 3, -1, -1, -1))
"""Labels of two samples with 4 classes each.

The labels of a sample end at its first -1: the first sample has the labels 1 and 2, the second has
the label 3.
"""
# Pairs of a label and a class that is no label: 2 * 2 in the first sample, 1 * 3 in the second.
pairs = 2 * 2 + 1 * 3
# The first sample has the label 1 twice, and the second sample has none.
of_one = Values((1, 1, -1, 0, -1, 0, 0, 0))

losses: list[Case] = [
    *(
        case("_ctc_loss", log_probs, (5,), **each, expected=Cost(other_flops=states * forward))
        for each in lengths
    ),
    *(
        case(
            "_ctc_loss_backward",
            (2,),
            log_probs,
            (5,),
            **each,
            expected=Cost(other_flops=states * backward + 4 * 7 * 2 * 10),
        )
        for each in lengths
    ),
    case(
        "_cudnn_ctc_loss miopen_ctc_loss",
        log_probs,
        (5,),
        **lengths[0],
        expected=Cost(other_flops=states * (forward + backward) + 4 * 7 * 2 * 10),
    ),
    case(
        "multilabel_margin_loss_forward",
        (2, 4),
        target=targets,
        expected=Cost(other_flops=3 * pairs),
    ),
    case(
        "multilabel_margin_loss_forward",
        (2, 4),
        target=of_one,
        expected=Cost(other_flops=3 * 2 * 3),
    ),
    case(
        "multilabel_margin_loss_forward",
        (2, 4),
        target=(2, 4),
        expected=Cost(other_flops=3 * 2 * 2 * 2, is_upper_bound=True),
    ),
    case(
        "multilabel_margin_loss_backward",
        (),
        (2, 4),
        target=targets,
        expected=Cost(other_flops=4 * pairs + 8),
    ),
    case(
        "multilabel_margin_loss_backward",
        (),
        (2, 4),
        target=(2, 4),
        expected=Cost(other_flops=4 * 8 + 8, is_upper_bound=True),
    ),
]

CASES = [*factorisations, *losses]
