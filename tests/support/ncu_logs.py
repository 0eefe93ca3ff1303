"""Handmade logs in the documented format of Nsight Compute.

They were not recorded on a GPU. Their numbers are round, so that results are easy to check.
"""

from collections.abc import Mapping

FADD = "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum"
FMUL = "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum"
FFMA = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"

LOG = f"""\
==PROF== Connected to process 4242 (/usr/bin/python3.11)
==PROF== Profiling "sgemm_128x64_nn" - 0: 0%....50%....100% - 3 passes
epoch 0
==PROF== Profiling "vectorized_elementwise_kernel" - 1: 0%....50%....100% - 3 passes
==PROF== Disconnected from process 4242
[4242] python3.11@127.0.0.1
  sgemm_128x64_nn (8, 16, 1)x(128, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Section: Command line profiler metrics
    ---------------------------------------------------- ----------- ------------
    Metric Name                                          Metric Unit Metric Value
    ---------------------------------------------------- ----------- ------------
    dram__sectors_read.sum                                    sector        4,000
    dram__sectors_write.sum                                   sector        1,000
    gpu__time_duration.sum                                        us        10.00
    {FADD}     inst        1,000
    {FFMA}     inst    1,000,000
    {FMUL}     inst        7,000
    ---------------------------------------------------- ----------- ------------

  void at::native::vectorized_elementwise_kernel<4, AddOp>(int, T2, T3) (64, 1, 1)x(128, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Section: Command line profiler metrics
    ---------------------------------------------------- ----------- ------------
    Metric Name                                          Metric Unit Metric Value
    ---------------------------------------------------- ----------- ------------
    dram__sectors_read.sum                                   Ksector         3.00
    dram__sectors_write.sum                                   sector        2,000
    gpu__time_duration.sum                                   usecond         5.00
    {FADD}     inst       32,000
    {FFMA}     inst            0
    {FMUL}     inst            0
    ---------------------------------------------------- ----------- ------------

"""
"""The log of two kernels.

The first has 2,000,000 + 1,000 + 7,000 FLOPs and 5,000 sectors of DRAM in 10 µs, because an FMA is
two FLOPs. The second has 32,000 FLOPs and 5,000 sectors in 5 µs.
"""

_RANGES = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
_FACTS = '"ID","Process ID","Process Name","Host Name"'
_PLACE = '"Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name"'


def _stack(*names: str) -> str:
    """Return the NVTX ranges around a kernel, as Nsight Compute writes them."""
    pushed = " ".join(
        f'""<default domain>:{name}:none:none:none:none:none:none""' for name in names
    )
    return f'"4242  {pushed}"'


def _row(number: int, ranges: str, kernel: str, metric: tuple[str, str, str]) -> str:
    """Return a row of the CSV log: one metric of one kernel."""
    name, unit, value = metric
    process = f'"{number}","4242","python3.11","127.0.0.1"'
    place = '"1","7","(128, 1, 1)","(8, 16, 1)","0","9.0","Command line profiler metrics"'
    return f'{process},{ranges},"{kernel}",{place},"{name}","{unit}","{value}"'


GEMM = "sm90_gemm_bf16"
ADD = "void at::add<4>(int, T2, T3)"

# Metrics of tensor cores, by the dtype of their inputs.
BF16 = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"
FP16 = "sm__ops_path_tensor_src_fp16.sum"
FP8 = "sm__ops_path_tensor_src_fp8.sum"
INT8 = "sm__ops_path_tensor_src_int8.sum"
FP16_PARTS = (
    "sm__ops_path_tensor_src_fp16_dst_fp16.sum",
    "sm__ops_path_tensor_src_fp16_dst_fp32.sum",
)

_GEMM_METRICS = (
    (BF16, "inst", "8,000,000"),
    ("dram__sectors_read.sum", "sector", "600"),
    ("dram__sectors_write.sum", "sector", "400"),
    ("gpu__time_duration.sum", "ns", "2,000"),
    ("lts__t_bytes.sum", "Kbyte", "64.00"),
    ("l1tex__t_bytes.sum", "byte", "160,000"),
)
_ADD_METRICS = (
    (FADD, "inst", "1000"),
    ("dram__sectors_read.sum", "sector", "2000"),
    ("dram__sectors_write.sum", "sector", "1000"),
    ("gpu__time_duration.sum", "ns", "1,000"),
    (BF16, "", "0"),
    (FP16, "", "0"),
    *((metric, "", "n/a") for metric in FP16_PARTS),
)

CSV = "\n".join(
    [
        "==PROF== Connected to process 4242 (/usr/bin/python3.11)",
        f'{_FACTS},"{_RANGES}",{_PLACE},"Metric Name","Metric Unit","Metric Value"',
        *(_row(0, _stack("step", "blocks.0.linear"), GEMM, metric) for metric in _GEMM_METRICS),
        *(_row(2, _stack("step", "blocks.0.linear"), GEMM, metric) for metric in _GEMM_METRICS),
        *(_row(1, _stack("step"), ADD, metric) for metric in _ADD_METRICS),
        "==PROF== Disconnected from process 4242",
        "",
    ]
)
"""A CSV log with one row per metric.

There are two matmuls, each with 8,000,000 FLOPs, 32,000 bytes of DRAM, 64,000 bytes of L2 and
160,000 bytes of L1 in 2 µs. A kernel between them has 1,000 additions and 96,000 bytes in 1 µs. A
sector is 32 bytes.
"""

_RAW_FACTS = '"ID","Process ID","Kernel Name","Context"'

RAW = "\n".join(
    [
        f'{_RAW_FACTS},"dram__bytes.sum","gpu__time_duration.sum","{FFMA}"',
        '"","","","","Mbyte","msecond","inst"',
        '"0","4242","fused","1","2.00","1.50","500,000"',
        '"1","4242","fused","1","1.00","0.50","500,000"',
        "",
    ]
)
"""A CSV log with one row per kernel, as `--page raw` writes it.

The kernels have 1,000,000 FLOPs each. The first moves 2 MB in 1.5 ms, the second 1 MB in 0.5 ms.
"""


def of_one_kernel(capability: str, metrics: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the log of one kernel in three formats.

    The formats are CSV with one row per metric, CSV with one row per kernel, and plain text.

    Args:
        capability: The compute capability of the chip; empty if it is unknown.
        metrics: The metrics of the kernel.
    """
    by_metric = ['"ID","Kernel Name","CC","Metric Name","Metric Unit","Metric Value"']
    for name, value in metrics.items():
        by_metric.append(f'"0","k","{capability}","{name}","","{value}"')
    names = ",".join(f'"{name}"' for name in metrics)
    values = ",".join(f'"{value}"' for value in metrics.values())
    by_kernel = f'"ID","Kernel Name","CC",{names}\n"0","k","{capability}",{values}\n'
    chip = f", Device 0, CC {capability}" if capability else ""
    as_text = [f"  k (1, 1, 1)x(1, 1, 1), Context 1, Stream 7{chip}"]
    for name, value in metrics.items():
        as_text.append(f"    {name}    {value}")
    return "\n".join(by_metric), by_kernel, "\n".join(as_text)
