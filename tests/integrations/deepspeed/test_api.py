"""Test lflops' version of DeepSpeed's profiler: `FlopsProfiler` and `get_model_profile`.

The tests check the accepted arguments, the returned and printed figures, and that profiling does
not change the model or the process. Most models come from `small_models`; their MACs `square`, `up`
and `down` are worked out by hand there.
"""

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
"""The flops of a `Block`: its MACs twice, its two biases, and its ReLU."""
BLOCK_PARAMS = 2 * hidden * wide + wide + hidden


@dataclass
class Batch:
    x: Tensor
    scale: float


class Taking(nn.Module):
    """A linear layer. Its input is a keyword, or inside a list, a tuple, a dict or a `Batch`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(hidden, hidden)

    def forward(self, batch: Any = None, *, x: Tensor | None = None) -> Tensor:
        if isinstance(batch, list | tuple):
            batch = batch[0]
        if isinstance(batch, dict):
            return self.layer(batch["x"])
        if isinstance(batch, Batch):
            return self.layer(batch.x)
        return self.layer(batch if x is None else x)


def profiled(model: nn.Module, *args: Any, **options: Any) -> FlopsProfiler:
    """Profile one forward, and return the profiler."""
    prof = FlopsProfiler(model, **options)
    prof.start_profile()
    model(*args)
    prof.stop_profile()
    return prof


def figures(printed: str) -> dict[str, str]:
    """Return the printed values by their labels."""
    found = re.findall(r"^(.{1,68}): +(\S.*)$", printed, re.MULTILINE)
    return {label.strip(): value for label, value in found}


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
"""The arguments and defaults of DeepSpeed 0.19.8."""


@pytest.mark.parametrize("function", THEIRS)
def test_the_arguments_and_their_order_and_defaults_are_deepspeeds(
    function: Callable[..., Any],
) -> None:
    """All arguments, their order and their defaults equal those of DeepSpeed 0.19.8.

    The exception is `None` instead of an empty list or dict, which all calls would share.
    """
    accepted = []
    for name, each in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        default = None if each.default is inspect.Parameter.empty else each.default
        accepted.append((name, default))
    assert list(THEIRS[function].items()) == accepted


def test_a_model_is_profiled_by_the_shape_of_its_input() -> None:
    """With `input_shape`, the counts are those of a `Block` with 2 × 3 vectors."""
    assert (BLOCK_FLOPS, BLOCK_MACS, BLOCK_PARAMS) == get_model_profile(
        Block(), (2, 3, hidden), print_profile=False, as_string=False
    )


def test_the_figures_are_strings_unless_asked_otherwise() -> None:
    """By default, the figures are strings in DeepSpeed's format.

    A `Block` has 420 MACs, 82 parameters and 954 flops: 840 in matmuls, 72 in biases, 42 in the
    ReLU.
    """
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
    """Inputs may be positional or keywords, and inside a dict, a list or a dataclass."""
    assert square == get_model_profile(Taking(), **inputs, print_profile=False, as_string=False)[1]


def test_a_model_without_parameters_has_an_input_too() -> None:
    """For a model without parameters, the input has torch's default dtype and is on the CPU.

    A ReLU has one FLOP for each of 3 × 4 elements.
    """
    assert (12, 0, 0) == get_model_profile(nn.ReLU(), (3, 4), print_profile=False, as_string=False)


def test_the_input_is_of_the_models_dtype() -> None:
    """A model in bfloat16 gets an input in bfloat16; with another dtype, it would fail."""
    model = Block().to(torch.bfloat16)
    _, macs, _ = get_model_profile(model, (2, 3, hidden), print_profile=False, as_string=False)
    assert BLOCK_MACS == macs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "no input for the model was passed: pass input_shape=, args= or kwargs="),
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
        ({"args": [torch.ones(2, 5)], "mode": "generate"}, r"Block has no method generate\(\)"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], said: str) -> None:
    """The error contains the argument, its value and the accepted values."""
    with pytest.raises(CountError, match=said):
        get_model_profile(Block(), **options)


def test_a_shape_for_a_model_of_token_ids_is_hinted_at() -> None:
    """If a model fails with an input from `input_shape`, a note on the error recommends `args`.

    The error of torch does not explain where the floating-point input comes from. For an input that
    the user passed, there is no note.
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
    """Generates one vector after the other, each from the previous vector."""

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
    """With `mode="generate"`, prefill and decode have separate figures.

    Prefill has 3 vectors of 2 sequences at once, 150 MACs. Decode has 4 calls with one vector of
    each sequence, 4 × 50 MACs.
    """
    _, macs, _ = get_model_profile(
        Speaker(), kwargs={"x": sequence(), "new": 5}, mode="generate", as_string=False
    )
    said = figures(capsys.readouterr().out)
    assert square + 4 * 2 * hidden * hidden == macs
    assert "150" == said["prefill MACs per GPU"]
    assert "200" == said["decode MACs per GPU"]
    assert "4" == said["decode calls"]
    assert {
        "prefill latency",
        "decode latency",
        "decode latency of one forward call",
        "decode tokens/second per GPU",
        "tokens/second per GPU",
    } <= said.keys()


def test_a_generation_of_one_call_has_no_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """If a generation calls the model once, there is no decode."""
    _, macs, _ = get_model_profile(
        Speaker(), args=[sequence(), 1], mode="generate", as_string=False
    )
    assert square == macs
    assert not any("decode" in label for label in figures(capsys.readouterr().out))


def test_a_model_that_is_none_is_refused() -> None:
    """`get_model_profile` and `FlopsProfiler` reject a class and a number with an error."""
    with pytest.raises(CountError, match="is a class: pass an instance"):
        get_model_profile(Block, (2, 3, hidden))  # type: ignore[arg-type]
    with pytest.raises(CountError, match="FlopsProfiler: 3 is no"):
        FlopsProfiler(3)


def test_a_model_is_profiled_in_evaluation_and_its_mode_is_put_back() -> None:
    """The model runs in eval mode. Then each module gets its mode back, even after an error."""
    length = 3
    model = between_linears(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(length)))
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
    """Random numbers, functions of torch, attributes, hooks and standard output do not change."""
    model = Block()
    attributes = dict(vars(model))
    functions = (F.linear, torch.matmul, Tensor.__matmul__)
    output = sys.stdout
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
    """Neither the random input nor the dropout of the profiled model changes torch's generator.

    So the next random number is the same as without profiling.
    """
    torch.manual_seed(7)
    get_model_profile(nn.Dropout(0.5), (2, 3), print_profile=False)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


def test_it_prints_once_and_what_it_prints_is_what_it_returns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The printed figures are those that are returned. The step is the number of warm-up passes."""
    flops, macs, params = get_model_profile(Block(), (2, 3, hidden), warm_up=3)
    printed = capsys.readouterr().out
    assert 1 == printed.count("Profile Summary at step 3:")
    said = figures(printed)
    assert flops == said["fwd flops per GPU"]
    assert macs == said["fwd MACs per GPU"]
    assert params == said["params per GPU"]
    assert params == said["params of model = params per GPU * mp_size"]


def test_it_prints_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The output depends on `print_profile`, `detailed`, `module_depth` and `top_modules`."""
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
    """With `output_file`, the profile is written there, and the folder is created if necessary.

    As in DeepSpeed, an empty name means standard output.
    """
    file = tmp_path / "new" / "profile.txt"
    get_model_profile(Block(), (2, 3, hidden), output_file=file)
    assert "" == capsys.readouterr().out
    assert "fwd MACs per GPU" in file.read_text("utf-8")
    get_model_profile(Block(), (2, 3, hidden), output_file="")
    assert "fwd MACs per GPU" in capsys.readouterr().out


@pytest.mark.parametrize("ignored", [[nn.Linear], nn.Linear, ["1.up", "1.down", "0", "2"]])
def test_ignoring_modules_takes_their_work_out(ignored: Any) -> None:
    """Ignored modules are left out of the counts, whether they are passed as classes or as names.

    Here they have all matmuls, so only the flops of the ReLU remain.
    """
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
    """The profiler has counts and times of one forward, as numbers and as strings.

    Both come from one pass, so counting makes it slower. `observer_ratio` in the profile says how
    much.
    """
    prof = profiled(Block(), sequence())
    assert BLOCK_FLOPS == prof.get_total_flops()
    assert BLOCK_MACS == prof.get_total_macs()
    assert BLOCK_PARAMS == prof.get_total_params()
    assert "954" == prof.get_total_flops(True)
    assert "420 MACs" == prof.get_total_macs(as_string=True)
    assert "82" == prof.get_total_params(True)
    seconds = prof.get_total_duration()
    assert isinstance(seconds, float)
    # The overhead of the hooks is subtracted. On a busy machine, nothing may remain.
    assert seconds >= 0
    assert re.fullmatch(r"[\d.]+ m?u?s", str(prof.get_total_duration(as_string=True)))
    assert prof.profile.run.observer_ratio is not None
    assert isinstance(prof.profile, Profile)


def test_its_report_says_by_how_much_counting_slows_the_latency(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The report says how much longer the counted pass took; its latency leaves this out.

    After printing, the profiler has the attributes `flops`, `macs` and `params`, as in DeepSpeed.
    """
    prof = profiled(Block(), sequence())
    prof.print_model_profile(profile_step=5)
    printed = capsys.readouterr().out
    assert "Profile Summary at step 5:" in printed
    cost = (
        f"counting made the pass {prof.profile.run.observer_ratio:.2f} times as long; the extra "
        "time is subtracted from the latencies, except for a few µs per operator"
    )
    assert cost == figures(printed)["cost of counting"]
    assert (BLOCK_FLOPS, BLOCK_MACS, BLOCK_PARAMS) == (prof.flops, prof.macs, prof.params)


def test_before_a_print_there_are_no_figures_on_the_profiler() -> None:
    """As in DeepSpeed, only printing sets the attributes `flops`, `macs` and `params`."""
    prof = profiled(Block(), sequence())
    for name in ("flops", "macs", "params"):
        assert not hasattr(prof, name)


def test_several_forwards_are_added_up() -> None:
    """The counts are the sum over all forwards between start and stop, here three."""
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
    """A second `start_profile` and `reset_profile` each discard the counts so far.

    In DeepSpeed, the former doubles all counts, and the latter does not discard them.
    """
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
    """After `reset_profile`, the modules in `ignore_list` are still ignored."""
    model = Block()
    prof = FlopsProfiler(model)
    prof.start_profile(ignore_list=[nn.Linear])
    prof.reset_profile()
    model(sequence())
    assert 0 == prof.get_total_macs()


def test_backward_is_counted_where_it_runs_before_the_stop() -> None:
    """A backward before `stop_profile` is counted, but not in `get_total_macs`, which is forward.

    Backward has one matmul for the first layer, whose input needs no gradient, and two for the
    second.
    """
    model = Block()
    prof = FlopsProfiler(model)
    prof.start_profile()
    model(sequence()).sum().backward()
    prof.stop_profile()
    assert BLOCK_MACS == prof.get_total_macs()
    assert up + 2 * down == prof.profile.total(phase="backward")


def test_backward_goes_on_after_the_stop() -> None:
    """Backward works after `end_profile` and is not counted: the forward's graph is unchanged."""
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
    """Without a counted forward, every method raises an error that explains the missing call."""
    prof = FlopsProfiler(Block())
    with pytest.raises(
        CountError, match=r"there is no profile: call start_profile\(\), and then call the model"
    ):
        ask(prof)
    prof.start_profile()
    with pytest.raises(CountError, match=r"no forward has run since start_profile\(\)"):
        ask(prof)


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    """After a forward that raised, later profiles have the right counts.

    In DeepSpeed, all later profiles of the process are doubled.
    """
    prof = FlopsProfiler(Block())
    prof.start_profile()
    with pytest.raises(RuntimeError):
        prof.model(torch.rand(2, 3))
    prof.end_profile()
    assert square == profiled(nn.Linear(hidden, hidden), sequence()).get_total_macs()


def test_to_stop_and_to_end_twice_or_early_does_nothing() -> None:
    """`stop_profile` and `end_profile` do nothing if no profile is running."""
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
    """`print_model_aggregated_profile` prints this part without a heading, as in DeepSpeed."""
    profiled(Block(), sequence()).print_model_aggregated_profile(module_depth=1, top_modules=3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Top 3 modules")
    assert "    params      - {'Linear': '82'}" == lines[6]


def engine(**facts: Any) -> SimpleNamespace:
    """Return a stand-in for a DeepSpeed engine with the attributes that lflops reads."""
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
    """Return stand-ins for DeepSpeed's timers, by name.

    Each timer has run `timings` times, and took the given milliseconds in total.
    """
    total = {"fwd": 0.0, "bwd": 0.0, "step": 0.0} | milliseconds

    def timer(name: str) -> SimpleNamespace:
        return SimpleNamespace(elapsed=lambda _reset: total[name], event_timers=[None] * timings)

    return timer


def timed(*, backward: int = 0, **given: Any) -> Profile:
    """Return a profile to which the facts of an engine with timers were added.

    The profile has a counting step with a forward of 477 MACs in 1 ms.

    Args:
        backward: MACs of a backward in 3 ms; without them, backward was not counted.
        given: Arguments of `timers`.
    """
    cells = [product("", "aten::mm", "forward", macs=477, bytes_moved=1)]
    phases = {"forward": 1e-3}
    if backward:
        cells.append(product("", "aten::mm", "backward", macs=backward, bytes_moved=1))
        phases["backward"] = 3e-3
    step = Step(index=0, kind="counting", seconds=sum(phases.values()), phases=phases, samples=1)
    counted = profile({"": {"class_name": "Net"}}, cells, steps=(step,))
    ds_engine = engine(wall_clock_breakdown=lambda: True, timers=timers(**given))
    return with_engine_facts(counted, nn.Linear(1, 1), ds_engine, 0.5)


def test_an_engine_tells_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """The engine determines the sizes and therefore the figures of the whole model.

    8 ranks have 4 copies of the model, each in 2 parts: 2 × 82 parameters and 2 × 954 flops.
    """
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
    """With sequence parallelism, the engine only has `seq_dp_world_size`, which is used instead."""
    prof = profiled(Block(), sequence(), ds_engine=engine(dp_world_size=None, seq_dp_world_size=3))
    assert 3 == prof.profile.run.data_parallel_size


def test_an_engines_timers_tell_what_was_not_watched() -> None:
    """The times of backward and of the optimizer step, which were not counted, come from timers.

    Forward has 954 flops in 1 ms. Its timer is not used, because it includes the counting. Backward
    is assumed to cost 2.5 forwards, and takes 2 ms. The optimizer step takes 1 ms. Each of 4
    data-parallel ranks has 2 samples in 4 ms.
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
    """If backward was counted, its 900 flops and 3 ms replace the assumed factor and the timer."""
    said = figures(summary(analyze(timed(backward=450, fwd=7, bwd=9))))
    assert "3 ms" == said["bwd latency"]
    assert "300 KFLOPS" == said["bwd FLOPS per GPU = bwd flops per GPU / bwd latency"]
    assert not any("* fwd flops per GPU /" in label for label in said)


def test_with_accumulation_the_latencies_are_those_of_one_batch() -> None:
    """With gradient accumulation over 4 batches, the times of the timers are divided by 4.

    DeepSpeed divides the flops of one batch by the time of all of them.
    """
    step = timed(timings=4, fwd=28, bwd=8, step=2).steps[0]
    assert {"forward": 1e-3, "backward": 2e-3, "optimizer": 5e-4} == step.phases
    assert (2, 3.5e-3) == (step.samples, step.seconds)


def test_timers_that_have_not_run_tell_nothing() -> None:
    """Timers that have not run add neither phases nor an assumed backward.

    This happens in DeepSpeed's example, which prints the profile between forward and backward.
    """
    told_early = timed(fwd=7)
    assert {"forward": 1e-3} == told_early.steps[0].phases
    assert () == told_early.notes


def test_an_engine_with_experts_tells_them_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """For a model with experts, parameters of experts and others are shown separately.

    The 40 parameters of the layer `down` are one of 4 experts, 160 in total. The other 42 are half
    of the rest, 84 in total.
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
    # If experts are tensor parallel, each expert is split in 2 parts as well.
    note = next(note for note in prof.profile.notes if note.code == "experts")
    assert 320 == note.values["expert_parameters"]
    assert 84 == note.values["non_expert_parameters"]
    assert 1 == note.values["tensor_parallel"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_profilers_do_not_see_each_other(order: tuple[int, int]) -> None:
    """Two profilers that run at the same time count only their own model, in any order of ending.

    For example, a teacher and a student each have a profiler.
    """
    teacher = Block()
    student = nn.Linear(hidden, hidden)
    of_teacher = FlopsProfiler(teacher)
    of_student = FlopsProfiler(student)
    of_teacher.start_profile()
    of_student.start_profile()
    teacher(sequence())
    student(sequence())
    for place in order:
        (of_teacher, of_student)[place].end_profile()
    assert BLOCK_MACS == of_teacher.get_total_macs()
    assert square == of_student.get_total_macs()
