"""Stand-ins for operators of packages that tests cannot install, with the same schemas.

Their results are not used. The schemas come from the packages' sources as of summer 2026. Those of
xformers come from version 0.0.30, and those of its CUTLASS operators from earlier releases.
"""

from typing import Any

import torch

__all__ = ["operator", "registered"]

_QKV = "Tensor q, Tensor k, Tensor v"
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k"
_WINDOW = "int window_size_left, int window_size_right"
_WINDOW_3 = "int window_size_left=-1, int window_size_right=-1"
_GRADIENTS = "Tensor(dq!)? dq, Tensor(dk!)? dk, Tensor(dv!)? dv"
_SAVED = "Tensor out, Tensor softmax_lse"
_END = "float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None"
_KEYS_3 = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None"
)
_SIZES_3 = "int? max_seqlen_q=None, int? max_seqlen_k=None"
_EXTRAS_3 = (
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None"
)
_SCALES_3 = (
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None"
)
_QUERIES = "Tensor query, Tensor key, Tensor value"
_OF_XFORMERS = (
    "int max_seqlen_q, int max_seqlen_k, float p, float softmax_scale, bool is_causal, "
    "int window_left, int window_right"
)
_STARTS = "Tensor? attn_bias, Tensor? seqstart_q, Tensor? seqstart_k"
_EFFICIENT = (
    "float dropout_p, bool compute_logsumexp, int custom_mask_type, float? scale, "
    "Tensor? seqlen_k, int? window_size"
)
_RANDOM = "float dropout_p, int rng_seed, int rng_offset, int custom_mask_type, float? scale"
_CONVOLUTION = "Tensor x, Tensor weight, Tensor? bias"
_STATES = "Tensor(a!) g, Tensor(b!) p, Tensor(c!) state1, Tensor(d!)? state2"
_TABLES = (
    "Tensor host_weights, Tensor dev_weights, Tensor uvm_weights, Tensor lxu_cache_weights, "
    "Tensor weights_placements, Tensor weights_offsets, Tensor D_offsets, SymInt total_D, "
    "SymInt max_D, Tensor hash_size_cumsum, Tensor indices, Tensor offsets, int pooling_mode, "
    "Tensor indice_weights, Tensor lxu_cache_locations, Tensor(f!) uvm_cache_stats, "
    "bool is_experimental, int output_dtype"
)
_BETAS = "float beta1, float beta2, float beta3, float alpha, float eps"

SCHEMAS = f"""
flash_attn::_flash_attn_forward({_QKV}, float dropout_p, float softmax_scale, bool causal, {_WINDOW}, float softcap, Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)
flash_attn::_flash_attn_varlen_forward({_QKV}, {_LENGTHS}, float dropout_p, float softmax_scale, bool causal, {_WINDOW_3}, float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False, int num_splits=0) -> (Tensor, Tensor, Tensor, Tensor)
flash_attn::_flash_attn_backward(Tensor dout, {_QKV}, {_SAVED}, {_GRADIENTS}, float dropout_p, float softmax_scale, bool causal, {_WINDOW}, {_END}) -> Tensor
flash_attn::_flash_attn_varlen_backward(Tensor dout, {_QKV}, {_SAVED}, {_GRADIENTS}, {_LENGTHS}, float dropout_p, float softmax_scale, bool causal, {_WINDOW}, {_END}, bool zero_tensors=False) -> Tensor
flash_attn_3::fwd({_QKV}, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, Tensor? out=None, {_KEYS_3}, {_SIZES_3}, Tensor? page_table=None, {_EXTRAS_3}, {_SCALES_3}, bool is_causal=False, {_WINDOW_3}, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)
flash_attn_3::_flash_attn_forward({_QKV}, Tensor? k_new=None, Tensor? v_new=None, Tensor? qv=None, Tensor? out_=None, {_KEYS_3}, {_SIZES_3}, Tensor? page_table=None, {_EXTRAS_3}, {_SCALES_3}, bool causal=False, {_WINDOW_3}, int attention_chunk=0, float softcap=0.0, bool rotary_interleaved=True, Tensor? scheduler_metadata=None, int num_splits=1, bool? pack_gqa=None, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)
flash_attn_3::bwd(Tensor dout, {_QKV}, {_SAVED}, Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, {_SIZES_3}, float? softmax_scale=None, bool is_causal=False, {_WINDOW_3}, float softcap=0.0, bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
flash_attn_3::_flash_attn_backward(Tensor dout, {_QKV}, {_SAVED}, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? sequed_q=None, Tensor? sequed_k=None, {_SIZES_3}, Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, float? softmax_scale=None, bool is_causal=False, {_WINDOW_3}, float softcap=0.0, bool deterministic=False, int sm_margin=0) -> Tensor
xformers_flash::flash_fwd({_QUERIES}, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, {_OF_XFORMERS}, bool return_softmax, Tensor? block_tables) -> (Tensor, Tensor, Tensor)
xformers_flash3::flash_fwd({_QUERIES}, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, {_OF_XFORMERS}, Tensor? descale_q=None, Tensor? descale_k=None, Tensor? descale_v=None, Tensor? block_table=None, bool use_kvsplit=False) -> (Tensor, Tensor)
xformers_flash::flash_bwd(bool grads_share_storage, Tensor grad, {_QUERIES}, Tensor out, Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, {_OF_XFORMERS}, Tensor rng_state) -> (Tensor, Tensor, Tensor)
xformers::efficient_attention_forward_cutlass({_QUERIES}, {_STARTS}, int? max_seqlen_q, {_EFFICIENT}) -> (Tensor, Tensor, int, int)
xformers::efficient_attention_forward_ck({_QUERIES}, {_STARTS}, int? max_seqlen_q, {_EFFICIENT}, Tensor? block_tables, int? page_size) -> (Tensor, Tensor?, int, int)
xformers::efficient_attention_backward_cutlass(Tensor grad_out, {_QUERIES}, {_STARTS}, int max_seqlen_q, int max_seqlen_k, Tensor logsumexp, Tensor output, {_RANDOM}, int num_splits_key, int? window_size) -> (Tensor, Tensor, Tensor, Tensor)
xformers::efficient_attention_backward_ck(Tensor grad_out, {_QUERIES}, {_STARTS}, int? max_seqlen_q, int? max_seqlen_k, Tensor? seqlen_k, Tensor logsumexp, Tensor output, {_RANDOM}, int? window_size) -> (Tensor, Tensor, Tensor, Tensor)
DaoAILab::_causal_conv1d_fwd_cpp({_CONVOLUTION}, Tensor? seq_idx, Tensor? initial_states, Tensor(a!) out, Tensor(b!)? final_states_out, bool silu_activation) -> ()
DaoAILab::_causal_conv1d_bwd_cpp({_CONVOLUTION}, Tensor dout, Tensor? seq_idx, Tensor? initial_states, Tensor(a!)? dfinal_states, Tensor(b!) dx, Tensor(c!) dweight, Tensor(d!)? dbias, Tensor(e!) dinitial_states, bool silu_activation) -> ()
DaoAILab::_causal_conv1d_update_cpp(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor(b!) out, bool silu_activation, Tensor? cache_seqlens, Tensor? conv_state_indices) -> ()
bitsandbytes::int8_mixed_scaled_mm(Tensor A, Tensor CA, Tensor CB, Tensor SCA, Tensor SCB, Tensor? outlier_cols=None, Tensor? bias=None) -> (Tensor, Tensor?)
bitsandbytes::int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, Tensor? bias=None, ScalarType? dtype=None) -> Tensor
bitsandbytes::int8_linear_matmul(Tensor A, Tensor B) -> Tensor
bitsandbytes::int8_vectorwise_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor?)
bitsandbytes::int8_vectorwise_dequant(Tensor A, Tensor stats) -> Tensor
bitsandbytes::int8_mm_dequant(Tensor A, Tensor row_stats, Tensor col_stats, ScalarType? dtype=None, Tensor? bias=None) -> Tensor
bitsandbytes::int8_double_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor, Tensor, Tensor?)
bitsandbytes::dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype) -> Tensor
bitsandbytes::quantize_4bit(Tensor A, int blocksize, str quant_type, ScalarType quant_storage) -> (Tensor, Tensor)
bitsandbytes::gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, Tensor? bias=None, Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor
bitsandbytes::gemv_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize) -> Tensor
bitsandbytes::dequantize_blockwise(Tensor A, Tensor absmax, Tensor code, int blocksize, ScalarType dtype) -> Tensor
bitsandbytes::quantize_blockwise(Tensor A, Tensor code, int blocksize) -> (Tensor, Tensor)
bitsandbytes::optimizer_update_32bit(str optimizer_name, {_STATES}, Tensor(e!)? unorm_vec, float max_unorm, float param_norm, {_BETAS}, float weight_decay, int step, float lr, float gnorm_scale, bool skip_zeros=False) -> ()
bitsandbytes::optimizer_update_8bit_blockwise(str optimizer_name, {_STATES}, {_BETAS}, int step, float lr, Tensor(e!) qmap1, Tensor(f!)? qmap2, Tensor(g!) absmax1, Tensor(h!)? absmax2, float weight_decay, float gnorm_scale, bool skip_zeros=False) -> ()
torchao::rowwise_scaled_linear_sparse_cutlass_f8f8(Tensor input, Tensor input_scale, Tensor weight, Tensor weight_meta, Tensor weight_scale, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor
torchao::to_sparse_semi_structured_cutlass_sm9x_f8(Tensor weight) -> (Tensor, Tensor)
torchao::mx_fp8_bf16(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale) -> Tensor
torchao::blockwise_scaled_mm(Tensor a, Tensor b, Tensor a_s, int scale_recipe_a, Tensor b_s, int scale_recipe_b, ScalarType out_dtype) -> Tensor
torchao::qscaled_dot_product({_QUERIES}, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, float? scale=None, float q_scale=1.0, int q_zp=0, float k_scale=1.0, int k_zp=0, float v_scale=1.0, int v_zp=0, float a_scale=1.0, int a_zp=0, float o_scale=1.0, int o_zp=0) -> Tensor
torchao::da8w4_linear_prepack_cpu(Tensor weight, Tensor scales, Tensor qzeros) -> (Tensor, Tensor, Tensor, Tensor)
torchao::da8w4_linear_cpu(Tensor input, Tensor input_scales, Tensor input_qzeros, Tensor weight, Tensor weight_scales, Tensor weight_qzeros, Tensor compensation, Tensor? bias, ScalarType output_dtype) -> Tensor
torchao::_scaled_embedding_bag(Tensor qweight, Tensor indices, Tensor offsets, Tensor weight_scale, float o_scale, int mode, bool include_last_offset, ScalarType output_dtype) -> Tensor
torchao::float8_linear_prepack_cpu(Tensor weight, Tensor scales) -> (Tensor, Tensor)
torchao::float8_linear_cpu(Tensor input, Tensor input_scales, Tensor weight, Tensor weight_scales, Tensor? bias, ScalarType output_dtype) -> Tensor
fbgemm::jagged_dense_bmm(Tensor x_values, Tensor x_offsets, Tensor y, int max_L) -> (Tensor, Tensor)
fbgemm::jagged_dense_bmm_forward(Tensor x_values, Tensor x_offsets, Tensor y, int max_L) -> Tensor
fbgemm::jagged_jagged_bmm(Tensor x_values, Tensor y_values, Tensor x_offsets, int max_L) -> Tensor
fbgemm::jagged_jagged_bmm_forward(Tensor x_values, Tensor y_values, Tensor x_offsets, int max_L) -> Tensor
fbgemm::batched_dense_vec_jagged_2d_mul(Tensor v, Tensor a_values, Tensor a_offsets) -> Tensor
fbgemm::batched_dense_vec_jagged_2d_mul_forward(Tensor v, Tensor a_values, Tensor a_offsets) -> Tensor
fbgemm::batched_dense_vec_jagged_2d_mul_backward(Tensor grad_output, Tensor v, Tensor a_values, Tensor a_offsets) -> (Tensor, Tensor)
fbgemm::jagged_softmax(Tensor values, Tensor x_offsets, int max_L) -> (Tensor, Tensor)
fbgemm::jagged_softmax_forward(Tensor values, Tensor x_offsets, int max_L) -> Tensor
fbgemm::jagged_softmax_backward(Tensor grad_output, Tensor output, Tensor x_offsets, int max_L) -> Tensor
fbgemm::jagged_dense_elementwise_add(Tensor x_values, Tensor[] x_offsets, Tensor y) -> Tensor
fbgemm::jagged_dense_elementwise_add_jagged_output(Tensor x_values, Tensor[] x_offsets, Tensor y) -> (Tensor, Tensor[])
fbgemm::jagged_dense_elementwise_mul(Tensor x_values, Tensor[] x_offsets, Tensor y) -> (Tensor, Tensor[])
fbgemm::jagged_dense_elementwise_mul_forward(Tensor x_values, Tensor[] x_offsets, Tensor y) -> Tensor
fbgemm::jagged_dense_elementwise_mul_backward(Tensor grad_output, Tensor[] x_offsets, Tensor y, Tensor x_values) -> (Tensor, Tensor)
fbgemm::jagged_to_padded_dense(Tensor values, Tensor[] offsets, SymInt[] max_lengths, float padding_value=0) -> Tensor
fbgemm::jagged_to_padded_dense_forward(Tensor values, Tensor[] offsets, SymInt[] max_lengths, float padding_value=0) -> Tensor
fbgemm::jagged_to_padded_dense_backward(Tensor grad_output, Tensor[] offsets, SymInt total_L) -> Tensor
fbgemm::dense_to_jagged(Tensor dense, Tensor[] x_offsets, SymInt? total_L=None) -> (Tensor, Tensor[])
fbgemm::dense_to_jagged_forward(Tensor dense, Tensor[] x_offsets, SymInt? total_L=None) -> Tensor
fbgemm::jagged_index_select_2d_forward(Tensor values, Tensor indices, Tensor input_offsets, Tensor output_offsets, int num_dense_output_rows) -> Tensor
fbgemm::jagged_slice_forward(Tensor x_values, Tensor x_lengths, Tensor src_start, Tensor output_lengths, Tensor tgt_start, int num_output_rows, int slice_length, bool fill_zeros) -> Tensor
fbgemm::stacked_jagged_2d_to_dense_forward(Tensor values, Tensor lengths, int[] offset_per_key, int[] max_lengths_per_key, int padding_value=0) -> (Tensor[], Tensor[])
fbgemm::dense_embedding_codegen_lookup_function(Tensor dev_weights, Tensor weights_offsets, Tensor D_offsets, SymInt total_D, SymInt max_D, Tensor hash_size_cumsum, int total_hash_size_bits, Tensor indices, Tensor offsets, int pooling_mode, Tensor? indice_weights, Tensor? feature_requires_grad, int output_dtype=0, Tensor? B_offsets=None, Tensor? vbe_output_offsets_feature_rank=None, Tensor? vbe_B_offsets_rank_per_feature=None, SymInt max_B=-1, SymInt max_B_feature_rank=-1, SymInt vbe_output_size=-1, bool mixed_D=True) -> Tensor
fbgemm::split_embedding_codegen_forward_unweighted_pt2_wrapper({_TABLES}) -> Tensor
fbgemm::split_embedding_codegen_forward_weighted_pt2_wrapper({_TABLES}) -> Tensor
fbgemm::bounds_check_indices(Tensor rows_per_table, Tensor(a!) indices, Tensor(b!) offsets, int bounds_check_mode, Tensor(c!) warning, Tensor(d!)? weights=None, Tensor? B_offsets=None, SymInt max_B=-1, Tensor? b_t_map=None, int info_B_num_bits=-1, int info_B_mask=-1, int bounds_check_version=1, bool prefetch_pipeline=False) -> ()
"""
BITS = "Tensor activations, Tensor packed_weights, int group_size, int n, int k"
ALL = [
    *filter(None, map(str.strip, SCHEMAS.splitlines())),
    *(f"torchao::_linear_8bit_act_{bits}bit_weight({BITS}) -> Tensor" for bits in range(1, 9)),
]

result_shape: tuple[int, ...] = (1,)
"""Shape of every single tensor that a stand-in returns. Tests replace it."""
_LIBRARIES: dict[str, torch.library.Library] = {}


def operator(name: str) -> Any:
    """Return the operator of this name, such as `flash_attn_3::fwd`."""
    namespace, _, short = name.partition("::")
    return getattr(getattr(torch.ops, namespace), short).default


def _result_of_type(kind: str) -> Any:
    """Return a result of a type of torch's schemas."""
    results = {
        "Tensor": torch.zeros(result_shape),
        "List[Tensor]": [torch.zeros(1)],
        "int": 0,
        "Optional[Tensor]": None,
    }
    return results[kind]


def _stand_in(name: str) -> Any:
    """Return a kernel whose results have the types in the schema of the operator."""

    def kernel(*_: Any, **__: Any) -> Any:
        returns = operator(name)._schema.returns
        results = [_result_of_type(str(each.type)) for each in returns]
        if not results:
            return None
        if len(results) == 1:
            return results[0]
        return tuple(results)

    return kernel


def registered() -> list[str]:
    """Register stand-ins for operators that are not installed, and return the names of all."""
    names = []
    for schema in ALL:
        namespace, _, rest = schema.partition("::")
        short = rest.partition("(")[0]
        name = f"{namespace}::{short}"
        names.append(name)
        if not hasattr(getattr(torch.ops, namespace), short):
            library = _LIBRARIES.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
            library.define(rest)
            torch.library.impl(name, "CompositeExplicitAutograd", _stand_in(name), lib=library)
    return names
