"""Text generation, counted and timed: what the prompt costs, and what each further token does."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace
from torch import Tensor, nn

from lflops.collect.attribution.hooks import after_each_call
from lflops.collect.count import Counting, Ignored
from lflops.collect.inputs.tensors import device_of
from lflops.collect.measure import timed
from lflops.collect.model.call import Divide, ModelCall
from lflops.collect.timing.clock import clock_of
from lflops.collect.timing.timed_passes import Pass
from lflops.profile.model import Profile
from lflops.profile.notes import Note

__all__ = ["measure_generate"]


def measure_generate(
    model: nn.Module,
    args: tuple[Any, ...] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    warmup: int = 1,
    repeats: int = 5,
    ignore: Ignored = (),
) -> Profile:
    """What `measure` does, of `model.generate(*args, **kwargs)`.

    Prefill is all up to the end of the first call of the model itself, decode is the rest. A note has the work of both, each step has
    the time. A model that is called only once has neither.
    """
    call = ModelCall.of("measure_generate", model, args, kwargs, backward=False, loss=None)
    clock = clock_of(device_of([*model.parameters(), *model.buffers(), *call.inputs()]))
    generate: Callable[..., Any] = model.generate  # type: ignore[assignment]
    called = getattr(generate, "__self__", model)  # a module that torch.compile wrapped calls itself, not the wrapper

    def run(divide: Divide) -> None:
        calls = itertools.count(1)
        with after_each_call(called, lambda: divide("decode") if next(calls) == 1 else None):
            generate(*call.args, **call.kwargs)

    with call.untouched():
        counting = Counting({"": model}, phase="forward", ignore=ignore, batch=(call.args, call.kwargs), eager=True)
        work_after_calls: list[tuple[int, int]] = []
        with counting, after_each_call(called, lambda: work_after_calls.append(counting.so_far())):
            generate(*call.args, **call.kwargs)
        counted, passes = _with_generated(counting.profile, work_after_calls), Pass(run, first="prefill", prepare=call.prepare)
        profile = timed(counted, passes, model, clock, warmup=warmup, repeats=repeats)
    # All of generating is forward; prefill and decode stay where there are both.
    phases = [{"forward": sum(step.phases.values()), **(step.phases if len(work_after_calls) > 1 else {})} for step in profile.steps]
    return replace(profile, steps=tuple(replace(step, phases=each) for step, each in zip(profile.steps, phases, strict=True)))


def _with_generated(profile: Profile, work_after_calls: list[tuple[int, int]]) -> Profile:
    """Add the work of prefill and decode, where the model was called more than once."""
    if len(work_after_calls) < 2:
        return profile
    macs, flops = work_after_calls[0]
    samples = profile.run.samples_per_step
    run = replace(profile.run, tokens_per_step=None if samples is None else samples * len(work_after_calls))  # one a call for each sample
    forward = profile.modules[""].forward
    values = {
        "prefill_macs": macs,
        "prefill_flops": flops,
        "decode_macs": forward.macs - macs,
        "decode_flops": forward.flops - flops,
        "decode_calls": len(work_after_calls) - 1,
    }
    return replace(profile, run=run, notes=(*profile.notes, Note(code="generated", subject="", values=values)))
