"""Write the lines of the summary that DeepSpeed's summary has too, as labels and values."""

from collections.abc import Iterator
from typing import NamedTuple

from lflops.analysis.analysis import Analysis
from lflops.analysis.step_times import StepTimes
from lflops.integrations.deepspeed.text import units
from lflops.profile.notes import notes_with
from lflops.profile.profile import Profile
from lflops.profile.series import multiplied, ratio, sum_known
from lflops.units import UNKNOWN


class _Flops(NamedTuple):
    """A number of FLOPs, and its description in labels.

    Attributes:
        words: The description, such as "3 * fwd flops per GPU".
        flops: The number of FLOPs, or `None` if it is unknown.
    """

    words: str
    flops: float | None


def figure_lines(analysis: Analysis, latencies: StepTimes) -> Iterator[tuple[str, str]]:
    """Yield the label and the value of each line that DeepSpeed's summary also has.

    Args:
        analysis: The profile with its results.
        latencies: The times of the steps.
    """
    run = analysis.profile.run
    world = run.world_size
    data_parallel = _group_size(run.data_parallel_size, run.tensor_parallel_size, world)
    tensor_parallel = _group_size(run.tensor_parallel_size, run.data_parallel_size, world)
    yield "world size", str(world)
    yield "data parallel size", _integer(data_parallel)
    yield "model parallel size", _integer(tensor_parallel)
    if run.pipeline_parallel_size is not None:
        yield "pipeline parallel size", str(run.pipeline_parallel_size)
    if run.expert_parallel_size is not None:
        yield "expert parallel size", str(run.expert_parallel_size)
    yield "batch size per GPU", _integer(run.samples_per_step)
    if analysis.is_staged:
        yield from _work_of_stages(analysis)
    else:
        yield from _parameters(analysis.profile, tensor_parallel)
        yield from _work(analysis, tensor_parallel)
    yield from _speed(analysis, latencies)
    rate = latencies.samples_per_second
    if data_parallel is None:
        yield "samples/second per GPU", _rounded(rate)
        return
    if rate is not None:
        rate *= data_parallel
    yield "samples/second", _rounded(rate)


def _group_size(size: int | None, other: int | None, world: int) -> int | None:
    """Return the size of the data parallel or tensor parallel group.

    If the size is unknown, the result is `None`. But if there is only one rank, or if the other
    group has all ranks, the size can only be 1.

    Args:
        size: The size of the group, if known.
        other: The size of the other group, if known.
        world: The number of ranks.
    """
    if size is None and world in {1, other}:
        return 1
    return size


def _work_of_stages(analysis: Analysis) -> Iterator[tuple[str, str]]:
    """Yield the lines with the parameters and the forward work of all pipeline stages together.

    There are no lines per GPU, because no GPU has the whole model.
    """
    root = analysis.profile.modules[""]
    macs = analysis.unsharded_macs
    yield "params of model, all stages together", units.params(root.parameters)
    forward_macs = macs.get("forward", root.forward.macs)
    yield "fwd MACs of the model, all stages together", units.macs(forward_macs)
    if macs:
        yield _double(macs.get("forward"))
    else:
        yield "fwd flops of model, all stages together", units.flops(root.forward.flops)


def _parameters(profile: Profile, tensor_parallel: int | None) -> Iterator[tuple[str, str]]:
    root = profile.modules[""]
    per_gpu = units.params(root.local_parameters)
    for note in notes_with("experts", profile.notes):
        shared = int(note.values["non_expert_parameters"])
        routed = int(note.values["expert_parameters"])
        yield "expert tensor parallelism enabled", str(bool(note.values["tensor_parallel"]))
        yield "params per GPU", per_gpu
        yield "params of model", units.params(shared + routed)
        yield "   non-expert params of model", units.params(shared)
        yield "   expert params of model", units.params(routed)
        return
    yield "params per GPU", per_gpu
    if root.local_parameters != root.parameters:
        yield "params of model, which is sharded", units.params(root.parameters)
        return
    of_model = multiplied(tensor_parallel, root.parameters)
    yield "params of model = params per GPU * mp_size", units.params(of_model)


def _work(analysis: Analysis, tensor_parallel: int | None) -> Iterator[tuple[str, str]]:
    """Yield the lines with the MACs and the FLOPs of forward."""
    if not analysis.profile.is_counted:
        yield "fwd MACs per GPU", UNKNOWN
        yield "fwd flops per GPU", UNKNOWN
        return
    forward = analysis.profile.modules[""].forward
    yield "fwd MACs per GPU", units.macs(forward.macs)
    yield "fwd flops per GPU", units.flops(forward.flops)
    yield _flops_of_model(analysis, tensor_parallel)


def _flops_of_model(analysis: Analysis, tensor_parallel: int | None) -> tuple[str, str]:
    """Return the line with the FLOPs of the unsharded model.

    With torch's tensor parallelism, some of the work is divided among the ranks, and each rank does
    all of the rest. The FLOPs of the model are therefore fewer than the FLOPs of a rank times the
    number of ranks. They are computed from the MACs of the unsharded model instead.
    """
    root = analysis.profile.modules[""]
    macs = analysis.unsharded_macs
    is_sharded_by_torch = tensor_parallel != 1 and root.local_parameters != root.parameters
    if macs or is_sharded_by_torch:
        return _double(macs.get("forward", root.forward.logical_macs))
    flops = multiplied(tensor_parallel, root.forward.flops)
    return "fwd flops of model = fwd flops per GPU * mp_size", units.flops(flops)


def _double(macs: int | None) -> tuple[str, str]:
    return "fwd flops of model = 2 * fwd MACs of model", units.flops(multiplied(macs, 2))


def _speed(analysis: Analysis, latencies: StepTimes) -> Iterator[tuple[str, str]]:
    """Yield the lines with the latencies and the achieved FLOPs per second.

    They cover forward, backward, the optimizer and the whole step.
    """
    root = analysis.profile.modules[""]
    forward = latencies.phases.get("forward")
    if forward is None and root.forward.seconds is not None:
        forward = root.forward.seconds.median
    has_flops = analysis.profile.is_counted and not analysis.is_staged
    forward_flops = root.forward.flops if has_flops else None
    yield "fwd latency", units.duration(forward)
    yield (
        "fwd FLOPS per GPU = fwd flops per GPU / fwd latency",
        _rate(forward_flops, forward),
    )
    backward = latencies.phases.get("backward")
    goes_backward = backward is not None or root.backward.calls > 0
    step_work = _flops_of_step(analysis)
    if goes_backward:
        work = _flops_of_backward(analysis)
        both = sum_known((forward, backward))
        yield "bwd latency", units.duration(backward)
        yield f"bwd FLOPS per GPU = {work.words} / bwd latency", _rate(work.flops, backward)
        yield (
            f"fwd+bwd FLOPS per GPU = {step_work.words} / (fwd+bwd latency)",
            _rate(step_work.flops, both),
        )
    optimizer = latencies.phases.get("optimizer")
    if optimizer is not None or root.optimizer.calls:
        yield "step latency", units.duration(optimizer)
    if goes_backward or optimizer is not None:
        yield "iter latency", units.duration(latencies.mean)
        yield (
            f"FLOPS per GPU = {step_work.words} / iter latency",
            _rate(step_work.flops, latencies.mean),
        )


def _flops_of_backward(analysis: Analysis) -> _Flops:
    root = analysis.profile.modules[""]
    factor = _assumed_factor(analysis.profile)
    if factor is not None:
        return _Flops(f"{factor:g} * fwd flops per GPU", factor * root.forward.flops)
    if not root.backward.calls or analysis.is_staged:
        return _Flops("bwd flops per GPU", None)
    flops = root.backward.flops + root.recompute.flops
    words = "bwd+recompute flops" if root.recompute.flops else "bwd flops per GPU"
    return _Flops(words, flops)


def _flops_of_step(analysis: Analysis) -> _Flops:
    """Return the FLOPs of forward and backward."""
    forward = analysis.profile.modules[""].forward.flops
    factor = _assumed_factor(analysis.profile)
    if factor is not None:
        return _Flops(f"{factor + 1:g} * fwd flops per GPU", (factor + 1) * forward)
    backward = _flops_of_backward(analysis)
    return _Flops(f"fwd+{backward.words}", sum_known((forward, backward.flops)))


def _assumed_factor(profile: Profile) -> float | None:
    """Return the assumed ratio of the FLOPs of backward to the FLOPs of forward.

    Returns `None` if backward was counted, because then no ratio is assumed.
    """
    for note in notes_with("backward_assumed", profile.notes):
        return float(note.values["forwards"])
    return None


def _rate(flops: float | None, seconds: float | None) -> str:
    return units.rate(ratio(flops, seconds))


def _integer(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _rounded(value: float | None) -> str:
    return UNKNOWN if value is None else str(round(value, 2))
