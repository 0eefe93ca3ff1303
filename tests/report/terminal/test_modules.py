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
NAMES = {
    "attn.c_attn": 3 * D * D,
    "attn.c_proj": D * D,
    "mlp.c_fc": 4 * D * D,
    "mlp.c_proj": 4 * D * D,
}
KINDS = {"": "GPT2Block", "attn": "GPT2Attention", "mlp": "GPT2MLP"}


def gpt(blocks: int = 12) -> Profile:
    """The linear layers of a GPT-2's blocks on 8 x 1024 tokens.

    A weight costs one MAC a token, and twice that backward.
    """
    inside = {"attn": 4 * D * D, "mlp": 8 * D * D, "": 12 * D * D}
    rows: dict[str, dict[str, Any]] = {
        name: weights(0, blocks * inside[""]) | {"class_name": "GPT2Model"} for name in ("", "h")
    }
    rows["h"] |= {"class_name": "ModuleList", "calls": 0}
    cells = []
    for block in range(blocks):
        for part, kind in KINDS.items():
            rows[f"h.{block}.{part}".rstrip(".")] = weights(0, inside[part]) | {"class_name": kind}
        for name, own in NAMES.items():
            rows[f"h.{block}.{name}"] = weights(own) | {"class_name": "Conv1D"}
            cells.append(
                product(
                    f"h.{block}.{name}", "aten::addmm", "forward", macs=8192 * own, bytes_moved=own
                )
            )
            cells.append(
                product(
                    f"h.{block}.{name}",
                    "aten::mm",
                    "backward",
                    macs=2 * 8192 * own,
                    bytes_moved=own,
                )
            )
    return profile(rows, cells)


def line_of(start: str, lines: list[str]) -> str:
    """The first line that begins so, blanks aside, each run of blanks as one."""
    return next(" ".join(line.split()) for line in lines if line.lstrip().startswith(start))


def test_a_row_of_the_table_says_what_each_module_costs() -> None:
    """Twelve blocks: 144 * 768**2 = 84,934,656 parameters, times 8192 tokens 695.78 G MACs forward, and twice that backward."""
    assert "0…11 ×12 GPT2Block 2.09 T 84.93 M 100.0 % 695.78 G 1.39 T 4.17 T 162.00 MiB" == line_of(
        "0…11", drawn(gpt(), 120)
    )


def test_the_header_says_what_each_column_is() -> None:
    """The phase stands above the quantity; phases without MACs have no column."""
    lines = drawn(gpt(), 120)
    assert "module MACs params MACs MACs MACs FLOPs moved" == line_of("module", lines)
    assert "total % of fwd bwd total total bytes" == " ".join(
        lines[lines.index(next(line for line in lines if line.startswith("module"))) - 1].split()
    )


@pytest.mark.parametrize("width", [20, 40, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_cut(width: int) -> None:
    """Columns are left out, names shortened."""
    lines = drawn(gpt(), width)
    assert max(map(len, lines)) <= width
    assert width < 80 or "2.09 T" in line_of("0…11", lines)
    assert "695.78" in "".join(lines)


@pytest.mark.parametrize(("width", "headings"), [(63, 4), (62, 3), (47, 3), (46, 2), (20, 1)])
def test_the_totals_give_up_columns_and_no_digit(width: int, headings: int) -> None:
    """The names take 16 columns, the figures 10, 8, 13 and 16 with the gaps.

    Twelve blocks of four products are 48 calls.
    """
    lines = drawn(gpt(), width)
    figures = ["695.78 G", "1.39 T", "81.00 MiB", "48"]
    assert f"forward {' '.join(figures[:headings])}" == line_of("forward", lines)
    left_out = ["MACs", "FLOPs", "bytes moved", "operator calls"][headings:]
    assert not left_out or f"too narrow for {', '.join(left_out)}" in " ".join(
        " ".join(lines).split()
    )


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(89, "total FLOPs, total bytes moved"), (102, "total bytes moved"), (103, None)],
)
def test_the_columns_that_had_no_room_are_named(width: int, left_out: str | None) -> None:
    """Names take 32 columns, the figures before the last two 48 with the gaps, these 10 and 13."""
    lines = drawn(gpt(), width)
    told = f"too narrow for {left_out} (COLUMNS=200 shows them)"
    assert [told] * bool(left_out) == [line for line in lines if line.startswith("too narrow")]


def test_a_long_name_keeps_its_two_ends() -> None:
    """What is between them gives way."""
    name = "the_first_of_all_the_projections_of_the_last_layer"
    lines = drawn(
        profile(
            {"": {}, name: {"class_name": "Linear"}},
            [product(name, "aten::mm", "forward", macs=4, bytes_moved=1)],
        ),
        60,
    )
    assert "the_first_of" in line_of("the_first", lines)
    assert "…" in line_of("the_first", lines)
    assert "last_layer 4" in line_of("the_first", lines)


def test_alike_neighbours_with_names_of_their_own_are_all_named() -> None:
    """Two or three are listed, more have their ends said."""
    cells = [
        product(name, "aten::mm", "forward", macs=4, bytes_moved=1)
        for name in ("q", "k", "v", "x.a", "x.b", "x.c", "x.d")
    ]
    rows: dict[str, dict[str, Any]] = {
        name: {} for name in ("", "q", "k", "v", "x", "x.a", "x.b", "x.c", "x.d")
    }
    lines = drawn(profile(rows, cells))
    assert line_of("q", lines).startswith("q, k, v ×3 Module")
    assert line_of("a", lines).startswith("a…d ×4 Module")


def test_the_flat_list_says_names_in_full_and_how_many_it_leaves_out() -> None:
    """The largest is a layer of the MLP; 38 modules of the 86 are containers."""
    lines = drawn(gpt(), flat=True)
    assert line_of("h.0.mlp.c_fc", lines).startswith(
        "h.0.mlp.c_fc Conv1D 57.98 G 2.36 M 2.8 % 19.33 G 38.65 G"
    )
    assert "38 modules without self work or parameters are not listed" in lines


def test_another_phase_has_its_own_columns() -> None:
    """MACs, parameters and the share of that phase.

    All phases together have the MACs of each as well.
    """
    backward, together = (
        drawn(untimed(small_profile()), phase="backward"),
        drawn(untimed(small_profile()), phase=None),
    )
    assert "head Linear 256 34 33.3 % 512 832 B" == line_of("head", backward)
    assert "head Linear 384 34 27.3 % 128 256 802 1.63 KiB" == line_of("head", together)


def test_a_phase_without_macs_has_the_share_of_its_flops() -> None:
    """The optimizer's 34 of 178: one operation for each parameter."""
    lines = drawn(untimed(small_profile()), phase="optimizer")
    assert "head Linear 34 34 19.1 % 408 B" == line_of("head", lines)
    assert "module FLOPs params FLOPs moved" == line_of("module", lines)


def timed_gpt() -> Profile:
    """1 ms for each 768 x 768 weights, twice that backward.

    The first block is twice as slow forward, the root itself takes 6 ms.
    """
    own: dict[tuple[str, Phase], float] = {("", "forward"): 6e-3}
    for block in range(12):
        for name, weight in NAMES.items():
            own[f"h.{block}.{name}", "forward"] = weight / (D * D) * (2e-3 if block == 0 else 1e-3)
            own[f"h.{block}.{name}", "backward"] = weight / (D * D) * 2e-3
    return clocked(gpt(), own)


def test_a_row_says_what_each_module_takes() -> None:
    """11 blocks take 12 ms and one 24, twelve backward 24.

    444 of 450 ms. 6 * 695.78 G FLOPs in that time are 9.40 T a second.
    """
    lines = drawn(timed_gpt(), 140)
    assert "module time time time time MACs params MACs FLOP/s MACs MACs FLOPs" == line_of(
        "module", lines
    )
    assert (
        "0…11 ×12 GPT2Block 444 ms 98.7 % 156 ms 288 ms 2.09 T 84.93 M 100.0 % 9.40 T 695.78 G 1.39 T 4.17 T"
        == line_of("0…11", lines)
    )
    assert "×N: N identical modules; the figures are those of all N together, times too" in lines


@pytest.mark.parametrize(("chip", "rate"), [(10e12, "9.40 T"), (9e12, "9.40 T (over the peak)")])
def test_a_rate_that_cannot_be_is_marked(chip: float, rate: str) -> None:
    """The 9.40 T of the blocks, on chips with more and with less.

    Each dtype has a peak, and the highest counts.
    """
    hardware = Hardware(name="chip", peak_flops_per_second={"fp32": chip, "fp64": 1.0})
    counted = timed_gpt()
    counted = replace(counted, run=replace(counted.run, hardware=hardware))
    assert f" 100.0 % {rate} " in line_of("0…11", drawn(counted, 160))


def test_the_usual_width_has_room_for_the_time_and_the_rate_of_long_names() -> None:
    """Of the columns only those that a timed profile can do without give way.

    Parameters, MACs, times and their rate stay.
    """
    name = "the_first_of_all_the_projections_of_the_last_layer"
    cells = [
        product(name, "aten::mm", phase, macs=10**11, bytes_moved=10**5)
        for phase in ("forward", "backward")
    ]
    own: dict[tuple[str, Phase], float] = {(name, "forward"): 0.1, (name, "backward"): 0.2}
    lines = drawn(clocked(profile({"": {}, name: weights(10**6)}, cells), own), 120)
    assert "300 ms 100.0 % 100 ms 200 ms 200.00 G 1.00 M 100.0 % 1.33 T" in line_of(
        "the_first", lines
    )
    assert (
        "too narrow for bwd MACs, total FLOPs, total bytes moved (COLUMNS=200 shows them)" in lines
    )


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
    """No digit is cut, and no line is wider than the terminal."""
    lines = drawn(timed_gpt(), width)
    assert max(map(len, lines)) <= width
    assert any(" ".join(line.split()).endswith(block) for line in lines)


def test_the_flat_list_has_the_time_of_each_module_itself() -> None:
    """The root's 6 ms of 450, without any MACs: a rate of nothing.

    The layers of the first block took twice as long.
    """
    lines = drawn(timed_gpt(), 140, flat=True, sort="time")
    assert line_of("h.0.mlp.c_fc", lines).startswith(
        "h.0.mlp.c_fc Conv1D 16.0 ms 3.6 % 8.00 ms 8.00 ms 57.98 G 2.36 M 2.8 % 7.25 T"
    )
    kept = replace(timed_gpt(), modules={"": replace(timed_gpt().modules[""], self_parameters=1)})
    assert line_of("GPT2Model", drawn(kept, 140, flat=True)).startswith(
        "GPT2Model 6.00 ms 1.3 % 6.00 ms – 0 1 0 % 0 0"
    )


def test_another_phase_has_its_own_time() -> None:
    """All of 288 ms backward, where 1.39 T MACs are 9.66 T FLOPs a second."""
    backward = drawn(timed_gpt(), 140, phase="backward")
    assert (
        "0…11 ×12 GPT2Block 288 ms 100.0 % 1.39 T 84.93 M 100.0 % 9.66 T 2.78 T 81.00 MiB"
        == line_of("0…11", backward)
    )


def test_a_phase_whose_times_are_unknown_has_no_columns_for_them() -> None:
    """The others keep theirs; a phase without MACs has a time, and no rate."""
    lines = drawn(timed_gpt(), 140, phase="optimizer")
    assert "module MACs params MACs FLOPs moved" == line_of("module", lines)
    timed = drawn(small_profile(), 140, phase="optimizer")
    assert "head Linear 100 µs 3.3 % 34 34 19.1 % 408 B" == line_of("head", timed)


def test_a_time_that_is_unknown_is_a_dash() -> None:
    """Backward of the head ran too, and its time is not known.

    That hides no known time, but there is no rate.
    """
    given = clocked(untimed(small_profile()), {("head", "forward"): 1e-3})
    lines = drawn(given, 140)
    assert "encoder Sequential – – 1.02 k 144 72.7 % – 512 512 2.32 k 4.75 KiB" == line_of(
        "encoder", lines
    )
    assert "head Linear 1.00 ms 100.0 % 384 34 27.3 % – 128 256 802 1.63 KiB" == line_of(
        "head", lines
    )


def test_passes_that_are_added_up_are_numbered() -> None:
    """A model that was called once needs no number, one whose forward was not called has none."""
    said = [
        line_of("profiled", drawn(profile({"": {"class_name": "Model", "calls": calls}}, [])))
        for calls in (1, 3, 0)
    ]
    assert ["counted on one pass", "counted, sum of 3 forward passes", "counted"] == [
        each.partition(", ")[2] for each in said
    ]


def test_several_models_are_named_by_their_kinds() -> None:
    """Each kind once; the row that they are added up in is all of it."""
    rows = {
        "": {"class_name": "", "calls": 0},
        "a": {"class_name": "Linear"},
        "b": {"class_name": "Sequential"},
        "b.0": {"class_name": "GELU"},
        "c": {"class_name": "Linear"},
    }
    lines = drawn(profile(rows, []))
    assert "profiled Linear and Sequential, counted" == line_of("profiled", lines)
    assert line_of("all of it", lines)


def test_the_lines_above_the_table_say_what_was_profiled() -> None:
    """What, where, when, on what, and the parameters with their bytes and dtype."""
    lines = drawn(small_profile())
    assert "profiled Model, training, fit, step 8, window 0" == line_of("profiled", lines)
    assert "device cpu on node0, float32, 2 ranks" == line_of("device", lines)
    assert "created 2026-01-02 03:04:05 UTC" == line_of("created", lines)
    assert "inputs 4×8; 4 samples" == line_of("inputs", lines)
    assert "parameters 178 in 712 B, all trainable, all float32" == line_of("parameters", lines)


def test_parameters_are_told_apart_where_they_differ() -> None:
    """Half is trainable, in two dtypes, half of all on this rank."""
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
    said = "parameters 100 in 280 B, 50 trainable in 160 B (50.0 %), 60 bfloat16 in 120 B, 40 float32 in 160 B, 50 in 140 B on this rank"
    assert said == line_of("parameters", drawn(given, 200))


def test_totals_are_by_phase_and_together() -> None:
    """640 and 768 MACs; masked attention would add a column of executed MACs."""
    lines = drawn(untimed(small_profile()))
    assert "totals MACs FLOPs bytes moved operator calls" == line_of("totals", lines)
    assert "forward 640 1.34 k 1.85 KiB 3" == line_of("forward", lines)
    assert "all 1.41 k 3.15 k 6.44 KiB 9" == line_of("all", lines)


def test_the_models_macs_have_a_column_where_a_rank_did_a_part_of_them() -> None:
    """Forward 200 of which the rank did 100; nobody knows of how many backward's 100 are a part."""
    given = profile(
        {"": {}},
        [
            product("", "aten::mm", phase, macs=100, bytes_moved=0)
            for phase in ("forward", "backward")
        ],
    )
    root = given.modules[""]
    known = replace(root, forward=replace(root.forward, logical_macs=200))
    lines = drawn(replace(given, modules={"": known}), 120)
    assert "totals MACs MACs of model FLOPs bytes moved operator calls" == line_of("totals", lines)
    assert "forward 100 200 200 0 B 1" == line_of("forward", lines)
    assert ("backward 100 – 200 0 B 1", "all 200 – 400 0 B 2") == (
        line_of("backward", lines),
        line_of("all", lines),
    )


def test_executed_macs_have_a_column_where_a_mask_spared_some() -> None:
    """100 MACs, 60 of them executed."""
    masked = replace(
        product("", "aten::sdpa", "forward", macs=100, bytes_moved=0), executed_macs=60
    )
    lines = drawn(profile({"": {}}, [masked]))
    assert "totals MACs executed MACs FLOPs bytes moved operator calls" == line_of("totals", lines)
    assert "forward 100 60 200 0 B 1" == line_of("forward", lines)


def test_an_unknown_peak_is_a_dash_and_a_known_one_is_broken_down() -> None:
    """The largest part first."""
    assert "peak live memory –" == line_of("peak", drawn(gpt()))
    assert "peak live memory 2.93 KiB, of these activations 2.23 KiB, parameters 712 B" == line_of(
        "peak", drawn(small_profile())
    )


def test_what_was_not_counted_is_listed() -> None:
    """Each operator with its calls, where they were, its bytes and its time if it is known.

    Or that there was none.
    """
    more = UnsupportedCall(
        module="encoder", operator="my_ops::scan", phase="backward", calls=1, bytes=960
    )
    given = replace(small_profile(), unsupported=(*small_profile().unsupported, more))
    assert "not counted my_ops::scan 2 calls in head, 64 B, 10.0 µs" == line_of(
        "not counted", drawn(scan_traced())
    )
    assert "not counted my_ops::scan 3 calls in 2 modules, 1.00 KiB" == line_of(
        "not counted", drawn(given)
    )
    assert "not counted nothing: every operator that ran has a formula" == line_of(
        "not counted", drawn(gpt())
    )


def test_a_long_ledger_ends_in_the_sum_of_the_rest() -> None:
    """12 operators are listed, 3 more have 2 calls and 10 bytes each."""
    entries = tuple(
        UnsupportedCall(module="", operator=f"my::op{n}", phase="forward", calls=2, bytes=10)
        for n in range(15)
    )
    assert "and 3 more operators 6 calls, 30 B" == line_of(
        "and 3", drawn(replace(gpt(), unsupported=entries))
    )


def test_modules_that_were_never_called_are_named_by_the_uppermost() -> None:
    """`pooler` has one module below it, `probe` none."""
    idle = {"class_name": "Linear", "calls": 0} | weights(8)
    given = profile({"": {}, "pooler": idle, "pooler.dense": idle, "probe": idle}, [])
    assert "never called pooler, probe and 1 below them" == line_of("never called", drawn(given))
    assert not [line for line in drawn(gpt()) if line.startswith("never called")]


def test_numbers_that_were_never_called_are_named() -> None:
    """A pattern without a word would say nothing."""
    idle = {"class_name": "Linear", "calls": 0} | weights(8)
    assert "never called 0, 1" == line_of(
        "never called", drawn(profile({"": {}, "0": idle, "1": idle}, []))
    )


def test_modules_that_were_never_called_in_every_block_are_one() -> None:
    """Names that differ in their numbers alone; after 4 others the rest is a number."""
    idle = {"class_name": "Adapter", "calls": 0} | weights(8)
    blocks = {
        name: {} if name.isdecimal() else idle
        for block in range(12)
        for name in (str(block), f"{block}.drop")
    }
    probes = {f"probe_{letter}": idle for letter in "abcdefghijklm"}
    assert "never called *.drop ×12" == line_of(
        "never called", drawn(profile({"": {}, **blocks}, []))
    )
    assert "probe_d and 9 more" in "\n".join(drawn(profile({"": {}, **probes}, []), 200))


@pytest.mark.parametrize(
    ("note", "said"),
    [
        (
            Note(
                code="ignored",
                subject="probe",
                values={"macs": 1_230_000, "flops": 2_460_000, "calls": 3},
            ),
            "probe is left out of all totals, as requested: 1.23 M MACs and 2.46 M FLOPs in 3 operator calls",
        ),
        (
            Note(
                code="ignored",
                subject="probe",
                values={"macs": 4, "flops": 8, "calls": 1, "seconds": 0.00125},
            ),
            "probe is left out of all totals, as requested: 4 MACs and 8 FLOPs in 1 operator call, 1.25 ms",
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
            "forward consists of prefill with 3.00 k MACs (6.00 k FLOPs), and of decode with 500 MACs (1.00 k FLOPs) in 7 calls",
        ),
        (
            Note(code="generated", subject="", values={"prefill_macs": 1, "decode_calls": 1}),
            "forward consists of prefill with 1 MACs (– FLOPs), and of decode with – MACs (– FLOPs) in 1 call",
        ),
        (
            Note(code="time_scaled", subject="", values={"forward": 0.925, "backward": 1.0625}),
            "module times are approximate (± 7 %): they are scaled to unprofiled passes, forward by 0.93, backward by 1.06",
        ),
        (
            Note(code="time_scaled", subject="", values={}),
            "module times are approximate: they are scaled to unprofiled passes, –",
        ),
        (
            Note(code="time_scaled", subject="", values={"forward": 2.5}),
            "module times are unreliable (± 150 %): they are scaled to unprofiled passes, forward by 2.50",
        ),
        (
            Note(code="no_trace", subject="cut_off", values={}),
            "there is no trace: another torch.profiler started during the recording, and Kineto supports only one at a time",
        ),
        (
            Note(code="backward_assumed", subject="", values={"forwards": 2.5}),
            "backward was timed but not counted; it is assumed to cost 2.50 times as much as forward",
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
            "the schedule is rounded up to whole steps of 3 batches, over which gradients are accumulated",
        ),
        (
            Note(
                code="schedule_shrunk",
                subject="",
                values={"batches": 4, "skip_first": 0, "wait": 1, "windows": 1},
            ),
            "the schedule is shortened, because the run has 4 batches; in steps: skip first 0, wait 1, windows 1",
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
            "no step was counted, so there are times, but no work",
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
            "ranks differ: 192 to 576 MACs; the counts are those of rank 1",
        ),
        (
            Note(
                code="ranks_differ",
                subject="",
                values={"leading_rank": 0, "least_macs": 8, "most_macs": 9, "rows_of_others": 4},
            ),
            "ranks differ: 8 to 9 MACs; the counts are those of rank 0, and 4 rows are from other ranks",
        ),
        (
            Note(
                code="ranks_differ",
                subject="",
                values={"leading_rank": 0, "least_macs": 8, "most_macs": 8, "rows_of_others": 0},
            ),
            "ranks run different operators, with 8 MACs each; the counts are those of rank 0",
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
            "only ranks 4-7, 12 have layers.6 to layers.8, 3 modules",
        ),
        (
            Note(code="ambiguous_threads", subject="", values={"calls": 1}),
            "the work of 1 operator call in backward is counted as self work of the model, because the module is unknown",
        ),
        (
            Note(
                code="formula_failed",
                subject="my::op",
                values={"error": "IndexError: tuple index out of range"},
            ),
            "the formula of my::op failed, so its calls are not counted: IndexError: tuple index out of range",
        ),
        (
            Note(code="compiled_ran_eager", subject="12", values={}),
            (
                "12 compiled modules were counted eagerly: the counts are those of the code as "
                "written, not of the compiled code"
            ),
        ),
        (
            Note(code="compiled_ran_eager", subject="1", values={}),
            (
                "1 compiled module was counted eagerly: the counts are those of the code as written, "
                "not of the compiled code"
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
    """Also one that nobody has a sentence for, and one that does not hold what its sentence needs."""
    assert said == sentence(note)


def test_names_do_not_drive_the_terminal() -> None:
    """Neither markup nor control characters do anything.

    A name with a line break stays on its line.
    """
    name = "[red]a\x1b[31m\nb"
    given = profile(
        {"": {}, name: {}}, [], notes=(Note(code="ignored", subject="[bold]x\x1b[0m", values={}),)
    )
    text = "\n".join(drawn(given))
    assert "[red]a�[31m�b" in text
    assert "[bold]x�[0m is left out" in text
