"""The convention for all that is no multiply-accumulate: it goes into FLOPs, never into MACs.

* A pointwise operator is one operation an element of its floating result, for every function; one that is two at once (`addcmul`,
  `lerp`) is two. Comparing, selecting and converting are none.
* A reduction is one operation an element of its floating input; a norm squares too, a variance subtracts, squares and needs the mean.
* Normalising is 5 an element (sum; subtract, square, sum; scale), 2 with known statistics, one more for a weight and one for a bias; its
  gradient is twice that. A root mean square saves the two of the mean.
* Softmax is 5 an element (largest; subtract, exponential, sum, divide), its gradient 4.
* A factorisation, and solving with a triangular matrix, are the leading terms of the textbook: `factorisations.py` lists them. Each step
  needs those before it: no matrix unit runs such a recurrence, so it would be wrong to count its multiply-accumulates as MACs.
* Pooling is one operation an element of each window; interpolating is 2 for each neighbour that it weighs.
"""

from collections.abc import Mapping


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _operations(table: Mapping[int, str]) -> dict[str, int]:
    return {name: operations for operations, text in table.items() for name in text.split()}


FREE = _names(
    """
    fsdp::record_grad_output_stream
    _assert_async _assert_scalar _assert_tensor_metadata _coalesced_ _conj _cudnn_init_dropout_state _dimI _dimV _efficientzerotensor
    _functional_assert_async _functional_assert_scalar _fused_sdp_choice _has_compatible_shallow_copy_type _has_same_storage_numel _indices
    _is_all_true _is_any_true _lazy_clone _linalg_check_errors _local_scalar_dense _make_dep_token _nested_get_jagged_dummy
    _nested_get_lengths _nested_get_max_seqlen _nested_get_min_seqlen _nested_get_offsets _nested_get_ragged_idx
    _nested_tensor_from_mask_left_aligned _nested_tensor_size _nested_tensor_storage_offsets _nested_tensor_strides _nnz _print
    _reshape_alias _resize_output_ _sparse_compressed_tensor_with_dims _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors
    _unsafe_view _values _version as_strided_ dense_dim detach_ empty empty_like empty_permuted empty_quantized empty_strided is_coalesced
    is_pinned is_same_size is_set_to lift lift_fresh new_empty new_empty_strided q_per_channel_axis q_per_channel_scales
    q_per_channel_zero_points q_scale q_zero_point qscheme record_stream resize_ resize_as_ scalar_tensor set_ sparse_dim squeeze_
    sym_constrain_range sym_constrain_range_for_size t_ transpose_ unsafe_split unsafe_split_with_sizes unsqueeze_
    """
)
"""No arithmetic and no traffic: allocations, views that are not marked as such, questions about a tensor."""

MOVES = _names(
    """
    fsdp::all_gather_copy_in fsdp::chunk_cat fsdp::chunk_cat_mixed_dtype fsdp::copy_ fsdp::split_with_sizes_copy _amp_update_scale_
    _chunk_cat _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo _convert_weight_to_int4pack_for_cpu _copy_from
    _copy_from_and_resize _dyn_quant_pack_4bit_weight _fill_mem_eff_dropout_mask_ _index_put_impl_ _jagged_to_padded_dense_forward
    _mkldnn_reshape _mkldnn_transpose _nested_from_padded _nested_tensor_from_mask _nested_tensor_from_tensor_list _pack_padded_sequence
    _padded_dense_to_jagged_forward _philox_key_fold_in _philox_key_split _philox_normal_ _philox_uniform_ _pin_memory _sample_dirichlet
    _sparse_mask_projection _spdiags _stack _standard_gamma _to_copy _to_dense _to_sparse _to_sparse_bsc _to_sparse_bsr _to_sparse_csc
    _to_sparse_csr _unique _unique2 _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d adaptive_max_pool2d_backward adaptive_max_pool3d_backward
    alias_copy all allclose any arange argsort as_strided_copy as_strided_scatter bartlett_window bernoulli bernoulli_ bincount binomial
    blackman_window block_diag bucketize cat cauchy_ channel_shuffle clone col2im complex constant_pad_nd copy copy_ copy_sparse_to_sparse_
    count_nonzero dequantize diag_embed diagonal_backward diagonal_copy diagonal_scatter embedding equal expand_copy exponential_ eye fill
    fill_ flip fractional_max_pool2d_backward fractional_max_pool3d_backward from_file full full_like gather geometric_ hamming_window
    hann_window histc histogram im2col index index_copy index_copy_ index_fill index_fill_ index_put index_put_ index_select int_repr isin
    kaiser_window kthvalue lift_fresh_copy linspace log_normal_ logspace lu_unpack masked_fill masked_fill_ masked_scatter masked_scatter_
    masked_scatter_backward masked_select max_pool2d_with_indices_backward max_pool3d_with_indices_backward max_unpool2d max_unpool3d median
    mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight mode multinomial nanmedian narrow_copy native_channel_shuffle new_full
    new_ones new_zeros nonzero nonzero_static normal normal_ ones ones_like permute_copy pixel_shuffle pixel_unshuffle poisson put put_
    quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic rand rand_like randint randint_like randn randn_like random random_
    randperm range reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d
    replication_pad3d roll rot90 scatter scatter_ searchsorted select_backward select_copy select_scatter slice_backward slice_copy
    slice_scatter sort sparse_mask split_copy split_with_sizes_copy squeeze_copy stack t_copy take to_mkldnn to_padded_tensor topk
    transpose_copy tril tril_ tril_indices triu triu_ triu_indices unbind_copy unfold_copy uniform uniform_ unique_consecutive unique_dim
    unsqueeze_copy upsample_nearest1d upsample_nearest2d upsample_nearest3d values_copy view_copy where zero zero_ zeros zeros_like
    """
)
"""Bytes and no arithmetic: copies, gathers, fills, sorts, random numbers."""

PER_OUTPUT = _operations(
    {
        1: """
            _add_relu _conj_physical _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_tensor_affine
            _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _prelu_kernel _prelu_kernel_backward _segment_reduce_backward copysign
            elu_backward fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask floor_divide gelu_backward
            glu_backward hardshrink_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward hypot leaky_relu
            leaky_relu_backward log_sigmoid_backward log_sigmoid_forward mish_backward native_dropout_backward rrelu_with_noise
            rrelu_with_noise_backward silu_backward softplus_backward softshrink_backward
        """,
        2: """
            _fused_dropout addcdiv addcmul addr glu huber_loss_backward lerp mse_loss_backward multi_margin_loss_backward native_dropout
            smooth_l1_loss_backward
        """,
        3: "_masked_scale binary_cross_entropy_backward linalg_cross polar soft_margin_loss_backward",
        4: "upsample_linear1d",
        8: "_upsample_bilinear2d_aa upsample_bilinear2d",
        16: "upsample_trilinear3d",
        32: "_upsample_bicubic2d_aa upsample_bicubic2d",
        72: "_upsample_lanczos2d_aa",
    }
)
"""Operations an element of the first result, where it is not the one of every pointwise operator."""

PER_INPUT = _operations(
    {
        1: """
            _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
            _amp_foreach_non_finite_check_and_unscale_ _cummax_helper _cummin_helper _upsample_nearest_exact1d_backward
            _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward adaptive_max_pool2d adaptive_max_pool3d amax amin argmax
            argmin avg_pool2d_backward avg_pool3d_backward cummax cummin cumprod cumsum embedding_dense_backward max mean min nansum
            prod reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
            replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward segment_reduce sum trace unfold_backward
            upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        """,
        2: "_aminmax aminmax linalg__powsum linalg_vector_norm norm",
        3: """
            _fake_quantize_learnable_per_channel_affine_backward _fake_quantize_learnable_per_tensor_affine_backward
            _fused_moving_avg_obs_fq_helper _weight_norm_interface dist mse_loss renorm
        """,
        4: """
            _log_softmax_backward_data _masked_softmax_backward _softmax_backward_data huber_loss logcumsumexp logsumexp multi_margin_loss
            smooth_l1_loss soft_margin_loss std std_mean upsample_linear1d_backward var var_mean
        """,
        5: "_log_softmax _masked_softmax _safe_softmax _softmax binary_cross_entropy binary_cross_entropy_with_logits",
        6: "_weight_norm_interface_backward",
        8: "_upsample_bilinear2d_aa_backward upsample_bilinear2d_backward",
        16: "upsample_trilinear3d_backward",
        32: "_upsample_bicubic2d_aa_backward upsample_bicubic2d_backward",
        72: "_upsample_lanczos2d_aa_backward",
    }
)
"""Operations an element of the first input."""
