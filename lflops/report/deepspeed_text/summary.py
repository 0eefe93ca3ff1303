"""A profile as the text that users of DeepSpeed's profiler know: a summary, the classes of modules by depth, the model in detail.

Headings, labels and their order are DeepSpeed's, so that two reports can be laid side by side; where a label of ours differs, the number
means something else, and the label says what. What DeepSpeed does not know stands beneath.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from lflops.analyze.speed.step_times import StepTimes, step_times
from lflops.analyze.speed.utilization import utilization
from lflops.profile.model import Note, Profile
from lflops.profile.records import Spread
from lflops.report.deepspeed_text import units as short_units
from lflops.report.deepspeed_text.aggregated import aggregated
from lflops.report.deepspeed_text.detailed import detailed as details
from lflops.report.deepspeed_text.extra_lines import further
from lflops.report.lines.budget import largest
from lflops.report.lines.ranks import is_staged
from lflops.report.lines.unsharded_work import whole_macs
from lflops.units import UNKNOWN

__all__ = ["summary"]

_NOTATIONS = """\
Notations:
dp: data parallel, mp: model parallel; params: parameters, shared ones once; MACs: multiply-accumulates of contractions;
flops: 2 for each MAC, and the pointwise and other work: a count; FLOPS: flops a second; latency: the median of the clean steps;
fwd: forward; bwd: backward, counted and timed; step: the optimizer's update; iter: a whole step, the wait for data in it"""

_Lines = Iterator[tuple[str, str]]


def summary(profile: Profile, *, step: int | None = None, module_depth: int = -1, top_modules: int = 1, detailed: bool = True) -> str:
    """The whole text.

    Args:
        profile: What to show.
        step: The step to name in the first line; `None` is the run's.
        module_depth: The last depth of the second part; 0 is the root alone, -1 and whatever is too deep are the innermost.
        top_modules: How many classes of modules the second part names for each figure.
        detailed: Whether to print the third part, which has a line or more for every module.

    Raises:
        ValueError: There is no such depth.
    """
    step = profile.run.step if step is None else step
    table = aggregated(profile, module_depth=module_depth, top_modules=top_modules)
    paced = _paced(profile)
    parts = [
        "-------------------------- lflops Flops Profiler --------------------------",
        "Profile Summary:" if step is None else f"Profile Summary at step {step}:",
        f"{_NOTATIONS}\n",
        *(_line(label, value) for label, value in _figures(profile, paced)),
        "\n------------------------------ Further Figures per GPU ------------------------------",
        *(_line(label, value) for label, value in further(profile, paced)),
        "\n----------------------------- Aggregated Profile per GPU -----------------------------",
        table,
    ]
    if detailed:
        parts += ["\n------------------------------ Detailed Profile per GPU ------------------------------", details(profile)]
    if closing := list(_closing(profile)):
        parts += ["\n----------------------------- Where the Step's Time Went -----------------------------", *closing]
    return "\n".join([*parts, "-" * 78])


def _closing(profile: Profile) -> Iterator[str]:
    """The largest parts of the budget, where there is one."""
    budget = utilization(profile).budget
    return iter(()) if budget is None else largest(profile, budget)


def _line(label: str, value: str) -> str:
    return f"{f'{label}: ' if label else '':<70}  {value}"


def _paced(profile: Profile) -> StepTimes:
    """Of the clean steps; where there is none, of those that were counted, and a line says so."""
    clean = step_times(profile)
    if clean.steps:
        return clean
    return step_times(replace(profile, steps=tuple(replace(step, kind="clean") for step in profile.steps if step.kind == "counted")))


def _figures(profile: Profile, paced: StepTimes) -> _Lines:
    """DeepSpeed's lines, in its order."""
    yield from _sizes(profile)
    yield from _work(profile)
    yield from _forward(profile, paced)
    if _goes_backward(profile, paced):
        yield from _backward(profile, paced)
    if "optimizer" in paced.phases or profile.modules[""].optimizer.calls:
        yield "step latency", short_units.duration(_median(paced.phases.get("optimizer")))
    if _goes_backward(profile, paced) or "optimizer" in paced.phases:
        yield from _iteration(profile, paced)
    replicas, _ = _parallel_sizes(profile)
    per_gpu = paced.samples_per_second
    if replicas is None:
        yield "samples/second per GPU", _rounded(per_gpu)
    else:
        yield "samples/second", _rounded(None if per_gpu is None else per_gpu * replicas)


def _sizes(profile: Profile) -> _Lines:
    data_parallel, tensor_parallel = _parallel_sizes(profile)
    yield "world size", str(profile.run.world_size)
    yield "data parallel size", _whole(data_parallel)
    yield "model parallel size", _whole(tensor_parallel)
    for kind in ("pipeline", "expert"):
        if (size := getattr(profile.run, f"{kind}_parallel_size")) is not None:
            yield f"{kind} parallel size", str(size)
    yield "batch size per GPU", _whole(profile.run.samples_per_step)


def _work(profile: Profile) -> _Lines:
    """Parameters, MACs and flops: of this GPU, and of the model."""
    root, (_, tensor_parallel) = profile.modules[""], _parallel_sizes(profile)
    if is_staged(profile):
        yield from _of_stages(profile)
        return
    experts = _note(profile, "experts")
    if experts is not None:
        yield "expert tensor parallelism enabled", str(bool(experts.values["tensor_parallel"]))
    yield "params per GPU", short_units.params(root.local_parameters)
    if experts is not None:
        apart = int(experts.values["non_expert_parameters"]), int(experts.values["expert_parameters"])
        yield "params of model", short_units.params(sum(apart))
        yield "   non-expert params of model", short_units.params(apart[0])
        yield "   expert params of model", short_units.params(apart[1])
    elif root.local_parameters == root.parameters:
        whole = None if tensor_parallel is None else root.parameters * tensor_parallel
        yield "params of model = params per GPU * mp_size", short_units.params(whole)
    else:
        yield "params of model, which is sharded", short_units.params(root.parameters)
    if not profile.is_counted:
        yield from (("fwd MACs per GPU", UNKNOWN), ("fwd flops per GPU", UNKNOWN))
        return
    yield "fwd MACs per GPU", short_units.macs(root.forward.macs)
    yield "fwd flops per GPU", short_units.flops(root.forward.flops)
    yield _flops_of_model(profile, tensor_parallel)


def _of_stages(profile: Profile) -> _Lines:
    """Of all of them: no GPU has as much."""
    root, whole = profile.modules[""], whole_macs(profile)
    yield "params of model, its stages together", short_units.params(root.parameters)
    yield "fwd MACs of model, its stages together", short_units.macs(whole.get("forward", root.forward.macs))
    if whole:
        yield _twice(whole.get("forward"))
    else:
        yield "fwd flops of model, its stages together", short_units.flops(root.forward.flops)


def _flops_of_model(profile: Profile, tensor_parallel: int | None) -> tuple[str, str]:
    """Under torch's own tensor parallelism some work is split and some is not, so no factor tells."""
    root, whole = profile.modules[""], whole_macs(profile)
    if whole or (tensor_parallel != 1 and root.local_parameters != root.parameters):
        return _twice(whole.get("forward", root.forward.logical_macs))
    flops = None if tensor_parallel is None else root.forward.flops * tensor_parallel
    return "fwd flops of model = fwd flops per GPU * mp_size", short_units.flops(flops)


def _twice(macs: int | None) -> tuple[str, str]:
    return "fwd flops of model = 2 * fwd MACs of model", short_units.flops(None if macs is None else 2 * macs)


def _forward(profile: Profile, paced: StepTimes) -> _Lines:
    seconds = _forward_seconds(profile, paced)
    yield "fwd latency", short_units.duration(seconds)
    unknown = not profile.is_counted or is_staged(profile)
    rate = None if unknown else _per_second(profile.modules[""].forward.flops, seconds)
    yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency", short_units.rate(rate)


def _backward(profile: Profile, paced: StepTimes) -> _Lines:
    backward = _median(paced.phases.get("backward"))
    forward = _forward_seconds(profile, paced)
    both = None if backward is None or forward is None else forward + backward
    what, flops = _flops_back(profile)
    yield "bwd latency", short_units.duration(backward)
    yield f"bwd FLOPS per GPU = {what} / bwd latency", short_units.rate(_per_second(flops, backward))
    what, flops = _flops_of_both(profile)
    yield f"fwd+bwd FLOPS per GPU = {what} / (fwd+bwd latency)", short_units.rate(_per_second(flops, both))


def _iteration(profile: Profile, paced: StepTimes) -> _Lines:
    seconds = _median(paced.seconds)
    what, flops = _flops_of_both(profile)
    yield "iter latency", short_units.duration(seconds)
    yield f"FLOPS per GPU = {what} / iter latency", short_units.rate(_per_second(flops, seconds))


def _flops_back(profile: Profile) -> tuple[str, float | None]:
    """What backward did, counted; else what it is taken to have done, if something is."""
    root, factor = profile.modules[""], _assumed_factor(profile)
    if factor is not None:
        return f"{factor:g} * fwd flops per GPU", factor * root.forward.flops
    if not root.backward.calls or is_staged(profile):
        return "bwd flops per GPU", None
    named = "bwd+recompute flops" if root.recompute.flops else "bwd flops per GPU"
    return named, root.backward.flops + root.recompute.flops


def _flops_of_both(profile: Profile) -> tuple[str, float | None]:
    root, factor = profile.modules[""], _assumed_factor(profile)
    if factor is not None:
        return f"{factor + 1:g} * fwd flops per GPU", (factor + 1) * root.forward.flops
    named, back = _flops_back(profile)
    return f"fwd+{named}", None if back is None else root.forward.flops + back


def _assumed_factor(profile: Profile) -> float | None:
    """Backward in forwards, where it ran and was not counted."""
    note = _note(profile, "backward_assumed")
    return None if note is None else float(note.values["forwards"])


def _goes_backward(profile: Profile, paced: StepTimes) -> bool:
    return "backward" in paced.phases or bool(profile.modules[""].backward.calls)


def _forward_seconds(profile: Profile, paced: StepTimes) -> float | None:
    """Of a step; of the root, where no step tells."""
    return _median(paced.phases.get("forward", profile.modules[""].forward.seconds))


def _parallel_sizes(profile: Profile) -> tuple[int | None, int | None]:
    """Of the data and the tensor parallel groups; where one of them has all the ranks, the other has one."""
    world, data, tensor = profile.run.world_size, profile.run.data_parallel_size, profile.run.tensor_parallel_size
    return (1 if data is None and world in {1, tensor} else data), (1 if tensor is None and world in {1, data} else tensor)


def _note(profile: Profile, code: str) -> Note | None:
    return next((note for note in profile.notes if note.code == code), None)


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def _per_second(flops: float | None, seconds: float | None) -> float | None:
    return None if flops is None or not seconds else flops / seconds


def _whole(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _rounded(value: float | None) -> str:
    return UNKNOWN if value is None else f"{round(value, 2)}"
