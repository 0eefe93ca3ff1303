"""What Nsight Compute counted, by the arithmetic that goes with its metrics.

2 x FMA + ADD + MUL, 32 bytes a sector.
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

H100_PRODUCTS, H100_TENSOR_CORES = (
    Path(__file__).with_name(f"h100_{name}.csv") for name in ("products", "tensor_cores")
)
MACS = 4096 * 1024 * 2048  # of each product that was run on the H100: 4096 x 1024 by 1024 x 2048
CHIP = Hardware("chip", {"fp32": 1e12, "bf16": 8e12}, 32e9)


def by_name(measured: Measured) -> dict[str, Kernel]:
    """Each kernel, where names differ."""
    return {kernel.name: kernel for kernel in measured.kernels}


def figures(kernel: Kernel) -> tuple[float, float | None, float | None, float | None]:
    """FLOPs, bytes of DRAM, intensity and FLOP/s."""
    return (
        kernel.flops,
        kernel.levels["dram"].bytes,
        kernel.levels["dram"].intensity,
        kernel.flops_per_second,
    )


def test_a_log_is_read_kernel_by_kernel() -> None:
    """2 x 1,000,000 + 1,000 + 7,000 FLOPs over 32 x 5,000 bytes, in 10 µs.

    32,000 over as many, in 5.
    """
    found = by_name(read(LOG))
    gemm = found["sgemm_128x64_nn"]
    assert (2_008_000, 160_000, 12.55, pytest.approx(2_008_000 / 1e-5)) == figures(gemm)
    add = found["void at::native::vectorized_elementwise_kernel<4, AddOp>(int, T2, T3)"]
    assert (32_000, 160_000, 0.2, pytest.approx(32_000 / 5e-6)) == figures(add)


def test_all_kernels_are_one_application() -> None:
    """2,040,000 FLOPs over 320,000 bytes are 6.375 a byte; in 15 µs 136 GFLOP/s."""
    total = read(LOG).total
    assert (2_040_000, 320_000, 6.375, pytest.approx(136e9)) == figures(total)
    assert (2, {"fp32": 2_040_000}) == (total.launches, total.flops_by_dtype)


def test_the_gpu_s_running_time_takes_the_place_of_the_kernels() -> None:
    """Nsight Systems says 20.4 µs: 100 GFLOP/s. Each kernel keeps its own."""
    measured = read(LOG, gpu_seconds=20.4e-6)
    assert pytest.approx(100e9) == measured.total.flops_per_second
    assert pytest.approx(1e-5) == by_name(measured)["sgemm_128x64_nn"].seconds


def test_tensor_cores_operations_are_flops() -> None:
    """Two launches of 8,000,000, which are no FMAs to be doubled.

    Fp16 is known by one of its forms.
    """
    found = by_name(read(CSV))
    assert ({"bf16": 16_000_000}, 2, pytest.approx(4e-6)) == (
        found[GEMM].flops_by_dtype,
        found[GEMM].launches,
        found[GEMM].seconds,
    )
    assert {"fp32": 1000} == found[ADD].flops_by_dtype


def test_half_and_double_are_counted_as_single_is() -> None:
    """3 FMAs, 2 additions and 1 product of each are 9 FLOPs."""
    counts = {"fma": 3, "add": 2, "mul": 1}
    metrics = {
        f"smsp__sass_thread_inst_executed_op_{letter}{name}_pred_on.sum": n
        for letter in "hd"
        for name, n in counts.items()
    }
    lines = [f'"0","k","{metric}","inst","{n}"' for metric, n in metrics.items()]
    text = "\n".join(['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"', *lines])
    assert {"fp16": 9, "fp64": 9} == read(text).total.flops_by_dtype


def test_an_h100_counts_two_operations_a_mac() -> None:
    """Of fp16 and fp8, by the metrics that an H100 has: 2 x 4096 x 1024 x 2048."""
    found = read(H100_TENSOR_CORES.read_text()).kernels
    assert [{"fp16": 2 * MACS}, {"fp8": 2 * MACS}] == [kernel.flops_by_dtype for kernel in found]
    assert [2 * MACS] * 2 == [kernel.flops for kernel in found]


def test_an_h100_without_a_count_of_fp16_has_no_flops() -> None:
    """It was not asked for the one form of fp16 that it has.

    For each output fp32 and tf32 have 2 more FLOPs, fp64 has 1.
    """
    outputs = 4096 * 2048
    found = by_name(
        read(H100_PRODUCTS.read_text(), chip=Hardware("chip", {"fp16": 1e15, "bf16": 1e15}, 3e12))
    )
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
        assert (None, None, None, None) == (
            kernel.flops,
            kernel.flops_per_second,
            kernel.bound,
            kernel.share,
        )
        assert kernel.seconds


def test_the_bf16_product_of_an_h100_moves_its_sectors() -> None:
    """393,944 + 35,720 sectors of 32 bytes in 32.992 µs."""
    (kernel,) = (
        kernel for kernel in read(H100_PRODUCTS.read_text()).kernels if "tst" in kernel.name
    )
    assert ((393_944 + 35_720) * 32, pytest.approx(32.992e-6)) == (
        kernel.levels["dram"].bytes,
        kernel.seconds,
    )


@pytest.mark.parametrize(
    ("capability", "metrics", "expected"),
    [
        ("9.0", {FP16: "8", FP16_PARTS[0]: "3", FP16_PARTS[1]: "5"}, {"fp16": 8}),  # never both
        ("9.0", {FP16: "8", FP16_PARTS[0]: "n/a", FP16_PARTS[1]: "n/a"}, {"fp16": 8}),
        ("8.0", {FP16: "n/a", FP16_PARTS[0]: "3", FP16_PARTS[1]: "5"}, {"fp16": 8}),
        ("8.0", {FP16: "n/a", FP16_PARTS[0]: "3", FP16_PARTS[1]: "n/a"}, {"fp16": None}),
        ("8.0", {BF16: "8", FP8: "n/a"}, {"bf16": 8}),  # an A100 has no fp8
        ("8.9", {BF16: "8", FP8: "n/a"}, {"bf16": 8, "fp8": None}),
        (
            "",
            {BF16: "8", FP8: "n/a"},
            {"bf16": 8, "fp8": None},
        ),  # a chip that is not known may have it
        ("9.0", {INT8: "8"}, {"int8": 8}),
        ("9.0", {FADD: "n/a", BF16: "8"}, {"bf16": 8, "fp32": None}),
    ],
)
def test_what_has_no_value_is_unknown(
    capability: str, metrics: dict[str, str], expected: dict[str, float | None]
) -> None:
    """A dtype is taken from one form of its metric.

    `n/a` of all is unknown, where the chip has the dtype. So in CSV as in a log.
    """
    for text in of_one_kernel(capability, metrics):
        total = read(text).total
        assert expected == total.flops_by_dtype
        assert (None if None in expected.values() else 8) == total.flops


def test_without_a_metric_of_operations_flops_are_unknown() -> None:
    """Time alone was asked for."""
    for text in of_one_kernel("9.0", {"gpu__time_duration.sum": "4"}):
        assert (None, {}) == (read(text).total.flops, read(text).total.flops_by_dtype)


def test_the_shell_says_what_was_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """And names kernels without torch's namespaces."""
    assert 0 == main(["roofline", "--ncu", str(H100_PRODUCTS), "--hardware", "H100 SXM"])
    shown = capsys.readouterr().out
    assert "FLOPs unknown: the log has no count (n/a) of fp16" in shown
    assert 0 == main(["roofline", "--ncu", str(H100_PRODUCTS), "--json"])
    assert {None} == {kernel["flops"] for kernel in json.loads(capsys.readouterr().out)["kernels"]}
    assert 0 == main(["roofline", "--ncu", str(H100_TENSOR_CORES)])
    shown = capsys.readouterr().out
    assert "17.18 G" in shown
    assert "unknown" not in shown


def test_a_kernel_s_name_has_no_namespaces_of_torch() -> None:
    """As Nsight Compute writes a nameless namespace."""
    name = "void at::<unnamed>::distribution_kernel<float, 4>(long, at::PhiloxCudaState, T3)"
    assert "distribution_kernel<float, 4>" == kernel_name(name)


def test_at_80_columns_time_and_share_of_the_roof_are_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before what else there is."""
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "ncu.csv").write_text(CSV)
    assert 0 == main(["roofline", "--ncu", str(tmp_path / "ncu.csv"), "--hardware", "H100 SXM"])
    heading = capsys.readouterr().out.splitlines()[0]
    assert len(heading) <= 80
    assert heading.split() == ["kernel", "time", "FLOP/s", "bound", "by", "of", "the", "roof"]


def test_caches_have_an_intensity_of_their_own() -> None:
    """8,000,000 FLOPs over 32,000 bytes of DRAM, 64,000 of L2, 160,000 of L1.

    Of the additions nobody asked.
    """
    found = by_name(read(CSV))
    assert {"dram": 250.0, "l2": 125.0, "l1": 50.0} == {
        level: traffic.intensity for level, traffic in found[GEMM].levels.items()
    }
    assert ["dram"] == list(found[ADD].levels)


def test_a_line_a_kernel_is_read_too() -> None:
    """2,000,000 FLOPs over 3 MB in 2 ms."""
    assert (2_000_000, 3e6, pytest.approx(2 / 3), pytest.approx(1e9)) == figures(read(RAW).total)


def test_a_kernel_is_the_module_s_whose_range_it_ran_in() -> None:
    """The innermost range that is a row's name; `step` is none."""
    measured = read(CSV, modules=["", "blocks", "blocks.0.linear"])
    assert {GEMM: "blocks.0.linear", ADD: None} == {
        name: kernel.module for name, kernel in by_name(measured).items()
    }


def test_a_kernel_is_placed_below_the_roof() -> None:
    """16 MFLOP at 8 T/s and 64,000 bytes at 32 GB/s are both 2 µs, of 4.

    The additions' 96,000 bytes take 3 µs and took 1.
    """
    found = by_name(read(CSV, chip=CHIP))
    assert ("compute", pytest.approx(0.5)) == (found[GEMM].bound, found[GEMM].share)
    assert ("memory", pytest.approx(3.0)) == (found[ADD].bound, found[ADD].share)


def test_without_a_peak_of_every_dtype_there_is_no_roof() -> None:
    """The chip is not known to multiply in bf16."""
    found = by_name(read(CSV, chip=Hardware("chip", {"fp32": 1e12}, 32e9)))
    assert (None, None, None) == (found[GEMM].roof_seconds, found[GEMM].bound, found[GEMM].share)


def test_without_times_there_is_no_rate() -> None:
    """As where only the seed's five metrics were asked for."""
    untimed = "\n".join(line for line in LOG.splitlines() if "gpu__time" not in line)
    total = read(untimed).total
    assert (6.375, None, None) == (
        total.levels["dram"].intensity,
        total.seconds,
        total.flops_per_second,
    )
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
    """That says what to give."""
    with pytest.raises(LflopsError, match="no kernel has a metric that lflops reads"):
        read(text)


def test_the_command_asks_for_what_is_read() -> None:
    """The five metrics of the formula, time, tensor cores, caches; of all processes, by module."""
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
    """The product of 10 µs comes first, below all of them."""
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
    """By its modules, on its chip."""
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
    """A line for a shell, or its words."""
    assert 0 == main(["roofline", "--ncu-command", "train.py --name 'my run'"])
    assert capsys.readouterr().out.endswith("python3 train.py --name 'my run'\n")
    assert 0 == main(["roofline", "--ncu-command", "train.py", "--json"])
    assert "train.py" == json.loads(capsys.readouterr().out)["command"][-1]


def test_a_long_line_of_metric_names_is_read_in_linear_time() -> None:
    """A regular expression with two repetitions would need minutes for 400,000 characters."""
    log = (
        "  sgemm (1, 1, 1)x(1, 1, 1), Context 1, Stream 7, Device 0, CC 9.0\n"
        f"    {'a__' * 130_000} !\n    lonely__name.sum\n"
        "    dram__bytes_read.sum     byte     96\n    dram__bytes_write.sum     32\n"
    )
    (launch,) = launches_in(log)
    assert {"dram__bytes_read.sum": 96.0, "dram__bytes_write.sum": 32.0} == {
        name: value for name, value in launch.metrics.items() if name.startswith("dram")
    }
