"""Text generation, counted and timed: what the prompt costs, and what each further token does."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace
from torch import Tensor, nn

from lflops.collect.count import Counting, Ignored
from lflops.collect.inputs.tensors import device_of
from lflops.collect.measure import timed
from lflops.collect.model.call import Divide, ModelCall
from lflops.collect.model.compile_guard import uncompiled
from lflops.collect.timing.clock import clock_of
from lflops.collect.timing.timed_passes import Pass
from lflops.profile.model import Profile
from lflops.profile.notes import Note
from lflops.profile.records import Step

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

    Prefill is all up to the end of the first call of the model itself, decode the rest; where the model is not called twice they are not
    told apart. A note has the work of both, each step the time.

    Raises:
        CountError: An argument is wrong, or times cannot be taken where the model is.
    """
    call = ModelCall.of("measure_generate", model, args, kwargs, backward=False, loss=None)
    clock = clock_of(device_of([*model.parameters(), *model.buffers(), *call.inputs()]))
    generate: Callable[..., Any] = model.generate  # type: ignore[assignment]
    called = getattr(generate, "__self__", model)  # a module that torch.compile wrapped calls itself, not the wrapper

    def run(divide: Divide) -> None:
        with _calls_of(called, lambda calls: divide("decode") if calls == 1 else None):
            generate(*call.args, **call.kwargs)

    with call.untouched():
        counting = Counting({"": model}, phase="forward", ignore=ignore, batch=(call.args, call.kwargs))
        prefill: list[tuple[int, int]] = []
        with counting, _calls_of(called, lambda _: prefill.append(counting.so_far())):
            generate(*call.args, **call.kwargs)
        told, passes = _told(counting.profile, prefill), Pass(run, first="prefill", prepare=call.prepare)
        profile = timed(told, passes, model, clock, warmup=warmup, repeats=repeats)
    return replace(profile, steps=tuple(_with_forward(step, apart=len(prefill) > 1) for step in profile.steps))


def _with_forward(step: Step, *, apart: bool) -> Step:
    """Generating is all forward: beside its two parts, or instead of them."""
    return replace(step, phases={"forward": sum(step.phases.values()), **(step.phases if apart else {})})


@contextlib.contextmanager
def _calls_of(model: nn.Module, ended: Callable[[int], None]) -> Iterator[None]:
    """Tell when calls of the model itself have ended, and how many that makes."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        ended(calls)

    handle = model.register_forward_hook(uncompiled(count))
    try:
        yield
    finally:
        handle.remove()


def _told(profile: Profile, so_far: list[tuple[int, int]]) -> Profile:
    """The profile with the work of prefill and decode, where the model allows to tell them apart."""
    if len(so_far) < 2:
        return profile
    macs, flops = so_far[0]
    samples = profile.run.samples_per_step
    run = replace(profile.run, tokens_per_step=None if samples is None else samples * len(so_far))  # one a call for each sample
    forward = profile.modules[""].forward
    values = {
        "prefill_macs": macs,
        "prefill_flops": flops,
        "decode_macs": forward.macs - macs,
        "decode_flops": forward.flops - flops,
        "decode_calls": len(so_far) - 1,
    }
    return replace(profile, run=run, notes=(*profile.notes, Note(code="generated", subject="", values=values)))
