"""Test the roofline of modules and operators, its figure, and the command `lflops roofline`.

All expected values are worked out by hand.
"""

import dataclasses
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from msgspec.structs import replace

import lflops
from lflops.analysis.analysis import analyze
from lflops.analysis.roofline import Ceiling, Point, Roofline, roofline
from lflops.cli.main import main
from lflops.hardware.chips import Hardware, lookup
from lflops.profile.profile import Profile
from lflops.profile.records import PHASES, Phase, Trace, TracedOperator
from lflops.report.figures.pictures import roofline_figure, save_roofline_figure
from tests.support.compiled_profiles import compiled_profile
from tests.support.profile_builders import cell, clocked, product, profile, run, small_profile

CHIP = Hardware("chip", {"fp32": 1000.0, "bf16": 8000.0}, 100.0, None, "a pencil", 400.0)
"""A chip with 1000 FLOP/s in fp32, 100 bytes/s and a cache of 400 bytes.

In fp32, an operator is compute-bound above 10 FLOPs per byte.
"""

ROWS: dict[str, dict[str, Any]] = {
    "": {"class_name": "Model"},
    "block": {"class_name": "Block"},
    "block.linear": {},
    "block.norm": {},
}

CELLS = (
    product("block.linear", "aten::addmm", "forward", macs=10_000, bytes_moved=1000),
    cell("block.norm", "aten::native_layer_norm", "forward", flops=500, bytes_moved=1000),
    cell("block.norm", "aten::mul", "forward", dtype="bfloat16", flops=400, bytes_moved=200),
)
"""The operators of `ROWS`, with these times on `CHIP`:

- addmm: 20,000 FLOPs take 20 s at the peak, and the bytes 10 s
- native_layer_norm: 0.5 s for the FLOPs, and 10 s for the bytes
- mul in bf16: 0.05 s for the FLOPs, and 2 s for the bytes
"""


def blocks(own: dict[tuple[str, Phase], float] | None = None, **facts: Any) -> Profile:
    """Return the profile of `ROWS` and `CELLS` with the self times `own`."""
    return clocked(
        profile(ROWS, CELLS, run=run(**({"kind": "measure", "hardware": CHIP} | facts))), own or {}
    )


def module(found: Roofline, name: str, phase: Phase = "forward") -> Point:
    """Return the point of a module in a phase."""
    return next(point for point in found.modules if (point.module, point.phase) == (name, phase))


def test_a_module_is_placed_below_its_roof() -> None:
    """20,000 FLOPs in 40 s are 500 FLOP/s of 1000, so the peak needs 20 s of the 40 s."""
    expected = Point(
        module="block.linear",
        operator=None,
        phase="forward",
        dtype=None,
        calls=1,
        flops=20_000,
        bytes_moved=1000,
        intensity=20.0,
        seconds=40.0,
        flops_per_second=500.0,
        roof_seconds=20.0,
        roof_flops_per_second=1000.0,
        bound="compute",
        share=0.5,
        potential_seconds=20.0,
        over=None,
    )
    assert expected == module(roofline(blocks({("block.linear", "forward"): 40.0})), "block.linear")


def test_what_moves_more_than_it_multiplies_is_below_the_slope() -> None:
    """A memory-bound module is compared with the bandwidth.

    900 FLOPs and 1200 bytes take 12 s, which is 75 FLOP/s and 3/4 of the measured 16 s.
    """
    norm = module(roofline(blocks({("block.norm", "forward"): 16.0})), "block.norm")
    assert ("memory", 12.0, 75.0, 0.75, 4.0) == (
        norm.bound,
        norm.roof_seconds,
        norm.roof_flops_per_second,
        norm.share,
        norm.potential_seconds,
    )


def test_a_module_s_roof_is_the_sum_of_its_operators() -> None:
    """The roofline of a module is the sum of its operators: 20 + 10 + 2 s.

    With one intensity for the whole module, it would be 22 s: 2200 bytes take 22 s, and 20,900
    FLOPs take 20.9 s.
    """
    block = module(
        roofline(blocks({("block.linear", "forward"): 40.0, ("block.norm", "forward"): 24.0})),
        "block",
    )
    assert (32.0, 64.0, 0.5, "compute") == (
        block.roof_seconds,
        block.seconds,
        block.share,
        block.bound,
    )


def test_operators_are_placed_without_a_time() -> None:
    """Without a trace, the time of an operator is unknown, not 0. Its roofline is still known."""
    found = roofline(blocks({("block.linear", "forward"): 40.0}))
    told = [
        (
            point.operator,
            point.dtype,
            point.intensity,
            point.bound,
            point.roof_seconds,
            point.seconds,
            point.share,
        )
        for point in found.op_counts
    ]
    assert [
        ("aten::addmm", "float32", 20.0, "compute", 20.0, None, None),
        ("aten::native_layer_norm", "float32", 0.5, "memory", 10.0, None, None),
        ("aten::mul", "bfloat16", 2.0, "memory", 2.0, None, None),
    ] == told


def test_an_operator_is_summed_over_the_modules() -> None:
    """The matmuls of two modules are one operator with 2 calls and a roofline of 2 * 20 s."""
    cells = (CELLS[0], replace(CELLS[0], module="block"))
    found = roofline(profile(ROWS, cells, run=run(hardware=CHIP)))
    assert [("aten::addmm", 2, 40_000, 40.0)] == [
        (p.operator, p.calls, p.flops, p.roof_seconds) for p in found.operators
    ]
    assert ["block.linear", "block"] == [point.module for point in found.op_counts]


def test_what_a_mask_leaves_out_is_not_done() -> None:
    """Only executed MACs count for the roofline.

    4,000 of 10,000 MACs are executed: 20,000 - 12,000 FLOPs take 8 s, and the bytes take 10 s.
    """
    masked = replace(CELLS[0], executed_macs=4_000)
    point = roofline(profile(ROWS, [masked], run=run(hardware=CHIP))).op_counts[0]
    assert (8_000, 10.0, "memory") == (point.flops, point.roof_seconds, point.bound)


def test_a_dtype_has_its_own_roof() -> None:
    """In bf16, the matmul takes 2.5 s at the peak, so it is limited by the bytes that it moves."""
    point = roofline(
        profile(ROWS, [replace(CELLS[0], dtype="bfloat16")], run=run(hardware=CHIP))
    ).op_counts[0]
    assert (10.0, "memory") == (point.roof_seconds, point.bound)


@pytest.mark.parametrize(
    "chip", [None, Hardware("chip", {"bf16": 8000.0}, 100.0), Hardware("chip", {"fp32": 1000.0})]
)
def test_without_a_peak_or_a_bandwidth_the_roof_is_unknown(chip: Hardware | None) -> None:
    """The roofline is unknown, but the measured intensity and rate are known."""
    linear = module(
        roofline(blocks({("block.linear", "forward"): 40.0}, hardware=chip)), "block.linear"
    )
    assert (20.0, 500.0) == (linear.intensity, linear.flops_per_second)
    assert (None, None, None, None, None) == (
        linear.roof_seconds,
        linear.roof_flops_per_second,
        linear.bound,
        linear.share,
        linear.over,
    )


def test_what_moves_integers_needs_no_peak() -> None:
    """A copy of int64 values has no FLOPs, so the bandwidth is enough: 1000 bytes take 10 s."""
    moved = cell("", "aten::copy_", "forward", dtype="int64", bytes_moved=1000)
    assert (
        10.0 == roofline(profile(ROWS, [moved], run=run(hardware=CHIP))).op_counts[0].roof_seconds
    )


CACHED = product("", "aten::mm", "forward", macs=500, bytes_moved=400)
"""A matmul that takes 1 s at the peak, and 4 s for its bytes."""


@pytest.mark.parametrize(
    ("seconds", "moved", "calls", "compiled", "cache", "why"),
    [
        (4.0, 400, 1, False, 400.0, None),
        (3.9, 400, 1, False, 400.0, None),
        (2.0, 400, 1, False, 400.0, "cache"),
        (2.0, 800, 2, False, 400.0, "cache"),
        (2.0, 800, 1, False, 400.0, "error"),
        (2.0, 800, 1, True, 400.0, "compiled"),
        (2.0, 400, 1, False, None, "cache_unknown"),
        (0.5, 400, 1, True, 400.0, "error"),
        (0.5, 400, 1, False, None, "error"),
    ],
    ids=[
        "on the roof",
        "within two measurements of a peak",
        "fits the cache",
        "each call fits the cache",
        "does not fit",
        "compiled",
        "no cache is known",
        "over the peak, compiled or not",
        "over the peak, whatever the cache",
    ],
)
def test_over_the_roof_is_explained_or_an_error(
    *, seconds: float, moved: int, calls: int, compiled: bool, cache: float | None, why: str | None
) -> None:
    """A module above its roofline has a reason, or the numbers are wrong.

    The cache of the chip or the fusion of compiled code may save bytes. Nothing can save FLOPs, so
    a module above the peak is always an error.
    """
    chip = Hardware("chip", {"fp32": 1000.0}, 100.0, cache_bytes=cache)
    ran = replace(CACHED, bytes_moved=moved, calls=calls)
    of_root = clocked(
        profile({"": {"compiled": compiled}}, [ran], run=run(hardware=chip)),
        {("", "forward"): seconds},
    )
    assert why == module(roofline(of_root), "").over


def test_only_the_part_that_fits_the_cache_is_explained_by_it() -> None:
    """The cache only explains the operators whose bytes fit into it.

    The matmul fits and needs 1 s without its bytes. The copy does not fit and needs 8 s. So 9 s is
    the minimum: 10 s are possible, and 8 s are an error.
    """
    cells = (
        CACHED,
        replace(CACHED, operator="aten::copy_", macs=0, executed_macs=0, flops=0, bytes_moved=800),
    )
    for seconds, why in ((10.0, "cache"), (8.0, "error")):
        of_root = clocked(
            profile({"": {}}, cells, run=run(hardware=CHIP)), {("", "forward"): seconds}
        )
        assert why == module(roofline(of_root), "").over


def test_the_ceilings_are_of_all_that_is_known_of_the_device() -> None:
    """The ceilings are the chip to compare with, the chip that the run measured, and its datasheet.

    They only have the dtypes of matmuls in the profile. The first ceiling is the one that shares
    are compared with.
    """
    datasheet = lookup("NVIDIA H200")
    assert datasheet is not None
    measured = Hardware("NVIDIA H200", {"fp32": 50e12, "bf16": 700e12}, 4e12, None, "measured")
    found = roofline(blocks(hardware=measured, device_name="NVIDIA H200"), CHIP).ceilings
    assert [
        ("chip", 1000.0, True),
        ("NVIDIA H200", 50e12, False),
        (datasheet.name, datasheet.peak_flops_per_second["fp32"], False),
    ] == [(ceiling.hardware, ceiling.flops_per_second, ceiling.is_reference) for ceiling in found]
    assert {"fp32"} == {ceiling.dtype for ceiling in found}
    judged = Ceiling(
        hardware="chip",
        source="a pencil",
        dtype="fp32",
        flops_per_second=1000.0,
        bandwidth_bytes_per_second=100.0,
        is_reference=True,
    )
    assert judged == found[0]
    # A chip that only differs in a field without an effect on the roofline is no second ceiling.
    written = dataclasses.replace(CHIP, usable_bytes=80)
    assert [judged] == list(roofline(blocks(hardware=written), CHIP).ceilings)


def test_a_chip_can_be_given_by_its_name() -> None:
    """As in `utilization`, the name of a chip is accepted, and an unknown name is an error."""
    assert roofline(blocks(), lookup("NVIDIA H200")) == lflops.roofline(blocks(), "NVIDIA H200")
    with pytest.raises(lflops.HardwareError, match="'H2000' is not in the table of chips"):
        lflops.roofline(blocks(), "H2000")


def test_a_counted_profile_has_a_roof_too() -> None:
    """A profile without times has a roofline: the bytes of the head's backward take this long."""
    found = roofline(small_profile(), CHIP)
    head = module(found, "head", "backward")
    assert 4 * 2 * (4 * 2 + 4 * 16 + 16 * 2) / 100 == head.roof_seconds


TIMED: dict[tuple[str, Phase], float] = {
    ("block.linear", "forward"): 40.0,
    ("block.norm", "forward"): 6.0,
}


def test_what_a_module_runs_itself_is_apart_from_what_is_below_it() -> None:
    """The block runs an addition itself, which is a separate point from its linear layer.

    The 500 bytes of the addition need 5 s of the 8 s of self time. The root runs no operators
    itself, so it has no point.
    """
    cells = (CELLS[0], cell("block", "aten::add", "forward", flops=100, bytes_moved=500))
    found = roofline(
        clocked(profile(ROWS, cells, run=run(hardware=CHIP)), TIMED | {("block", "forward"): 8.0})
    ).self_work
    assert [("block", 100, 8.0, 5.0, 3.0), ("block.linear", 20_000, 40.0, 20.0, 20.0)] == [
        (point.module, point.flops, point.seconds, point.roof_seconds, point.potential_seconds)
        for point in found
    ]


def test_what_modules_run_themselves_is_all_of_it_once() -> None:
    """In every phase, the FLOPs and bytes of all points add up to the root's FLOPs and bytes."""
    given = small_profile()
    for phase in PHASES:
        points = [point for point in roofline(given).self_work if point.phase == phase]
        whole = given.modules[""].work(phase)
        assert (whole.flops, whole.bytes_moved) == (
            sum(point.flops for point in points),
            sum(point.bytes_moved for point in points),
        )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of a saved profile."""
    blocks(TIMED).save(tmp_path / "blocks.json")
    return tmp_path / "blocks.json"


def test_the_shell_shows_roofs_modules_and_operators(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The norm took 6 s, but its roofline is 12 s, so it is marked as impossible.

    The bytes of its larger call do not fit into the cache, so the cache is no explanation.
    """
    assert 0 == main(["roofline", str(file)])
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert "roofline          1.00 kFLOP/s in fp32, 100 B/s: chip, a pencil" == lines[0]
    norm = next(line for line in lines if line.startswith("block.norm"))
    assert [
        "block.norm",
        "fwd",
        "6.00",
        "s",
        "200.0",
        "%",
        "!",
        "0",
        "s",
        "memory",
        "0.75",
    ] == norm.split()[:11]
    assert (
        "!: above its roofline limit: the counted work, the measured time or the peak is wrong"
        in lines
    )
    assert any(line.startswith("aten::addmm float32") for line in lines)


def test_the_shell_shows_what_fusion_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column next to the bytes has the fused bytes: 1216 of 1472 for the encoder in forward."""
    compiled_profile().save(tmp_path / "compiled.json")
    monkeypatch.setenv("COLUMNS", "250")
    assert 0 == main(["roofline", str(tmp_path / "compiled.json")])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[-3:] == ["bytes", "fused", "bytes"] for line in lines)
    encoder = next(line for line in lines if line.startswith("encoder ") and " fwd " in line)
    assert ["1.44", "KiB", "1.19", "KiB"] == encoder.split()[-4:]
    assert any(
        line.startswith("compiled code moves 1.75 KiB instead of 2.19 KiB: fusion saves 20.0 %")
        for line in lines
    )


def test_the_shell_writes_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown values are null. `--hardware` selects the chip to compare with."""
    assert 0 == main(["roofline", str(file), "--json", "--hardware", "NVIDIA H200"])
    shown = json.loads(capsys.readouterr().out)
    assert ["ceilings", "modules", "operators", "op_counts", "self_work"] == list(shown)
    assert shown["operators"][0]["seconds"] is None
    assert "H200" in shown["ceilings"][0]["hardware"]


@pytest.mark.parametrize(
    ("ending", "begins"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")]
)
def test_a_figure_is_written_in_the_format_of_its_name(
    ending: str, begins: bytes, tmp_path: Path
) -> None:
    """Each file begins with the signature of its format."""
    save_roofline_figure(analyze(blocks(TIMED)).roofline, tmp_path / f"roof.{ending}", {})
    assert (tmp_path / f"roof.{ending}").read_bytes().startswith(begins)


def test_the_figure_shows_the_innermost_modules_below_the_roof() -> None:
    """The points are at 20 FLOPs per byte and 500 FLOP/s, and at 0.75 and 150.

    The line of the roofline bends at 10 FLOPs per byte and 1000 FLOP/s.
    """
    axes = roofline_figure(analyze(blocks(TIMED)).roofline, {}).axes[0]
    (points,) = axes.collections
    assert [(20.0, 500.0), (0.75, 150.0)] == [tuple(at) for at in points.get_offsets().tolist()]
    roof, *_ = axes.lines
    assert (10.0, 1000.0) in list(zip(roof.get_xdata(), roof.get_ydata(), strict=True))


def test_no_two_names_of_the_figure_overlap() -> None:
    """The labels of the drawn figure do not overlap, although 30 points lie close together.

    Only a few points can have a label. The legend explains the ring around the first point, which
    is above its roofline.
    """
    rows: dict[str, dict[str, Any]] = {"": {}, "layers": {}}
    works = []
    times: dict[tuple[str, Phase], float] = {}
    for number in range(30):
        layer = f"layers.{number}"
        name = f"{layer}.projection"
        rows[layer] = {}
        rows[name] = {}
        flops = 10_000 + 300 * number
        works.append(cell(name, "aten::mm", "forward", flops=flops, bytes_moved=1000))
        times[name, "forward"] = 100.0 + 7 * (number % 9)
    times["layers.0.projection", "forward"] = 1e-3
    given = clocked(profile(rows, works, run=run(hardware=CHIP)), times)
    figure = roofline_figure(analyze(given).roofline, {})
    FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) > 1
    overlapping = [(one, other) for one, other in combinations(boxes, 2) if one.overlaps(other)]
    assert not overlapping
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert "above its roofline limit" in [text.get_text() for text in legend.get_texts()]


def test_the_figure_shows_what_a_block_runs_itself() -> None:
    """The addition that the block runs itself is a point: 100 FLOPs and 500 bytes in 8 s."""
    cells = (CELLS[0], cell("block", "aten::add", "forward", flops=100, bytes_moved=500))
    given = clocked(
        profile(ROWS, cells, run=run(hardware=CHIP)), TIMED | {("block", "forward"): 8.0}
    )
    (points,) = roofline_figure(analyze(given).roofline, {}).axes[0].collections
    assert (0.2, 12.5) in [tuple(at) for at in points.get_offsets().tolist()]


def test_without_times_the_figure_shows_what_operators_could_reach() -> None:
    """Without times, each operator is drawn on its roofline: at 1000, 50 and 200 FLOP/s."""
    (points,) = roofline_figure(analyze(blocks()).roofline, {}).axes[0].collections
    assert [(20.0, 1000.0), (0.5, 50.0), (2.0, 200.0)] == [
        tuple(at) for at in points.get_offsets().tolist()
    ]


def test_an_empty_profile_has_an_empty_figure() -> None:
    """The roofline of an empty profile has no ceilings, and its figure has no points."""
    empty = profile({"": {}}, [])
    assert Roofline(ceilings=(), modules=(), operators=(), op_counts=(), self_work=()) == roofline(
        empty
    )
    assert 0 == len(roofline_figure(analyze(empty).roofline, {}).axes[0].collections)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            [],
            "nothing to compare: pass the FILE of a profile or a trace, --ncu LOG, or --ncu-command SCRIPT",
        ),
        (
            ["{file}", "--figure", "roof.gif"],
            "figure='roof.gif': the file name must end with one of .svg, .png, .pdf",
        ),
        (["{file}", "--gpu-time", "3"], "gpu_time=3.0: --gpu-time needs a log"),
        (
            ["--ncu", "{file}", "--gpu-time", "-3"],
            "gpu_time=-3.0: pass a positive number of seconds",
        ),
        (
            ["--ncu", "{file}", "--figure", "roof.svg"],
            "--figure draws a profile, not the log that --ncu reads: leave --figure out",
        ),
        (["{file}", "--ncu-command", "train.py"], "--ncu-command can only be combined with --json"),
        (
            ["{file}", "--hardware", "H2000"],
            "hardware='H2000': 'H2000' is not in the table of chips",
        ),
        (["--ncu", "missing.csv"], "missing.csv: No such file or directory"),
        (["--ncu", "{file}"], "{file}: no kernel has a metric that lflops reads"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], reason: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command prints one line on stderr and exits with status 2."""
    assert 2 == main(["roofline", *(argument.format(file=file) for argument in arguments)])
    shown = capsys.readouterr()
    assert ("", 1) == (shown.out, len(shown.err.splitlines()))
    assert shown.err.startswith(f"lflops: {reason.format(file=file)}")


def test_an_operator_has_its_time_from_a_trace() -> None:
    """A trace has the time of an operator for all phases together: 40 s in each of 2 batches.

    20,000 FLOPs in forward and 20,000 in backward take 40 s, which is the peak of 1000 FLOP/s. The
    trace does not have `aten::mul`, so its time is unknown.
    """
    traced = TracedOperator(
        name="aten::addmm",
        calls=4,
        host_seconds=80.0,
        self_host_seconds=60.0,
        device_seconds=0.0,
        self_device_seconds=0.0,
    )
    cells = [
        *CELLS,
        product("block.linear", "aten::addmm", "backward", macs=10_000, bytes_moved=1000),
    ]
    given = profile(
        ROWS,
        cells,
        run=run(kind="measure", hardware=CHIP),
        trace=Trace(files={}, batches=2, operators=(traced,)),
    )
    found = {point.operator: point for point in roofline(given).operators}
    addmm = found["aten::addmm"]
    assert ("all", 40.0, 40_000, 1000.0, 1.0, 0.0) == (
        addmm.phase,
        addmm.seconds,
        addmm.flops,
        addmm.flops_per_second,
        addmm.share,
        addmm.potential_seconds,
    )
    assert (None, "forward") == (found["aten::mul"].seconds, found["aten::mul"].phase)
