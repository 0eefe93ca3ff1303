"""Test the category, the precision and the use of tensor cores of kernels and operators.

They are found from names that torch, cuDNN, cuBLAS, CUTLASS, Tensile and Triton use.
"""

from pathlib import Path

import pytest

from lflops.trace.analysis.categories import (
    CATEGORIES,
    category_of_kernel,
    category_of_operator,
    precision_by_name,
    tensor_cores_by_name,
)
from lflops.trace.analysis.summary import summarise
from lflops.trace.recorded import DeviceEvent
from tests.support.traces_by_hand import TraceByHand

KERNELS = [
    # Each row has the name, the category, the precision, and whether tensor cores are used.
    ("ampere_sgemm_128x64_nn", "gemm", "fp32", False),
    ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize32x32x8_stage3", "gemm", "tf32", True),
    (
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>(X::Params)",
        "gemm",
        "bf16",
        True,
    ),
    ("cutlass_80_simt_sgemm_128x32_8x5_nn_align1", "gemm", "fp32", False),
    ("sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize96x64x32", "gemm", "fp16", True),
    ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x3_nn", "gemm", "fp16", True),
    ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "gemm", None, True),
    ("Cijk_Alik_Bljk_HHS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1", "gemm", "fp16", True),
    (
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>",
        "gemm",
        "fp32",
        False,
    ),
    (
        "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw",
        "convolution",
        "tf32",
        True,
    ),
    (
        "cudnn_ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
        "convolution",
        None,
        None,
    ),
    (
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(X)",
        "convolution",
        "fp32",
        None,
    ),
    (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t> >(X)",
        "attention",
        "bf16",
        True,
    ),
    ("fmha_cutlassF_f16_aligned_64x64_rf_sm80", "attention", "fp16", True),
    # The name in cuDNN on an H100, in a training run in bfloat16.
    (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "attention",
        None,
        True,
    ),
    (
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1>(X)",
        "normalisation",
        "fp32",
        None,
    ),
    (
        "void at::native::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)",
        "normalisation",
        "bf16",
        False,
    ),
    (
        "void softmax_warp_forward<c10::Half, c10::Half, float, 7, false, false>(X)",
        "softmax",
        "fp16",
        False,
    ),
    (
        "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, FusedAdamMathFunctor<float, 4> >(X)",
        "optimizer",
        "fp32",
        None,
    ),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >",
        "pointwise",
        "fp32",
        False,
    ),
    ("triton_poi_fused_add_cos_sin_0", "pointwise", None, None),
    ("triton_red_fused_native_layer_norm_3", "normalisation", None, False),
    ("triton_per_fused_sum_1", "reduction", None, None),
    (
        "void split_embedding_codegen_forward_unweighted_kernel<float, float, int, 4>(X)",
        "indexing",
        "fp32",
        None,
    ),
    (
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 3>",
        "copy",
        None,
        None,
    ),
    (
        "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_bA32_bB32_bC32_t128x8x512_s7_et128x8_m128x8x32_cga1x1x1",
        "gemm",
        "mxfp4 × mxfp8",
        True,
    ),
    ("bmm_Bfloat16_MxE2m1MxE4m3_Fp32_bA32_t128x16x512", "gemm", "mxfp4 × mxfp8", True),
    ("bmm_E4m3_Bfloat16Bfloat16_Fp32_t128x16x512", "gemm", "bf16", True),
    ("cutlass3x_sm100_tensorop_gemm_e3m2_e2m3_f32_bf16", "gemm", "fp6", True),
    ("void cutlass_sm90_wgmma_e4m3_e5m2_bf16", "gemm", "fp8", True),
    ("nvfp4_gemm_kernel_sm100", "gemm", "nvfp4", None),
    ("mystery", "other", None, None),
]


@pytest.mark.parametrize(("name", "category", "precision", "tensor_cores"), KERNELS)
def test_a_kernel_without_an_operator_is_known_by_its_name(
    name: str, category: str, precision: str | None, tensor_cores: object
) -> None:
    """The properties of a kernel without an operator are found from its name, or are unknown."""
    work = DeviceEvent("kernel", name, 0, 7, 0, 1, 1, 0)
    assert (category, precision, tensor_cores) == (
        category_of_kernel(work, None),
        precision_by_name(name),
        tensor_cores_by_name(name),
    )


OPERATORS = {
    "aten::addmm": "gemm",
    "aten::_scaled_mm": "gemm",
    "aten::cudnn_convolution": "convolution",
    "aten::convolution_backward": "convolution",
    "aten::_flash_attention_forward": "attention",
    "aten::_scaled_dot_product_efficient_attention_backward": "attention",
    "aten::native_layer_norm_backward": "normalisation",
    "aten::cudnn_batch_norm": "normalisation",
    "aten::_softmax": "softmax",
    "aten::sum": "reduction",
    "aten::max_pool2d_with_indices_backward": "reduction",
    "aten::add_": "pointwise",
    "aten::threshold_backward": "pointwise",
    "aten::embedding_dense_backward": "indexing",
    "aten::_foreach_addcdiv_": "optimizer",
    "aten::_fused_adamw_": "optimizer",
    "aten::copy_": "copy",
    "aten::zero_": "fill",
    "c10d::allreduce_": "communication",
    "AddmmBackward0": "other",
    "autograd::engine::evaluate_function: ConvolutionBackward0": "other",
    "my::op": "other",
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_known_by_its_name(name: str) -> None:
    """The category of an operator is found from its name.

    An autograd node has the category `other`, because the operators that it calls have categories.
    """
    assert OPERATORS[name] == category_of_operator(name)
    assert OPERATORS[name] in CATEGORIES


def test_the_operator_decides_where_it_is_known(tmp_path: Path) -> None:
    """A kernel has the category of its operator, if that is known.

    A layout change within a convolution is convolution, and has the precision of the inputs. A
    collective stays communication.
    """
    trace = TraceByHand()
    trace.operator(
        "aten::cudnn_convolution",
        0,
        100,
        shapes=[[1, 3, 8, 8], [4, 3, 3, 3]],
        types=["c10::Half", "c10::Half"],
    )
    trace.kernel("nchwToNhwcKernel", 100, 130, launch=(10, 20))
    trace.kernel("sm80_xmma_fprop", 130, 200, launch=(30, 40))
    trace.kernel("ncclDevKernel_Broadcast", 200, 300, launch=(50, 60))
    trace.kernel("triton_poi_fused_add_0", 300, 350, launch=(150, 160))
    found = summarise(trace.read(tmp_path))
    assert [("convolution", 100, 2), ("communication", 100, 1), ("pointwise", 50, 1)] == [
        (row.category, row.device, row.calls) for row in found.categories
    ]
    assert [("fp16", 100, 70), (None, 50, 0)] == [
        (row.precision, row.device, row.tensor_cores) for row in found.precisions
    ]
    kernel = next(row for row in found.kernels if row.name == "nchwToNhwcKernel")
    assert ("aten::cudnn_convolution",) == kernel.operators


def test_tf32_is_told_by_the_kernel_and_not_by_its_inputs(tmp_path: Path) -> None:
    """TF32 is found from the kernel's name, because the inputs are in fp32."""
    trace = TraceByHand()
    trace.operator("aten::mm", 0, 100, shapes=[[2, 3], [3, 4]])
    trace.kernel("sm80_xmma_gemm_f32f32_tf32f32_f32_nn", 100, 130, launch=(10, 20))
    assert [("tf32", 30, 30)] == [
        (row.precision, row.device, row.tensor_cores)
        for row in summarise(trace.read(tmp_path)).precisions
    ]


def test_a_custom_matmul_of_packed_operands_is_not_what_its_first_input_is(tmp_path: Path) -> None:
    """The precision of a custom matmul is not that of its first input.

    Its bfloat16 input is the activations. The precision of a kernel whose name does not show it is
    unknown.
    """
    trace = TraceByHand()
    trace.operator("trtllm::fp4_block_scale_moe", 0, 100, shapes=[[8, 64]], types=["c10::BFloat16"])
    trace.kernel("bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128", 100, 140, launch=(10, 20))
    trace.kernel("gemm_kernel_0", 140, 150, launch=(30, 40))
    found = summarise(trace.read(tmp_path))
    assert {("mxfp4 × mxfp8", 40, 40), (None, 10, 0)} == {
        (row.precision, row.device, row.tensor_cores) for row in found.precisions
    }
