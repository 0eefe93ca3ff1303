"""Test cases for formulas: the arguments of an operator, and its cost calculated by hand.

The cases of the other operators are in the other `*_cases.py` files of this folder.
"""

from itertools import product
from typing import Any, NamedTuple

from lflops.formulas.table import Cost, SparseShape, Values


class Case(NamedTuple):
    """A call of a formula.

    Attributes:
        operators: Names of the operators that have this formula, separated by spaces. A name
            without a namespace belongs to ATen.
        args: The positional arguments: shapes instead of tensors, other arguments as they are.
        kwargs: The keyword arguments.
        expected: The cost of one call.
    """

    operators: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: Cost


def case(operators: str, *args: Any, expected: int | Cost, **kwargs: Any) -> Case:
    """Return a case. If `expected` is a number, it is the number of MACs."""
    return Case(operators, args, kwargs, Cost.of(expected))


# Sizes of the matmuls. They are chosen so that no two products of these sizes are equal. So a
# formula that multiplies the wrong sizes returns a wrong number.
# Rows:
N = 3
# Inner dimension:
K = 5
# Columns:
M = 7
# Matrices in a batch, or experts:
G = 4

by_expert = "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2"

matmul = [
    case("mm _int_mm", (N, K), (K, M), expected=N * K * M),
    case("_foreach_mm", [(N, K), (K, M)], [(K, M), (M, G)], expected=N * K * M + K * M * G),
    case(
        "sparse_sampled_addmm", (N, M), (N, K), (K, M), expected=Cost(N * M * K, other_flops=N * M)
    ),
    case("sparse_sampled_addmm", (N, M), (N, K), (K, M), beta=0, expected=Cost(N * M * K)),
    case("_scaled_mm _scaled_mm_v2", (N, K), (K, M), expected=Cost(N * K * M, other_flops=N * M)),
    case(
        "addmm addmm_ _sparse_addmm",
        (M,),
        (N, K),
        (K, M),
        expected=Cost(N * K * M, other_flops=N * M),
    ),
    case("addmm addmm_ _sparse_addmm", (M,), (N, K), (K, M), beta=0, expected=Cost(N * K * M)),
    case(
        "_addmm_activation", (M,), (N, K), (K, M), expected=Cost(N * K * M, other_flops=2 * N * M)
    ),
    case(
        "_addmm_activation",
        (M,),
        (N, K),
        (K, M),
        beta=0,
        expected=Cost(N * K * M, other_flops=N * M),
    ),
    case("bmm", (G, N, K), (G, K, M), expected=G * N * K * M),
    case(
        "baddbmm baddbmm_",
        (M,),
        (G, N, K),
        (G, K, M),
        expected=Cost(G * N * K * M, other_flops=G * N * M),
    ),
    case("baddbmm baddbmm_", (M,), (G, N, K), (G, K, M), beta=0, expected=Cost(G * N * K * M)),
    case(
        "addbmm addbmm_",
        (N, M),
        (G, N, K),
        (G, K, M),
        expected=Cost(G * N * K * M, other_flops=N * M),
    ),
    case("addbmm addbmm_", (N, M), (G, N, K), (G, K, M), beta=0, expected=Cost(G * N * K * M)),
    case("hspmm", SparseShape((N, K), 7), (K, M), expected=7 * M),
    case("_sparse_mm_reduce_impl", SparseShape((N, K), 7), (K, M), "sum", expected=7 * M),
    case(
        "_sparse_mm_reduce_impl",
        SparseShape((N, K), 7),
        (K, M),
        "mean",
        expected=Cost(7 * M, other_flops=N * M),
    ),
    # Each stored element is multiplied and compared in each column. These are two operations, but
    # no multiply-accumulate.
    case(
        "_sparse_mm_reduce_impl",
        SparseShape((N, K), 7),
        (K, M),
        "amax",
        expected=Cost(other_flops=2 * 7 * M),
    ),
    case(
        "_sparse_mm_reduce_impl_backward",
        SparseShape((N, K), 7),
        (N, M),
        (K, M),
        "sum",
        output_mask=(True, False),
        expected=Cost(7 * M),
    ),
    case(
        "_sparse_mm_reduce_impl_backward",
        SparseShape((N, K), 7),
        (N, M),
        (K, M),
        "sum",
        output_mask=(True, True),
        expected=Cost(2 * 7 * M),
    ),
    case(
        "_sparse_mm_reduce_impl_backward",
        SparseShape((N, K), 7),
        (N, M),
        (K, M),
        "amin",
        output_mask=(True, False),
        expected=Cost(other_flops=2 * N * M),
    ),
    case(
        "_sparse_mm_reduce_impl_backward",
        SparseShape((N, K), 7),
        (N, M),
        (K, M),
        "amin",
        output_mask=(True, True),
        expected=Cost(other_flops=2 * 2 * N * M),
    ),
    case("mkldnn_linear_backward_input", [G, N, K], (G, N, M), (M, K), expected=G * N * M * K),
    case(
        "mkldnn_linear_backward_weights",
        (G, N, M),
        (G, N, K),
        (M, K),
        bias_defined=False,
        expected=G * N * M * K,
    ),
    case(
        "mkldnn_linear_backward_weights",
        (G, N, M),
        (G, N, K),
        (M, K),
        bias_defined=True,
        expected=Cost(G * N * M * K, other_flops=G * N * M),
    ),
    case("mv", (N, K), (K,), expected=N * K),
    case("addmv addmv_", (N,), (N, K), (K,), expected=Cost(N * K, other_flops=N)),
    case("addmv addmv_", (N,), (N, K), (K,), beta=0, expected=Cost(N * K)),
    case("dot vdot", (K,), (K,), expected=K),
    # Matmuls of experts, without offsets. In this order, the experts divide the rows, the columns,
    # and the inner dimension (for the gradient of the weights). The last one is an ordinary batch.
    case(by_expert, (N, K), (G, K, M), expected=N * K * M),
    case(by_expert, (G, N, K), (K, M), expected=N * K * M),
    case(by_expert, (N, K), (K, M), expected=N * K * M),
    case(by_expert, (G, N, K), (G, K, M), expected=G * N * K * M),
    # Matmuls of experts with offsets, the ends of the groups. In the first three cases, the last
    # group ends before the last row, column, or element of the inner dimension. Then the offsets
    # are unknown, and in the last case the last group ends with the last row.
    case(
        by_expert, (N, K), (G, K, M), offs=Values((0, 1, 1, 2)), expected=Cost(N * K * M, 2 * K * M)
    ),
    case(
        by_expert, (G, N, K), (K, M), offs=Values((1, 2, 3, 5)), expected=Cost(N * K * M, N * K * 5)
    ),
    case(by_expert, (N, K), (K, M), offs=Values((1, 2, 3, 4)), expected=Cost(N * K * M, N * 4 * M)),
    case(by_expert, (N, K), (G, K, M), offs=(G,), expected=N * K * M),
    case(by_expert, (N, K), (G, K, M), offs=Values((1, 2, 2, N)), expected=N * K * M),
    case("transformers::grouped_mm_fallback", (N, K), (G, K, M), expected=N * K * M),
    case("transformers::grouped_mm_fallback_backward", (N, K), (G, K, M), expected=2 * N * K * M),
    # N images with 8 x 9 positions. The 3 coordinates of each position are multiplied by a 3 x 2
    # matrix.
    case("affine_grid_generator", (N, 2, 3), out=(N, 8, 9, 2), expected=N * 8 * 9 * 3 * 2),
]

# Sizes of the convolutions.
B = 2
IN = 6
OUT = 9
GROUPS = 3
KERNEL = 5 * 7
HEIGHT = 17
WIDTH = 19
OUT_HEIGHT = 13
OUT_WIDTH = 11
image = (B, IN, HEIGHT, WIDTH)
smaller = (B, OUT, OUT_HEIGHT, OUT_WIDTH)

# Shapes of the weights.
dense = (OUT, IN, 5, 7)
grouped = (OUT, IN // GROUPS, 5, 7)
depthwise = (IN, 1, 5, 7)
transposed_weight = (IN, OUT // GROUPS, 5, 7)

dense_macs = B * OUT_HEIGHT * OUT_WIDTH * OUT * IN * KERNEL
# Elements of the result: operations of a bias, of an addition, and of an activation.
added = B * OUT * OUT_HEIGHT * OUT_WIDTH

any_convolution = (
    "convolution _convolution convolution_overrideable mkldnn_convolution miopen_convolution"
    " cudnn_convolution _slow_conv2d_forward _conv_depthwise2d slow_conv3d_forward"
    " conv_depthwise3d slow_conv_dilated2d slow_conv_dilated3d _nnpack_spatial_convolution"
    " miopen_depthwise_convolution"
)
backwards = "convolution_backward convolution_backward_overrideable"

# `output_mask` selects the gradients that are computed: of the input, the weight and the bias.
masked_gradients = []
for operators, options in (
    (backwards, {"transposed": False}),
    ("_slow_conv2d_backward", {}),
):
    for mask in product((False, True), repeat=3):
        of_input, of_weight, of_bias = mask
        masked_gradients.append(
            case(
                operators,
                smaller,
                image,
                dense,
                **options,
                output_mask=mask,
                expected=Cost(dense_macs * (of_input + of_weight), other_flops=added * of_bias),
            )
        )

convolution = [
    case(any_convolution, image, dense, out=smaller, expected=dense_macs),
    case(
        any_convolution,
        image,
        dense,
        bias=(OUT,),
        out=smaller,
        expected=Cost(dense_macs, other_flops=added),
    ),
    case(any_convolution, image, grouped, out=smaller, expected=dense_macs // GROUPS),
    case(any_convolution, image, depthwise, out=image, expected=B * HEIGHT * WIDTH * IN * KERNEL),
    case(
        any_convolution, (B, IN, 17), (OUT, IN, 5), out=(B, OUT, 13), expected=B * 13 * OUT * IN * 5
    ),
    case(
        any_convolution,
        (B, IN, 7, 8, 9),
        (OUT, IN, 2, 3, 4),
        out=(B, OUT, 6, 6, 6),
        expected=B * 6**3 * OUT * IN * 2 * 3 * 4,
    ),
    # In a transposed convolution, each position of the input is multiplied by a whole kernel. The
    # weight's shape is [in, out / groups, *kernel].
    case(
        any_convolution,
        image,
        transposed_weight,
        transposed=True,
        out=smaller,
        expected=B * HEIGHT * WIDTH * IN * OUT // GROUPS * KERNEL,
    ),
    case(
        "conv_tbc",
        (17, B, IN),
        (5, IN, OUT),
        (OUT,),
        out=(13, B, OUT),
        expected=Cost(13 * B * 5 * IN * OUT, other_flops=13 * B * OUT),
    ),
    case(
        "cudnn_convolution_relu cudnn_convolution_add_relu",
        image,
        dense,
        out=smaller,
        expected=Cost(dense_macs, other_flops=added),
    ),
    case(
        "cudnn_convolution_relu cudnn_convolution_add_relu",
        image,
        dense,
        out=smaller,
        bias=(OUT,),
        z=smaller,
        expected=Cost(dense_macs, other_flops=4 * added),
    ),
    case(
        "cudnn_convolution_transpose miopen_convolution_transpose slow_conv_transpose2d"
        " slow_conv_transpose3d",
        image,
        transposed_weight,
        out=smaller,
        bias=(OUT,),
        expected=Cost(B * HEIGHT * WIDTH * IN * OUT // GROUPS * KERNEL, other_flops=added),
    ),
    *masked_gradients,
    case(
        backwards,
        smaller,
        image,
        grouped,
        transposed=False,
        output_mask=(True, True, False),
        expected=2 * dense_macs // GROUPS,
    ),
    case(
        backwards,
        image,
        image,
        depthwise,
        transposed=False,
        output_mask=(True, True, False),
        expected=2 * B * HEIGHT * WIDTH * IN * KERNEL,
    ),
    case(
        backwards,
        smaller,
        image,
        transposed_weight,
        transposed=True,
        output_mask=(True, True, False),
        expected=2 * B * HEIGHT * WIDTH * IN * OUT // GROUPS * KERNEL,
    ),
]

HEADS = 3
# The number of queries and of keys: the score matrix is ROWS x COLUMNS.
ROWS = 5
COLUMNS = 8
# The width of queries and keys, and of values.
WIDE = 16
VALUE = 24

query = (B, HEADS, ROWS, WIDE)
key = (B, HEADS, COLUMNS, WIDE)
value = (B, HEADS, COLUMNS, VALUE)
one_key = (B, 1, COLUMNS, WIDE)
one_value = (B, 1, COLUMNS, VALUE)
grad = (B, HEADS, ROWS, VALUE)

square = B * HEADS * ROWS * COLUMNS
"""Number of scores without a mask."""
upper_left = B * HEADS * (1 + 2 + 3 + 4 + 5)
"""Number of scores under a causal mask that begins at the upper left.

Query 0 sees only key 0, query 1 sees keys 0 and 1, and so on.
"""
lower_right = B * HEADS * (4 + 5 + 6 + 7 + 8)
"""Number of scores under a causal mask that ends at the lower right.

The last query sees all 8 keys, the one before it sees 7, and so on.
"""


def attention(seen: int = square) -> Cost:
    """Return the cost of attention: two matmuls, and 5 operations of the softmax per score.

    `seen` is the number of scores that the kernel computes under a mask. Per score, Q x K needs
    `WIDE` and P x V needs `VALUE` MACs.
    """
    return Cost(square * (WIDE + VALUE), seen * (WIDE + VALUE), 5 * square)


def attention_backward(seen: int = square) -> Cost:
    """Return the cost of the gradient of attention.

    There is one matmul for each of the gradients of V, P, Q and K. The scores are recomputed with
    one more matmul. Their exponentials need only two operations per score, because forward has kept
    the sums of the softmax.
    """
    again = Cost(square * WIDE, seen * WIDE, 2 * square)
    return Cost(square * 2 * (WIDE + VALUE), seen * 2 * (WIDE + VALUE), 4 * square, again)


dot_products = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"
    " _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable"
)
gradients = " ".join(f"{operator}_backward" for operator in dot_products.split())
dot_products += " _scaled_dot_product_attention_math_for_mps"

fused = [
    case(dot_products, query, key, value, is_causal=False, expected=attention()),
    case(dot_products, query, one_key, one_value, is_causal=False, expected=attention()),
    case(dot_products, query, key, value, is_causal=True, expected=attention(upper_left)),
    case(gradients, grad, query, key, value, is_causal=False, expected=attention_backward()),
    case(
        gradients, grad, query, key, value, is_causal=True, expected=attention_backward(upper_left)
    ),
    case(
        "_scaled_dot_product_flash_attention",
        query,
        key,
        value,
        is_causal=False,
        expected=attention(),
    ),
    case(
        "_scaled_dot_product_flash_attention",
        query,
        key,
        value,
        is_causal=True,
        expected=attention(lower_right),
    ),
    case(
        "_scaled_dot_product_flash_attention_backward",
        grad,
        query,
        key,
        value,
        is_causal=False,
        expected=attention_backward(),
    ),
    case(
        "_scaled_dot_product_flash_attention_backward",
        grad,
        query,
        key,
        value,
        is_causal=True,
        expected=attention_backward(lower_right),
    ),
]

ELEMENTS = 2 * 6 * 5
x = (2, 6, 5)
channels = (6,)
wide = (5,)


def norm(each: int) -> Cost:
    """Return a cost without MACs: a number of operations per element of `x`."""
    return Cost(other_flops=each * ELEMENTS)


batch_norms = (
    "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit"
    " _batch_norm_with_update"
)
# These use the running statistics.
known = "_native_batch_norm_legit_no_training _batch_norm_no_update"
batch_norm_gradients = (
    "native_batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward"
    " batch_norm_backward"
)

normalisation = [
    case("native_layer_norm", x, wide, None, None, expected=norm(5)),
    case("native_layer_norm", x, wide, wide, None, expected=norm(6)),
    case("native_layer_norm", x, wide, wide, wide, expected=norm(7)),
    case(
        "native_layer_norm_backward",
        x,
        x,
        wide,
        (2, 6, 1),
        (2, 6, 1),
        wide,
        wide,
        expected=norm(2 * 7),
    ),
    case(
        "native_layer_norm_backward",
        x,
        x,
        wide,
        (2, 6, 1),
        (2, 6, 1),
        None,
        None,
        expected=norm(2 * 5),
    ),
    case("_fused_rms_norm", x, wide, None, expected=norm(3)),
    case("_fused_rms_norm", x, wide, wide, expected=norm(4)),
    case("_fused_rms_norm_backward", x, x, wide, (2, 6, 1), wide, expected=norm(2 * 4)),
    case("_fused_rms_norm_backward", x, x, wide, (2, 6, 1), None, expected=norm(2 * 3)),
    case("native_group_norm", x, None, None, expected=norm(5)),
    case("native_group_norm", x, channels, channels, expected=norm(7)),
    case("native_group_norm_backward", x, x, (2, 3), (2, 3), channels, expected=norm(2 * 7)),
    case("native_group_norm_backward", x, x, (2, 3), (2, 3), None, expected=norm(2 * 5)),
    case(batch_norms, x, channels, channels, expected=norm(7)),
    case(batch_norms, x, channels, channels, training=False, expected=norm(4)),
    case(batch_norms, x, None, None, expected=norm(5)),
    case(known, x, channels, channels, expected=norm(4)),
    case(known, x, None, None, expected=norm(2)),
    case(batch_norm_gradients, x, x, channels, expected=norm(2 * 7)),
    case(batch_norm_gradients, x, x, None, expected=norm(2 * 5)),
    case(batch_norm_gradients, x, x, channels, train=False, expected=norm(2 * 4)),
    case(batch_norm_gradients, x, x, channels, update=False, expected=norm(2 * 4)),
    # Batch norm that is synchronized over ranks runs as several kernels. Together they cost the
    # same as one: 4 + 3 operations per element, and 7 + 7 for the gradient.
    case("batch_norm_stats", x, expected=norm(4)),
    case("batch_norm_elemt", x, channels, channels, expected=norm(3)),
    case(
        "batch_norm_gather_stats_with_counts", x, (8, 6), expected=Cost(other_flops=(3 + 3) * 8 * 6)
    ),
    case(
        "batch_norm_backward_reduce batch_norm_backward_elemt",
        x,
        x,
        channels,
        channels,
        channels,
        expected=norm(7),
    ),
]


def pools_of(d: int) -> str:
    """Return the names of the pooling operators with 2 or 3 dimensions."""
    return (
        f"max_pool{d}d_with_indices avg_pool{d}d fractional_max_pool{d}d"
        f" quantized_max_pool{d}d mkldnn_max_pool{d}d"
    )


pooled = (2, 3, 4, 5)
pooled_3d = (2, 3, 4, 5, 6)
pools = pools_of(2) + " quantized::max_pool2d"
pools_3d = pools_of(3)

# torch's numbers for the interpolation of a grid sampler.
LINEAR = 0
NEAREST = 1
CUBIC = 2
places = (2, 7, 9, 2)
places_3d = (2, 7, 9, 11, 3)
sampled = (2, 3, 7, 9)
sampled_3d = (2, 3, 7, 9, 11)
samples = 2 * 3 * 7 * 9
samples_3d = 2 * 3 * 7 * 9 * 11

# Linear interpolation multiplies and adds 4 neighbors in an image, and 8 in a volume. Each of the
# two gradients, of the input and of the places, costs as much.
sampler_gradients = []
for operator, shape, at, neighbors, elements in (
    ("grid_sampler_2d_backward", sampled, places, 4, samples),
    ("grid_sampler_3d_backward", sampled_3d, places_3d, 8, samples_3d),
):
    for of_input, of_places in ((True, True), (True, False), (False, True)):
        operations = (of_input + of_places) * 2 * neighbors * elements
        sampler_gradients.append(
            case(
                operator,
                shape,
                (2, 3, 4, 5),
                at,
                LINEAR,
                output_mask=(of_input, of_places),
                expected=Cost(other_flops=operations),
            )
        )

sums = [
    case(
        pools, (2, 3, 8, 15), [2, 3], out=pooled, expected=Cost(other_flops=2 * 3 * 4 * 5 * 2 * 3)
    ),
    case(
        pools,
        (2, 3, 8, 10),
        [2],
        out=(pooled, pooled),
        expected=Cost(other_flops=2 * 3 * 4 * 5 * 2 * 2),
    ),
    case(
        pools_3d,
        (2, 3, 8, 10, 12),
        [2],
        out=pooled_3d,
        expected=Cost(other_flops=2 * 3 * 4 * 5 * 6 * 2**3),
    ),
    case(
        pools_3d,
        (2, 3, 8, 15, 24),
        [2, 3, 4],
        out=(pooled_3d, pooled_3d),
        expected=Cost(other_flops=2 * 3 * 4 * 5 * 6 * 2 * 3 * 4),
    ),
    case(
        "index_add index_add_ index_reduce index_reduce_",
        (9, 5),
        0,
        (3,),
        (3, 5),
        expected=Cost(other_flops=3 * 5),
    ),
    case(
        "scatter_add scatter_add_ scatter_reduce scatter_reduce_",
        (9, 5),
        1,
        (3, 2),
        (4, 5),
        expected=Cost(other_flops=3 * 2),
    ),
    case(
        "_embedding_bag _embedding_bag_forward_only",
        (100, 8),
        (12,),
        expected=Cost(other_flops=12 * 8),
    ),
    case(
        "_embedding_bag_backward _embedding_bag_dense_backward",
        (4, 8),
        (12,),
        expected=Cost(other_flops=12 * 8),
    ),
    case(
        "quantized_max_pool1d quantized::max_pool1d",
        (2, 3, 8),
        [2],
        out=(2, 3, 4),
        expected=Cost(other_flops=2 * 3 * 4 * 2),
    ),
    case(
        "_embedding_bag_per_sample_weights_backward",
        (4, 8),
        (100, 8),
        (12,),
        expected=Cost(other_flops=2 * 12 * 8),
    ),
    case("embedding_renorm_", (100, 8), (12,), expected=Cost(other_flops=12 * 8 * 3)),
    case("nll_loss_forward nll_loss2d_forward", (4, 100), (4,), expected=Cost(other_flops=4)),
    case("nll_loss_backward nll_loss2d_backward", (), (4, 100), (4,), expected=Cost(other_flops=4)),
    case(
        "grid_sampler_2d",
        (2, 3, 4, 5),
        places,
        LINEAR,
        out=sampled,
        expected=Cost(other_flops=2 * 4 * samples),
    ),
    case(
        "grid_sampler_2d",
        (2, 3, 4, 5),
        places,
        CUBIC,
        out=sampled,
        expected=Cost(other_flops=2 * 16 * samples),
    ),
    case("grid_sampler_2d", (2, 3, 4, 5), places, NEAREST, out=sampled, expected=Cost()),
    case(
        "grid_sampler_3d",
        (2, 3, 4, 5, 6),
        places_3d,
        LINEAR,
        out=sampled_3d,
        expected=Cost(other_flops=2 * 8 * samples_3d),
    ),
    *sampler_gradients,
]

parameters = [(5, 6), (6,)]
PARAMETERS = 5 * 6 + 6
adam = "_fused_adam _fused_adam_ _fused_adamw _fused_adamw_"
sgd = "_fused_sgd _fused_sgd_"
adagrad = "_fused_adagrad _fused_adagrad_"
plain_sgd = {"momentum": 0, "weight_decay": 0, "nesterov": False, "is_first_step": False}

updates = [
    case(
        adam, parameters, weight_decay=0, amsgrad=False, expected=Cost(other_flops=10 * PARAMETERS)
    ),
    case(
        adam,
        parameters,
        weight_decay=0.1,
        amsgrad=False,
        expected=Cost(other_flops=11 * PARAMETERS),
    ),
    case(
        adam, parameters, weight_decay=0.1, amsgrad=True, expected=Cost(other_flops=12 * PARAMETERS)
    ),
    case(sgd, parameters, **plain_sgd, expected=Cost(other_flops=PARAMETERS)),
    case(
        sgd, parameters, **plain_sgd | {"momentum": 0.9}, expected=Cost(other_flops=3 * PARAMETERS)
    ),
    case(
        sgd,
        parameters,
        **plain_sgd | {"momentum": 0.9, "is_first_step": True},
        expected=Cost(other_flops=PARAMETERS),
    ),
    case(
        sgd,
        parameters,
        **plain_sgd | {"momentum": 0.9, "nesterov": True},
        expected=Cost(other_flops=4 * PARAMETERS),
    ),
    case(
        sgd,
        parameters,
        **plain_sgd | {"weight_decay": 0.1},
        expected=Cost(other_flops=2 * PARAMETERS),
    ),
    case(adagrad, parameters, weight_decay=0, expected=Cost(other_flops=6 * PARAMETERS)),
    case(adagrad, parameters, weight_decay=0.1, expected=Cost(other_flops=7 * PARAMETERS)),
]

CASES = [*matmul, *convolution, *fused, *normalisation, *sums, *updates]
