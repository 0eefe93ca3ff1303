"""The case that detects an error in a formula, or the reason why a formula has no such case."""

from collections.abc import Mapping

from tests.support.package_stand_ins import registered

__all__ = ["ELSEWHERE", "GUARDS"]


def by_operator(operators: Mapping[str, str]) -> dict[str, str]:
    """Return the key of each operator. Each value has names of operators, separated by blanks."""
    keys = {}
    for key, names in operators.items():
        for name in names.split():
            keys[name] = key
    return keys


GUARDS = by_operator(
    {
        "mm": "mm",
        "linear of 2 dimensions with bias": "addmm",
        "addmm in place": "addmm_",
        "addmm with an activation": "_addmm_activation",
        "bmm": "bmm",
        "baddbmm": "baddbmm",
        "baddbmm in place": "baddbmm_",
        "addbmm": "addbmm",
        "addbmm in place": "addbmm_",
        "mv": "mv",
        "addmv": "addmv",
        "addmv in place": "addmv_",
        "dot": "dot",
        "vdot": "vdot",
        "bilinear": "_trilinear",
        "int_mm": "_int_mm",
        "foreach_mm": "_foreach_mm",
        "a product at the places of a sparse matrix": "sparse_sampled_addmm",
        "sparse.mm of coordinates": "_sparse_addmm",
        "grouped_mm of rows that go to experts": "_grouped_mm",
        "linear of floats of eight bits": "_scaled_mm",
        "linear of floats of eight bits by its public name": "_scaled_mm_v2",
        "linear with weights of eight bits": "_weight_int8pack_mm",
        "linear with weights of four bits": "_weight_int4pack_mm_for_cpu",
        "linear with weights of four bits, quantized dynamically": "_dyn_quant_matmul_4bit",
        "linear in oneDNN's layout": "mkldnn_linear",
        "linear, quantized": "quantized::linear",
        "linear and ReLU, quantized": "quantized::linear_relu",
        "linear, quantized dynamically": "quantized::linear_dynamic",
        "linear and ReLU, quantized dynamically": "quantized::linear_relu_dynamic",
        "linear, quantized dynamically to 16 bits": "quantized::linear_dynamic_fp16",
        "conv1d, quantized": "quantized::conv1d",
        "conv2d, quantized": "quantized::conv2d",
        "conv3d, quantized": "quantized::conv3d",
        "conv1d and ReLU, quantized": "quantized::conv1d_relu",
        "conv2d and ReLU, quantized": "quantized::conv2d_relu",
        "conv3d and ReLU, quantized": "quantized::conv3d_relu",
        "conv1d, quantized dynamically": "quantized::conv1d_dynamic",
        "conv2d, quantized dynamically": "quantized::conv2d_dynamic",
        "conv3d, quantized dynamically": "quantized::conv3d_dynamic",
        "conv_transpose1d, quantized": "quantized::conv_transpose1d",
        "conv_transpose2d, quantized": "quantized::conv_transpose2d",
        "conv_transpose3d, quantized": "quantized::conv_transpose3d",
        "conv_transpose1d, quantized dynamically": "quantized::conv_transpose1d_dynamic",
        "conv_transpose2d, quantized dynamically": "quantized::conv_transpose2d_dynamic",
        "conv_transpose3d, quantized dynamically": "quantized::conv_transpose3d_dynamic",
        "conv2d and a sum, quantized": "quantized::conv2d_add",
        "conv2d and a sum and ReLU, quantized": "quantized::conv2d_add_relu",
        "LSTM, quantized dynamically": "quantized_lstm",
        "GRU, quantized dynamically": "quantized_gru",
        "sparse.mm of rows, averaged": "_sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward",
        "conv2d": "convolution convolution_backward",
        "conv_tbc, time first": "conv_tbc",
        "_convolution": "_convolution",
        "mkldnn_convolution": "mkldnn_convolution",
        "_slow_conv2d_forward": "_slow_conv2d_forward _slow_conv2d_backward",
        "slow_conv3d_forward": "slow_conv3d_forward",
        "sdpa": """
            _scaled_dot_product_flash_attention_for_cpu
            _scaled_dot_product_flash_attention_for_cpu_backward
        """,
        "flex attention on blocks": "flex_attention",
        "varlen_attn": "torch_attn::_varlen_attn torch_attn::_varlen_attn_backward",
        "varlen_attn into a tensor": "torch_attn::_varlen_attn_out",
        "flash attention into a tensor": "_flash_attention_forward_no_dropout_inplace",
        "nested tensors, flash": "_flash_attention_forward _flash_attention_backward",
        "nested tensors, efficient": "_efficient_attention_forward _efficient_attention_backward",
        "MultiheadAttention in one kernel": "_native_multi_head_attention",
        "TransformerEncoderLayer in one kernel": "_transformer_encoder_layer_fwd",
        "LSTM": "mkldnn_rnn_layer mkldnn_rnn_layer_backward",
        "cdist of few rows": "_cdist_forward _cdist_backward",
        "distances to data": "_euclidean_dist",
        "pdist": "_pdist_forward _pdist_backward",
        "affine_grid": "affine_grid_generator",
        "normalisation of rows": "native_layer_norm native_layer_norm_backward",
        "normalisation of images": "native_group_norm native_group_norm_backward",
        "batch normalisation, evaluated": "native_batch_norm native_batch_norm_backward",
        "_native_batch_norm_legit": "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training": "_native_batch_norm_legit_no_training",
        "_batch_norm_with_update": "_batch_norm_with_update batch_norm_backward",
        "_batch_norm_no_update": "_batch_norm_no_update",
        "Fourier transforms": "_fft_c2c _fft_r2c _fft_c2r",
        "pooling in two dimensions": "max_pool2d_with_indices avg_pool2d fractional_max_pool2d",
        "pooling in three dimensions": "max_pool3d_with_indices avg_pool3d fractional_max_pool3d",
        "sums at indices": "index_add index_reduce scatter_add scatter_reduce",
        "sums in place": "index_add_ index_reduce_ scatter_add_ scatter_reduce_",
        "embedding bag, sum": "_embedding_bag _embedding_bag_backward",
        "embedding bag of frozen rows": "_embedding_bag_forward_only",
        "_embedding_bag_dense_backward": "_embedding_bag_dense_backward",
        "embedding with a largest norm": "embedding_renorm_",
        "cross entropy": "nll_loss_forward nll_loss_backward",
        "cross entropy of images": "nll_loss2d_forward nll_loss2d_backward",
        "sampling at a grid": "grid_sampler_2d grid_sampler_2d_backward",
        "sampling in a volume": "grid_sampler_3d grid_sampler_3d_backward",
    }
)
"""For each operator, the case with wrong counts if the operator's formula returns one MAC more."""

ELSEWHERE = by_operator(
    {
        "runs on NVIDIA's GPUs": """
            _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
            _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
            _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
            _cudnn_attention_forward _cudnn_attention_backward cudnn_convolution
            cudnn_convolution_relu cudnn_convolution_add_relu cudnn_convolution_transpose
            _conv_depthwise2d cudnn_batch_norm cudnn_batch_norm_backward _fused_rms_norm
            _fused_rms_norm_backward _cudnn_rnn _cudnn_rnn_backward _thnn_fused_lstm_cell
            _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell _thnn_fused_gru_cell_backward
            batch_norm_stats batch_norm_elemt batch_norm_gather_stats_with_counts
            batch_norm_backward_reduce batch_norm_backward_elemt _scaled_grouped_mm
            _scaled_grouped_mm_v2 _weight_int4pack_mm _cslt_sparse_mm _sparse_semi_structured_linear
            _sparse_semi_structured_mm _sparse_semi_structured_addmm flex_attention_backward
        """,
        "runs on AMD's GPUs": """
            miopen_convolution miopen_convolution_transpose miopen_batch_norm
            miopen_batch_norm_backward miopen_rnn miopen_rnn_backward
        """,
        "runs on Apple's GPUs": "_lstm_mps _scaled_dot_product_attention_math_for_mps",
        "runs on devices that other packages add": """
            convolution_overrideable convolution_backward_overrideable
            _scaled_dot_product_fused_attention_overrideable
            _scaled_dot_product_fused_attention_overrideable_backward
        """,
        "runs in an optimizer step, which no case has": """
            _fused_adam _fused_adam_ _fused_adamw _fused_adamw_ _fused_sgd _fused_sgd_
            _fused_adagrad _fused_adagrad_
        """,
        "is an operator of transformers, for versions of torch without such a kernel": """
            transformers::grouped_mm_fallback transformers::grouped_mm_fallback_backward
        """,
        "is an operator of another package": " ".join(registered()),
        "computes no matmul, and the cases only have MACs of matmuls": """
            linalg_solve_triangular triangular_solve linalg_cholesky_ex cholesky
            linalg_ldl_factor_ex linalg_lu linalg_lu_factor_ex _linalg_det _linalg_slogdet
            linalg_inv_ex cholesky_inverse _linalg_solve_ex _cholesky_solve_helper cholesky_solve
            linalg_lu_solve linalg_ldl_solve linalg_qr geqrf linalg_householder_product ormqr
            linalg_lstsq _linalg_eigh linalg_eig _linalg_eigvals _linalg_svd _ctc_loss
            _ctc_loss_backward _cudnn_ctc_loss miopen_ctc_loss multilabel_margin_loss_forward
            multilabel_margin_loss_backward _embedding_bag_per_sample_weights_backward
            quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d quantized::max_pool1d
            quantized::max_pool2d mkldnn_max_pool2d mkldnn_max_pool3d quantized::embedding_bag_byte
            quantized::embedding_bag_4bit quantized::embedding_byte quantized::embedding_4bit
            quantized::add_relu quantized::add_scalar quantized::add_scalar_relu quantized::mul_relu
            quantized::mul_scalar quantized::mul_scalar_relu quantized::batch_norm
            quantized::batch_norm_relu quantized::batch_norm1d quantized::batch_norm1d_relu
            quantized::batch_norm2d quantized::batch_norm2d_relu quantized::batch_norm3d
            quantized::batch_norm3d_relu quantized::layer_norm quantized::group_norm
            quantized::instance_norm quantized::softmax quantized::prelu onednn::qadd
            onednn::qadd_relu onednn::qmul onednn::qbatch_norm2d quantized::linear_prepack
            quantized::conv1d_prepack quantized::conv2d_prepack quantized::conv3d_prepack
            quantized::embedding_bag_byte_prepack quantized::embedding_bag_4bit_prepack
            quantized::conv_transpose1d_prepack quantized::conv_transpose2d_prepack
            quantized::conv_transpose3d_prepack onednn::qlinear_prepack onednn::qconv_prepack
        """,
        "is called only by torch itself, in compiled graphs or on other kinds of machines": """
            conv_depthwise3d slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d
            slow_conv_transpose3d _nnpack_spatial_convolution miopen_depthwise_convolution hspmm
            _mixed_dtypes_linear _weight_int4pack_mm_with_scales_and_zeros
            mkldnn_linear_backward_input mkldnn_linear_backward_weights quantized::matmul
            quantized::linear_relu_dynamic_fp16 quantized::linear_leaky_relu quantized::linear_tanh
            quantized::linear_with_input_q_dq_qweight_dq_output_fp32
            quantized::linear_with_input_q_dq_qweight_dq_relu_output_fp32 onednn::qlinear_pointwise
            onednn::linear_dynamic_fp16 onednn::linear_relu_dynamic_fp16 onednn::qconv_pointwise
            onednn::qconv1d_pointwise onednn::qconv2d_pointwise onednn::qconv3d_pointwise
        """,
    }
)
"""For each operator that no case can run, the reason. Its formula is tested only with shapes."""
