"""Cases with answers calculated by hand for further families of operators.

They are whole layers as one kernel, packed weights, transforms, and distances.
"""

from lflops.formulas.table import Cost
from tests.support.formula_cases import case

LENGTH, B, IN, HIDDEN = 7, 2, 5, 3
steps = LENGTH * B
"""Vectors that a recurrent layer goes over."""
x = (LENGTH, B, IN)
RELU, LSTM, GRU = 0, 2, 3


def weights(gates: int, width: int = IN, *, biases: bool = True) -> list[tuple[int, ...]]:
    """One layer's: of the input, of the state; and two biases."""
    rows = gates * HIDDEN
    return [(rows, width), (rows, HIDDEN), *([(rows,), (rows,)] if biases else [])]


def macs(gates: int, width: int = IN) -> int:
    """Of one layer: every gate of every step multiplies the input and the state."""
    return steps * gates * HIDDEN * (width + HIDDEN)


def others(gates: int, each: int) -> int:
    """Two biases a gate, and what a hidden unit of its kind does beside."""
    return steps * HIDDEN * (2 * gates + each)


one_layer = {"hidden_size": HIDDEN, "num_layers": 1, "bidirectional": False}
two_ways = {"hidden_size": HIDDEN, "num_layers": 2, "bidirectional": True}
four_cells = weights(4) * 2 + weights(4, 2 * HIDDEN) * 2
both_layers = 2 * macs(4) + 2 * macs(4, 2 * HIDDEN)
mkldnn, cudnn = "mkldnn_rnn_layer", "_cudnn_rnn miopen_rnn"
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
    # Packed: as many vectors, of sequences of any lengths.
    case(
        cudnn,
        (steps, IN),
        weights(4),
        mode=LSTM,
        **one_layer,
        expected=Cost(macs(4), other_flops=others(4, 13)),
    ),
    *(
        case(
            back,
            x,
            weights(4),
            mode=LSTM,
            **one_layer,
            output_mask=[True, True, True, of_weights],
            expected=Cost(times * macs(4), other_flops=times * others(4, 13)),
        )
        for of_weights, times in ((True, 2), (False, 1))
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

WIDTH, HEADS, FEED, KEYS = 12, 3, 48, 9
tokens, keys = B * LENGTH, B * KEYS
sequence = (B, LENGTH, WIDTH)
qkv = (3 * WIDTH, WIDTH)


def layer(columns: int, rows: int) -> Cost:
    """Projections of queries and of what comes out, of keys and values.

    Scores and sums, a softmax; a bias each.
    """
    scores = B * HEADS * LENGTH * columns
    return Cost(
        2 * (tokens + rows) * WIDTH**2 + scores * 2 * (WIDTH // HEADS),
        other_flops=5 * scores + 2 * (tokens + rows) * WIDTH,
    )


inner = layer(LENGTH, tokens)
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
        # Up and down; two norms, two additions, two biases, an activation.
        expected=Cost(
            inner.macs + 2 * tokens * WIDTH * FEED,
            other_flops=inner.other_flops
            + tokens * (2 * 7 * WIDTH + 2 * WIDTH + FEED + WIDTH + FEED),
        ),
    ),
]

N, K, M = 3, 8, 7
packed = (
    "quantized::linear quantized::linear_relu quantized::linear_dynamic quantized::linear_relu_dynamic quantized::linear_dynamic_fp16"
    " _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu _dyn_quant_matmul_4bit mkldnn_linear"
    " _weight_int4pack_mm_with_scales_and_zeros _mixed_dtypes_linear quantized::linear_relu_dynamic_fp16 quantized::linear_leaky_relu"
    " quantized::linear_tanh quantized::linear_with_input_q_dq_qweight_dq_output_fp32"
    " quantized::linear_with_input_q_dq_qweight_dq_relu_output_fp32"
    " onednn::qlinear_pointwise onednn::linear_dynamic_fp16 onednn::linear_relu_dynamic_fp16"
)

quantized = [
    case(packed, (N, K), out=(N, M), expected=N * K * M),
    case(packed, (B, N, K), out=(B, N, M), expected=B * N * K * M),
    case("quantized::matmul", (B, N, K), (B, K, M), expected=B * N * K * M),
    # 2 images of 6 by 7 places, 7 channels of 8 / 4 times a kernel of 3 by 5.
    case(
        "onednn::qconv_pointwise onednn::qconv1d_pointwise onednn::qconv2d_pointwise onednn::qconv3d_pointwise",
        (2, K, 8, 11),
        qw=(M, K // 4, 3, 5),
        out=(2, M, 6, 7),
        expected=2 * 6 * 7 * M * K // 4 * 3 * 5,
    ),
    case(
        "quantized::add_relu quantized::add_scalar quantized::add_scalar_relu quantized::mul_relu quantized::mul_scalar"
        " quantized::mul_scalar_relu quantized::batch_norm quantized::batch_norm_relu quantized::batch_norm1d quantized::batch_norm1d_relu"
        " quantized::batch_norm2d quantized::batch_norm2d_relu quantized::batch_norm3d quantized::batch_norm3d_relu quantized::layer_norm"
        " quantized::group_norm quantized::instance_norm quantized::softmax quantized::prelu onednn::qadd onednn::qadd_relu onednn::qmul"
        " onednn::qbatch_norm2d quantized::linear_prepack quantized::conv1d_prepack quantized::conv2d_prepack quantized::conv3d_prepack"
        " quantized::embedding_bag_byte_prepack quantized::embedding_bag_4bit_prepack quantized::conv_transpose1d_prepack"
        " quantized::conv_transpose2d_prepack quantized::conv_transpose3d_prepack onednn::qlinear_prepack onednn::qconv_prepack",
        (N, K),
        expected=Cost(),
    ),
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
    # x W y: [batch, in], [out, in, other], [batch, other], each spread over the dimensions that it
    # has not.
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

# Two layers in both directions, four gates of each; the second layer's input is the state of both
# directions.
quantized_cells = [
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
