"""Test chips in the user's own TOML file."""

import json
import re
import tomllib
from pathlib import Path

import pytest

import lflops
from lflops.cli.main import main
from lflops.errors import HardwareError
from lflops.hardware.chips import Hardware, chips, is_gpu, lookup, named, names, save, vendor_of

MINE = """
[[NVIDIA]]
name = "Blue 9"
names = ["NVIDIA Blue 9 SXM"]
peaks = { bf16 = 500e12, fp32 = 50e12 }
bandwidth = 2e12
memory_gib = 64
source = "the sheet of 2026"
date = 2026-11-20

[[ours]]
name = "Green"
peaks = { bf16 = 3e12 }
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the user's table into the folder of settings, and return its path."""
    monkeypatch.delenv("LFLOPS_CHIPS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "lflops" / "chips.toml"
    path.parent.mkdir()
    path.write_text(MINE)
    return path


def test_a_chip_of_the_user_s_table_is_found_by_each_of_its_names(own: Path) -> None:
    """A chip of the user's table is found by each name, with the numbers of the file.

    The memory is in bytes, and the chip is listed with its vendor.
    """
    mine = Hardware(
        "Blue 9",
        {"bf16": 500e12, "fp32": 50e12},
        2e12,
        64 * 2**30,
        "the sheet of 2026 (2026-11-20)",
    )
    assert (
        mine == lookup("nvidia blue 9") == lookup("Blue 9 SXM") == lflops.hardware.lookup("Blue 9")
    )
    assert Hardware("Green", {"bf16": 3e12}, None, None, str(own)) == lookup("green")
    assert {"Blue 9", "Green", "H200 SXM"} < set(names())
    assert mine in chips()["NVIDIA"]
    assert "NVIDIA" == vendor_of("Blue 9")
    assert "ours" == vendor_of("Green")
    assert is_gpu(lookup("Blue 9"))
    assert not is_gpu(lookup("Green"))


def test_without_a_file_there_is_the_shipped_table(own: Path) -> None:
    """The file is read again after a change, and without it only the shipped table is used."""
    assert lookup("Green") is not None
    own.write_text(MINE.replace("Green", "Yellow"))
    assert lookup("Green") is None
    assert lookup("Yellow") is not None
    own.unlink()
    assert lookup("Yellow") is None
    assert lookup("H200") is not None


def test_the_variable_names_another_file(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LFLOPS_CHIPS` replaces the file in the folder of settings; a missing file is an error."""
    other = tmp_path / "other.toml"
    monkeypatch.setenv("LFLOPS_CHIPS", str(other))
    with pytest.raises(
        HardwareError,
        match=r"LFLOPS_CHIPS='.*other\.toml': No such file or directory: pass a TOML file of chips",
    ):
        lookup("Green")
    other.write_text('[[x]]\nname = "Red"\npeaks = { fp32 = 1e12 }\n')
    assert lookup("Red") is not None
    assert lookup("Green") is None


def test_a_chip_of_the_user_s_table_replaces_the_shipped_one(own: Path) -> None:
    """Each lookup of an L4 returns the user's numbers, and the list has one L4."""
    own.write_text('[[NVIDIA]]\nname = "L4"\npeaks = { bf16 = 1e12 }\n')
    chip = lookup("NVIDIA L4")
    assert chip is not None
    assert {"bf16": 1e12} == chip.peak_flops_per_second
    assert 1 == names().count("L4")


def test_a_file_with_one_chip_is_taken_in_place_of_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A TOML file with one chip can be passed instead of a name, in Python and in the shell."""
    path = tmp_path / "one.toml"
    path.write_text('[[NVIDIA]]\nname = "Only 1"\npeaks = { bf16 = 7e12 }\n')
    assert {"bf16": 7e12} == named(str(path)).peak_flops_per_second
    assert is_gpu(named(str(path)))
    assert 0 == main(["hardware", str(path)])
    assert re.search(r"bf16 +7\.00 TFLOP/s", capsys.readouterr().out)
    path.write_text(MINE)
    with pytest.raises(
        HardwareError,
        match="has the chips Blue 9, Green: pass a file with one chip, or set LFLOPS_CHIPS to the "
        "path of this file and pass the name of one of its chips",
    ):
        named(str(path))
    path.write_text("")
    with pytest.raises(HardwareError, match="has no chip: pass a file with one chip"):
        named(str(path))
    assert 2 == main(["hardware", str(tmp_path / "none.toml")])
    assert capsys.readouterr().err.endswith(
        "none.toml: No such file or directory: pass a TOML file of chips\n"
    )


WRONG = [
    ("[[a]]\nname = 3\npeaks = {}", "[[a]] number 1: name = 3: use a string"),
    (
        '[[a]]\nname = "x"',
        "[[a]] number 1, 'x': peaks is missing: add the FLOP/s of each dtype, such as { bf16 = 312e12 }",
    ),
    ("[[a]]\npeaks = { bf16 = 1 }", "[[a]] number 1: name is missing: add a string"),
    (
        '[[a]]\nname = "x"\npeaks = 312e12',
        "'x': peaks = 312000000000000.0: use the FLOP/s of each dtype",
    ),
    (
        '[[a]]\nname = "x"\npeaks = { bfloat16 = 1 }',
        "'x': peaks has the unknown dtype 'bfloat16': use one of fp64, fp32, tf32, fp16, bf16",
    ),
    (
        '[[a]]\nname = "x"\npeaks = { bf16 = "312e12" }',
        "'x': peaks.bf16 = '312e12': use a number of FLOP/s, such as 312e12",
    ),
    ('[[a]]\nname = "x"\npeaks = { bf16 = -1 }', "'x': peaks.bf16 = -1: use a number of FLOP/s"),
    (
        '[[a]]\nname = "x"\npeaks = { bf16 = 1 }\nmemory = 3',
        "'x': unknown key 'memory': use one of name, names, peaks",
    ),
    (
        '[[a]]\nname = "x"\npeaks = { bf16 = 1 }\nbandwidth = inf',
        "'x': bandwidth = inf: use a positive number",
    ),
    (
        '[[a]]\nname = "x"\npeaks = { bf16 = 1 }\nnames = "x"',
        "'x': names = 'x': use a list of strings",
    ),
    (
        '[[a]]\nname = "x"\npeaks = { bf16 = 1 }\ndate = "today"',
        "'x': date = 'today': use a date without quotes, such as 2026-11-20",
    ),
    (
        '[a]\nname = "x"',
        "a is {'name': 'x'}, not a list of chips: begin each chip with the line [[a]], followed by its",
    ),
    ("peaks == 3", "not a valid TOML file: "),
    (
        '[[a]]\nname = "x"\npeaks = { bf16 = 1 }\n[[b]]\nname = "X"\npeaks = { bf16 = 2 }',
        "two chips have the name 'X': rename one of them",
    ),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_wrong_file_is_refused_by_file_chip_key_and_value(
    text: str, message: str, own: Path
) -> None:
    """Every lookup of any chip, and the constructor of a monitor, names the error in the file."""
    own.write_text(text)
    for asked in (lambda: lookup("H200"), lambda: lflops.FlopsMonitor(hardware="auto")):
        with pytest.raises(HardwareError) as raised:
            asked()
        assert str(raised.value).startswith(f"{own}: ")
        assert message in str(raised.value)


def test_measured_figures_are_saved_under_a_name(own: Path) -> None:
    """Measured numbers are saved exactly, after the existing content of the file.

    A device that is in no table is then also found by its own name.
    """
    measured = Hardware(
        "Some CPU @ 2 GHz",
        {"fp32": 123456789012.3, "int8": 5e11},
        98765432109.8,
        16 * 2**30 + 3,
        'a "source"',
        36.0 * 2**20,
    )
    assert own == save("desk-1", measured)
    assert own.read_text().startswith(MINE.rstrip())
    saved = Hardware("desk-1", *[getattr(measured, name) for name in FIGURES])
    assert saved == lookup("desk-1")
    assert saved == lookup("Some CPU @ 2 GHz")
    assert "measured" == vendor_of("desk-1")
    assert ["NVIDIA", "ours", "measured"] == list(tomllib.loads(own.read_text()))


FIGURES = (
    "peak_flops_per_second",
    "bandwidth_bytes_per_second",
    "memory_bytes",
    "source",
    "cache_bytes",
)


def test_a_listed_chip_keeps_its_figures_when_this_machine_is_measured(own: Path) -> None:
    """A listed chip keeps the vendor's peak, on which MFU is based.

    The measured peak only belongs to the new name.
    """
    save("our h200", Hardware("NVIDIA H200", {"bf16": 700e12}))
    assert "H200 SXM" == named("NVIDIA H200").name
    assert "our h200" == named("our h200").name
    assert "NVIDIA" == vendor_of("our h200")


def test_a_name_is_saved_once(own: Path) -> None:
    """A name that exists in the user's or the shipped table is an error; nothing is replaced."""
    before = own.read_text()
    for name in ("Green", "blue 9", "H200"):
        with pytest.raises(
            HardwareError,
            match=f"save='{name}': a chip with this name already exists: pass another name",
        ):
            save(name, Hardware("x", {"bf16": 1e12}))
    with pytest.raises(HardwareError, match="save='-': pass a name with letters or digits"):
        save("-", Hardware("x", {"bf16": 1e12}))
    assert before == own.read_text()


def test_the_shell_measures_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--measure --save` creates a missing folder of settings, and checks the name first."""
    monkeypatch.delenv("LFLOPS_CHIPS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "new"))
    monkeypatch.setattr(
        "lflops.hardware.calibrate.calibrate",
        lambda **_: Hardware("a CPU", {"fp32": 3e11}, source="measured here"),
    )
    assert 0 == main(["hardware", "--measure", "--save", "desk", "--json"])
    out, err = capsys.readouterr()
    assert {"fp32": 3e11} == json.loads(out)["measured"]["peak_flops_per_second"]
    assert f"{tmp_path}/new/lflops/chips.toml" == err.strip()
    assert lookup("desk") is not None

    # The name is checked before the measurement, so `calibrate` is not called.
    monkeypatch.setattr("lflops.hardware.calibrate.calibrate", None)
    assert 2 == main(["hardware", "--measure", "--save", "desk"])
    assert "a chip with this name already exists" in capsys.readouterr().err
    assert 2 == main(["hardware", "--save", "other"])
    assert (
        "--save needs the figures that --measure measures: pass --measure as well"
        in capsys.readouterr().err
    )


def test_a_folder_that_cannot_be_written_is_named(own: Path) -> None:
    """The error contains the path and the chip that was not saved."""
    path = own
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file where the folder would be")
    with pytest.raises(HardwareError, match=r"chips\.toml: .*: the chip 'desk' was not saved"):
        save("desk", Hardware("a CPU", {"fp32": 3e11}))
