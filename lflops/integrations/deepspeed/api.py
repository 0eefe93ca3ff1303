"""DeepSpeed's profiler by its own names and arguments, on this engine.

Scripts that use it run with the import changed.

No function of torch is patched, and nothing is left on the model. What a profile has beyond
DeepSpeed's figures is in `FlopsProfiler.profile`. The "flops_profiler" section of a DeepSpeed
config becomes a monitor's arguments.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from torch import nn

from lflops.analysis.analysis import analyze
from lflops.errors import CountError
from lflops.files import read, write_whole
from lflops.inputs.arguments import check_module, check_whole, describe
from lflops.inputs.batch import tensor_of_shape
from lflops.integrations.deepspeed.text import units as short_units
from lflops.integrations.deepspeed.text.summary import aggregated, summary
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.profile.steps import Step
from lflops.schedule import Schedule
from lflops.timing.measure import CountAndTime, measure, measure_generate

_FORWARDS_BACK = 2.0
# what DeepSpeed's groups of experts are called, before their size
_EXPERTS = "ep_size_"


def with_engine_facts(
    profile: Profile, model: nn.Module, engine: Any, recompute_fwd_factor: float
) -> Profile:
    """The profile with what DeepSpeed's engine knows.

    Its sizes, the times of its timers, its experts.
    """
    root = profile.modules[""]
    forwards = max(root.calls, 1)
    samples = engine.train_micro_batch_size_per_gpu() * forwards
    # None where sequence parallelism has taken the group in
    data_parallel = engine.dp_world_size
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
        phases = (
            _timed(engine, forwards) | watched
            # without what counting took, which is in the engine's
        )
        steps = (
            Step(
                index=0,
                kind="counting",
                seconds=sum(phases.values()),
                phases=phases,
                samples=samples,
            ),
        )
    notes = list(profile.notes)
    if not root.backward.calls and any("backward" in step.phases for step in steps):
        notes.append(
            Note(
                code="backward_assumed",
                subject="",
                values={"forwards": _FORWARDS_BACK + recompute_fwd_factor},
            )
        )
    if getattr(engine, "has_moe_layers", False):
        notes.append(_experts(model, engine.mp_world_size))
    return replace(profile, run=run, steps=steps, notes=tuple(notes))


def splits_experts(model: nn.Module) -> bool:
    """Whether DeepSpeed's experts are split over the tensor parallel group, as the first module says that says anything."""
    said = (getattr(module, "enable_expert_tensor_parallelism", None) for module in model.modules())
    return bool(next((enabled for enabled in said if enabled is not None), False))


def _timed(engine: Any, forwards: int) -> dict[str, float]:
    """Seconds of each phase for so many micro-batches.

    With accumulation the timers have run over more of them.
    """
    timers = {
        phase: engine.timers(name)
        for phase, name in (("forward", "fwd"), ("backward", "bwd"), ("optimizer", "step"))
    }
    batches = len(getattr(timers["forward"], "event_timers", ())) or 1
    seconds = {
        phase: timer.elapsed(False) / 1e3 * forwards / batches  # noqa: FBT003
        for phase, timer in timers.items()
    }
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


# passes that are timed, and as many more that are divided over the modules: DeepSpeed takes one
_REPEATS = 5
_PROFILER = "FlopsProfiler"


def get_model_profile(  # noqa: PLR0917 - DeepSpeed's signature
    model: Any,
    input_shape: tuple[int, ...] | None = None,
    args: Iterable[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,  # noqa: FBT001, FBT002
    detailed: bool = True,  # noqa: FBT001, FBT002
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,  # noqa: FBT001, FBT002
    output_file: str | os.PathLike[str] | None = None,
    ignore_modules: Iterable[Any] | None = None,
    mode: str = "forward",
) -> tuple[int, int, int] | tuple[str, str, str]:
    """Count one pass of a model in evaluation mode, time others, and print what was found.

    The model's mode is put back. Gradients are recorded or not as the caller has it, as in
    DeepSpeed.

    Args:
        model: What to profile.
        input_shape: Of a floating-point tensor to be the only positional argument; `args` are not
            looked at then.
        args: The positional arguments; a lone tensor stands for itself.
        kwargs: The keyword arguments.
        print_profile: Whether to print.
        detailed: Whether to print the model, module by module.
        module_depth: The last depth that is added up; 0 is the root alone, -1 or any number too
            large is the innermost.
        top_modules: How many classes of modules are named at each depth.
        warm_up: Passes that are thrown away first.
        as_string: Whether to return text, as `'1.43 G'`.
        output_file: Where to write what would be printed.
        ignore_modules: Classes or names of modules whose own work is left out of every total.
        mode: `"forward"` calls the model, `"generate"` its `generate`.

    Returns:
        Floating-point operations, multiply-accumulates, and parameters on this rank.

    Raises:
        CountError: An argument is wrong.
    """
    caller = "get_model_profile"
    check_module(caller, model)
    _check_printing(caller, module_depth, top_modules)
    check_whole(caller, "warm_up", warm_up, least=0)
    if mode not in {"forward", "generate"}:
        raise CountError(f"{caller}: mode={describe(mode)}: give 'forward' or 'generate'")
    if mode == "generate" and not callable(getattr(model, "generate", None)):
        raise CountError(f"{caller}: mode='generate', but {type(model).__name__} has no generate()")
    given = (
        tuple(args) if isinstance(args, list | tuple) else () if args is None else (args,)
        # a tensor is one argument
    )
    positional = given if input_shape is None else (tensor_of_shape(caller, model, input_shape),)
    if not positional and not kwargs:
        raise CountError(
            f"{caller}: there is nothing to call the model with: give input_shape=, args= or kwargs="
        )
    hint = f"{caller}: input_shape= gives a floating-point tensor; a model that takes others, as token ids, needs args="
    with _evaluating(model, None if input_shape is None else hint):
        passes = measure if mode == "forward" else measure_generate
        profile = passes(
            model,
            positional,
            kwargs,
            warmup=warm_up,
            repeats=_REPEATS,
            ignore=_ignored(ignore_modules),
        )
    if print_profile:
        _show(
            summary(
                analyze(profile),
                step=warm_up,
                module_depth=module_depth,
                top_modules=top_modules,
                detailed=detailed,
            ),
            output_file,
        )
    flops, macs, params = _figures(profile)
    return (
        (short_units.flops(flops), short_units.macs(macs), short_units.params(params))
        if as_string
        else (flops, macs, params)
    )


class FlopsProfiler:
    """Counts and times what a model does between `start_profile` and `stop_profile`.

    It does both at once, for there is but one pass: what counting takes is taken off the latencies,
    and the report says how much it was. What runs of backward and the optimizer before it is
    stopped is counted as well. To ask for a figure, or to print, stops it.

    Args:
        model: What to profile.
        ds_engine: DeepSpeed's engine, for its sizes and its timers.
        recompute_fwd_factor: Of a backward that was timed and not counted: forwards that it
            repeats, in addition to the 2 that it is assumed to cost.

    Attributes:
        flops: Floating-point operations of forward, once something was printed; so are `macs` and
            `params`.
        macs: Multiply-accumulates of forward.
        params: Parameters on this rank.
    """

    flops: int
    macs: int
    params: int

    def __init__(
        self, model: Any, ds_engine: Any = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        check_module(_PROFILER, model)
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._ignore: tuple[Any, ...] = ()
        self._watching: CountAndTime | None = None
        self._watched: Profile | None = None

    def start_profile(self, ignore_list: Iterable[Any] | None = None) -> None:
        """Begin, from nothing. `ignore_list` is as `ignore_modules` of `get_model_profile`."""
        self.stop_profile()
        self._ignore = _ignored(ignore_list)
        self._watched = None
        self._watching = CountAndTime(self.model, ignore=self._ignore)
        self._watching.__enter__()
        self.started = True

    def stop_profile(self) -> None:
        """Stop; what was found stays."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.__exit__(None, None, None)
            self._watched = watching.profile

    def reset_profile(self) -> None:
        """Forget what was found, and if it is running, go on from nothing."""
        if self._watching is not None:
            self.start_profile(self._ignore)
        self._watched = None

    def end_profile(self) -> None:
        """Stop. Nothing was left on the model, so what was found can still be asked for."""
        self.stop_profile()
        self.started = False

    @property
    def profile(self) -> Profile:
        """All that was found, with what the engine tells.

        A `CountError` where it was not started, or no forward ran.
        """
        self.stop_profile()
        if self._watched is None:
            raise CountError(
                f"{_PROFILER}: there is no profile: call start_profile(), then the model"
            )
        if not any(module.calls for module in self._watched.modules.values()):
            raise CountError(
                f"{_PROFILER}: no forward has run since start_profile(): call the model before asking or printing"
            )
        engine, factor = self.ds_engine, self.recompute_fwd_factor
        return (
            self._watched
            if engine is None
            else with_engine_facts(self._watched, self.model, engine, factor)
        )

    def get_total_flops(self, as_string: bool = False) -> int | str:  # noqa: FBT001, FBT002
        """Floating-point operations of forward."""
        flops = self.profile.modules[""].forward.flops
        return short_units.flops(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:  # noqa: FBT001, FBT002
        """Multiply-accumulates of forward."""
        macs = self.profile.modules[""].forward.macs
        return short_units.macs(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str | None:  # noqa: FBT001, FBT002
        """Seconds of forward, without what counting took; `None` where they are unknown."""
        spread = self.profile.modules[""].forward.seconds
        seconds = None if spread is None else spread.median
        return short_units.duration(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:  # noqa: FBT001, FBT002
        """Parameters on this rank, shared ones once."""
        params = self.profile.modules[""].local_parameters
        return short_units.params(params) if as_string else params

    def is_expert_tensor_parallelism_enabled(self) -> bool:
        """Whether DeepSpeed's experts are split over the tensor parallel group."""
        return splits_experts(self.model)

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,  # noqa: FBT001, FBT002
        output_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Print all of it, or write it to a file, as `get_model_profile` does.

        The first line names the `profile_step`.
        """
        _check_printing(_PROFILER, module_depth, top_modules)
        profile = self.profile
        self.flops, self.macs, self.params = _figures(profile)
        asked: dict[str, Any] = {
            "module_depth": module_depth,
            "top_modules": top_modules,
            "detailed": detailed,
        }
        _show(summary(analyze(profile), step=profile_step, **asked), output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print which classes of modules have the most, depth by depth.

        What is given is as in `get_model_profile`.
        """
        _check_printing(_PROFILER, module_depth, top_modules)
        _show(aggregated(self.profile, module_depth=module_depth, top_modules=top_modules), None)


def _figures(profile: Profile) -> tuple[int, int, int]:
    root = profile.modules[""]
    return root.forward.flops, root.forward.macs, root.local_parameters


@contextlib.contextmanager
def _evaluating(model: Any, hint: str | None) -> Iterator[None]:
    """Put the modes back.

    An error gets the hint: a model of token ids fails on floating-point numbers far from where they
    came from.
    """
    modes = [(module, module.training) for module in model.modules() if hasattr(module, "training")]
    try:
        model.eval()
        yield
    except Exception as error:
        if hint is not None:
            error.add_note(hint)
        raise
    finally:
        for module, training in modes:
            module.training = training


def _ignored(modules: Any) -> tuple[Any, ...]:
    return (
        tuple(modules)
        if isinstance(modules, Iterable) and not isinstance(modules, str)
        else ()
        if modules is None
        else (modules,)
    )


def _check_printing(caller: str, module_depth: Any, top_modules: Any) -> None:
    check_whole(caller, "module_depth", module_depth, least=-1)
    check_whole(caller, "top_modules", top_modules, least=0)


def _show(text: str, output_file: str | os.PathLike[str] | None) -> None:
    if output_file:
        path = Path(output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{text}\n".encode())
    else:
        print(text)  # noqa: T201 - it was asked for


SECTION = "flops_profiler"
TAKEN = {
    "enabled": bool,
    "recompute_fwd_factor": int | float,
    "profile_step": int,
    "module_depth": int,
    "top_modules": int,
    "detailed": bool,
    "output_file": str | None,
}
"""The section's keys, and what they hold."""


def arguments_of(config: str | PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Read a config: the arguments of `FlopsMonitor`, and whether it is to do anything."""
    whole = config if isinstance(config, Mapping) else _read(Path(config))
    section = whole.get(SECTION)
    if not isinstance(section, Mapping):
        raise CountError(f'from_deepspeed: the config has no "{SECTION}" section')
    unknown = ", ".join(sorted(map(repr, section.keys() - TAKEN.keys())))
    if unknown:
        raise CountError(
            f'from_deepspeed: "{SECTION}" has the unknown keys {unknown}; known are {", ".join(TAKEN)}'
        )
    for key, value in section.items():
        if not isinstance(value, TAKEN[key]) or (
            isinstance(value, bool) and TAKEN[key] is not bool
        ):
            raise CountError(f"from_deepspeed: {key}={describe(value)} is not what DeepSpeed takes")
    step = section.get("profile_step", 1)
    arguments = {
        key: section[key]
        for key in ("module_depth", "top_modules", "detailed", "output_file")
        if key in section
    }
    # DeepSpeed numbers steps from 1, and profiles this one alone.
    schedule = Schedule(wait=max(step - 1, 0), warmup=1)
    return {"top_modules": 1, "detailed": True, **arguments, "schedule": schedule}, bool(
        section.get("enabled", False)
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(read(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CountError(f"from_deepspeed: {path}: {error}") from error
    if not isinstance(config, Mapping):
        raise CountError(f"from_deepspeed: {path}: not a JSON object")
    return config
