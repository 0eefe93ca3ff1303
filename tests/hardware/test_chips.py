"""Test the table of chips against a second list of numbers from the vendors' data sheets."""

import dataclasses
import json
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

import lflops
from lflops.cli.main import main
from lflops.errors import HardwareError
from lflops.hardware.chips import DTYPES, Hardware, chips, hint, lookup, names
from lflops.report.terminal.hardware import figures
from tests.support.terminal import printed

# The names that drivers report, the name in the table, peaks, and the bandwidth in GB/s. Peaks are
# written as in the data sheet: halved if the sheet has them with sparsity, or as cores × operations
# per clock × clock. The bandwidth is None if boards of one name differ.
CHIPS: list[tuple[list[str], str, dict[str, float], float | None]] = [
    (
        ["Tesla V100-SXM2-16GB"],
        "V100 SXM2 16GB",
        {"fp16": 640 * 128 * 1.53e9, "fp32": 5120 * 2 * 1.53e9},
        900,
    ),
    (["Tesla V100-SXM2-32GB"], "V100 SXM2 32GB", {"fp16": 125e12, "fp64": 7.8e12}, 900),
    (["Tesla V100-PCIE-16GB"], "V100 PCIe 16GB", {"fp16": 112e12, "fp32": 14e12}, 900),
    (["Tesla V100-PCIE-32GB"], "V100 PCIe 32GB", {"fp16": 112e12, "fp64": 7e12}, 900),
    (["Tesla V100S-PCIE-32GB"], "V100S PCIe 32GB", {"fp16": 130e12, "fp32": 16.4e12}, 1134),
    (["Tesla T4"], "T4", {"fp16": 320 * 128 * 1.59e9, "int8": 130e12}, 320),
    (
        ["NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"],
        "A100 SXM 40GB",
        {"bf16": 624e12 / 2, "fp64": 19.5e12},
        1555,
    ),
    (
        ["NVIDIA A100-SXM4-80GB"],
        "A100 SXM 80GB",
        {"bf16": 432 * 512 * 1.41e9, "int8": 1248e12 / 2},
        2039,
    ),
    (
        ["NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"],
        "A100 PCIe 40GB",
        {"bf16": 624e12 / 2, "tf32": 312e12 / 2},
        1555,
    ),
    (["NVIDIA A100 80GB PCIe"], "A100 PCIe 80GB", {"bf16": 624e12 / 2, "fp32": 19.5e12}, 1935),
    (["NVIDIA A800-SXM4-80GB"], "A800 SXM 80GB", {"bf16": 624e12 / 2}, 2039),
    (["NVIDIA A800 80GB PCIe"], "A800 PCIe 80GB", {"bf16": 624e12 / 2}, 1935),
    (
        ["NVIDIA A800 40GB Active"],
        "A800 40GB Active",
        {"bf16": 623.8e12 / 2, "int8": 1247.6e12 / 2},
        1555.2,
    ),
    (["NVIDIA A30"], "A30", {"bf16": 330e12 / 2, "fp64": 10.3e12}, 933),
    (["NVIDIA A40"], "A40", {"bf16": 299.4e12 / 2, "fp32": 37.4e12}, 696),
    (["NVIDIA A10"], "A10", {"bf16": 250e12 / 2, "tf32": 125e12 / 2}, 600),
    (["NVIDIA A10G"], "A10G", {"bf16": 140e12 / 2, "int8": 280e12 / 2}, 600),
    (["NVIDIA A2"], "A2", {"bf16": 36e12 / 2, "fp32": 4.5e12}, 200),
    (
        ["NVIDIA H100 80GB HBM3"],
        "H100 SXM",
        {"bf16": 1979e12 / 2, "fp8": 528 * 2048 * 1.83e9, "fp64": 67e12},
        3350,
    ),
    (["NVIDIA H100 PCIe"], "H100 PCIe", {"bf16": 1513e12 / 2, "fp8": 3026e12 / 2}, 2000),
    (["NVIDIA H100 NVL"], "H100 NVL", {"bf16": 1671e12 / 2, "fp8": 3341e12 / 2}, 3900),
    (["NVIDIA H800"], "H800 SXM", {"bf16": 1979e12 / 2, "fp64": 1e12}, 3350),
    (["NVIDIA H800 PCIe"], "H800 PCIe", {"bf16": 1513e12 / 2, "fp64": 0.8e12}, 2000),
    (["NVIDIA H20"], "H20", {"bf16": 147e12, "fp8": 293e12}, 4000),
    (["NVIDIA H200"], "H200 SXM", {"bf16": 1979e12 / 2, "int8": 3958e12 / 2}, 4800),
    (["NVIDIA H200 NVL"], "H200 NVL", {"bf16": 1671e12 / 2, "tf32": 835e12 / 2}, 4800),
    (["NVIDIA GH200 480GB", "NVIDIA GH200 120GB"], "GH200 96GB", {"bf16": 1979e12 / 2}, 4000),
    (["NVIDIA GH200 144G HBM3e"], "GH200 144GB", {"bf16": 1979e12 / 2}, 4900),
    (["NVIDIA B200"], "B200", {"bf16": 36e15 / 8 / 2, "fp4": 144e15 / 8 / 2}, 8000),
    (
        ["NVIDIA GB200"],
        "GB200",
        {"bf16": 360e15 / 72 / 2, "fp8": 720e15 / 72 / 2, "fp4": 720e15 / 72},
        8000,
    ),
    (["NVIDIA B300 SXM6 AC"], "B300", {"bf16": 36e15 / 8 / 2, "fp4": 108e15 / 8}, 7700),
    (["NVIDIA GB300"], "GB300", {"bf16": 360e15 / 72 / 2, "fp4": 1080e15 / 72}, 8000),
    (["NVIDIA L4"], "L4", {"bf16": 242e12 / 2, "fp8": 485e12 / 2}, 300),
    (["NVIDIA L40"], "L40", {"bf16": 362.1e12 / 2, "fp8": 724e12 / 2}, 864),
    (["NVIDIA L40S"], "L40S", {"bf16": 362.05e12, "fp8": 1466e12 / 2}, 864),
    (
        ["NVIDIA RTX 6000 Ada Generation"],
        "RTX 6000 Ada",
        {"bf16": 1457e12 / 4, "fp8": 1457e12 / 2},
        960,
    ),
    (
        ["NVIDIA RTX 5000 Ada Generation"],
        "RTX 5000 Ada",
        {"bf16": 1044.4e12 / 4, "fp32": 65.3e12},
        576,
    ),
    (
        ["NVIDIA RTX 4500 Ada Generation"],
        "RTX 4500 Ada",
        {"bf16": 634e12 / 4, "fp32": 39.6e12},
        432,
    ),
    (
        ["NVIDIA RTX 4000 Ada Generation"],
        "RTX 4000 Ada",
        {"bf16": 48 * 1024 * 2.175e9, "fp32": 26.7e12},
        360,
    ),
    (
        ["NVIDIA RTX PRO 6000 Blackwell Workstation Edition"],
        "RTX PRO 6000 Workstation",
        {"bf16": 188 * 1024 * 2.617e9, "fp4": 4030.4e12 / 2},
        1792,
    ),
    (
        ["NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"],
        "RTX PRO 6000 Max-Q",
        {"bf16": 188 * 1024 * 2.28e9, "fp4": 3511e12 / 2},
        1792,
    ),
    (
        ["NVIDIA RTX PRO 6000 Blackwell Server Edition"],
        "RTX PRO 6000 Server",
        {"bf16": 4 * 120e12, "fp32": 120e12},
        1597,
    ),
    (["NVIDIA RTX A6000", "RTX A6000"], "RTX A6000", {"bf16": 309.7e12 / 2, "int8": 309.7e12}, 768),
    (["NVIDIA RTX A5500"], "RTX A5500", {"bf16": 272.8e12 / 2, "fp32": 34.1e12}, 768),
    (["NVIDIA RTX A5000"], "RTX A5000", {"bf16": 222.2e12 / 2, "fp32": 27.8e12}, 768),
    (["NVIDIA RTX A4500"], "RTX A4500", {"bf16": 189.2e12 / 2, "fp32": 23.7e12}, 640),
    (["NVIDIA RTX A4000"], "RTX A4000", {"bf16": 153.4e12 / 2, "fp32": 19.2e12}, 448),
    # GeForce: cores × 2 operations, a product and a sum, × 2 for bf16 on tensor cores. For newer
    # chips a second peak is derived from the published AI TOPS.
    (["NVIDIA GeForce RTX 3060"], "RTX 3060", {"bf16": 3584 * 4 * 1.78e9}, None),
    (["NVIDIA GeForce RTX 3060 Ti"], "RTX 3060 Ti", {"bf16": 4864 * 4 * 1.67e9}, None),
    (["NVIDIA GeForce RTX 3070"], "RTX 3070", {"bf16": 81.3e12 / 2}, 448),
    (["NVIDIA GeForce RTX 3070 Ti"], "RTX 3070 Ti", {"bf16": 6144 * 4 * 1.77e9}, 608),
    (["NVIDIA GeForce RTX 3080"], "RTX 3080", {"bf16": 119e12 / 2}, None),
    (["NVIDIA GeForce RTX 3080 Ti"], "RTX 3080 Ti", {"bf16": 10240 * 4 * 1.67e9}, 912),
    (
        ["NVIDIA GeForce RTX 3090", "GeForce RTX 3090"],
        "RTX 3090",
        {"bf16": 142e12 / 2, "fp32": 10496 * 2 * 1.695e9},
        936,
    ),
    (["NVIDIA GeForce RTX 3090 Ti"], "RTX 3090 Ti", {"bf16": 10752 * 4 * 1.86e9}, 1008),
    (["NVIDIA GeForce RTX 4060"], "RTX 4060", {"bf16": 3072 * 4 * 2.46e9, "int8": 242e12 / 2}, 272),
    (
        ["NVIDIA GeForce RTX 4060 Ti"],
        "RTX 4060 Ti",
        {"bf16": 4352 * 4 * 2.54e9, "int8": 353e12 / 2},
        288,
    ),
    (
        ["NVIDIA GeForce RTX 4070"],
        "RTX 4070",
        {"bf16": 5888 * 4 * 2.48e9, "int8": 466e12 / 2},
        None,
    ),
    (
        ["NVIDIA GeForce RTX 4070 SUPER"],
        "RTX 4070 SUPER",
        {"bf16": 7168 * 4 * 2.48e9, "int8": 568e12 / 2},
        504,
    ),
    (
        ["NVIDIA GeForce RTX 4070 Ti"],
        "RTX 4070 Ti",
        {"bf16": 7680 * 4 * 2.61e9, "int8": 641e12 / 2},
        504,
    ),
    (
        ["NVIDIA GeForce RTX 4070 Ti SUPER"],
        "RTX 4070 Ti SUPER",
        {"bf16": 8448 * 4 * 2.61e9, "int8": 706e12 / 2},
        672,
    ),
    (
        ["NVIDIA GeForce RTX 4080"],
        "RTX 4080",
        {"bf16": 9728 * 4 * 2.51e9, "int8": 780e12 / 2},
        716.8,
    ),
    (
        ["NVIDIA GeForce RTX 4080 SUPER"],
        "RTX 4080 SUPER",
        {"bf16": 10240 * 4 * 2.55e9, "int8": 836e12 / 2},
        736,
    ),
    (
        ["NVIDIA GeForce RTX 4090"],
        "RTX 4090",
        {"bf16": 330.4e12 / 2, "fp8": 660.6e12 / 2, "int8": 1321e12 / 2},
        1008,
    ),
    (["NVIDIA GeForce RTX 5060"], "RTX 5060", {"bf16": 3840 * 4 * 2.5e9, "fp4": 614e12 / 2}, 448),
    (
        ["NVIDIA GeForce RTX 5060 Ti"],
        "RTX 5060 Ti",
        {"bf16": 4608 * 4 * 2.57e9, "fp4": 759e12 / 2},
        448,
    ),
    (["NVIDIA GeForce RTX 5070"], "RTX 5070", {"bf16": 6144 * 4 * 2.51e9, "fp4": 988e12 / 2}, 672),
    (
        ["NVIDIA GeForce RTX 5070 Ti"],
        "RTX 5070 Ti",
        {"bf16": 8960 * 4 * 2.45e9, "fp4": 1406e12 / 2},
        896,
    ),
    (
        ["NVIDIA GeForce RTX 5080"],
        "RTX 5080",
        {"bf16": 10752 * 4 * 2.62e9, "fp4": 1801e12 / 2},
        960,
    ),
    (
        ["NVIDIA GeForce RTX 5090"],
        "RTX 5090",
        {"bf16": 419e12 / 2, "fp8": 838e12 / 2, "fp4": 3352e12 / 2},
        1792,
    ),
    # AMD: compute units × operations per clock × clock. A device of an MI250 or MI250X is one of
    # two dies.
    (
        ["AMD Instinct MI210"],
        "MI210",
        {"bf16": 104 * 1024 * 1.7e9, "fp64": 104 * 256 * 1.7e9},
        1638.4,
    ),
    (
        ["AMD Instinct MI250", "MI250"],
        "MI250 (per die)",
        {"bf16": 362.1e12 / 2, "fp64": 90.5e12 / 2},
        3276.8 / 2,
    ),
    (
        ["AMD Instinct MI250X", "MI250X"],
        "MI250X (per die)",
        {"bf16": 383e12 / 2, "fp32": 95.7e12 / 2},
        3276.8 / 2,
    ),
    (["AMD Instinct MI300A"], "MI300A", {"bf16": 228 * 2048 * 2.1e9, "tf32": 490.3e12}, 5300),
    (
        ["AMD Instinct MI300X", "AMD Instinct MI300X VF"],
        "MI300X",
        {"bf16": 304 * 2048 * 2.1e9, "fp8": 2614.9e12},
        5300,
    ),
    (
        ["AMD Instinct MI325X", "AMD Instinct MI325X VF"],
        "MI325X",
        {"bf16": 304 * 2048 * 2.1e9, "fp64": 163.4e12},
        6000,
    ),
    (
        ["AMD Instinct MI350X", "AMD Instinct MI350X VF"],
        "MI350X",
        {"bf16": 256 * 4096 * 2.2e9, "fp4": 256 * 16384 * 2.2e9},
        8000,
    ),
    (
        ["AMD Instinct MI355X", "AMD Instinct MI355X VF"],
        "MI355X",
        {"bf16": 256 * 4096 * 2.4e9, "fp4": 256 * 16384 * 2.4e9},
        8000,
    ),
    # Other vendors: the number of cores × the peak of each, if the vendor publishes it.
    (["Gaudi2", "GAUDI2"], "Gaudi2", {"bf16": 432e12}, 2460),
    (["Gaudi3", "GAUDI3"], "Gaudi3", {"bf16": 1835e12, "fp8": 1835e12}, 3670),
    (["Trainium"], "Trainium", {"bf16": 2 * 95e12, "fp32": 2 * 23.75e12}, 820),
    (["Trainium2"], "Trainium2", {"bf16": 667e12, "fp8": 1299e12, "fp32": 181e12}, 2900),
    (["Trainium3"], "Trainium3", {"bf16": 671e12, "tf32": 671e12}, 4900),
    (["TPU v5e"], "TPU v5e", {"bf16": 50.63e15 / 256}, 819),
    (["TPU v5p"], "TPU v5p", {"bf16": 459e12}, 2765),
    (["TPU v6e"], "TPU v6e", {"bf16": 234.9e15 / 256}, 1600),
]
BY_NAME = [(driver, ours) for drivers, ours, _, _ in CHIPS for driver in drivers]


@pytest.mark.parametrize(
    ("drivers", "ours", "peaks", "bandwidth"), CHIPS, ids=[ours for _, ours, _, _ in CHIPS]
)
def test_a_chip_is_found_by_what_drivers_call_it(
    drivers: list[str], ours: str, peaks: dict[str, float], bandwidth: float | None
) -> None:
    """Each name that a driver reports finds the chip, with the numbers of its data sheet.

    They are peaks of one device, without sparsity and accumulated in fp32.
    """
    for name in [*drivers, ours, ours.lower()]:
        chip = lookup(name)
        assert chip is not None
        assert ours == chip.name
        found = {dtype: chip.peak_flops_per_second.get(dtype) for dtype in peaks}
        assert pytest.approx(peaks, rel=5e-3) == found
        if bandwidth is None:
            assert chip.bandwidth_bytes_per_second is None
        else:
            assert chip.bandwidth_bytes_per_second == pytest.approx(bandwidth * 1e9)


@pytest.mark.parametrize(
    ("name", "links", "each"),
    [
        ("V100 SXM2 16GB", 6, 25),
        ("A100 SXM 80GB", 12, 25),
        ("H100 SXM", 18, 25),
        ("H200 SXM", 18, 25),
        ("B200", 18, 50),
    ],
)
def test_the_link_is_that_of_all_nvlinks_in_one_direction(name: str, links: int, each: int) -> None:
    """The link bandwidth is the number of NVLinks of a chip times the GB/s of each.

    A card for which a bridge can be bought has no link in the table.
    """
    chip = lookup(name)
    card = lookup("H100 PCIe")
    assert chip is not None
    assert card is not None
    assert links * each * 1e9 == chip.link_bytes_per_second
    assert card.link_bytes_per_second is None


def test_every_chip_of_the_table_is_tested() -> None:
    """Every chip of the table is in `CHIPS`, so each number was entered twice, independently."""
    tested = {ours for _, ours, _, _ in CHIPS}
    untested = set(names()) - tested
    gone = tested - set(names())
    assert not untested, (
        f"add {sorted(untested)} to CHIPS in tests/hardware/test_chips.py, with the numbers of the "
        "vendor's data sheet"
    )
    assert not gone, (
        f"{sorted(gone)} of CHIPS in tests/hardware/test_chips.py are not in "
        "lflops/hardware/chips.toml"
    )
    assert len(CHIPS) == len(tested) == len(names())


UNKNOWN = [
    "",
    " ",
    "cpu",
    "cuda",
    "NVIDIA",
    "GeForce",
    "Intel(R) Xeon(R) Processor",
    "NVIDIA L4000",
    "NVIDIA H2000",
    # A board with 64 GB.
    "NVIDIA H100",
    "NVIDIA H100 NVL2",
    "NVIDIA A100",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA H20-3e",
    "NVIDIA A10M",
    "NVIDIA A10-24Q",
    "NVIDIA L20",
    "NVIDIA L2",
    "GRID A100-10C",
    "GeForce GTX 1080",
    "Quadro RTX 8000",
    "Quadro RTX 6000",
    "Quadro RTX 4000",
    "NVIDIA RTX 6000D",
    "NVIDIA RTX 4000 SFF Ada Generation",
    "NVIDIA RTX 5000 Ada Generation Laptop GPU",
    "NVIDIA RTX A5000 Laptop GPU",
    "NVIDIA RTX PRO 6000 Blackwell",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5090 D v2",
    "4090",
    "Tesla V100-SXM3-32GB",
    "AMD Instinct MI250X / MI250",
    "AMD Instinct MI250X/MI250",
    "AMD Instinct MI308X",
    "AMD Instinct MI300X HF",
    "AMD Radeon Graphics",
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_chip_that_is_not_in_the_table_is_unknown(name: str) -> None:
    """A similar name never finds a chip, and the hint is one line."""
    assert lookup(name) is None
    assert 1 == len(hint(name).splitlines())


@pytest.mark.parametrize(("driver", "ours"), BY_NAME)
def test_a_part_of_a_chip_is_not_the_chip(driver: str, ours: str) -> None:
    """A part of a chip is not found, although its name contains the name of the chip.

    Examples are a MIG slice, a laptop chip and a share of a virtual GPU.
    """
    for part in ("MIG 1g.10gb", "MIG 7g.80gb", "Laptop GPU", "Embedded GPU", "-48Q"):
        assert lookup(f"{driver} {part}") is None


@pytest.mark.parametrize(("driver", "ours"), BY_NAME)
def test_no_chip_is_found_by_the_beginning_of_anothers_name(driver: str, ours: str) -> None:
    """The first words of a name find no other chip.

    The only exception is a whole name, as NVIDIA H200 is in NVIDIA H200 NVL.
    """
    words = re.split(r"[ -]", driver)
    for end in range(1, len(words)):
        beginning = " ".join(words[:end])
        found = lookup(beginning)
        assert found is None or found.name == dict(BY_NAME).get(beginning, ours)


def test_no_two_chips_share_a_name() -> None:
    """No two chips have the same name, even with the words in another order."""
    path = Path(lflops.hardware.__file__).with_name("chips.toml")
    vendors = msgspec.toml.decode(path.read_bytes())
    brands = {"nvidia", "tesla", "geforce", "amd", "instinct"}
    chip_of: dict[frozenset[str], str] = {}
    for rows in vendors.values():
        for row in rows:
            for name in (row["name"], *row["names"]):
                words = frozenset(re.findall(r"[a-z0-9]+", name.lower())) - brands
                assert row["name"] == chip_of.setdefault(words, row["name"])


@pytest.mark.parametrize(
    "asked", ["nvidia h200", "H200", "  h200  ", "NVIDIA_H200", "h200-sxm", "SXM H200"]
)
def test_case_vendor_order_and_punctuation_do_not_matter(asked: str) -> None:
    """Users type less than a driver reports."""
    chip = lookup(asked)
    assert chip is not None
    assert "H200 SXM" == chip.name


def every_chip() -> Iterator[Hardware]:
    """Return all chips of the table."""
    for of_vendor in chips().values():
        yield from of_vendor


def test_every_chip_has_a_source_and_the_day_it_was_checked() -> None:
    """A source is an address followed by a date."""
    for chip in every_chip():
        assert re.fullmatch(r"https://\S+ \(20\d\d-\d\d-\d\d\)", chip.source), chip.name


def test_narrower_numbers_are_never_slower() -> None:
    """A narrower dtype is never slower, and the peaks of tensor cores have fixed ratios.

    A mixture of numbers with and without sparsity would have other ratios.
    """
    for chip in every_chip():
        assert [] == list(wrong_proportions(chip))


def wrong_proportions(chip: Hardware) -> Iterator[str]:
    """Return a message for each pair of a chip's peaks with a wrong ratio."""
    peaks = chip.peak_flops_per_second
    known = [dtype for dtype in ("fp32", "tf32", "bf16", "fp8", "fp4") if dtype in peaks]
    for wide, narrow in pairwise(known):
        if peaks[wide] > peaks[narrow]:
            yield f"{chip.name}: {wide} is faster than {narrow}"
    for wide, narrow, ratios in (
        ("fp16", "bf16", [1]),
        ("tf32", "bf16", [1, 2, 4]),
        ("bf16", "fp8", [1, 2]),
        ("fp8", "fp4", [2, 3, 4]),
    ):
        if wide not in peaks or narrow not in peaks:
            continue
        ratio = peaks[narrow] / peaks[wide]
        if not any(ratio == pytest.approx(each, rel=0.03) for each in ratios):
            yield f"{chip.name}: {narrow} is {ratio:.2f} × {wide}, not one of {ratios}"


def wrong_sizes(chip: Hardware) -> Iterator[str]:
    """Return a message for each number of a chip outside of the usual range."""
    peaks = chip.peak_flops_per_second
    bandwidth = chip.bandwidth_bytes_per_second
    # A vendor may publish neither of these.
    half = peaks.get("fp16", peaks.get("bf16"))
    if half is not None and not 18e12 <= half <= 2.6e15:
        yield f"{chip.name}: {half:g} FLOP/s in 16 bits"
    if half is not None and bandwidth is not None and not 30 < half / bandwidth < 600:
        yield f"{chip.name}: {half / bandwidth:.0f} FLOPs for each byte that it reads"
    if chip.memory_bytes is not None and not 8 * 2**30 <= chip.memory_bytes <= 288 * 2**30:
        yield f"{chip.name}: {chip.memory_bytes:g} bytes of memory"


def test_the_figures_are_of_the_size_that_chips_have() -> None:
    """All numbers are in the range of real chips, so a wrong unit or a factor of 1,000 would fail.

    FLOPs per byte lie within bounds too.
    """
    for chip in every_chip():
        assert [] == list(wrong_sizes(chip))


def test_a_chip_without_fp16_can_be_added() -> None:
    """The table omits numbers that a vendor does not publish, even fp16."""
    for peaks in ({"bf16": 400e12, "fp8": 800e12}, {"fp32": 20e12}):
        chip = Hardware("new", peaks, 2e12, 64 * 2**30)
        assert [] == [*wrong_proportions(chip), *wrong_sizes(chip)]


@pytest.mark.parametrize(
    ("peaks", "bandwidth", "memory_gib", "message"),
    [
        ({"fp32": 40e12, "bf16": 20e12}, 2e11, 64, "new: fp32 is faster than bf16"),
        ({"fp16": 400e12, "bf16": 200e12}, 2e12, 64, "new: bf16 is 0.50 × fp16, not one of [1]"),
        ({"bf16": 400e12, "fp8": 1600e12}, 2e12, 64, "new: fp8 is 4.00 × bf16, not one of [1, 2]"),
        ({"bf16": 400e9}, 2e9, 64, "new: 4e+11 FLOP/s in 16 bits"),
        ({"fp16": 400e12}, 2e9, 64, "new: 200000 FLOPs for each byte that it reads"),
        ({"fp16": 400e12}, 2e12, 64000, "new: 6.87195e+13 bytes of memory"),
    ],
)
def test_a_slip_in_a_chip_s_figures_is_seen(
    peaks: dict[str, float], bandwidth: float, memory_gib: int, message: str
) -> None:
    """Wrong numbers make the two tests above fail, with the chip and the number in the message."""
    chip = Hardware("new", peaks, bandwidth, memory_gib * 2**30)
    assert [message] == [*wrong_proportions(chip), *wrong_sizes(chip)]


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("H100", "similar names: H100 SXM, H100 NVL, H100 PCIe)"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "similar names: RTX 4090)"),
        (
            "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
            "similar names: A100 SXM 80GB), because a MIG slice is only a part of its chip",
        ),
        ("AMD Instinct MI300", "similar names: MI300X, MI300A"),
        ("rtx4090", "similar names: RTX 4090"),
    ],
)
def test_the_hint_names_what_is_near(asked: str, near: str) -> None:
    """The hint names similar chips, and shows how to pass the user's own numbers."""
    assert near in hint(asked)
    assert "lflops.Hardware(name=" in hint(asked)


GIVEN: dict[str, Any] = {"name": "mine", "peak_flops_per_second": {"bf16": 1e12}}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"name": ""}, "name='': pass a string"),
        ({"name": None}, "name=None: pass a string"),
        ({"source": 3}, "source=3: pass a string"),
        (
            {"peak_flops_per_second": {}},
            "peak_flops_per_second={}: pass a dict with the FLOP/s of each dtype",
        ),
        (
            {"peak_flops_per_second": 312e12},
            "peak_flops_per_second=312000000000000.0: pass a dict with the FLOP/s of each dtype",
        ),
        (
            {"peak_flops_per_second": {"bfloat16": 1e12}},
            "peak_flops_per_second has the unknown dtype 'bfloat16': use one of fp64, fp32, tf32, fp16, bf16",
        ),
        (
            {"peak_flops_per_second": {"bf16": "312e12"}},
            "peak_flops_per_second['bf16']='312e12': pass a positive, finite number",
        ),
        ({"peak_flops_per_second": {"bf16": True}}, "peak_flops_per_second['bf16']=True: pass"),
        ({"peak_flops_per_second": {"bf16": 0}}, "peak_flops_per_second['bf16']=0: pass"),
        ({"bandwidth_bytes_per_second": -1.0}, "bandwidth_bytes_per_second=-1.0: pass"),
        ({"bandwidth_bytes_per_second": math.inf}, "bandwidth_bytes_per_second=inf: pass"),
        ({"memory_bytes": math.nan}, "memory_bytes=nan: pass"),
    ],
)
def test_figures_that_cannot_be_are_refused(argument: dict[str, Any], message: str) -> None:
    """The error contains the argument, its value and the accepted values."""
    with pytest.raises(HardwareError, match=re.escape(message)):
        Hardware(**GIVEN | argument)


def test_a_device_of_ones_own_is_a_frozen_value() -> None:
    """A `Hardware` is immutable, compares by value, and can be pickled.

    A later change of the dict it was made from has no effect.
    """
    peaks = {"bf16": 1e12}
    mine = Hardware("mine", peaks)
    peaks["bf16"] = 2e12
    assert (
        Hardware("mine", {"bf16": 1e12}, None, None, "") == mine == pickle.loads(pickle.dumps(mine))  # noqa: S301
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        mine.name = "yours"  # type: ignore[misc]
    assert lflops.Hardware is Hardware
    assert lookup("H200") == lflops.hardware.lookup("H200")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the output of `lflops hardware`."""
    assert 0 == main(["hardware", *arguments])
    return capsys.readouterr().out


def test_the_shell_lists_every_chip(capsys: pytest.CaptureFixture[str]) -> None:
    """Every chip is listed under its vendor, in 120 columns."""
    lines = shown(capsys).splitlines()
    assert [] == [name for name in names() if not any(line.startswith(name) for line in lines)]
    assert lines.index("NVIDIA") < lines.index("AMD")
    assert max(map(len, lines)) <= 120


def test_the_shell_shows_one_chip_with_units_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the numbers that the chip has are shown."""
    out = shown(capsys, "NVIDIA A100-SXM4-80GB")
    assert re.search(r"bf16 +312\.00 TFLOP/s", out)
    assert re.search(r"int8 +624\.00 TOP/s", out)
    assert re.search(r"bandwidth +2\.04 TB/s", out)
    assert "fp8" not in out
    assert "nvidia-a100-datasheet" in "".join(out.split())


def test_the_shell_gives_si_units_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON contains all chips, or the named chip."""
    everything = json.loads(shown(capsys, "--json"))
    assert list(names()) == [chip["name"] for chip in everything["chips"]]
    assert everything["measured"] is None
    (chip,) = json.loads(shown(capsys, "l40s", "--json"))["chips"]
    assert 362.05e12 == chip["peak_flops_per_second"]["bf16"]
    assert 48 * 2**30 == chip["memory_bytes"]


def test_the_shell_refuses_an_unknown_chip_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The error line contains similar chips, and the exit status is 2."""
    assert 2 == main(["hardware", "H100"])
    out, err = capsys.readouterr()
    assert "" == out
    assert err.startswith("lflops: 'H100' is not in the table of chips (similar names: H100 SXM")
    assert 1 == len(err.splitlines())
    assert err.endswith(
        ": run `lflops hardware` to list the chips, or `lflops hardware --measure` to measure this "
        "machine\n"
    )


def test_a_narrow_list_says_where_the_rest_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A narrow terminal hides columns, and a line says how to show them."""
    monkeypatch.setenv("COLUMNS", "90")
    assert re.search(
        r"hidden at this terminal width: .*int8.* \(COLUMNS=200 shows more\)", shown(capsys)
    )


def test_another_chip_has_no_share_of_what_is_measured() -> None:
    """The share of the peak is shown only if the measured device is the shown chip.

    A measurement of a CPU has no share of an H100's peak.
    """

    def drawn(chip: str, device: str) -> str:
        console = Console(file=StringIO(), width=100, color_system=None)
        with console.capture() as captured:
            console.print(figures(lookup(chip), Hardware(device, {"bf16": 400e12})))
        return captured.get()

    of_a_cpu = drawn("H100 SXM", "some CPU")
    of_the_chip = drawn("H200", "NVIDIA H200")
    assert "reached" not in of_a_cpu
    assert "40.4 %" not in of_a_cpu
    assert "reached" in of_the_chip
    assert "40.4 %" in of_the_chip


def test_a_chip_s_name_is_no_markup_and_is_shortened() -> None:
    """A chip's name is printed without markup, and is shortened.

    With markup, rich needed 20 seconds for a name of 100,000 backslashes.
    """
    lines = printed(figures(Hardware("[red]My[/red] chip", {"bf16": 400e12})))
    assert "[red]My[/red] chip" in lines[0]
    lines = printed(figures(Hardware("\\" * 100_000, {"bf16": 400e12})))
    assert max(map(len, lines)) <= 100


def test_the_table_needs_no_torch() -> None:
    """Neither a lookup nor `lflops.Hardware` imports torch."""
    code = "import sys, lflops; lflops.hardware.lookup('H200'); lflops.Hardware; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "False" == ended.stdout.strip()


def test_every_dtype_of_the_table_is_one_that_is_taken() -> None:
    """The accepted dtypes are exactly the dtypes in the table."""
    dtypes: set[str] = set()
    for chip in every_chip():
        dtypes.update(chip.peak_flops_per_second)
    assert set(DTYPES) == dtypes
