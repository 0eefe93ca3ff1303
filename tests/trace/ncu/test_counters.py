"""Test how the metrics of Nsight Compute become FLOPs, bytes and rates.

FLOPs are 2 x FMA + ADD + MUL, and a sector has 32 bytes.
"""

import json
from pathlib import Path

import pytest

from lflops.cli.main import main
from lflops.errors import LflopsError
from lflops.hardware.chips import Hardware
from lflops.report.text import kernel_name
from lflops.trace.ncu.kernels import METRICS, Kernel, Measured, command, read
from lflops.trace.ncu.log import launches_in
from tests.support.ncu_logs import (
    ADD,
    BF16,
    CSV,
    FADD,
    FFMA,
    FP8,
    FP16,
    FP16_PARTS,
    GEMM,
    INT8,
    LOG,
    RAW,
    of_one_kernel,
)
from tests.support.profile_builders import profile, run

H100_PRODUCTS = Path(__file__).with_name("h100_products.csv")
H100_TENSOR_CORES = Path(__file__).with_name("h100_tensor_cores.csv")
MACS = 4096 * 1024 * 2048
"""MACs of each matmul that ran on the H100: 4096 x 1024 by 1024 x 2048."""

CHIP = Hardware("chip", {"fp32": 1e12, "bf16": 8e12}, 32e9)


def by_name(measured: Measured) -> dict[str, Kernel]:
    """Return the kernels by name. All names must be different."""
    return {kernel.name: kernel for kernel in measured.kernels}


def figures(kernel: Kernel) -> tuple[float, float | None, float | None, float | None]:
    """Return the FLOPs, bytes of DRAM, intensity and FLOP/s of a kernel."""
    dram = kernel.levels["dram"]
    return kernel.flops, dram.bytes, dram.intensity, kernel.flops_per_second


def test_a_log_is_read_kernel_by_kernel() -> None:
    """Each kernel of a log has its FLOPs, bytes and rates.

    The first has 2 x 1,000,000 + 1,000 + 7,000 FLOPs and 32 x 5,000 bytes in 10 µs. The second has
    32,000 FLOPs and as many bytes in 5 µs.
    """
    found = by_name(read(LOG))
    gemm = found["sgemm_128x64_nn"]
    assert (2_008_000, 160_000, 12.55, pytest.approx(2_008_000 / 1e-5)) == figures(gemm)
    add = found["void at::native::vectorized_elementwise_kernel<4, AddOp>(int, T2, T3)"]
    assert (32_000, 160_000, 0.2, pytest.approx(32_000 / 5e-6)) == figures(add)


def test_all_kernels_are_one_application() -> None:
    """The total is the sum of all kernels.

    2,040,000 FLOPs and 320,000 bytes are 6.375 FLOPs per byte, and in 15 µs 136 GFLOP/s.
    """
    total = read(LOG).total
    assert (2_040_000, 320_000, 6.375, pytest.approx(136e9)) == figures(total)
    assert (2, {"fp32": 2_040_000}) == (total.launches, total.flops_by_dtype)


def test_the_gpu_s_running_time_takes_the_place_of_the_kernels() -> None:
    """If the running time of the GPU is passed, the total rate refers to it.

    With 20.4 µs, as Nsight Systems measures, the rate is 100 GFLOP/s. Each kernel keeps its time.
    """
    measured = read(LOG, gpu_seconds=20.4e-6)
    assert pytest.approx(100e9) == measured.total.flops_per_second
    assert pytest.approx(1e-5) == by_name(measured)["sgemm_128x64_nn"].seconds


def test_tensor_cores_operations_are_flops() -> None:
    """Operations of tensor cores are FLOPs and are not doubled, unlike FMAs.

    Two launches have 8,000,000 each. For fp16, the log has only one form of the metric.
    """
    found = by_name(read(CSV))
    gemm = found[GEMM]
    assert {"bf16": 16_000_000} == gemm.flops_by_dtype
    assert (2, pytest.approx(4e-6)) == (gemm.launches, gemm.seconds)
    assert {"fp32": 1000} == found[ADD].flops_by_dtype


def test_half_and_double_are_counted_as_single_is() -> None:
    """Half and double precision are counted in the same way as single precision.

    3 FMAs, 2 additions and 1 multiplication are 9 FLOPs.
    """
    lines = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    for letter in "hd":
        for name, number in (("fma", 3), ("add", 2), ("mul", 1)):
            metric = f"smsp__sass_thread_inst_executed_op_{letter}{name}_pred_on.sum"
            lines.append(f'"0","k","{metric}","inst","{number}"')
    assert {"fp16": 9, "fp64": 9} == read("\n".join(lines)).total.flops_by_dtype


def test_an_h100_counts_two_operations_a_mac() -> None:
    """The metrics of an H100 for fp16 and fp8 count two operations per MAC."""
    found = read(H100_TENSOR_CORES.read_text()).kernels
    assert [{"fp16": 2 * MACS}, {"fp8": 2 * MACS}] == [kernel.flops_by_dtype for kernel in found]
    assert [2 * MACS] * 2 == [kernel.flops for kernel in found]


def test_an_h100_without_a_count_of_fp16_has_no_flops() -> None:
    """If the fp16 operations of an H100 were not counted, all of its FLOPs are unknown.

    The log does not have the form of the fp16 metric that an H100 provides. The FLOPs of other
    dtypes are known: for each output, fp32 and tf32 have 2 FLOPs in addition, and fp64 has 1.
    """
    outputs = 4096 * 2048
    chip = Hardware("chip", {"fp16": 1e15, "bf16": 1e15}, 3e12)
    found = by_name(read(H100_PRODUCTS.read_text(), chip=chip))
    known = {
        "nvjet_sm90_tst": {"bf16": 2 * MACS},
        "sm90_xmma_gemm_f32f32_tf32": {
            "tf32": 2 * MACS,
            "fp32": pytest.approx(2 * outputs, rel=0.01),
        },
        "sm80_xmma_gemm_f32f32_f32f32": {"fp32": 2 * MACS + 2 * outputs},
        "sm90_xmma_gemm_f64": {"fp64": 2 * MACS + outputs},
        "nvjet_sm90_hsh": {},
    }
    assert len(known) == len(found)
    for start, by_dtype in known.items():
        (kernel,) = (kernel for name, kernel in found.items() if name.startswith(start))
        assert {**by_dtype, "fp16": None} == kernel.flops_by_dtype
        assert (None, None) == (kernel.flops, kernel.flops_per_second)
        assert (None, None) == (kernel.bound, kernel.share)
        assert kernel.seconds


def test_the_bf16_product_of_an_h100_moves_its_sectors() -> None:
    """The bf16 matmul moves 393,944 + 35,720 sectors of 32 bytes in 32.992 µs."""
    kernels = read(H100_PRODUCTS.read_text()).kernels
    (kernel,) = (kernel for kernel in kernels if "tst" in kernel.name)
    assert (393_944 + 35_720) * 32 == kernel.levels["dram"].bytes
    assert pytest.approx(32.992e-6) == kernel.seconds


@pytest.mark.parametrize(
    ("capability", "metrics", "expected"),
    [
        # The two forms of the fp16 metric are not added up.
        ("9.0", {FP16: "8", FP16_PARTS[0]: "3", FP16_PARTS[1]: "5"}, {"fp16": 8}),
        ("9.0", {FP16: "8", FP16_PARTS[0]: "n/a", FP16_PARTS[1]: "n/a"}, {"fp16": 8}),
        ("8.0", {FP16: "n/a", FP16_PARTS[0]: "3", FP16_PARTS[1]: "5"}, {"fp16": 8}),
        ("8.0", {FP16: "n/a", FP16_PARTS[0]: "3", FP16_PARTS[1]: "n/a"}, {"fp16": None}),
        # An A100 has no fp8.
        ("8.0", {BF16: "8", FP8: "n/a"}, {"bf16": 8}),
        ("8.9", {BF16: "8", FP8: "n/a"}, {"bf16": 8, "fp8": None}),
        # An unknown chip may have fp8.
        ("", {BF16: "8", FP8: "n/a"}, {"bf16": 8, "fp8": None}),
        ("9.0", {INT8: "8"}, {"int8": 8}),
        ("9.0", {FADD: "n/a", BF16: "8"}, {"bf16": 8, "fp32": None}),
    ],
)
def test_what_has_no_value_is_unknown(
    capability: str, metrics: dict[str, str], expected: dict[str, float | None]
) -> None:
    """The operations of a dtype are read from one form of its metric.

    If all forms are `n/a` and the chip has the dtype, they are unknown, and so is the total. This
    holds for CSV files and for logs.
    """
    flops = None if None in expected.values() else 8
    for text in of_one_kernel(capability, metrics):
        total = read(text).total
        assert expected == total.flops_by_dtype
        assert flops == total.flops


def test_without_a_metric_of_operations_flops_are_unknown() -> None:
    """If a log has only times, the FLOPs are unknown."""
    for text in of_one_kernel("9.0", {"gpu__time_duration.sum": "4"}):
        assert (None, {}) == (read(text).total.flops, read(text).total.flops_by_dtype)


def test_the_shell_says_what_was_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """`lflops roofline` prints which dtypes were not counted; in JSON, unknown FLOPs are null."""
    assert 0 == main(["roofline", "--ncu", str(H100_PRODUCTS), "--hardware", "H100 SXM"])
    shown = capsys.readouterr().out
    assert "The FLOPs are unknown, because the log has no value (n/a) for fp16" in shown
    assert 0 == main(["roofline", "--ncu", str(H100_PRODUCTS), "--json"])
    assert {None} == {kernel["flops"] for kernel in json.loads(capsys.readouterr().out)["kernels"]}
    assert 0 == main(["roofline", "--ncu", str(H100_TENSOR_CORES)])
    shown = capsys.readouterr().out
    assert "17.18 G" in shown
    assert "unknown" not in shown


def test_a_kernel_s_name_has_no_namespaces_of_torch() -> None:
    """The shown name of a kernel has no namespaces of torch, not even an unnamed one."""
    name = "void at::<unnamed>::distribution_kernel<float, 4>(long, at::PhiloxCudaState, T3)"
    assert "distribution_kernel<float, 4>" == kernel_name(name)


def test_at_80_columns_time_and_share_of_the_roof_are_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal of 80 columns, the time and the share of the roof are shown."""
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "ncu.csv").write_text(CSV)
    assert 0 == main(["roofline", "--ncu", str(tmp_path / "ncu.csv"), "--hardware", "H100 SXM"])
    heading = capsys.readouterr().out.splitlines()[0]
    assert len(heading) <= 80
    assert heading.split() == ["kernel", "time", "FLOP/s", "bound", "by", "of", "roofline"]


def test_caches_have_an_intensity_of_their_own() -> None:
    """Each level of memory has its own intensity.

    The matmul has 8,000,000 FLOPs, 32,000 bytes of DRAM, 64,000 of L2 and 160,000 of L1. For the
    additions, the log has no metrics of caches.
    """
    found = by_name(read(CSV))
    assert {"dram": 250.0, "l2": 125.0, "l1": 50.0} == {
        level: traffic.intensity for level, traffic in found[GEMM].levels.items()
    }
    assert ["dram"] == list(found[ADD].levels)


def test_a_line_a_kernel_is_read_too() -> None:
    """A log with one line for each kernel is read: 2,000,000 FLOPs and 3 MB in 2 ms."""
    assert (2_000_000, 3e6, pytest.approx(2 / 3), pytest.approx(1e9)) == figures(read(RAW).total)


def test_a_kernel_is_the_module_s_whose_range_it_ran_in() -> None:
    """A kernel belongs to the innermost range with the name of a module.

    The range `step` is not the name of a module.
    """
    measured = read(CSV, modules=["", "blocks", "blocks.0.linear"])
    assert {GEMM: "blocks.0.linear", ADD: None} == {
        name: kernel.module for name, kernel in by_name(measured).items()
    }


def test_a_kernel_is_placed_below_the_roof() -> None:
    """A kernel is compared with the roofline of the chip.

    The matmul needs 2 µs for 16 MFLOP at 8 TFLOP/s, and as long for 64,000 bytes at 32 GB/s; it
    took 4 µs. The additions need 3 µs for their 96,000 bytes and took 1 µs.
    """
    found = by_name(read(CSV, chip=CHIP))
    assert ("compute", pytest.approx(0.5)) == (found[GEMM].bound, found[GEMM].share)
    assert ("memory", pytest.approx(3.0)) == (found[ADD].bound, found[ADD].share)


def test_without_a_peak_of_every_dtype_there_is_no_roof() -> None:
    """If the chip has no peak for a dtype of a kernel, here bf16, the kernel has no roof."""
    gemm = by_name(read(CSV, chip=Hardware("chip", {"fp32": 1e12}, 32e9)))[GEMM]
    assert (None, None, None) == (gemm.roof_seconds, gemm.bound, gemm.share)


def test_without_times_there_is_no_rate() -> None:
    """If a log has no times, the rate is unknown, unless the running time of the GPU is passed."""
    untimed = "\n".join(line for line in LOG.splitlines() if "gpu__time" not in line)
    total = read(untimed).total
    assert 6.375 == total.levels["dram"].intensity
    assert (None, None) == (total.seconds, total.flops_per_second)
    assert pytest.approx(2_040_000 / 1e-3) == read(untimed, gpu_seconds=1e-3).total.flops_per_second


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no kernels were profiled\n",
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n',
    ],
)
def test_a_file_without_a_kernel_is_an_error(text: str) -> None:
    """A file without a kernel is an error, with the reason."""
    with pytest.raises(LflopsError, match="no kernel has a metric that lflops reads"):
        read(text)


def test_the_command_asks_for_what_is_read() -> None:
    """The printed `ncu` command requests all metrics that lflops reads, for all processes."""
    words = command(["train.py", "--epochs", "1"])
    assert ["ncu", "--csv", "--log-file"] == words[:3]
    assert ["--target-processes", "all", "python3", "train.py", "--epochs", "1"] == words[-6:]
    asked = words[words.index("--metrics") + 1].split(",")
    assert list(METRICS) == asked
    assert {
        FADD,
        FFMA,
        BF16,
        "dram__sectors_read.sum",
        "dram__sectors_write.sum",
        "gpu__time_duration.sum",
        "l1tex__t_bytes.sum",
    } <= set(asked)


def test_the_shell_reads_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`lflops roofline --ncu` prints the total, and then the kernels, with the longest first."""
    (tmp_path / "ncu.log").write_text(LOG)
    assert 0 == main(["roofline", "--ncu", str(tmp_path / "ncu.log"), "--gpu-time", "20.4e-6"])
    lines = capsys.readouterr().out.splitlines()
    assert [
        "all",
        "kernels",
        "20.4",
        "µs",
        "100.00",
        "G",
        "2",
        "2.04",
        "M",
        "312.50",
        "KiB",
        "6.38",
    ] == lines[1].split()
    assert lines[2].startswith("sgemm_128x64_nn")


def test_the_shell_joins_a_log_to_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a profile, the kernels are assigned to its modules and compared with its chip."""
    profile(
        {"": {}, "blocks": {}, "blocks.0": {}, "blocks.0.linear": {}}, [], run=run(hardware=CHIP)
    ).save(tmp_path / "run.json")
    (tmp_path / "ncu.csv").write_text(CSV)
    assert 0 == main(
        ["roofline", str(tmp_path / "run.json"), "--ncu", str(tmp_path / "ncu.csv"), "--json"]
    )
    shown = json.loads(capsys.readouterr().out)
    assert [("blocks.0.linear", "compute"), (None, "memory")] == [
        (kernel["module"], kernel["bound"]) for kernel in shown["kernels"]
    ]


def test_the_shell_prints_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The `ncu` command is printed as one line for a shell, or as a list in JSON."""
    assert 0 == main(["roofline", "--ncu-command", "train.py --name 'my run'"])
    assert capsys.readouterr().out.endswith("python3 train.py --name 'my run'\n")
    assert 0 == main(["roofline", "--ncu-command", "train.py", "--json"])
    assert "train.py" == json.loads(capsys.readouterr().out)["command"][-1]


def test_a_long_line_of_metric_names_is_read_in_linear_time() -> None:
    """A very long line is read in linear time.

    A regular expression with two nested repetitions would take minutes for 400,000 characters.
    """
    log = (
        "  sgemm (1, 1, 1)x(1, 1, 1), Context 1, Stream 7, Device 0, CC 9.0\n"
        f"    {'a__' * 130_000} !\n    lonely__name.sum\n"
        "    dram__bytes_read.sum     byte     96\n    dram__bytes_write.sum     32\n"
    )
    (launch,) = launches_in(log)
    dram = {name: value for name, value in launch.metrics.items() if name.startswith("dram")}
    assert {"dram__bytes_read.sum": 96.0, "dram__bytes_write.sum": 32.0} == dram
