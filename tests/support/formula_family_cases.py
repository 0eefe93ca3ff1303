"""Test cases, with costs calculated by hand, for further families of operators.

The families are layers that run as one kernel, packed weights, Fourier transforms, and distances.
"""

from lflops.formulas.table import Cost
from tests.support.formula_cases import case

LENGTH = 7
B = 2
IN = 5
HIDDEN = 3
steps = LENGTH * B
"""Number of vectors that a recurrent layer processes."""
x = (LENGTH, B, IN)
# torch's numbers for the kinds of recurrent cells.
RELU = 0
LSTM = 2
GRU = 3


def weights(gates: int, width: int = IN, *, biases: bool = True) -> list[tuple[int, ...]]:
    """Return the shapes of one layer's weights.

    They are a matrix for the input, a matrix for the hidden state, and two biases.
    """
    rows = gates * HIDDEN
    shapes: list[tuple[int, ...]] = [(rows, width), (rows, HIDDEN)]
    if biases:
        shapes += [(rows,), (rows,)]
    return shapes


def macs(gates: int, width: int = IN) -> int:
    """Return the MACs of one layer: at each step, each gate multiplies the input and the state."""
    return steps * gates * HIDDEN * (width + HIDDEN)


def others(gates: int, each: int) -> int:
    """Return the other operations of one layer.

    Each hidden unit adds two biases per gate, and does `each` further operations, a number that
    depends on the kind of cell.
    """
    return steps * HIDDEN * (2 * gates + each)


one_layer = {"hidden_size": HIDDEN, "num_layers": 1, "bidirectional": False}

# Two layers in two directions. The input of the second layer is the state of both directions.
two_ways = {"hidden_size": HIDDEN, "num_layers": 2, "bidirectional": True}
four_cells = weights(4) * 2 + weights(4, 2 * HIDDEN) * 2
both_layers = 2 * macs(4) + 2 * macs(4, 2 * HIDDEN)

mkldnn = "mkldnn_rnn_layer"
cudnn = "_cudnn_rnn miopen_rnn"
back = "_cudnn_rnn_backward miopen_rnn_backward"
plain_lstm = {"mode": LSTM, "hidden_size": HIDDEN, "has_biases": True}

recurrent = [
    case(mkldnn, x, *weights(4), **plain_lstm, expected=Cost(macs(4), other_flops=others(4, 13))),
    case(
        mkldnn,
        x,
        *weights(4)[:2],
        (12,),
        (12,),
        **plain_lstm | {"has_biases": False},
        expected=Cost(macs(4), other_flops=steps * HIDDEN * 13),
    ),
    case(
        f"{mkldnn}_backward",
        x,
        *weights(4),
        **plain_lstm,
        expected=Cost(2 * macs(4), other_flops=2 * others(4, 13)),
    ),
    case(
        f"{mkldnn}_backward",
        x,
        *weights(4)[:2],
        (12,),
        (12,),
        **plain_lstm | {"has_biases": False},
        expected=Cost(2 * macs(4), other_flops=2 * steps * HIDDEN * 13),
    ),
    case(
        cudnn,
        x,
        weights(1),
        mode=RELU,
        **one_layer,
        expected=Cost(macs(1), other_flops=others(1, 2)),
    ),
    case(
        cudnn,
        x,
        weights(3),
        mode=GRU,
        **one_layer,
        expected=Cost(macs(3), other_flops=others(3, 10)),
    ),
    case(
        cudnn,
        x,
        weights(4, biases=False),
        mode=LSTM,
        **one_layer,
        expected=Cost(macs(4), other_flops=steps * HIDDEN * 13),
    ),
    case(
        cudnn,
        x,
        four_cells,
        mode=LSTM,
        **two_ways,
        expected=Cost(both_layers, other_flops=4 * others(4, 13)),
    ),
    # A packed input has the same number of vectors. The lengths of its sequences do not matter.
    case(
        cudnn,
        (steps, IN),
        weights(4),
        mode=LSTM,
        **one_layer,
        expected=Cost(macs(4), other_flops=others(4, 13)),
    ),
    # With gradients of the weights, backward costs twice as much as forward; without them, it
    # costs as much.
    case(
        back,
        x,
        weights(4),
        mode=LSTM,
        **one_layer,
        output_mask=[True, True, True, True],
        expected=Cost(2 * macs(4), other_flops=2 * others(4, 13)),
    ),
    case(
        back,
        x,
        weights(4),
        mode=LSTM,
        **one_layer,
        output_mask=[True, True, True, False],
        expected=Cost(macs(4), other_flops=others(4, 13)),
    ),
    case(
        "_lstm_mps",
        x,
        [(1, B, HIDDEN), (1, B, HIDDEN)],
        weights(4),
        num_layers=1,
        bidirectional=False,
        expected=Cost(macs(4), other_flops=others(4, 13)),
    ),
    case("_thnn_fused_lstm_cell", (B, 4 * HIDDEN), expected=Cost(other_flops=B * HIDDEN * 13)),
    case(
        "_thnn_fused_lstm_cell_backward_impl",
        (B, HIDDEN),
        None,
        (B, HIDDEN),
        expected=Cost(other_flops=B * HIDDEN * 13),
    ),
    case("_thnn_fused_gru_cell", (B, 3 * HIDDEN), expected=Cost(other_flops=B * HIDDEN * 10)),
    case("_thnn_fused_gru_cell_backward", (B, HIDDEN), expected=Cost(other_flops=B * HIDDEN * 10)),
]

WIDTH = 12
HEADS = 3
FEED = 48
KEYS = 9
tokens = B * LENGTH
keys = B * KEYS
sequence = (B, LENGTH, WIDTH)
qkv = (3 * WIDTH, WIDTH)


def layer(columns: int, key_rows: int) -> Cost:
    """Return the cost of a multi-head attention layer.

    There are four projections with a bias: of the queries and of the result, which have `tokens`
    rows, and of the keys and of the values, which have `key_rows` rows. The scores need a matmul
    and a softmax of 5 operations per score, and the weighted sums of the values need a matmul.

    Args:
        columns: Number of keys of a sequence.
        key_rows: Number of keys of the whole batch.
    """
    scores = B * HEADS * LENGTH * columns
    projected = 2 * (tokens + key_rows) * WIDTH
    return Cost(
        projected * WIDTH + scores * 2 * (WIDTH // HEADS),
        other_flops=5 * scores + projected,
    )


inner = layer(LENGTH, tokens)
# Operations per token: two layer norms of 7 operations per element, two residual additions, the
# biases of both linear layers, and the activation.
beside_attention = 2 * 7 * WIDTH + 2 * WIDTH + (FEED + WIDTH) + FEED
encoder = [
    case(
        "_native_multi_head_attention",
        sequence,
        sequence,
        sequence,
        WIDTH,
        HEADS,
        qkv,
        expected=inner,
    ),
    case(
        "_native_multi_head_attention",
        sequence,
        (B, KEYS, WIDTH),
        (B, KEYS, WIDTH),
        WIDTH,
        HEADS,
        qkv,
        expected=layer(KEYS, keys),
    ),
    case(
        "_transformer_encoder_layer_fwd",
        sequence,
        WIDTH,
        HEADS,
        ffn_weight_1=(FEED, WIDTH),
        ffn_weight_2=(WIDTH, FEED),
        # Attention, and the two linear layers up and down.
        expected=Cost(
            inner.macs + 2 * tokens * WIDTH * FEED,
            other_flops=inner.other_flops + tokens * beside_attention,
        ),
    ),
]

N = 3
K = 8
M = 7
packed = (
    "quantized::linear quantized::linear_relu quantized::linear_dynamic"
    " quantized::linear_relu_dynamic quantized::linear_dynamic_fp16 _weight_int8pack_mm"
    " _weight_int4pack_mm _weight_int4pack_mm_for_cpu _dyn_quant_matmul_4bit mkldnn_linear"
    " _weight_int4pack_mm_with_scales_and_zeros _mixed_dtypes_linear"
    " quantized::linear_relu_dynamic_fp16 quantized::linear_leaky_relu quantized::linear_tanh"
    " quantized::linear_with_input_q_dq_qweight_dq_output_fp32"
    " quantized::linear_with_input_q_dq_qweight_dq_relu_output_fp32"
    " onednn::qlinear_pointwise onednn::linear_dynamic_fp16 onednn::linear_relu_dynamic_fp16"
)
integer_results = (
    "quantized::add_relu quantized::add_scalar quantized::add_scalar_relu quantized::mul_relu"
    " quantized::mul_scalar quantized::mul_scalar_relu quantized::batch_norm"
    " quantized::batch_norm_relu quantized::batch_norm1d quantized::batch_norm1d_relu"
    " quantized::batch_norm2d quantized::batch_norm2d_relu quantized::batch_norm3d"
    " quantized::batch_norm3d_relu quantized::layer_norm quantized::group_norm"
    " quantized::instance_norm quantized::softmax quantized::prelu onednn::qadd onednn::qadd_relu"
    " onednn::qmul onednn::qbatch_norm2d quantized::linear_prepack quantized::conv1d_prepack"
    " quantized::conv2d_prepack quantized::conv3d_prepack quantized::embedding_bag_byte_prepack"
    " quantized::embedding_bag_4bit_prepack quantized::conv_transpose1d_prepack"
    " quantized::conv_transpose2d_prepack quantized::conv_transpose3d_prepack"
    " onednn::qlinear_prepack onednn::qconv_prepack"
)

quantized = [
    case(packed, (N, K), out=(N, M), expected=N * K * M),
    case(packed, (B, N, K), out=(B, N, M), expected=B * N * K * M),
    case("quantized::matmul", (B, N, K), (B, K, M), expected=B * N * K * M),
    # The results are 2 images of 6 x 7 positions with 7 channels. Each element is a sum over 8 / 4
    # input channels and a kernel of 3 x 5.
    case(
        "onednn::qconv_pointwise onednn::qconv1d_pointwise onednn::qconv2d_pointwise"
        " onednn::qconv3d_pointwise",
        (2, K, 8, 11),
        qw=(M, K // 4, 3, 5),
        out=(2, M, 6, 7),
        expected=2 * 6 * 7 * M * K // 4 * 3 * 5,
    ),
    case(integer_results, (N, K), expected=Cost()),
    case("quantized::embedding_byte quantized::embedding_4bit", None, expected=Cost()),
    case(
        "quantized::embedding_bag_byte quantized::embedding_bag_4bit",
        None,
        (12,),
        out=(4, 8),
        expected=Cost(other_flops=12 * 8),
    ),
    case(
        "_sparse_semi_structured_linear", (N, K), (M, K // 2), out=(N, M), expected=N * M * K // 2
    ),
    case("_sparse_semi_structured_mm", (N, K // 2), (N, K // 16), (K, M), expected=N * M * K // 2),
    case(
        "_sparse_semi_structured_addmm",
        (N,),
        (N, K // 2),
        (N, K // 16),
        (K, M),
        expected=Cost(N * M * K // 2, other_flops=N * M),
    ),
    case("_cslt_sparse_mm", (N * K,), (K, M), None, out=(N, M), expected=N * M * K // 2),
    case(
        "_cslt_sparse_mm",
        (N * K,),
        (K, M),
        (N,),
        out=(N, M),
        expected=Cost(N * M * K // 2, other_flops=N * M),
    ),
]

spectral = [
    case("_fft_c2c", (3, 8), [1], expected=Cost(other_flops=3 * 8 * 5 * 3)),
    case("_fft_c2c", (3, 8, 16), [1, 2], expected=Cost(other_flops=3 * 8 * 16 * 5 * (3 + 4))),
    case("_fft_r2c", (3, 8), [1], expected=Cost(other_flops=3 * 8 * 5 * 3 // 2)),
    case("_fft_c2r", (3, 5), [1], out=(3, 8), expected=Cost(other_flops=3 * 8 * 5 * 3 // 2)),
]

pairs = B * N * M
distances = [
    case(
        "_cdist_forward _euclidean_dist",
        (B, N, K),
        (B, M, K),
        expected=Cost(pairs * K, other_flops=pairs * (K + 1)),
    ),
    case(
        "_cdist_forward _euclidean_dist",
        (N, K),
        (M, K),
        expected=Cost(N * M * K, other_flops=N * M * (K + 1)),
    ),
    case(
        "_cdist_backward",
        (B, N, M),
        (B, N, K),
        (B, M, K),
        expected=Cost(pairs * K, other_flops=pairs * (K + 1)),
    ),
    case("_pdist_forward", (5, K), expected=Cost(10 * K, other_flops=10 * (K + 1))),
    case("_pdist_backward", (10,), (5, K), expected=Cost(10 * K, other_flops=10 * (K + 1))),
    # A bilinear layer, x W y, with the shapes [batch, in], [out, in, other] and [batch, other].
    # Each tensor is expanded to the dimensions that it does not have.
    case(
        "_trilinear",
        (B, N),
        (M, N, K),
        (B, K),
        expand1=[1, 3],
        expand2=[0],
        expand3=[1, 2],
        expected=Cost(B * M * N * K, other_flops=B * M * N * K),
    ),
]

quantized_cells = [
    # Two layers in two directions with four gates each. The input of the second layer is the state
    # of both directions.
    case(
        "quantized_lstm",
        x,
        hx=[(4, B, HIDDEN), (4, B, HIDDEN)],
        num_layers=2,
        bidirectional=True,
        expected=Cost(
            2 * (macs(4) + macs(4, 2 * HIDDEN)), other_flops=steps * 4 * HIDDEN * (2 * 4 + 13)
        ),
    ),
    case(
        "quantized_gru",
        x,
        hx=(1, B, HIDDEN),
        num_layers=1,
        bidirectional=False,
        expected=Cost(macs(3), other_flops=steps * HIDDEN * (2 * 3 + 10)),
    ),
]

CASES = [*quantized_cells, *recurrent, *encoder, *quantized, *spectral, *distances]
