"""Where an operator's schema has the arguments that formulas ask for by name, for traces, which list arguments without names.

Written from torch's schemas; `tests/formulas/test_places.py` compares it with those of the torch that is installed.
"""

import re


def _places(text: str) -> dict[str, dict[str, int]]:
    """By operator, of lines `operator operator: name=place name=place`."""
    places: dict[str, dict[str, int]] = {}
    for line in re.sub(r"\n +(?=\w+=)", " ", text).splitlines():
        operators, _, arguments = line.partition(": ")
        of_each = {name: int(place) for name, place in (argument.split("=") for argument in arguments.split())}
        places.update((operator if "::" in operator else f"aten::{operator}", of_each) for operator in operators.split())
    return places


PLACES = _places(
    """
    torch_attn::_varlen_attn: cu_seq_q=3 cu_seq_k=4 max_q=5 max_k=6 is_causal=7 window_size=9 seqused_k=11 block_table=12
    torch_attn::_varlen_attn_backward: cu_seq_q=6 cu_seq_k=7 max_q=8 max_k=9 is_causal=10 window_size=13
    torch_attn::_varlen_attn_out: cu_seq_q=4 cu_seq_k=5 max_q=6 max_k=7 is_causal=8 window_size=10 seqused_k=12 block_table=13
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention: is_causal=4
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention: is_causal=6
    _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps: is_causal=5
    _scaled_dot_product_flash_attention_for_cpu_backward: is_causal=7
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention_backward: is_causal=11
    _scaled_dot_product_cudnn_attention_backward: is_causal=14
    _scaled_dot_product_fused_attention_overrideable_backward: is_causal=13
    convolution _convolution convolution_overrideable: bias=2 stride=3 padding=4 dilation=5 transposed=6 output_padding=7 groups=8
    mkldnn_convolution miopen_convolution miopen_depthwise_convolution: bias=2 padding=3 stride=4 dilation=5 groups=6
    cudnn_convolution: padding=2 stride=3 dilation=4 groups=5
    _slow_conv2d_forward slow_conv3d_forward: bias=3 stride=4 padding=5
    _conv_depthwise2d conv_depthwise3d slow_conv_dilated2d slow_conv_dilated3d: bias=3 stride=4 padding=5 dilation=6
    _nnpack_spatial_convolution: bias=2 padding=3 stride=4
    cudnn_convolution_relu: bias=2 stride=3 padding=4 dilation=5 groups=6
    cudnn_convolution_add_relu: z=2 bias=4 stride=5 padding=6 dilation=7 groups=8
    cudnn_convolution_transpose: padding=2 output_padding=3 stride=4 dilation=5 groups=6
    miopen_convolution_transpose: bias=2 padding=3 output_padding=4 stride=5 dilation=6 groups=7
    slow_conv_transpose2d slow_conv_transpose3d: bias=3 stride=4 padding=5 output_padding=6 dilation=7
    convolution_backward: transposed=7 output_mask=10
    convolution_backward_overrideable: transposed=6 output_mask=9
    linalg_solve_triangular triangular_solve: unitriangular=4
    linalg_qr: mode=1
    ormqr: left=3
    _linalg_eigh: compute_v=2
    _linalg_svd: full_matrices=1 compute_uv=2
    _ctc_loss _cudnn_ctc_loss miopen_ctc_loss: input_lengths=2 target_lengths=3
    _ctc_loss_backward: input_lengths=3 target_lengths=4
    multilabel_margin_loss_forward: target=1
    multilabel_margin_loss_backward: target=2
    _sparse_mm_reduce_impl_backward: output_mask=5
    mkldnn_linear_backward_weights: bias_defined=3
    sparse_sampled_addmm addmm addmm_ _sparse_addmm _addmm_activation baddbmm baddbmm_ addbmm addbmm_ addmv addmv_: beta=3
    _grouped_mm: offs=2
    _scaled_grouped_mm: offs=4
    _scaled_grouped_mm_v2: offs=8
    native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit: training=5
    native_batch_norm_backward: train=7
    batch_norm_backward: update=7
    _fused_adam _fused_adam_ _fused_adamw _fused_adamw_: weight_decay=9 amsgrad=11
    _fused_sgd _fused_sgd_: weight_decay=3 momentum=4 nesterov=7 is_first_step=9
    _fused_adagrad _fused_adagrad_: weight_decay=6
    _trilinear: expand1=3 expand2=4 expand3=5
    onednn::qconv_pointwise onednn::qconv1d_pointwise onednn::qconv2d_pointwise onednn::qconv3d_pointwise: qw=3 stride=7 padding=8
        dilation=9 groups=10
    quantized::conv1d_prepack quantized::conv2d_prepack quantized::conv3d_prepack: stride=2 padding=3 dilation=4 groups=5
    quantized::conv_transpose1d_prepack quantized::conv_transpose2d_prepack quantized::conv_transpose3d_prepack: stride=2 padding=3
        output_padding=4 dilation=5 groups=6
    onednn::qconv_prepack: stride=4 padding=5 dilation=6 groups=7
    mkldnn_rnn_layer: mode=9 hidden_size=10 has_biases=12
    mkldnn_rnn_layer_backward: mode=14 hidden_size=15 has_biases=17
    _cudnn_rnn: mode=6 hidden_size=7 num_layers=9 bidirectional=13
    miopen_rnn: mode=5 hidden_size=6 num_layers=7 bidirectional=11
    _cudnn_rnn_backward: mode=10 hidden_size=11 num_layers=13 bidirectional=17 output_mask=21
    miopen_rnn_backward: mode=10 hidden_size=11 num_layers=12 bidirectional=16 output_mask=20
    _lstm_mps: num_layers=4 bidirectional=7
    quantized_lstm quantized_gru: hx=1 num_layers=4 bidirectional=7
    grid_sampler_2d_backward grid_sampler_3d_backward: output_mask=6
    _transformer_encoder_layer_fwd: ffn_weight_1=14 ffn_weight_2=16
    _flash_attention_forward: cum_seq_q=3 cum_seq_k=4 max_q=5 max_k=6 is_causal=8 window_size_left=11 window_size_right=12
        seqused_k=13 block_table=15
    _flash_attention_forward_no_dropout_inplace: cum_seq_q=4 cum_seq_k=5 max_q=6 max_k=7 is_causal=9 window_size_left=12
        window_size_right=13 seqused_k=14 block_table=16
    _flash_attention_backward: cum_seq_q=6 cum_seq_k=7 max_q=8 max_k=9 is_causal=11 window_size_left=15 window_size_right=16
    _efficient_attention_forward: cu_seqlens_q=4 cu_seqlens_k=5 max_seqlen_q=6 max_seqlen_k=7 custom_mask_type=9 seqlen_k=12
        window_size=13
    _efficient_attention_backward: cu_seqlens_q=6 cu_seqlens_k=7 max_seqlen_q=8 max_seqlen_k=9 custom_mask_type=14 window_size=18
    _cudnn_attention_forward: cum_seq_q=4 cum_seq_k=5 max_q=6 max_k=7 is_causal=10
    _cudnn_attention_backward: cum_seq_q=9 cum_seq_k=10 max_q=11 max_k=12 is_causal=14
    flash_attn::_flash_attn_forward: causal=5 window_size_left=6 window_size_right=7
    flash_attn::_flash_attn_varlen_forward: cu_seqlens_q=3 cu_seqlens_k=4 max_seqlen_q=5 max_seqlen_k=6 causal=9 window_size_left=10
        window_size_right=11 block_table=15 seqused_k=17
    flash_attn::_flash_attn_backward: causal=11 window_size_left=12 window_size_right=13
    flash_attn::_flash_attn_varlen_backward: cu_seqlens_q=9 cu_seqlens_k=10 max_seqlen_q=11 max_seqlen_k=12 causal=15
        window_size_left=16 window_size_right=17
    flash_attn_3::fwd: k_new=3 cu_seqlens_q=7 cu_seqlens_k=8 seqused_q=10 seqused_k=11 max_seqlen_q=12 max_seqlen_k=13 page_table=14
        is_causal=24 window_size_left=25 window_size_right=26
    flash_attn_3::_flash_attn_forward: k_new=3 cu_seqlens_q=7 cu_seqlens_k=8 seqused_q=10 seqused_k=11 max_seqlen_q=12 max_seqlen_k=13
        page_table=14 causal=24 window_size_left=25 window_size_right=26
    flash_attn_3::bwd: cu_seqlens_q=9 cu_seqlens_k=10 max_seqlen_q=13 max_seqlen_k=14 is_causal=16 window_size_left=17
        window_size_right=18
    flash_attn_3::_flash_attn_backward: cu_seqlens_q=6 cu_seqlens_k=7 max_seqlen_q=10 max_seqlen_k=11 is_causal=16 window_size_left=17
        window_size_right=18
    xformers_flash::flash_fwd: cu_seqlens_q=3 cu_seqlens_k=4 seqused_k=5 max_seqlen_q=6 max_seqlen_k=7 is_causal=10 window_left=11
        window_right=12 block_tables=14
    xformers_flash3::flash_fwd: cu_seqlens_q=3 cu_seqlens_k=4 seqused_k=5 max_seqlen_q=6 max_seqlen_k=7 is_causal=10 window_left=11
        window_right=12 block_table=16
    xformers_flash::flash_bwd: cu_seqlens_q=7 cu_seqlens_k=8 max_seqlen_q=9 max_seqlen_k=10 is_causal=13 window_left=14
        window_right=15
    xformers::efficient_attention_forward_cutlass xformers::efficient_attention_forward_ck: seqstart_q=4 seqstart_k=5 max_seqlen_q=6
        custom_mask_type=9 seqlen_k=11 window_size=12
    xformers::efficient_attention_backward_cutlass: seqstart_q=5 seqstart_k=6 max_seqlen_q=7 max_seqlen_k=8 custom_mask_type=14
        window_size=17
    xformers::efficient_attention_backward_ck: seqstart_q=5 seqstart_k=6 max_seqlen_q=7 max_seqlen_k=8 custom_mask_type=15
        window_size=17
    DaoAILab::_causal_conv1d_fwd_cpp: silu_activation=7
    DaoAILab::_causal_conv1d_bwd_cpp: silu_activation=11
    DaoAILab::_causal_conv1d_update_cpp: silu_activation=5
    bitsandbytes::int8_mixed_scaled_mm: outlier_cols=5 bias=6
    bitsandbytes::int8_scaled_mm bitsandbytes::int8_mm_dequant: bias=4
    bitsandbytes::dequantize_4bit: shape=4
    bitsandbytes::optimizer_update_32bit: weight_decay=13
    bitsandbytes::optimizer_update_8bit_blockwise: state2=4 weight_decay=16
    torchao::rowwise_scaled_linear_sparse_cutlass_f8f8: bias=5
    torchao::qscaled_dot_product: is_causal=5
    fbgemm::jagged_dense_bmm fbgemm::jagged_dense_bmm_forward: x_offsets=1 y=2 max_L=3
    fbgemm::jagged_jagged_bmm fbgemm::jagged_jagged_bmm_forward: x_offsets=2 max_L=3
    fbgemm::jagged_dense_elementwise_add: y=2
    fbgemm::dense_embedding_codegen_lookup_function: indices=7 D_offsets=2 max_D=4 total_D=3
    fbgemm::split_embedding_codegen_forward_unweighted_pt2_wrapper fbgemm::split_embedding_codegen_forward_weighted_pt2_wrapper:
        indices=10 D_offsets=6 max_D=8 total_D=7
    """
)
