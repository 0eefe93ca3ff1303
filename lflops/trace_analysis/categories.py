"""What kind of work an operator or a kernel is, and what a kernel's name says about precision and tensor cores.

An operator's name decides where it is known, a kernel's name elsewhere: a conversion of layouts inside of a convolution is convolution.
"""

import functools
import re
from typing import Literal, get_args

from lflops.traces.device_states import communicates
from lflops.traces.recorded import DeviceWork

Category = Literal[
    "gemm",
    "convolution",
    "attention",
    "normalisation",
    "softmax",
    "reduction",
    "pointwise",
    "indexing",
    "optimizer",
    "communication",
    "copy",
    "fill",
    "other",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)


def _table(rows: dict[Category, str]) -> dict[str, Category]:
    return {name: category for category, names in rows.items() for name in names.split()}


_OPERATORS = _table(
    {
        "gemm": """
            mm addmm bmm baddbmm addbmm mv addmv dot vdot matmul linear einsum tensordot outer ger _scaled_mm _grouped_mm _int_mm
            _foreach_mm _addmm_activation _scaled_grouped_mm _weight_int8pack_mm _weight_int4pack_mm mkldnn_linear _trilinear
        """,
        "attention": "flex_attention flex_attention_backward",
        "normalisation": """
            native_layer_norm native_layer_norm_backward layer_norm native_batch_norm native_batch_norm_backward batch_norm
            _batch_norm_impl_index _batch_norm_with_update batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm
            miopen_batch_norm_backward native_group_norm native_group_norm_backward group_norm instance_norm rms_norm _fused_rms_norm
            _fused_rms_norm_backward batch_norm_stats batch_norm_elemt batch_norm_backward_reduce batch_norm_backward_elemt
            batch_norm_gather_stats_with_counts
        """,
        "softmax": "softmax _softmax _softmax_backward_data log_softmax _log_softmax _log_softmax_backward_data _safe_softmax",
        "reduction": """
            sum mean amax amin max min prod norm linalg_vector_norm var std var_mean std_mean all any argmax argmin cumsum cumprod logsumexp
            nansum count_nonzero _foreach_norm
        """,
        "indexing": """
            embedding embedding_dense_backward index index_select index_add index_add_ index_put index_put_ _index_put_impl_ gather scatter
            scatter_ scatter_add scatter_add_ take masked_select nonzero topk sort argsort _embedding_bag masked_scatter searchsorted
            _unique2 roll index_copy_
        """,
        "pointwise": """
            add sub mul div rsub neg exp log sqrt rsqrt pow abs sin cos tan tanh sigmoid relu gelu gelu_backward silu silu_backward
            threshold_backward sigmoid_backward tanh_backward hardtanh leaky_relu elu mish softplus clamp clamp_min clamp_max eq ne lt le gt
            ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not where masked_fill native_dropout dropout bernoulli
            native_dropout_backward addcmul addcdiv lerp reciprocal maximum minimum erf square sign floor ceil round remainder fmod atan2
            expm1 log1p isnan isinf isfinite hardswish hardsigmoid glu glu_backward mse_loss mse_loss_backward nll_loss_forward
            nll_loss_backward upsample_nearest1d upsample_nearest2d upsample_bilinear2d uniform normal random exponential randn rand randint
            tril triu _fused_dropout
        """,
        "copy": "copy_ _to_copy to contiguous clone cat stack repeat expand_copy constant_pad_nd pad",
        "fill": "fill_ zero_ zeros ones full arange zeros_like ones_like full_like",
        "optimizer": "_amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_",
    }
)
_PARTS: tuple[tuple[re.Pattern[str], Category], ...] = (
    (re.compile(r"Backward\d*$|^autograd::engine::"), "other"),
    (re.compile("attention|sdpa"), "attention"),
    (re.compile("conv(?!ert)"), "convolution"),
    (re.compile(r"^(_foreach_|_fused_(adam|sgd|adagrad)|Optimizer\.step)"), "optimizer"),
    (re.compile(r"pool\dd"), "reduction"),
    (re.compile("^(c10d::|_c10d_functional::|nccl:|record_param_comms)"), "communication"),
)
"""What the names of families of operators have in them; the first that is found decides."""

_KERNEL_PARTS: tuple[tuple[str, Category], ...] = (
    (r"embedding", "indexing"),
    (r"flash|fmha|attn|attention|sdpa|mha_", "attention"),
    (
        r"conv(?!ert)|implicit_gemm|implicit_convolve|winograd|dgrad|wgrad|fprop|nchwtonhwc|nhwctonchw|miopen(?!.*norm)|im2col|col2im|igemm",
        "convolution",
    ),
    (r"gemm|gemv|cijk_|cutlass|xmma|nvjet|cublas|splitk|dot_kernel|_mm_|^triton_mm|matmul", "gemm"),
    (r"(layer|batch|group|rms|instance)_?norm|bn_(fw|bw)|welford|_norm_", "normalisation"),
    (r"softmax", "softmax"),
    (r"multi_tensor_apply|adam|_sgd_|lamb", "optimizer"),
    (r"memcpy|catarray|copy_kernel|direct_copy|transpose", "copy"),
    (r"memset|fillfunctor|fill_kernel", "fill"),
    (r"index|gather|scatter|embedding|sort|radix|topk|nonzero", "indexing"),
    (r"reduce|reduction|triton_(red|per)_|cumsum|scan", "reduction"),
    (r"elementwise|pointwise|triton_poi|dropout|functor|activation", "pointwise"),
)
_KERNELS = tuple((re.compile(pattern, re.IGNORECASE), category) for pattern, category in _KERNEL_PARTS)

_TENSOR_CORES = re.compile(
    r"tensorop|[_sh](16816|1688|884|161616|16832|64x\d+x\d+)|wmma|hmma|imma|qmma|wgmma|gmma|sm\d+_xmma|nvjet|mfma|_MI\d+x\d+|"
    r"flash_fwd|flash_bwd|fmha|cudnn_generated_fort_native_sdpa|tcgen05|umma|mma_",
    re.IGNORECASE,
)
_NO_TENSOR_CORES = re.compile(r"simt|sgemm|dgemm|gemv|elementwise|reduce_kernel|layer_norm|softmax|gemmk1|ffma", re.IGNORECASE)

_PRECISIONS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), precision)
    for pattern, precision in (
        (r"e4m3|e5m2|float8|fp8", "fp8"),
        (r"bfloat16|bf16|__nv_bfloat16|_BBS_|_B_B", "bf16"),
        (r"__half|\bhalf\b|fp16|f16f16|h16816|h1688|_f16_|c10::half|_HHS_|hgemm", "fp16"),
        (r"tf32|s1688gemm(?!_)|s1688", "tf32"),
        (r"\bdouble\b|dgemm|f64", "fp64"),
        (r"sgemm|\bfloat\b|f32f32_f32|_f32_|_SB_", "fp32"),
        (r"\bimma|int8|s8s8", "int8"),
    )
)


@functools.lru_cache(1 << 16)
def category_of_operator(name: str) -> Category:
    """What kind of work an operator is, by its name; `other` where nothing here knows."""
    base = name.removeprefix("aten::")
    known = base if base in _OPERATORS else base.rstrip("_")
    if known in _OPERATORS:
        return _OPERATORS[known]
    return next((category for pattern, category in _PARTS if pattern.search(base)), "other")


def category_of_kernel(work: DeviceWork, operator: str | None) -> Category:
    """What kind of work a kernel is, by the operator that launched it or else by its own name."""
    if communicates(work):
        return "communication"
    if work.kind == "copy":
        return "copy"
    by_operator = category_of_operator(operator) if operator else "other"
    if by_operator != "other":
        return by_operator
    return "fill" if work.kind == "fill" else _category_by_name(work.name)


@functools.lru_cache(1 << 16)
def _category_by_name(name: str) -> Category:
    return next((category for pattern, category in _KERNELS if pattern.search(name)), "other")


@functools.lru_cache(1 << 16)
def tensor_cores_by_name(name: str) -> bool | None:
    """Whether a kernel runs on tensor or matrix cores; `None` where its name does not tell."""
    if _TENSOR_CORES.search(name):
        return True
    return False if _NO_TENSOR_CORES.search(name) else None


@functools.lru_cache(1 << 16)
def precision_by_name(name: str) -> str | None:
    """The precision that a kernel's name tells, as `hardware.DTYPES` call it."""
    return next((precision for pattern, precision in _PRECISIONS if pattern.search(name)), None)
