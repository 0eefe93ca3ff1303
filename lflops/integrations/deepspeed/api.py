"""A replacement for DeepSpeed's profiler, with the same names and arguments.

A script that uses DeepSpeed's profiler only needs a different import. No torch function is patched,
and nothing is left on the model. `FlopsProfiler.profile` is an lflops profile, which has many
results that DeepSpeed's profiler does not have.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lflops.analysis.analysis import analyze
from lflops.errors import CountError
from lflops.files import write_whole
from lflops.inputs.arguments import check_module, check_whole, describe
from lflops.inputs.batch import tensor_of_shape
from lflops.integrations.deepspeed.engine import splits_experts, with_engine_facts
from lflops.integrations.deepspeed.text import units as short_units
from lflops.integrations.deepspeed.text.module_classes import aggregated
from lflops.integrations.deepspeed.text.summary import summary
from lflops.profile.profile import Profile
from lflops.profile.records import median_of
from lflops.timing.measure import CountAndTime, measure, measure_generate

# Number of timed passes. Modules are timed in as many further passes. DeepSpeed times one pass.
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
    """Count one pass of a model in evaluation mode, time other passes, and print the result.

    Afterwards, each module is back in its previous mode. As in DeepSpeed, the caller decides
    whether gradients are recorded.

    Args:
        model: The model.
        input_shape: Shape of a floating-point tensor to pass as the only positional argument. If it
            is set, `args` is ignored.
        args: The positional arguments, or a single tensor.
        kwargs: The keyword arguments.
        print_profile: Whether to print the report.
        detailed: Whether the report lists the model, module by module.
        module_depth: The deepest level of modules in the table of module classes. 0 means only the
            root; -1 means all levels.
        top_modules: The number of module classes that this table lists for each level.
        warm_up: The number of passes that run first and are discarded.
        as_string: Whether to return text, such as `'1.43 G'`.
        output_file: A file to write to instead of printing.
        ignore_modules: Classes or names of modules. Their work, without the work of their
            submodules, is left out of every total.
        mode: `"forward"` calls the model, and `"generate"` calls its method `generate`.

    Returns:
        The FLOPs and the MACs of forward, and the number of parameters on this rank.

    Raises:
        CountError: An argument is wrong.
    """
    caller = "get_model_profile"
    check_module(caller, model)
    _check_printing(caller, module_depth, top_modules)
    check_whole(caller, "warm_up", warm_up, least=0)
    if mode not in {"forward", "generate"}:
        raise CountError(f"{caller}: mode={describe(mode)}: pass 'forward' or 'generate'")
    if mode == "generate" and not callable(getattr(model, "generate", None)):
        raise CountError(
            f"{caller}: mode='generate', but {type(model).__name__} has no method generate()"
        )
    if input_shape is None:
        positional = _positional(args)
        hint = None
    else:
        positional = (tensor_of_shape(caller, model, input_shape),)
        hint = (
            f"{caller}: input_shape= creates a floating-point tensor; for other inputs, such as "
            "token ids, pass args="
        )
    if not positional and not kwargs:
        raise CountError(
            f"{caller}: no input for the model was passed: pass input_shape=, args= or kwargs="
        )
    measure_passes = measure if mode == "forward" else measure_generate
    with _evaluating(model, hint):
        profile = measure_passes(
            model,
            positional,
            kwargs,
            warmup=warm_up,
            repeats=_REPEATS,
            ignore=_as_tuple(ignore_modules),
        )
    if print_profile:
        text = summary(
            analyze(profile),
            step=warm_up,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
        )
        _show(text, output_file)
    flops, macs, params = _figures(profile)
    if not as_string:
        return flops, macs, params
    return short_units.flops(flops), short_units.macs(macs), short_units.params(params)


class FlopsProfiler:
    """Counts and times the work of a model between `start_profile` and `stop_profile`.

    The same pass is counted and timed. The time that counting takes is subtracted from the
    latencies and shown in the report. If backward and the optimizer run before `stop_profile`, they
    are counted as well. Reading or printing a result stops the profiler.

    Args:
        model: The model.
        ds_engine: DeepSpeed's engine. The sizes of parallel groups and the timers are read from it.
        recompute_fwd_factor: The number of forward passes that backward recomputes. It is used only
            if backward was timed but not counted. In this case, backward is assumed to cost as much
            as 2 forward passes plus this number.

    Attributes:
        flops: FLOPs of forward. Like `macs` and `params`, it is set by `print_model_profile`.
        macs: MACs of forward.
        params: Number of parameters on this rank.
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
        self._running: CountAndTime | None = None
        self._finished: Profile | None = None

    def start_profile(self, ignore_list: Iterable[Any] | None = None) -> None:
        """Start the profiler, and discard earlier results.

        Args:
            ignore_list: Classes or names of modules. Their work, without the work of their
                submodules, is left out of every total.
        """
        self.stop_profile()
        self._ignore = _as_tuple(ignore_list)
        self._finished = None
        self._running = CountAndTime(self.model, ignore=self._ignore)
        self._running.__enter__()
        self.started = True

    def stop_profile(self) -> None:
        """Stop the profiler and keep the results."""
        if self._running is None:
            return
        running = self._running
        self._running = None
        running.__exit__(None, None, None)
        self._finished = running.profile

    def reset_profile(self) -> None:
        """Discard the results.

        If the profiler is running, it starts again.
        """
        if self._running is not None:
            self.start_profile(self._ignore)
        self._finished = None

    def end_profile(self) -> None:
        """Stop the profiler.

        The results can still be read, because they are not stored on the model.
        """
        self.stop_profile()
        self.started = False

    @property
    def profile(self) -> Profile:
        """The profile, including the facts that were read from DeepSpeed's engine, if any.

        Raises:
            CountError: The profiler was not started, or no forward ran.
        """
        self.stop_profile()
        profile = self._finished
        if profile is None:
            raise CountError(
                f"{_PROFILER}: there is no profile: call start_profile(), and then call the model"
            )
        if not any(module.calls for module in profile.modules.values()):
            raise CountError(
                f"{_PROFILER}: no forward has run since start_profile(): "
                "call the model before you read or print the profile"
            )
        if self.ds_engine is None:
            return profile
        return with_engine_facts(profile, self.model, self.ds_engine, self.recompute_fwd_factor)

    def get_total_flops(self, as_string: bool = False) -> int | str:  # noqa: FBT001, FBT002
        """Return the FLOPs of forward."""
        flops = self.profile.modules[""].forward.flops
        return short_units.flops(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:  # noqa: FBT001, FBT002
        """Return the MACs of forward."""
        macs = self.profile.modules[""].forward.macs
        return short_units.macs(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str | None:  # noqa: FBT001, FBT002
        """Return the seconds of forward, minus the time of counting, or `None` if unknown."""
        seconds = median_of(self.profile.modules[""].forward.seconds)
        return short_units.duration(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> int | str:  # noqa: FBT001, FBT002
        """Return the number of parameters on this rank. Shared parameters count once."""
        params = self.profile.modules[""].local_parameters
        return short_units.params(params) if as_string else params

    def is_expert_tensor_parallelism_enabled(self) -> bool:
        """Return whether DeepSpeed's experts are split over the tensor parallel group."""
        return splits_experts(self.model)

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,  # noqa: FBT001, FBT002
        output_file: str | os.PathLike[str] | None = None,
    ) -> None:
        """Print the whole report or write it to a file, as `get_model_profile` does.

        Args:
            profile_step: The step number in the first line of the report.
            module_depth: See `get_model_profile`.
            top_modules: See `get_model_profile`.
            detailed: See `get_model_profile`.
            output_file: See `get_model_profile`.
        """
        _check_printing(_PROFILER, module_depth, top_modules)
        profile = self.profile
        self.flops, self.macs, self.params = _figures(profile)
        text = summary(
            analyze(profile),
            step=profile_step,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
        )
        _show(text, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the module classes with the most parameters, MACs and time at each depth.

        The arguments are the same as in `get_model_profile`.
        """
        _check_printing(_PROFILER, module_depth, top_modules)
        text = aggregated(self.profile, module_depth=module_depth, top_modules=top_modules)
        _show(text, None)


def _figures(profile: Profile) -> tuple[int, int, int]:
    """Return the FLOPs and the MACs of forward, and the number of parameters."""
    root = profile.modules[""]
    return root.forward.flops, root.forward.macs, root.local_parameters


@contextlib.contextmanager
def _evaluating(model: Any, hint: str | None) -> Iterator[None]:
    """Return a context in which the model is in evaluation mode.

    Afterwards, each module is back in its previous mode.

    Args:
        model: The model.
        hint: Remark that is added to errors, or `None`. For example, a model that expects token ids
            fails if the user passed `input_shape`, but the model's error message does not mention
            `input_shape`.
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


def _positional(args: Any) -> tuple[Any, ...]:
    """Return the positional arguments as a tuple.

    A value that is not a list or a tuple is a single argument.
    """
    if args is None:
        return ()
    return tuple(args) if isinstance(args, list | tuple) else (args,)


def _as_tuple(modules: Any) -> tuple[Any, ...]:
    """Return the modules to ignore as a tuple.

    A value that is not a collection is a single module.
    """
    if modules is None:
        return ()
    if isinstance(modules, str) or not isinstance(modules, Iterable):
        return (modules,)
    return tuple(modules)


def _check_printing(caller: str, module_depth: Any, top_modules: Any) -> None:
    check_whole(caller, "module_depth", module_depth, least=-1)
    check_whole(caller, "top_modules", top_modules, least=0)


def _show(text: str, output_file: str | os.PathLike[str] | None) -> None:
    if not output_file:
        print(text)  # noqa: T201 - the user asked to print
        return
    path = Path(output_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{text}\n".encode())
