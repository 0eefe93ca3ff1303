"""Test `lflops show`: its options, its JSON output and its errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from lflops.cli.main import main
from lflops.profile.json_file import save
from lflops.profile.records import CompiledCode, CompiledKernel
from tests.support.profile_builders import product, profile, profile_of, run, small_profile, untimed
from tests.support.terminal import drawn

COMMAND = [sys.executable, "-c", "import sys; from lflops.cli.main import main; sys.exit(main())"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of a file with `small_profile()`."""
    path = tmp_path / "small.profile.json"
    save(small_profile(), path)
    return path


def shell(*args: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run lflops in a process, with an output that is not a terminal."""
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [*COMMAND, *map(str, args)]
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=inherited | environment,
    )


def test_show_prints_the_table_without_colours_in_the_width_asked_for(file: Path) -> None:
    """Without a terminal, the width is 120 columns, or the value of COLUMNS.

    There are no colors, and no blanks at the ends of lines.
    """
    shown = shell("show", file, COLUMNS="60", FORCE_COLOR="1")
    assert (0, "") == (shown.returncode, shown.stderr)
    assert "\x1b" not in shown.stdout
    assert shown.stdout.splitlines() == [line.rstrip() for line in drawn(small_profile(), 60)]
    assert drawn(small_profile(), 120) == shell("show", file).stdout.splitlines()


def test_show_takes_depth_order_phase_and_flat(file: Path) -> None:
    """The options are passed on to the table."""
    sorted_rows = shell(
        "show", file, "--depth", 1, "--sort", "name", "--phase", "all"
    ).stdout.splitlines()
    assert drawn(small_profile(), 120, depth=1, sort="name", phase=None) == sorted_rows
    assert (
        drawn(small_profile(), 120, flat=True) == shell("show", file, "--flat").stdout.splitlines()
    )


def test_show_takes_the_folder_of_a_run(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """For a folder, the last window is shown. A folder without a profile is an error."""
    assert 0 == main(["show", str(file.parent), "--json"])
    of_folder = capfd.readouterr().out
    assert 0 == main(["show", str(file), "--json"])
    assert of_folder == capfd.readouterr().out
    file.unlink()
    assert 2 == main(["show", str(file.parent)])
    assert f"{file.parent}: this folder has no profile" in capfd.readouterr().err


def test_json_holds_exact_integers_in_rows_within_rows(tmp_path: Path) -> None:
    """Two blocks share a row. Each has a layer with 2**60 + 1 MACs, which no float can hold."""
    blocks = [f"{block}.layer" for block in range(2)]
    cells = [product(name, "aten::mm", "forward", macs=2**60 + 1, bytes_moved=1) for name in blocks]
    save(
        profile(
            {"": {}, "0": {}, "0.layer": {}, "1": {}, "1.layer": {}},
            cells,
            run=run(tokens_per_step=8192),
        ),
        tmp_path / "large.json",
    )
    shown = json.loads(shell("show", tmp_path / "large.json", "--json").stdout)
    (block,) = shown["rows"][0]["children"]
    assert {"first": "0", "last": "1", "times": 2} == block["repeat"]
    assert 2**60 + 1 == block["children"][0]["phases"]["forward"]["macs"]
    assert 2**61 + 2 == shown["totals"]["forward"]["macs"]
    assert ("all", 8192, [], []) == (
        shown["phase"],
        shown["run"]["tokens_per_step"],
        shown["unsupported"],
        shown["uncalled"],
    )


def test_json_has_the_pace_and_the_times(file: Path) -> None:
    """The JSON output has the times of the steps and of each module.

    The unprofiled step takes 3 ms and has 2 * 1408 FLOPs. The peak is unknown, so there is no MFU.
    The head takes 300 of 800 µs, and nothing of it was recomputed.
    """
    shown = json.loads(shell("show", file, "--json").stdout)
    assert (1, 0.003, 0.001) == (
        shown["pace"]["steps"],
        shown["pace"]["seconds"]["median"],
        shown["pace"]["phases"]["forward"],
    )
    assert (2816 / 0.003, None) == (
        shown["utilization"]["flops_per_second"],
        shown["utilization"]["mfu"],
    )
    head = shown["rows"][0]["children"][1]
    assert (1e-4, None) == (head["seconds"]["forward"], head["seconds"]["recompute"])
    assert pytest.approx(3 / 8) == head["time_share"]


def test_without_times_json_says_that_they_are_unknown(tmp_path: Path) -> None:
    """Unknown times are null in the JSON output, never 0."""
    save(untimed(small_profile()), tmp_path / "counted.json")
    shown = json.loads(shell("show", tmp_path / "counted.json", "--json", "--operators").stdout)
    assert (0, None, {}, None) == tuple(
        shown["pace"][field] for field in ("steps", "seconds", "phases", "samples_per_second")
    )
    assert {None} == {value for field, value in shown["utilization"].items() if field != "dtype"}
    shown = json.loads(shell("show", tmp_path / "counted.json", "--json").stdout)
    assert {None} == {*shown["rows"][0]["seconds"].values(), shown["rows"][0]["time_share"]}


def test_rows_are_sorted_by_time(file: Path) -> None:
    """The two operators of the encoder take 200 µs, so it comes before the head with 100 µs."""
    rows = json.loads(shell("show", file, "--json", "--sort", "time").stdout)["rows"][0]["children"]
    assert [("encoder", 2e-4), ("head", 1e-4)] == [
        (row["name"], row["seconds"]["forward"]) for row in rows
    ]


def test_times_that_are_not_there_are_no_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sorting by time without times is a usage error in one line, also with --flat and --json."""
    save(untimed(small_profile()), tmp_path / "counted.json")
    for options in ([], ["--flat"], ["--json"]):
        assert 2 == main(["show", str(tmp_path / "counted.json"), "--sort", "time", *options])
        shown = capsys.readouterr()
        assert ("", 1) == (shown.out, len(shown.err.splitlines()))
        assert shown.err.startswith(
            "lflops: sort='time': no module of this profile was timed in any phase: pass one of "
            "macs, flops"
        )


def test_json_of_the_flat_list_has_every_module(file: Path) -> None:
    """The flat list has the self values of each module. Unknown numbers are null."""
    rows = json.loads(shell("show", file, "--flat", "--json", "--sort", "parameters").stdout)[
        "rows"
    ]
    assert [("encoder.0", 144), ("head", 34), ("", 0), ("encoder", 0), ("encoder.1", 0)] == [
        (row["name"], row["parameters"]) for row in rows
    ]
    assert {None} == {row["trainable_parameters"] for row in rows}


def test_kernels_of_compiled_code_are_shown_by_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of kernels has the mean of two batches, and says where they were timed.

    For a fused kernel, it has the number of modules that the kernel computes for.
    """
    kernel = CompiledKernel(
        name="cpp_fused_add_0",
        module="head",
        phase="forward",
        modules=2,
        calls=2,
        host_seconds=3e-5,
        bytes_moved=4096,
    )
    code = CompiledCode(
        graphs=1,
        unrecorded_graphs=0,
        regions=2,
        timed_on="host",
        seconds=1e-4,
        unassigned_seconds=4e-5,
        divided_seconds=3e-5,
        kernels=(
            kernel,
            replace(
                kernel,
                name="extern_kernels.mm",
                module="",
                phase="backward",
                modules=1,
                bytes_moved=None,
            ),
        ),
    )
    counted = small_profile()
    assert counted.trace is not None
    save(replace(counted, trace=replace(counted.trace, compiled=code)), tmp_path / "compiled.json")
    monkeypatch.setenv("COLUMNS", "140")
    assert 0 == main(["show", str(tmp_path / "compiled.json"), "--operators"])
    assert [
        (
            "kernels of compiled code, per batch module phase host % of compiled "
            "fused bytes moved fused from calls"
        ),
        "cpp_fused_add_0 head forward 15.0 µs 30.0 % 2.00 KiB 2 modules 1",
        "extern_kernels.mm the model itself backward 15.0 µs 30.0 % – 1 module 1",
    ] == [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[-3:]]


def test_operators_are_shown_in_place_of_modules(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--operators` prints a table of operators, or JSON with the exact numbers."""
    monkeypatch.setenv("COLUMNS", "120")
    assert 0 == main(["show", str(file), "--operators", "--phase", "forward"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [
        "operators, forward MACs % of MACs FLOPs bytes moved calls",
        "aten::addmm 640 100.0 % 1.28 k 1.35 KiB 2",
    ] == lines[-6:-4]
    assert [
        "traced operators, per batch device, self device host, self host calls",
        "aten::addmm 15.0 µs 15.0 µs 50.0 µs 100 µs 1",
    ] == lines[-2:]
    assert 0 == main(["show", str(file), "--operators", "--phase", "recompute"])
    assert "no operators in recompute" == capsys.readouterr().out.splitlines()[-1]
    assert 0 == main(["show", str(file), "--operators", "--json", "--phase", "optimizer"])
    said = json.loads(capsys.readouterr().out)
    assert ("flops", [("aten::_foreach_add_", 178)]) == (
        said["share_of"],
        [(row["operator"], row["figures"]["flops"]) for row in said["operators"]],
    )


def test_a_file_of_another_version_is_no_wrong_file(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says that another version of lflops is needed."""
    file.write_text('{"schema_version": "3.0"}')
    assert 2 == main(["show", str(file)])
    assert capsys.readouterr().err.endswith(
        ': schema_version is "3.0", but this lflops reads 2.x: a later version of lflops is '
        "needed\n"
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "Missing command"),
        (["sow"], "No such command 'sow'"),
        (["show"], "Missing argument 'FILE'"),
        (["show", "{file}", "--deep"], "No such option: --deep"),
        (["show", "{file}", "--depth", "two"], "Invalid value for '--depth'"),
        (["show", "{file}", "--depth", "-2"], "depth=-2: pass -1 for all levels"),
        (
            ["show", "{file}", "--sort", "size"],
            "sort='size': pass one of macs, flops, parameters, bytes, name",
        ),
        (
            ["show", "{file}", "--phase", "sideways"],
            "phase='sideways': pass one of forward, backward",
        ),
        (
            ["show", "{file}", "--flat", "--depth", "1"],
            "depth=1: --flat prints a list, and only a tree has a depth",
        ),
        (
            ["show", "{file}", "--operators", "--flat"],
            "--operators cannot be combined with --depth, --sort or --flat",
        ),
        (["show", "nowhere.json"], "nowhere.json: No such file"),
        # The folder is not ".", because `make demo` leaves a run there.
        (["show", "docs"], "docs"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], reason: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command prints one line on stderr and nothing on stdout, and exits with status 2."""
    assert 2 == main([argument.format(file=file) for argument in arguments])
    shown = capsys.readouterr()
    assert "" == shown.out
    assert shown.err.startswith(f"lflops: {reason}")
    assert 1 == len(shown.err.splitlines())


def test_a_broken_file_is_named_in_one_line(tmp_path: Path) -> None:
    """A broken file gives one line and no traceback, even if its name contains a line break."""
    broken = tmp_path / "broken\nfile.json"
    broken.write_text('{"schema_version": "2.0", "modules": ')
    shown = shell("show", broken)
    assert (2, "", 1) == (shown.returncode, shown.stdout, len(shown.stderr.splitlines()))
    assert "broken" in shown.stderr


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    """A closed pipe, as in `lflops show FILE | head -1`, is no error.

    The output is larger than the buffer of a pipe.
    """
    save(profile_of(2000), tmp_path / "large.json")
    with subprocess.Popen(
        [*COMMAND, "show", tmp_path / "large.json", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout
        assert process.stderr
        assert b"{\n" == process.stdout.readline()
        process.stdout.close()
        assert b"" == process.stderr.read()
    assert 0 == process.returncode


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="only Linux has a disk that is always full"
)
def test_a_full_disk_is_said_in_one_line(file: Path) -> None:
    """The error is printed only once, although Python flushes stdout again when it shuts down."""
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [*COMMAND, "show", file], check=False, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (2, "lflops: cannot write the output: No space left on device\n") == (
        ended.returncode,
        ended.stderr,
    )


def test_a_terminal_that_has_no_such_letters_gets_others(file: Path) -> None:
    """On an ASCII output, other characters replace the dash and the times sign."""
    shown = shell("show", file, PYTHONIOENCODING="ascii")
    assert (0, "") == (shown.returncode, shown.stderr)
    assert shown.stdout.isascii()


def test_help_and_version_are_plain_text() -> None:
    """The help text has no boxes, and lists all options of `show`."""
    assert "Commands:\n  show" in shell("--help").stdout
    shown = shell("show", "--help").stdout
    for option in ("--depth", "--sort", "--flat", "--operators", "--phase", "--json"):
        assert option in shown
    assert shell("--version").stdout.startswith("lflops")


def test_the_package_itself_is_the_shell() -> None:
    """`python -m lflops` works if the script is not on the path."""
    ran = subprocess.run(
        [sys.executable, "-m", "lflops", "--version"], check=True, capture_output=True, text=True
    )
    assert ran.stdout.startswith("lflops ")


def test_an_error_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters in a path, which someone else may have chosen, are not printed."""
    assert main(["show", "\x1b]0;owned\x07.profile.json"]) == 2
    said = capsys.readouterr().err
    assert "owned" in said
    assert said.strip().isprintable()
