"""Handmade logs in the documented format of Nsight Compute.

No GPU was used, and the numbers are round on purpose.
"""

from collections.abc import Mapping

FADD, FMUL, FFMA = (
    f"smsp__sass_thread_inst_executed_op_f{name}_pred_on.sum" for name in ("add", "mul", "fma")
)

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
"""FLOPs 2,000,000 + 1,000 + 7,000 in 10 µs, 5,000 sectors; and 32,000 in 5 µs, 5,000 sectors."""

_RANGES = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
_FACTS = '"ID","Process ID","Process Name","Host Name"'
_PLACE = '"Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name"'


def _stack(*names: str) -> str:
    pushed = " ".join(
        f'""<default domain>:{name}:none:none:none:none:none:none""' for name in names
    )
    return f'"4242  {pushed}"'


def _row(number: int, ranges: str, kernel: str, metric: tuple[str, str, str]) -> str:
    place = '"1","7","(128, 1, 1)","(8, 16, 1)","0","9.0","Command line profiler metrics"'
    return f'"{number}","4242","python3.11","127.0.0.1",{ranges},"{kernel}",{place},"{metric[0]}","{metric[1]}","{metric[2]}"'


GEMM, ADD = "sm90_gemm_bf16", "void at::add<4>(int, T2, T3)"
BF16, FP16 = "sm__ops_path_tensor_src_bf16_dst_fp32.sum", "sm__ops_path_tensor_src_fp16.sum"
FP8, INT8 = "sm__ops_path_tensor_src_fp8.sum", "sm__ops_path_tensor_src_int8.sum"
FP16_PARTS = tuple(f"sm__ops_path_tensor_src_fp16_dst_fp{bits}.sum" for bits in (16, 32))

CSV = "\n".join(
    [
        "==PROF== Connected to process 4242 (/usr/bin/python3.11)",
        f'{_FACTS},"{_RANGES}",{_PLACE},"Metric Name","Metric Unit","Metric Value"',
        *(
            _row(number, _stack("step", "blocks.0.linear"), GEMM, metric)
            for number in (0, 2)
            for metric in (
                (BF16, "inst", "8,000,000"),
                ("dram__sectors_read.sum", "sector", "600"),
                ("dram__sectors_write.sum", "sector", "400"),
                ("gpu__time_duration.sum", "ns", "2,000"),
                ("lts__t_bytes.sum", "Kbyte", "64.00"),
                ("l1tex__t_bytes.sum", "byte", "160,000"),
            )
        ),
        *(
            _row(1, _stack("step"), ADD, metric)
            for metric in (
                (FADD, "inst", "1000"),
                ("dram__sectors_read.sum", "sector", "2000"),
                ("dram__sectors_write.sum", "sector", "1000"),
                ("gpu__time_duration.sum", "ns", "1,000"),
                (BF16, "", "0"),
                (FP16, "", "0"),
                *((metric, "", "n/a") for metric in FP16_PARTS),
            )
        ),
        "==PROF== Disconnected from process 4242",
        "",
    ]
)
"""Two products of 8,000,000 FLOPs, each 32,000 bytes of DRAM, 64,000 of L2, 160,000 of L1 in 2 µs.

1,000 additions, 96,000 bytes, 1 µs.
"""

RAW = "\n".join(
    [
        '"ID","Process ID","Kernel Name","Context","dram__bytes.sum","gpu__time_duration.sum","'
        + FFMA
        + '"',
        '"","","","","Mbyte","msecond","inst"',
        '"0","4242","fused","1","2.00","1.50","500,000"',
        '"1","4242","fused","1","1.00","0.50","500,000"',
        "",
    ]
)
"""By kernel, as `--page raw` writes them: 2 MB in 1.5 ms and 1 MB in 0.5, 1,000,000 FLOPs each."""


def of_one_kernel(capability: str, metrics: Mapping[str, str]) -> tuple[str, str, str]:
    """A log of one kernel on a chip with a compute capability, or an unknown one.

    As CSV by metric, as CSV by kernel, and for people.
    """
    by_metric = [f'"0","k","{capability}","{name}","","{value}"' for name, value in metrics.items()]
    names, values = (
        ",".join(f'"{each}"' for each in column) for column in (metrics, metrics.values())
    )
    chip = f", Device 0, CC {capability}" if capability else ""
    return (
        "\n".join(
            ['"ID","Kernel Name","CC","Metric Name","Metric Unit","Metric Value"', *by_metric]
        ),
        f'"ID","Kernel Name","CC",{names}\n"0","k","{capability}",{values}\n',
        "\n".join(
            [
                f"  k (1, 1, 1)x(1, 1, 1), Context 1, Stream 7{chip}",
                *(f"    {name}    {value}" for name, value in metrics.items()),
            ]
        ),
    )
