"""What DeepSpeed's engine knows of a run, read from an object that has its names: DeepSpeed itself need not be there."""

from typing import Any

from msgspec.structs import replace
from torch import nn

from lflops.profile.model import Profile
from lflops.profile.notes import Note
from lflops.profile.steps import Step

__all__ = ["splits_experts", "with_engine_facts"]

_FORWARDS_BACK = 2.0
_EXPERTS = "ep_size_"
"""What DeepSpeed's groups of experts are called, before their size."""


def with_engine_facts(profile: Profile, model: nn.Module, engine: Any, recompute_fwd_factor: float) -> Profile:
    """The profile with what DeepSpeed's engine knows: its sizes, the times of its timers, its experts.

    Args:
        profile: Of forwards that ran under the engine.
        model: What was profiled.
        engine: An engine with the attributes that DeepSpeed's has.
        recompute_fwd_factor: Forwards that a backward without a count is assumed to repeat.
    """
    root = profile.modules[""]
    forwards = max(root.calls, 1)
    samples = engine.train_micro_batch_size_per_gpu() * forwards
    data_parallel = engine.dp_world_size  # None where sequence parallelism has taken the group in
    run = replace(
        profile.run,
        world_size=engine.world_size,
        data_parallel_size=engine.seq_dp_world_size if data_parallel is None else data_parallel,
        tensor_parallel_size=engine.mp_world_size,
        samples_per_step=samples,
    )
    steps = profile.steps
    if engine.wall_clock_breakdown():
        watched = {name: seconds for step in steps for name, seconds in step.phases.items()}
        phases = _timed(engine, forwards) | watched  # without what counting took, which is in the engine's
        steps = (Step(index=0, kind="counted", seconds=sum(phases.values()), phases=phases, samples=samples),)
    notes = list(profile.notes)
    if not root.backward.calls and any("backward" in step.phases for step in steps):
        notes.append(Note(code="backward_assumed", subject="", values={"forwards": _FORWARDS_BACK + recompute_fwd_factor}))
    if getattr(engine, "has_moe_layers", False):
        notes.append(_experts(model, engine.mp_world_size))
    return replace(profile, run=run, steps=steps, notes=tuple(notes))


def splits_experts(model: nn.Module) -> bool:
    """Whether DeepSpeed's experts are split over the tensor parallel group, as the first that says anything says."""
    said = (getattr(module, "enable_expert_tensor_parallelism", None) for module in model.modules())
    return bool(next((enabled for enabled in said if enabled is not None), False))


def _timed(engine: Any, forwards: int) -> dict[str, float]:
    """Seconds of each phase for so many micro-batches: with accumulation the timers have run over more of them."""
    timers = {phase: engine.timers(name) for phase, name in (("forward", "fwd"), ("backward", "bwd"), ("optimizer", "step"))}
    batches = len(getattr(timers["forward"], "event_timers", ())) or 1
    seconds = {phase: timer.elapsed(False) / 1e3 * forwards / batches for phase, timer in timers.items()}  # noqa: FBT003 - not to be reset
    return {phase: taken for phase, taken in seconds.items() if taken}


def _experts(model: nn.Module, tensor_parallel: int) -> Note:
    """The model's parameters outside of experts and in them, all ranks together."""
    split = splits_experts(model)
    held = {True: 0, False: 0}
    for parameter in model.parameters():
        group = str(getattr(parameter, "group_name", ""))
        size = group.removeprefix(_EXPERTS) if group.startswith(_EXPERTS) else ""
        held[size.isdecimal()] += parameter.numel() * (int(size) if size.isdecimal() else 1)
    values = {
        "expert_parameters": held[True] * (tensor_parallel if split else 1),
        "non_expert_parameters": held[False] * tensor_parallel,
        "tensor_parallel": int(split),
    }
    return Note(code="experts", subject="", values=values)
