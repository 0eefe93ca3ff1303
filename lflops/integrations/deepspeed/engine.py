"""Read facts about a run from DeepSpeed's engine: sizes of parallel groups, timers, experts."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace
from torch import nn

from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.steps import Step

# The assumed cost of a backward pass that was timed but not counted, as a multiple of forward.
_BACKWARD_FORWARDS = 2.0
# The beginning of DeepSpeed's name for a group of experts. The rest is the size of the group.
_EXPERT_GROUP = "ep_size_"
# DeepSpeed's names of the timers.
_TIMERS = {"forward": "fwd", "backward": "bwd", "optimizer": "step"}


def with_engine_facts(
    profile: Profile, model: nn.Module, engine: Any, recompute_fwd_factor: float
) -> Profile:
    """Return the profile with facts from DeepSpeed's engine, such as sizes of parallel groups.

    Args:
        profile: The profile.
        model: The model.
        engine: DeepSpeed's engine.
        recompute_fwd_factor: See `FlopsProfiler`.
    """
    root = profile.modules[""]
    forwards = max(root.calls, 1)
    samples = engine.train_micro_batch_size_per_gpu() * forwards
    data_parallel = engine.dp_world_size
    if data_parallel is None:
        # The size of the group for data and sequence parallelism together.
        data_parallel = engine.seq_dp_world_size
    run = replace(
        profile.run,
        world_size=engine.world_size,
        data_parallel_size=data_parallel,
        tensor_parallel_size=engine.mp_world_size,
        samples_per_step=samples,
    )
    steps = profile.steps
    if engine.wall_clock_breakdown():
        steps = (_step(profile.steps, _engine_phases(engine, forwards), samples),)
    notes = list(profile.notes)
    has_backward_time = any("backward" in step.phases for step in steps)
    if has_backward_time and not root.backward.calls:
        values = {"forwards": _BACKWARD_FORWARDS + recompute_fwd_factor}
        notes.append(Note(code="backward_assumed", subject="", values=values))
    if getattr(engine, "has_moe_layers", False):
        notes.append(_experts(model, engine.mp_world_size))
    return replace(profile, run=run, steps=steps, notes=tuple(notes))


def _step(steps: tuple[Step, ...], engine_phases: Mapping[str, float], samples: int) -> Step:
    """Return the profiled step, whose phases are timed by lflops or by DeepSpeed's engine.

    The engine's times include the time that counting takes. They are therefore used only for phases
    that lflops did not time.
    """
    phases = dict(engine_phases)
    for step in steps:
        phases.update(step.phases)
    seconds = sum(phases.values())
    return Step(index=0, kind="counting", seconds=seconds, phases=phases, samples=samples)


def _engine_phases(engine: Any, forwards: int) -> dict[str, float]:
    """Return the seconds of each phase according to the timers of DeepSpeed's engine.

    With gradient accumulation, the timers cover all micro-batches since the last step. Their times
    are scaled to the profiled micro-batches.

    Args:
        engine: DeepSpeed's engine.
        forwards: Number of micro-batches that were profiled.
    """
    forward_timer = engine.timers(_TIMERS["forward"])
    batches = len(getattr(forward_timer, "event_timers", ())) or 1
    phases = {}
    reset = False
    for phase, name in _TIMERS.items():
        milliseconds = engine.timers(name).elapsed(reset)
        if milliseconds:
            phases[phase] = milliseconds / 1e3 * forwards / batches
    return phases


def splits_experts(model: nn.Module) -> bool:
    """Return whether DeepSpeed's experts are split over the tensor parallel group.

    The setting is read from the first module that has it.
    """
    for module in model.modules():
        enabled = getattr(module, "enable_expert_tensor_parallelism", None)
        if enabled is not None:
            return bool(enabled)
    return False


def _experts(model: nn.Module, tensor_parallel: int) -> Note:
    """Return a note that says how many parameters are in experts and outside them, on all ranks."""
    splits = splits_experts(model)
    in_experts = 0
    outside = 0
    for parameter in model.parameters():
        group = str(getattr(parameter, "group_name", ""))
        size = group.removeprefix(_EXPERT_GROUP)
        if group.startswith(_EXPERT_GROUP) and size.isdecimal():
            in_experts += parameter.numel() * int(size)
        else:
            outside += parameter.numel()
    if splits:
        in_experts *= tensor_parallel
    values = {
        "expert_parameters": in_experts,
        "non_expert_parameters": outside * tensor_parallel,
        "tensor_parallel": int(splits),
    }
    return Note(code="experts", subject="", values=values)
