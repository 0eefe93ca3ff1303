"""Test the terminal report of a profile: the summary above, the module table, totals and notes."""

from typing import Any

import pytest
from msgspec.structs import replace

from lflops.hardware.chips import Hardware
from lflops.profile.notes import Note, sentence
from lflops.profile.profile import DtypeShare, Profile, UnsupportedCall
from lflops.profile.records import Phase
from tests.support.profile_builders import (
    clocked,
    product,
    profile,
    scan_traced,
    small_profile,
    untimed,
    weights,
)
from tests.support.terminal import drawn

D = 768
# The linear layers of a block, each with its number of weights
NAMES = {
    "attn.c_attn": 3 * D * D,
    "attn.c_proj": D * D,
    "mlp.c_fc": 4 * D * D,
    "mlp.c_proj": 4 * D * D,
}


def gpt(blocks: int = 12) -> Profile:
    """Return a profile of the linear layers of GPT-2's blocks, on 8 x 1024 tokens.

    Each weight has one MAC per token in forward, and two in backward.
    """
    attention = 4 * D * D
    mlp = 8 * D * D
    in_block = attention + mlp
    tokens = 8 * 1024
    rows: dict[str, dict[str, Any]] = {
        "": weights(0, blocks * in_block) | {"class_name": "GPT2Model"},
        "h": weights(0, blocks * in_block) | {"class_name": "ModuleList", "calls": 0},
    }
    cells = []
    for block in range(blocks):
        rows[f"h.{block}"] = weights(0, in_block) | {"class_name": "GPT2Block"}
        rows[f"h.{block}.attn"] = weights(0, attention) | {"class_name": "GPT2Attention"}
        rows[f"h.{block}.mlp"] = weights(0, mlp) | {"class_name": "GPT2MLP"}
        for layer, own in NAMES.items():
            name = f"h.{block}.{layer}"
            rows[name] = weights(own) | {"class_name": "Conv1D"}
            macs = tokens * own
            cells.append(product(name, "aten::addmm", "forward", macs=macs, bytes_moved=own))
            cells.append(product(name, "aten::mm", "backward", macs=2 * macs, bytes_moved=own))
    return profile(rows, cells)


def line_of(start: str, lines: list[str]) -> str:
    """Return the first line that begins with `start`, with single blanks between words."""
    return next(" ".join(line.split()) for line in lines if line.lstrip().startswith(start))


def test_a_row_of_the_table_says_what_each_module_costs() -> None:
    """A row has MACs, parameters, the share of MACs, MACs by phase, FLOPs and bytes moved.

    Twelve blocks have 144 * 768**2 = 84,934,656 parameters. With 8192 tokens, these are 695.78 G
    MACs in forward and twice as many in backward.
    """
    row = "0…11 ×12 GPT2Block 2.09 T 84.93 M 100.0 % 695.78 G 1.39 T 4.17 T 162.00 MiB"
    assert row == line_of("0…11", drawn(gpt(), 120))


def test_the_header_says_what_each_column_is() -> None:
    """The phase stands above the quantity, and a phase without MACs has no column."""
    lines = drawn(gpt(), 120)
    assert "module MACs params MACs MACs MACs FLOPs moved" == line_of("module", lines)
    places = [place for place, line in enumerate(lines) if line.startswith("module")]
    above = lines[places[0] - 1]
    assert "total % of fwd bwd total total bytes" == " ".join(above.split())


@pytest.mark.parametrize("width", [20, 40, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_cut(width: int) -> None:
    """A narrow terminal shows fewer columns and shorter names, but complete numbers."""
    lines = drawn(gpt(), width)
    assert max(map(len, lines)) <= width
    if width >= 80:
        assert "2.09 T" in line_of("0…11", lines)
    assert "695.78" in "".join(lines)


@pytest.mark.parametrize(("width", "headings"), [(63, 4), (62, 3), (47, 3), (46, 2), (20, 1)])
def test_the_totals_give_up_columns_and_no_digit(width: int, headings: int) -> None:
    """In a narrow terminal, the table of totals leaves out columns and names them.

    Names take 16 columns; the numbers take 10, 8, 13 and 16 columns with their gaps. Twelve blocks
    of four matmuls have 48 operator calls.
    """
    lines = drawn(gpt(), width)
    figures = ["695.78 G", "1.39 T", "81.00 MiB", "48"]
    assert f"forward {' '.join(figures[:headings])}" == line_of("forward", lines)
    left_out = ["MACs", "FLOPs", "bytes moved", "operator calls"][headings:]
    if left_out:
        text = " ".join(" ".join(lines).split())
        assert f"hidden at this terminal width: {', '.join(left_out)}" in text


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(89, "total FLOPs, total bytes moved"), (102, "total bytes moved"), (103, None)],
)
def test_the_columns_that_had_no_room_are_named(width: int, left_out: str | None) -> None:
    """A line below the table names the columns that are left out.

    Names take 32 columns. The numbers before the last two columns take 48 with their gaps, and the
    last two columns take 10 and 13.
    """
    lines = drawn(gpt(), width)
    found = [line for line in lines if line.startswith("hidden at")]
    if left_out is None:
        assert [] == found
    else:
        expected = f"hidden at this terminal width: {left_out} (COLUMNS=200 shows more)"
        assert [expected] == found


def test_a_long_name_keeps_its_two_ends() -> None:
    """A long name is shortened in the middle."""
    name = "the_first_of_all_the_projections_of_the_last_layer"
    rows = {"": {}, name: {"class_name": "Linear"}}
    cells = [product(name, "aten::mm", "forward", macs=4, bytes_moved=1)]
    line = line_of("the_first", drawn(profile(rows, cells), 60))
    assert "the_first_of" in line
    assert "…" in line
    assert "last_layer 4" in line


def test_alike_neighbours_with_names_of_their_own_are_all_named() -> None:
    """Three identical modules are all named; of more, only the first and the last."""
    leaves = ("q", "k", "v", "x.a", "x.b", "x.c", "x.d")
    cells = [product(name, "aten::mm", "forward", macs=4, bytes_moved=1) for name in leaves]
    names = ("", "q", "k", "v", "x", "x.a", "x.b", "x.c", "x.d")
    rows: dict[str, dict[str, Any]] = {name: {} for name in names}
    lines = drawn(profile(rows, cells))
    assert line_of("q", lines).startswith("q, k, v ×3 Module")
    assert line_of("a", lines).startswith("a…d ×4 Module")


def test_the_flat_list_says_names_in_full_and_how_many_it_leaves_out() -> None:
    """The flat list has complete names, and says how many containers it leaves out.

    The largest layer is in an MLP. 38 of the 86 modules are containers.
    """
    lines = drawn(gpt(), flat=True)
    assert line_of("h.0.mlp.c_fc", lines).startswith(
        "h.0.mlp.c_fc Conv1D 57.98 G 2.36 M 2.8 % 19.33 G 38.65 G"
    )
    assert "38 modules without self work or parameters are not listed" in lines


def test_another_phase_has_its_own_columns() -> None:
    """For one phase, the columns refer to this phase; for all phases, each has a MACs column."""
    backward = drawn(untimed(small_profile()), phase="backward")
    together = drawn(untimed(small_profile()), phase=None)
    assert "head Linear 256 34 33.3 % 512 832 B" == line_of("head", backward)
    assert "head Linear 384 34 27.3 % 128 256 802 1.63 KiB" == line_of("head", together)


def test_a_phase_without_macs_has_the_share_of_its_flops() -> None:
    """In the optimizer, which has no MACs, shares refer to FLOPs.

    The head has 34 of 178 parameters, and each needs one operation.
    """
    lines = drawn(untimed(small_profile()), phase="optimizer")
    assert "head Linear 34 34 19.1 % 408 B" == line_of("head", lines)
    assert "module FLOPs params FLOPs moved" == line_of("module", lines)


def timed_gpt() -> Profile:
    """Return the GPT-2 profile with times: 1 ms in forward for 768 x 768 weights, 2 ms in backward.

    The first block takes twice as long in forward. The root itself takes 6 ms.
    """
    own: dict[tuple[str, Phase], float] = {("", "forward"): 6e-3}
    for block in range(12):
        forward = 2e-3 if block == 0 else 1e-3
        for name, weight in NAMES.items():
            own[f"h.{block}.{name}", "forward"] = weight / (D * D) * forward
            own[f"h.{block}.{name}", "backward"] = weight / (D * D) * 2e-3
    return clocked(gpt(), own)


def test_a_row_says_what_each_module_takes() -> None:
    """A row has the total time, its share, the times by phase and the rate.

    In forward, 11 blocks take 12 ms and one block takes 24 ms. In backward, 12 blocks take 24 ms.
    These are 444 of 450 ms. 6 * 695.78 G FLOPs in this time are 9.40 TFLOP/s.
    """
    lines = drawn(timed_gpt(), 140)
    assert "module time time time time MACs params MACs FLOP/s MACs MACs FLOPs" == line_of(
        "module", lines
    )
    assert (
        "0…11 ×12 GPT2Block 444 ms 98.7 % 156 ms 288 ms 2.09 T 84.93 M 100.0 % 9.40 T 695.78 G "
        "1.39 T 4.17 T"
    ) == line_of("0…11", lines)
    assert "×N: N identical modules; all figures and times are sums over the N modules" in lines


@pytest.mark.parametrize(("chip", "rate"), [(10e12, "9.40 T"), (9e12, "9.40 T (over the peak)")])
def test_a_rate_that_cannot_be_is_marked(chip: float, rate: str) -> None:
    """A rate above the peak of the chip is marked.

    The blocks have 9.40 TFLOP/s. Of several dtypes, the highest peak counts.
    """
    hardware = Hardware(name="chip", peak_flops_per_second={"fp32": chip, "fp64": 1.0})
    counted = timed_gpt()
    counted = replace(counted, run=replace(counted.run, hardware=hardware))
    assert f" 100.0 % {rate} " in line_of("0…11", drawn(counted, 160))


def test_the_usual_width_has_room_for_the_time_and_the_rate_of_long_names() -> None:
    """At 120 columns, long names leave room for times, parameters, MACs and the rate.

    Only less important columns are left out.
    """
    name = "the_first_of_all_the_projections_of_the_last_layer"
    cells = [
        product(name, "aten::mm", "forward", macs=10**11, bytes_moved=10**5),
        product(name, "aten::mm", "backward", macs=10**11, bytes_moved=10**5),
    ]
    own: dict[tuple[str, Phase], float] = {(name, "forward"): 0.1, (name, "backward"): 0.2}
    lines = drawn(clocked(profile({"": {}, name: weights(10**6)}, cells), own), 120)
    figures = "300 ms 100.0 % 100 ms 200 ms 200.00 G 1.00 M 100.0 % 1.33 T"
    assert figures in line_of("the_first", lines)
    left_out = "bwd MACs, total FLOPs, total bytes moved"
    expected = f"hidden at this terminal width: {left_out} (COLUMNS=200 shows more)"
    assert expected in lines


@pytest.mark.parametrize(
    ("width", "block"),
    [
        (28, "444 ms"),
        (31, "444 ms 98.7 %"),
        (61, "444 ms 98.7 %"),
        (62, "444 ms 98.7 % 156 ms"),
        (89, "444 ms 98.7 % 156 ms 288 ms 2.09 T"),
        (90, "444 ms 98.7 % 156 ms 288 ms 2.09 T 84.93 M"),
    ],
)
def test_total_time_and_its_share_give_way_last(width: int, block: str) -> None:
    """In a narrow terminal, the total time and its share are the last columns to be left out."""
    lines = drawn(timed_gpt(), width)
    assert max(map(len, lines)) <= width
    assert any(" ".join(line.split()).endswith(block) for line in lines)


def test_the_flat_list_has_the_time_of_each_module_itself() -> None:
    """The flat list has self times.

    The layers of the first block take twice as long. The root has 6 of 450 ms but no MACs, so its
    rate is unknown.
    """
    lines = drawn(timed_gpt(), 140, flat=True, sort="time")
    assert line_of("h.0.mlp.c_fc", lines).startswith(
        "h.0.mlp.c_fc Conv1D 16.0 ms 3.6 % 8.00 ms 8.00 ms 57.98 G 2.36 M 2.8 % 7.25 T"
    )
    # Without self parameters, the flat list would leave the root out.
    root = replace(timed_gpt().modules[""], self_parameters=1)
    given = replace(timed_gpt(), modules={"": root})
    assert line_of("GPT2Model", drawn(given, 140, flat=True)).startswith(
        "GPT2Model 6.00 ms 1.3 % 6.00 ms – 0 1 0 % 0 0"
    )


def test_another_phase_has_its_own_time() -> None:
    """For one phase, times and rates are those of the phase.

    In backward, 1.39 T MACs in 288 ms are 9.66 TFLOP/s.
    """
    backward = drawn(timed_gpt(), 140, phase="backward")
    row = "0…11 ×12 GPT2Block 288 ms 100.0 % 1.39 T 84.93 M 100.0 % 9.66 T 2.78 T 81.00 MiB"
    assert row == line_of("0…11", backward)


def test_a_phase_whose_times_are_unknown_has_no_columns_for_them() -> None:
    """A phase without known times has no time columns; a phase without MACs has no rate."""
    lines = drawn(timed_gpt(), 140, phase="optimizer")
    assert "module MACs params MACs FLOPs moved" == line_of("module", lines)
    timed = drawn(small_profile(), 140, phase="optimizer")
    assert "head Linear 100 µs 3.3 % 34 34 19.1 % 408 B" == line_of("head", timed)


def test_a_time_that_is_unknown_is_a_dash() -> None:
    """The known forward time of the head is shown although its backward time is unknown.

    There is no rate, because this would need both times. The encoder has no known time.
    """
    given = clocked(untimed(small_profile()), {("head", "forward"): 1e-3})
    lines = drawn(given, 140)
    encoder = "encoder Sequential – – 1.02 k 144 72.7 % – 512 512 2.32 k 4.75 KiB"
    assert encoder == line_of("encoder", lines)
    head = "head Linear 1.00 ms 100.0 % 384 34 27.3 % – 128 256 802 1.63 KiB"
    assert head == line_of("head", lines)


def test_passes_that_are_added_up_are_numbered() -> None:
    """The summary has the number of forward passes only if there are several."""
    for calls, expected in (
        (1, "counted in one pass"),
        (3, "counted, sum of 3 forward passes"),
        # The model ran, but not by its forward.
        (0, "counted"),
    ):
        given = profile({"": {"class_name": "Model", "calls": calls}}, [])
        assert f"profiled Model, {expected}" == line_of("profiled", drawn(given))


def test_several_models_are_named_by_their_kinds() -> None:
    """Several models are named by their classes, each class once; their sum is "the whole model"."""
    rows = {
        "": {"class_name": "", "calls": 0},
        "a": {"class_name": "Linear"},
        "b": {"class_name": "Sequential"},
        "b.0": {"class_name": "GELU"},
        "c": {"class_name": "Linear"},
    }
    lines = drawn(profile(rows, []))
    assert "profiled Linear and Sequential, counted" == line_of("profiled", lines)
    assert line_of("the whole model", lines)


def test_the_lines_above_the_table_say_what_was_profiled() -> None:
    """The summary has the run, the device, the date, the inputs and the parameters."""
    lines = drawn(small_profile())
    assert "profiled Model, training, fit, step 8, window 0" == line_of("profiled", lines)
    assert "device cpu on node0, float32, 2 ranks" == line_of("device", lines)
    assert "created 2026-01-02 03:04:05 UTC" == line_of("created", lines)
    assert "inputs 4×8; 4 samples" == line_of("inputs", lines)
    assert "parameters 178 in 712 B, all trainable, all float32" == line_of("parameters", lines)


def test_parameters_are_told_apart_where_they_differ() -> None:
    """The line about parameters has the trainable ones, each dtype, and the part on this rank.

    Half of them are trainable, there are two dtypes, and half of all are on this rank.
    """
    dtypes = {
        "bfloat16": DtypeShare(parameters=60, bytes=120),
        "float32": DtypeShare(parameters=40, bytes=160),
    }
    root = weights(100) | {
        "trainable_parameters": 50,
        "parameter_bytes": 280,
        "trainable_parameter_bytes": 160,
        "dtypes": dtypes,
    }
    given = profile({"": root | {"local_parameters": 50, "local_parameter_bytes": 140}}, [])
    assert (
        "parameters 100 in 280 B, 50 trainable in 160 B (50.0 %), 60 bfloat16 in 120 B, 40 float32 "
        "in 160 B, 50 in 140 B on this rank"
    ) == line_of("parameters", drawn(given, 200))


def test_totals_are_by_phase_and_together() -> None:
    """Totals have a row for each phase and one for all phases.

    Without masked attention there is no column of executed MACs.
    """
    lines = drawn(untimed(small_profile()))
    assert "totals MACs FLOPs bytes moved operator calls" == line_of("totals", lines)
    assert "forward 640 1.34 k 1.85 KiB 3" == line_of("forward", lines)
    assert "all 1.41 k 3.15 k 6.44 KiB 9" == line_of("all", lines)


def test_the_models_macs_have_a_column_where_a_rank_did_a_part_of_them() -> None:
    """If the rank did only a part of the model's MACs, the model's MACs have a column.

    In forward, the rank did 100 of 200 MACs. For backward, the number is unknown.
    """
    cells = [
        product("", "aten::mm", "forward", macs=100, bytes_moved=0),
        product("", "aten::mm", "backward", macs=100, bytes_moved=0),
    ]
    given = profile({"": {}}, cells)
    root = given.modules[""]
    known = replace(root, forward=replace(root.forward, logical_macs=200))
    lines = drawn(replace(given, modules={"": known}), 120)
    assert "totals MACs MACs of model FLOPs bytes moved operator calls" == line_of("totals", lines)
    assert "forward 100 200 200 0 B 1" == line_of("forward", lines)
    assert "backward 100 – 200 0 B 1" == line_of("backward", lines)
    assert "all 200 – 400 0 B 2" == line_of("all", lines)


def test_executed_macs_have_a_column_where_a_mask_spared_some() -> None:
    """If a mask skips MACs, executed MACs have a column: 60 of 100 here."""
    masked = replace(
        product("", "aten::sdpa", "forward", macs=100, bytes_moved=0), executed_macs=60
    )
    lines = drawn(profile({"": {}}, [masked]))
    assert "totals MACs executed MACs FLOPs bytes moved operator calls" == line_of("totals", lines)
    assert "forward 100 60 200 0 B 1" == line_of("forward", lines)


def test_an_unknown_peak_is_a_dash_and_a_known_one_is_broken_down() -> None:
    """An unknown peak of memory is a dash; a known peak has its categories, the largest first."""
    assert "peak live memory –" == line_of("peak", drawn(gpt()))
    peak = "peak live memory 2.93 KiB, of these activations 2.23 KiB, parameters 712 B"
    assert peak == line_of("peak", drawn(small_profile()))


def test_what_was_not_counted_is_listed() -> None:
    """Unsupported operators are listed with their calls, modules, bytes and time, if it is known.

    If there are none, a line says so.
    """
    more = UnsupportedCall(
        module="encoder", operator="my_ops::scan", phase="backward", calls=1, bytes=960
    )
    given = replace(small_profile(), unsupported=(*small_profile().unsupported, more))
    timed = line_of("not counted", drawn(scan_traced()))
    assert "not counted my_ops::scan 2 calls in head, 64 B moved, 10.0 µs" == timed
    in_two_modules = line_of("not counted", drawn(given))
    assert "not counted my_ops::scan 3 calls in 2 modules, 1.00 KiB moved" == in_two_modules
    without = line_of("not counted", drawn(gpt()))
    assert "not counted nothing: every operator that ran has a formula" == without


def test_a_long_ledger_ends_in_the_sum_of_the_rest() -> None:
    """At most 12 unsupported operators are listed; a last line has the sum of the others.

    Here 3 more operators have 2 calls and 10 bytes each.
    """
    entries = tuple(
        UnsupportedCall(module="", operator=f"my::op{n}", phase="forward", calls=2, bytes=10)
        for n in range(15)
    )
    lines = drawn(replace(gpt(), unsupported=entries))
    assert "and 3 more operators 6 calls, 30 B moved" == line_of("and 3", lines)


def test_modules_that_were_never_called_are_named_by_the_uppermost() -> None:
    """Only the uppermost modules that were never called are named, with the number below them.

    `pooler` has one module below it, and `probe` has none.
    """
    idle = {"class_name": "Linear", "calls": 0} | weights(8)
    given = profile({"": {}, "pooler": idle, "pooler.dense": idle, "probe": idle}, [])
    expected = "never called pooler, probe and 1 of their submodules"
    assert expected == line_of("never called", drawn(given))
    assert not [line for line in drawn(gpt()) if line.startswith("never called")]


def test_numbers_that_were_never_called_are_named() -> None:
    """Modules with a number as name are listed, because a pattern alone would say nothing."""
    idle = {"class_name": "Linear", "calls": 0} | weights(8)
    lines = drawn(profile({"": {}, "0": idle, "1": idle}, []))
    assert "never called 0, 1" == line_of("never called", lines)


def test_modules_that_were_never_called_in_every_block_are_one() -> None:
    """Modules that differ only in numbers are one name, and more than 4 names are shortened."""
    idle = {"class_name": "Adapter", "calls": 0} | weights(8)
    blocks: dict[str, dict[str, Any]] = {"": {}}
    for block in range(12):
        blocks[f"{block}"] = {}
        blocks[f"{block}.drop"] = idle
    lines = drawn(profile(blocks, []))
    assert "never called *.drop ×12" == line_of("never called", lines)
    probes = {f"probe_{letter}": idle for letter in "abcdefghijklm"}
    lines = drawn(profile({"": {}, **probes}, []), 200)
    assert "probe_d and 9 more" in "\n".join(lines)


@pytest.mark.parametrize(
    ("note", "said"),
    [
        (
            Note(
                code="ignored",
                subject="probe",
                values={"macs": 1_230_000, "flops": 2_460_000, "calls": 3},
            ),
            (
                "probe is left out of all totals, as requested: 1.23 M MACs and 2.46 M FLOPs in 3 "
                "operator calls"
            ),
        ),
        (
            Note(
                code="ignored",
                subject="probe",
                values={"macs": 4, "flops": 8, "calls": 1, "seconds": 0.00125},
            ),
            (
                "probe is left out of all totals, as requested: 4 MACs and 8 FLOPs in 1 operator "
                "call, 1.25 ms"
            ),
        ),
        (
            Note(
                code="generated",
                subject="",
                values={
                    "prefill_macs": 3000,
                    "decode_macs": 500,
                    "decode_calls": 7,
                    "prefill_flops": 6000,
                    "decode_flops": 1000,
                },
            ),
            (
                "forward consists of prefill with 3.00 k MACs (6.00 k FLOPs), and of decode with "
                "500 MACs (1.00 k FLOPs) in 7 calls"
            ),
        ),
        (
            Note(code="generated", subject="", values={"prefill_macs": 1, "decode_calls": 1}),
            (
                "forward consists of prefill with 1 MACs (– FLOPs), and of decode with – MACs (– "
                "FLOPs) in 1 call"
            ),
        ),
        (
            Note(code="time_scaled", subject="", values={"forward": 0.925, "backward": 1.0625}),
            (
                "module times are approximate (± 7 %): to match unprofiled passes, they are "
                "multiplied by 0.93 in forward, 1.06 in backward"
            ),
        ),
        (
            Note(code="time_scaled", subject="", values={}),
            "module times are approximate: to match unprofiled passes, they are multiplied by –",
        ),
        (
            Note(code="time_scaled", subject="", values={"forward": 2.5}),
            (
                "module times are unreliable (± 150 %): to match unprofiled passes, they are "
                "multiplied by 2.50 in forward"
            ),
        ),
        (
            Note(code="no_trace", subject="cut_off", values={}),
            (
                "there is no trace: another torch.profiler started during the recording, and "
                "Kineto supports only one at a time"
            ),
        ),
        (
            Note(code="backward_assumed", subject="", values={"forwards": 2.5}),
            (
                "the FLOPs of backward were not counted; lflops assumes 2.50 times the FLOPs of "
                "forward"
            ),
        ),
        (
            Note(
                code="experts",
                subject="",
                values={
                    "expert_parameters": 3000,
                    "non_expert_parameters": 500,
                    "tensor_parallel": 1,
                },
            ),
            "3.00 k parameters are in experts, and 500 are outside of experts",
        ),
        (
            Note(code="rounded_to_cycles", subject="", values={"accumulation": 3}),
            (
                "each step accumulates the gradients of 3 batches, so each part of lflops' schedule is "
                "rounded up to a whole number of steps"
            ),
        ),
        (
            Note(
                code="schedule_shrunk",
                subject="",
                values={"batches": 4, "skip_first": 0, "wait": 1, "windows": 1},
            ),
            (
                "the schedule is shortened, because the run has 4 batches; the new profiling schedule, in "
                "steps: skip first 0, wait 1, windows 1"
            ),
        ),
        (
            Note(code="few_unprofiled_steps", subject="", values={"steps": 2}),
            "only 2 unprofiled steps were timed",
        ),
        (
            Note(code="ended_early", subject="KeyboardInterrupt", values={}),
            "KeyboardInterrupt ended the training run before the end of the window",
        ),
        (
            Note(code="not_counted", subject="", values={}),
            "no step was counted, so the profile has times, but no MACs or FLOPs",
        ),
        (
            Note(code="ranks_missing", subject="1, 3", values={"missing": 2, "world_size": 5}),
            "2 of 5 ranks sent no profile: 1, 3",
        ),
        (
            Note(
                code="ranks_differ",
                subject="",
                values={
                    "leading_rank": 1,
                    "least_macs": 192,
                    "most_macs": 576,
                    "rows_of_others": 0,
                },
            ),
            "ranks do different work: 192 to 576 MACs; the counts are from rank 1",
        ),
        (
            Note(
                code="ranks_differ",
                subject="",
                values={"leading_rank": 0, "least_macs": 8, "most_macs": 9, "rows_of_others": 4},
            ),
            (
                "ranks do different work: 8 to 9 MACs; the counts are from rank 0, and 4 "
                "modules are from other ranks"
            ),
        ),
        (
            Note(
                code="ranks_differ",
                subject="",
                values={"leading_rank": 0, "least_macs": 8, "most_macs": 8, "rows_of_others": 0},
            ),
            "ranks run different operators, but all have 8 MACs; the counts are from rank 0",
        ),
        (
            Note(
                code="only_on", subject="1", values={"modules": 1, "first": "head", "last": "head"}
            ),
            "only rank 1 has head",
        ),
        (
            Note(
                code="only_on",
                subject="4-7, 12",
                values={"modules": 3, "first": "layers.6", "last": "layers.8"},
            ),
            "only ranks 4-7, 12 have layers.6 to layers.8 (3 modules)",
        ),
        (
            Note(code="ambiguous_threads", subject="", values={"calls": 1}),
            (
                "in backward, 1 operator call could be assigned to no module, so the work counts as the "
                "model's own, outside its submodules"
            ),
        ),
        (
            Note(
                code="formula_failed",
                subject="my::op",
                values={"error": "IndexError: tuple index out of range"},
            ),
            (
                "the formula of my::op failed, so its calls are not counted: IndexError: tuple "
                "index out of range"
            ),
        ),
        (
            Note(code="compiled_ran_eager", subject="12", values={}),
            (
                "12 compiled modules were counted without compilation: the counts describe the "
                "original code, not the compiled code"
            ),
        ),
        (
            Note(code="compiled_ran_eager", subject="1", values={}),
            (
                "1 compiled module was counted without compilation: the counts describe the "
                "original code, not the compiled code"
            ),
        ),
        (
            Note(code="rank_missing", subject="7", values={"waited_seconds": 30.0}),
            "rank missing 7: waited_seconds 30.0",
        ),
        (Note(code="strange", subject="", values={}), "strange"),
        (
            Note(code="ignored", subject="probe", values={}),
            "probe is left out of all totals, as requested: – MACs and – FLOPs in – operator calls",
        ),
    ],
)
def test_a_note_becomes_a_sentence(note: Note, said: str) -> None:
    """Each note becomes a sentence.

    This includes notes of an unknown code, and notes that lack values of their sentence.
    """
    assert said == sentence(note)


def test_names_do_not_drive_the_terminal() -> None:
    """Markup, control characters and line breaks in names have no effect."""
    name = "[red]a\x1b[31m\nb"
    note = Note(code="ignored", subject="[bold]x\x1b[0m", values={})
    given = profile({"": {}, name: {}}, [], notes=(note,))
    text = "\n".join(drawn(given))
    assert "[red]a�[31m�b" in text
    assert "[bold]x�[0m is left out" in text
