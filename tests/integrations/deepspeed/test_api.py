"""DeepSpeed's profiler by its own names: what it takes, what it gives, and that it leaves no trace."""

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lflops.analysis.analysis import analyze
from lflops.errors import CountError
from lflops.integrations.deepspeed.api import FlopsProfiler, get_model_profile
from lflops.integrations.deepspeed.engine import with_engine_facts
from lflops.integrations.deepspeed.text.summary import summary
from lflops.profile.profile import Profile
from lflops.profile.steps import Step
from tests.support.profile_builders import product, profile
from tests.support.small_models import (
    Block,
    between_linears,
    down,
    hidden,
    sequence,
    square,
    tokens,
    up,
    wide,
)

BLOCK_MACS = up + down
BLOCK_FLOPS = 2 * BLOCK_MACS + tokens * (wide + hidden) + tokens * wide
BLOCK_PARAMS = 2 * hidden * wide + wide + hidden


@dataclass
class Batch:
    x: Tensor
    scale: float


class Taking(nn.Module):
    """A linear layer that takes its input in any wrapping."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(hidden, hidden)

    def forward(self, batch: Any = None, *, x: Tensor | None = None) -> Tensor:
        if isinstance(batch, list | tuple):
            batch = batch[0]
        found = (
            batch["x"]
            if isinstance(batch, dict)
            else batch.x
            if isinstance(batch, Batch)
            else batch
            if x is None
            else x
        )
        return self.layer(found)


def profiled(model: nn.Module, *args: Any, **options: Any) -> FlopsProfiler:
    """A profiler around one forward."""
    prof = FlopsProfiler(model, **options)
    prof.start_profile()
    model(*args)
    prof.stop_profile()
    return prof


def figures(printed: str) -> dict[str, str]:
    """What was printed, by its labels."""
    return {
        label.strip(): value
        for label, value in re.findall(r"^(.{1,68}): +(\S.*)$", printed, re.MULTILINE)
    }


THEIRS = {
    get_model_profile: {
        "model": None,
        "input_shape": None,
        "args": None,
        "kwargs": None,
        "print_profile": True,
        "detailed": True,
        "module_depth": -1,
        "top_modules": 1,
        "warm_up": 1,
        "as_string": True,
        "output_file": None,
        "ignore_modules": None,
        "mode": "forward",
    },
    FlopsProfiler: {"model": None, "ds_engine": None, "recompute_fwd_factor": 0.0},
    FlopsProfiler.start_profile: {"ignore_list": None},
    FlopsProfiler.stop_profile: {},
    FlopsProfiler.reset_profile: {},
    FlopsProfiler.end_profile: {},
    FlopsProfiler.get_total_flops: {"as_string": False},
    FlopsProfiler.get_total_macs: {"as_string": False},
    FlopsProfiler.get_total_duration: {"as_string": False},
    FlopsProfiler.get_total_params: {"as_string": False},
    FlopsProfiler.is_expert_tensor_parallelism_enabled: {},
    FlopsProfiler.print_model_profile: {
        "profile_step": 1,
        "module_depth": -1,
        "top_modules": 1,
        "detailed": True,
        "output_file": None,
    },
    FlopsProfiler.print_model_aggregated_profile: {"module_depth": -1, "top_modules": 1},
}


@pytest.mark.parametrize("function", THEIRS)
def test_the_arguments_and_their_order_and_defaults_are_deepspeeds(
    function: Callable[..., Any],
) -> None:
    """As in 0.19.8; `None` where that has an empty list or dict that all calls share."""
    taken = {
        name: each.default
        for name, each in inspect.signature(function).parameters.items()
        if name != "self"
    }
    assert list(THEIRS[function].items()) == [
        (name, None if default is inspect.Parameter.empty else default)
        for name, default in taken.items()
    ]


def test_a_model_is_profiled_by_the_shape_of_its_input() -> None:
    """Two products of 2 * 3 vectors, their biases, and the ReLU between them, once an element."""
    assert (BLOCK_FLOPS, BLOCK_MACS, BLOCK_PARAMS) == get_model_profile(
        Block(), (2, 3, hidden), print_profile=False, as_string=False
    )


def test_the_figures_are_strings_unless_asked_otherwise() -> None:
    """420 MACs, 840 + 72 + 42 flops, 82 parameters: as DeepSpeed writes them."""
    assert ("954", "420 MACs", "82") == get_model_profile(
        Block(), (2, 3, hidden), print_profile=False
    )


@pytest.mark.parametrize(
    "inputs",
    [
        {"args": [sequence()]},
        {"args": (sequence(),)},
        {"args": sequence()},
        {"args": None, "kwargs": {"x": sequence()}},
        {"kwargs": {"x": sequence()}},
        {"args": [], "kwargs": {"x": sequence()}},
        {"args": [{"x": sequence()}]},
        {"args": [[sequence()]]},
        {"args": [Batch(sequence(), 1.0)]},
        {"kwargs": {"batch": Batch(sequence(), 1.0)}},
    ],
)
def test_every_way_to_give_an_input_works(inputs: dict[str, Any]) -> None:
    """By position, by keyword, in a dict, a list, a dataclass."""
    assert square == get_model_profile(Taking(), **inputs, print_profile=False, as_string=False)[1]


def test_a_model_without_parameters_has_an_input_too() -> None:
    """In torch's default dtype, on the CPU."""
    assert (12, 0, 0) == get_model_profile(nn.ReLU(), (3, 4), print_profile=False, as_string=False)


def test_the_input_is_of_the_models_dtype() -> None:
    """That of the first floating parameter."""
    model = Block().to(torch.bfloat16)
    assert (
        BLOCK_MACS
        == get_model_profile(model, (2, 3, hidden), print_profile=False, as_string=False)[1]
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "the model has no input: pass input_shape=, args= or kwargs="),
        ({"input_shape": 3}, r"input_shape=3: pass the sizes of one tensor"),
        ({"input_shape": ()}, r"input_shape=\(\): pass the sizes"),
        ({"input_shape": (2, 5), "mode": "train"}, r"mode='train': pass 'forward' or 'generate'"),
        (
            {"input_shape": (2, 5), "module_depth": -2},
            r"module_depth=-2: pass a whole number, at least -1",
        ),
        (
            {"input_shape": (2, 5), "top_modules": -1},
            r"top_modules=-1: pass a whole number, at least 0",
        ),
        ({"input_shape": (2, 5), "warm_up": 0.5}, r"warm_up=0.5: pass a whole number, at least 0"),
        (
            {"input_shape": (2, 5), "ignore_modules": ["nowhere"]},
            "the model has no module 'nowhere'",
        ),
        ({"args": [torch.ones(2, 5)], "mode": "generate"}, r"Block has no generate\(\)"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], said: str) -> None:
    """With what was given and what is taken, before anything is printed."""
    with pytest.raises(CountError, match=said):
        get_model_profile(Block(), **options)


def test_a_shape_for_a_model_of_token_ids_is_hinted_at() -> None:
    """Torch's own error says nothing of where the floating-point numbers came from.

    With other inputs there is nothing to hint at.
    """
    with pytest.raises(RuntimeError) as failed:
        get_model_profile(nn.Embedding(5, 3), (2, 3))
    assert [
        (
            "get_model_profile: input_shape= creates a floating-point tensor; for other inputs, "
            "such as token ids, pass args="
        )
    ] == getattr(failed.value, "__notes__", [])
    with pytest.raises(RuntimeError) as failed:
        get_model_profile(nn.Embedding(5, 3), args=[torch.rand(2, 3)])
    assert not hasattr(failed.value, "__notes__")


class Speaker(nn.Module):
    """Says one vector after the other, each from the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def generate(self, x: Tensor, new: int) -> Tensor:
        said = self(x)[:, -1:]
        for _ in range(new - 1):
            said = torch.cat([said, self(said[:, -1:])], dim=1)
        return said


def test_a_generation_has_its_two_parts_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """3 vectors of 2 sequences at once, then 4 times one more of each: 150 MACs and 4 * 50."""
    _, macs, _ = get_model_profile(
        Speaker(), kwargs={"x": sequence(), "new": 5}, mode="generate", as_string=False
    )
    said = figures(capsys.readouterr().out)
    assert square + 4 * 2 * hidden * hidden == macs
    assert ("150", "200", "4") == (
        said["prefill MACs per GPU"],
        said["decode MACs per GPU"],
        said["decode calls"],
    )
    assert {
        "prefill latency",
        "decode latency",
        "decode latency of one call",
        "decode tokens/second per GPU",
        "tokens/second per GPU",
    } <= said.keys()


def test_a_generation_of_one_call_has_no_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to tell apart."""
    _, macs, _ = get_model_profile(
        Speaker(), args=[sequence(), 1], mode="generate", as_string=False
    )
    assert square == macs
    assert not any("decode" in label for label in figures(capsys.readouterr().out))


def test_a_model_that_is_none_is_refused() -> None:
    """By both."""
    with pytest.raises(CountError, match="is a class: pass an instance"):
        get_model_profile(Block, (2, 3, hidden))  # type: ignore[arg-type]
    with pytest.raises(CountError, match="FlopsProfiler: 3 is no"):
        FlopsProfiler(3)


def test_a_model_is_profiled_in_evaluation_and_its_mode_is_put_back() -> None:
    """Of each module its own; also where the model fails."""
    model = between_linears(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(length := 3)))
    model[1][1].eval()
    before = [module.training for module in model.modules()]
    seen = []
    model.register_forward_hook(lambda module, *_: seen.append(module.training))
    get_model_profile(model, (2, length, hidden), print_profile=False)
    assert {False} == set(seen)
    assert before == [module.training for module in model.modules()]
    with pytest.raises(RuntimeError):
        get_model_profile(model, (2, 3, hidden + 1))
    assert before == [module.training for module in model.modules()]


def test_profiling_leaves_the_run_alone() -> None:
    """Random numbers, patched functions, attributes, hooks, standard output.

    As if nothing had been.
    """
    model = Block()
    attributes, functions, output = (
        dict(vars(model)),
        (F.linear, torch.matmul, Tensor.__matmul__),
        sys.stdout,
    )
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    get_model_profile(model, (2, 3, hidden), print_profile=False)
    profiled(model, sequence()).end_profile()
    torch.manual_seed(7)
    assert torch.equal(expected, torch.rand(3))
    assert attributes.keys() == vars(model).keys()
    assert functions == (F.linear, torch.matmul, Tensor.__matmul__)
    assert output is sys.stdout
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_random_numbers_go_on_as_if_no_input_had_been_drawn() -> None:
    """The input's are its own."""
    torch.manual_seed(7)
    get_model_profile(nn.Dropout(0.5), (2, 3), print_profile=False)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


def test_it_prints_once_and_what_it_prints_is_what_it_returns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The step is how many passes warmed up."""
    flops, macs, params = get_model_profile(Block(), (2, 3, hidden), warm_up=3)
    printed = capsys.readouterr().out
    assert 1 == printed.count("Profile Summary at step 3:")
    said = figures(printed)
    assert (flops, macs, params) == (
        said["fwd flops per GPU"],
        said["fwd MACs per GPU"],
        said["params per GPU"],
    )
    assert params == said["params of model = params per GPU * mp_size"]


def test_it_prints_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing; or without the model in detail; or down to a depth, with so many classes."""
    get_model_profile(Block(), (2, 3, hidden), print_profile=False)
    assert "" == capsys.readouterr().out
    get_model_profile(Block(), (2, 3, hidden), detailed=False, module_depth=0, top_modules=2)
    printed = capsys.readouterr().out
    assert "Detailed" not in printed
    assert "Top 2 modules" in printed
    assert ["depth 0:"] == re.findall(r"^depth .*", printed, re.MULTILINE)


def test_what_it_prints_goes_to_a_file_if_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder that need not be there yet; an empty name is none, as in DeepSpeed."""
    file = tmp_path / "new" / "profile.txt"
    get_model_profile(Block(), (2, 3, hidden), output_file=file)
    assert "" == capsys.readouterr().out
    assert "fwd MACs per GPU" in file.read_text("utf-8")
    get_model_profile(Block(), (2, 3, hidden), output_file="")
    assert "fwd MACs per GPU" in capsys.readouterr().out


@pytest.mark.parametrize("ignored", [[nn.Linear], nn.Linear, ["1.up", "1.down", "0", "2"]])
def test_ignoring_modules_takes_their_work_out(ignored: Any) -> None:
    """All products are theirs; what remains is the ReLU."""
    model = between_linears(Block())
    flops, macs, _ = get_model_profile(
        model, (2, 3, hidden), ignore_modules=ignored, print_profile=False, as_string=False
    )
    assert (tokens * wide, 0) == (flops, macs)
    prof = FlopsProfiler(model)
    prof.start_profile(ignore_list=ignored)
    model(sequence())
    assert (tokens * wide, 0) == (prof.get_total_flops(), prof.get_total_macs())


def test_a_profiler_around_one_forward_counts_and_times_it() -> None:
    """Both at once: there is but one pass, and the profile says what that costs."""
    prof = profiled(Block(), sequence())
    assert (BLOCK_FLOPS, BLOCK_MACS, BLOCK_PARAMS) == (
        prof.get_total_flops(),
        prof.get_total_macs(),
        prof.get_total_params(),
    )
    assert ("954", "420 MACs", "82") == (
        prof.get_total_flops(True),
        prof.get_total_macs(as_string=True),
        prof.get_total_params(True),
    )
    seconds = prof.get_total_duration()
    assert isinstance(seconds, float)
    assert seconds >= 0  # less what the hooks took, which on a busy machine may be all of it
    assert re.fullmatch(r"[\d.]+ m?u?s", str(prof.get_total_duration(as_string=True)))
    assert prof.profile.run.observer_ratio is not None
    assert isinstance(prof.profile, Profile)


def test_its_report_says_by_how_much_counting_slows_the_latency(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Beneath the latency, which is without it."""
    prof = profiled(Block(), sequence())
    prof.print_model_profile(profile_step=5)
    printed = capsys.readouterr().out
    assert "Profile Summary at step 5:" in printed
    assert (
        f"the pass took {prof.profile.run.observer_ratio:.2f} times as long; this is subtracted from the latencies, except for a few µs per operator"
        == figures(printed)["cost of counting"]
    )
    assert (BLOCK_FLOPS, BLOCK_MACS, BLOCK_PARAMS) == (prof.flops, prof.macs, prof.params)


def test_before_a_print_there_are_no_figures_on_the_profiler() -> None:
    """As in DeepSpeed."""
    assert not any(
        hasattr(profiled(Block(), sequence()), name) for name in ("flops", "macs", "params")
    )


def test_several_forwards_are_added_up() -> None:
    """Three times the work, and nothing of what ran before or after."""
    model = Block()
    prof = FlopsProfiler(model)
    model(sequence())
    prof.start_profile()
    for _ in range(3):
        model(sequence())
    prof.stop_profile()
    model(sequence())
    assert 3 * BLOCK_MACS == prof.get_total_macs()


def test_to_start_again_and_to_reset_begin_from_nothing() -> None:
    """DeepSpeed doubles on the first, and keeps counting after the second."""
    model = Block()
    prof = profiled(model, sequence())
    prof.start_profile()
    prof.start_profile()
    model(sequence())
    assert BLOCK_MACS == prof.get_total_macs()
    prof.start_profile()
    model(sequence())
    prof.reset_profile()
    model(sequence())
    assert BLOCK_MACS == prof.get_total_macs()
    prof.reset_profile()
    with pytest.raises(CountError, match="there is no profile"):
        prof.get_total_macs()


def test_a_reset_keeps_what_is_ignored() -> None:
    """It is the same profile, from nothing."""
    model = Block()
    prof = FlopsProfiler(model)
    prof.start_profile(ignore_list=[nn.Linear])
    prof.reset_profile()
    model(sequence())
    assert 0 == prof.get_total_macs()


def test_backward_is_counted_where_it_runs_before_the_stop() -> None:
    """The input needs no gradient: one product for the first weight, two for the second layer."""
    model = Block()
    prof = FlopsProfiler(model)
    prof.start_profile()
    model(sequence()).sum().backward()
    prof.stop_profile()
    assert (BLOCK_MACS, up + 2 * down) == (
        prof.get_total_macs(),
        prof.profile.total(phase="backward"),
    )


def test_backward_goes_on_after_the_stop() -> None:
    """The graph of a counted forward is a graph."""
    model = Block()
    prof = FlopsProfiler(model)
    prof.start_profile()
    loss = model(sequence()).sum()
    prof.end_profile()
    loss.backward()
    assert model.up.weight.grad is not None
    assert 0 == prof.profile.total(phase="backward")


@pytest.mark.parametrize(
    "ask",
    [
        FlopsProfiler.print_model_profile,
        FlopsProfiler.print_model_aggregated_profile,
        FlopsProfiler.get_total_flops,
        FlopsProfiler.get_total_macs,
        FlopsProfiler.get_total_duration,
        FlopsProfiler.get_total_params,
        lambda prof: prof.profile,
    ],
)
def test_asking_before_a_forward_is_an_error_that_says_what_to_do(
    ask: Callable[[FlopsProfiler], Any],
) -> None:
    """Before the start, and after it without a forward."""
    prof = FlopsProfiler(Block())
    with pytest.raises(
        CountError, match=r"there is no profile: call start_profile\(\), then the model"
    ):
        ask(prof)
    prof.start_profile()
    with pytest.raises(CountError, match=r"no forward has run since start_profile\(\)"):
        ask(prof)


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    """DeepSpeed doubles every profile of the process from there on."""
    prof = FlopsProfiler(Block())
    prof.start_profile()
    with pytest.raises(RuntimeError):
        prof.model(torch.rand(2, 3))
    prof.end_profile()
    assert square == profiled(nn.Linear(hidden, hidden), sequence()).get_total_macs()


def test_to_stop_and_to_end_twice_or_early_does_nothing() -> None:
    """Whatever the order."""
    prof = FlopsProfiler(Block())
    prof.stop_profile()
    prof.end_profile()
    prof.end_profile()
    assert not prof.started
    prof.start_profile()
    assert prof.started
    prof.end_profile()
    assert not prof.started


def test_the_second_part_can_be_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a heading, as in DeepSpeed."""
    profiled(Block(), sequence()).print_model_aggregated_profile(module_depth=1, top_modules=3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Top 3 modules")
    assert "    params      - {'Linear': '82'}" == lines[6]


def engine(**facts: Any) -> SimpleNamespace:
    """The names that are read of DeepSpeed's engine."""
    usual: dict[str, Any] = {
        "world_size": 8,
        "dp_world_size": 4,
        "mp_world_size": 2,
        "train_micro_batch_size_per_gpu": lambda: 2,
        "has_moe_layers": False,
        "wall_clock_breakdown": lambda: False,
        "timers": None,
    }
    return SimpleNamespace(**usual | facts)


def timers(timings: int = 1, **milliseconds: float) -> Callable[[str], SimpleNamespace]:
    """DeepSpeed's timers: each has run so often, for so long in all."""
    usual = {"fwd": 0.0, "bwd": 0.0, "step": 0.0} | milliseconds
    return lambda name: SimpleNamespace(
        elapsed=lambda _reset: usual[name], event_timers=[None] * timings
    )


def timed(*, backward: int = 0, **given: Any) -> Profile:
    """A forward of 477 MACs, counted in 1 ms, with what an engine tells.

    And a backward of so many MACs in 3 ms.
    """
    cells = [product("", "aten::mm", "forward", macs=477, bytes_moved=1)]
    phases = {"forward": 1e-3}
    if backward:
        cells.append(product("", "aten::mm", "backward", macs=backward, bytes_moved=1))
        phases["backward"] = 3e-3
    step = Step(index=0, kind="counting", seconds=sum(phases.values()), phases=phases, samples=1)
    told_by = engine(wall_clock_breakdown=lambda: True, timers=timers(**given))
    return with_engine_facts(
        profile({"": {"class_name": "Net"}}, cells, steps=(step,)), nn.Linear(1, 1), told_by, 0.5
    )


def test_an_engine_tells_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """8 ranks, 4 times the model in 2 parts: 164 parameters, 1908 flops."""
    profiled(Block(), sequence(), ds_engine=engine()).print_model_profile()
    said = figures(capsys.readouterr().out)
    expected = {
        "world size": "8",
        "data parallel size": "4",
        "model parallel size": "2",
        "batch size per GPU": "2",
        "params per GPU": "82",
        "params of model = params per GPU * mp_size": "164",
        "fwd flops of model = fwd flops per GPU * mp_size": "1.91 K",
    }
    assert expected == {label: said.get(label) for label in expected}


def test_an_engine_with_sequence_parallelism_has_no_data_parallel_size() -> None:
    """The group that took it in has one."""
    prof = profiled(Block(), sequence(), ds_engine=engine(dp_world_size=None, seq_dp_world_size=3))
    assert 3 == prof.profile.run.data_parallel_size


def test_an_engines_timers_tell_what_was_not_watched() -> None:
    """954 flops in 1 ms, a backward that nobody counted at 2.5 forwards in 2, a step in 1.

    2 samples in 4 ms on 4 of the 8 ranks.

    The engine's own time of the forward has the counting in it.
    """
    said = figures(summary(analyze(timed(fwd=7, bwd=2, step=1))))
    expected = {
        "fwd latency": "1 ms",
        "fwd FLOPS per GPU = fwd flops per GPU / fwd latency": "954 KFLOPS",
        "bwd latency": "2 ms",
        "bwd FLOPS per GPU = 2.5 * fwd flops per GPU / bwd latency": "1.19 MFLOPS",
        "fwd+bwd FLOPS per GPU = 3.5 * fwd flops per GPU / (fwd+bwd latency)": "1.11 MFLOPS",
        "step latency": "1 ms",
        "iter latency": "4 ms",
        "FLOPS per GPU = 3.5 * fwd flops per GPU / iter latency": "834.75 KFLOPS",
        "samples/second": "2000.0",
    }
    assert expected == {label: said.get(label) for label in expected}


def test_the_factor_is_not_used_where_backward_was_counted() -> None:
    """It ran before the stop: its 900 flops are known, and so are its 3 ms."""
    said = figures(summary(analyze(timed(backward=450, fwd=7, bwd=9))))
    assert ("3 ms", "300 KFLOPS") == (
        said["bwd latency"],
        said["bwd FLOPS per GPU = bwd flops per GPU / bwd latency"],
    )
    assert not any("* fwd flops per GPU /" in label for label in said)


def test_with_accumulation_the_latencies_are_those_of_one_batch() -> None:
    """The timers ran over 4; DeepSpeed divides one batch's flops by the time of all."""
    step = timed(timings=4, fwd=28, bwd=8, step=2).steps[0]
    assert {"forward": 1e-3, "backward": 2e-3, "optimizer": 5e-4} == step.phases
    assert (2, 3.5e-3) == (step.samples, step.seconds)


def test_timers_that_have_not_run_tell_nothing() -> None:
    """Printed between forward and backward, as in DeepSpeed's own example."""
    told_early = timed(fwd=7)
    assert {"forward": 1e-3} == told_early.steps[0].phases
    assert () == told_early.notes


def test_an_engine_with_experts_tells_them_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """The lower layer's 40 parameters are an expert's, of 4 ranks.

    The other 42 are split in 2 parts.
    """
    model = Block()
    for parameter in model.down.parameters():
        parameter.group_name = "ep_size_4"  # type: ignore[attr-defined]
    prof = profiled(model, sequence(), ds_engine=engine(has_moe_layers=True))
    prof.print_model_profile()
    said = figures(capsys.readouterr().out)
    expected = {
        "expert tensor parallelism enabled": "False",
        "params of model": "244",
        "non-expert params of model": "84",
        "expert params of model": "160",
    }
    assert expected == {label: said.get(label) for label in expected}
    assert not prof.is_expert_tensor_parallelism_enabled()
    model.enable_expert_tensor_parallelism = True
    assert prof.is_expert_tensor_parallelism_enabled()
    note = next(note for note in prof.profile.notes if note.code == "experts")
    assert (320, 84, 1) == tuple(
        note.values[name]
        for name in ("expert_parameters", "non_expert_parameters", "tensor_parallel")
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_profilers_do_not_see_each_other(order: tuple[int, int]) -> None:
    """A teacher and a student, each with a profiler."""
    teacher, student = Block(), nn.Linear(hidden, hidden)
    first, second = FlopsProfiler(teacher), FlopsProfiler(student)
    first.start_profile()
    second.start_profile()
    teacher(sequence())
    student(sequence())
    for place in order:
        (first, second)[place].end_profile()
    assert (BLOCK_MACS, square) == (first.get_total_macs(), second.get_total_macs())
