"""`measure`: one pass is counted, others are timed."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace
from torch import Tensor, nn

from lflops.collect.calibration.calibrate import hardware_of
from lflops.collect.count import Ignored, counted
from lflops.collect.inputs.arguments import check_whole
from lflops.collect.inputs.batch import Units, units_of
from lflops.collect.inputs.tensors import device_of
from lflops.collect.model.call import ModelCall
from lflops.collect.model.module_tree import ModuleTree
from lflops.collect.ranks.unsharded import check_logical
from lflops.collect.timing.attach_times import attach_module_times
from lflops.collect.timing.clock import Clock, clock_of
from lflops.collect.timing.hook_overhead import hook_overhead
from lflops.collect.timing.module_hooks import ModuleTimer
from lflops.collect.timing.timed_passes import Pass, time_passes
from lflops.hardware.chips import Hardware
from lflops.profile.model import Profile

__all__ = ["measure", "timed"]


def measure(
    model: nn.Module,
    args: tuple[Any, ...] | Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    warmup: int = 3,
    repeats: int = 10,
    ignore: Ignored = (),
    hardware: Hardware | str | None = "auto",
    units: Units | None = None,
    logical: Profile | None = None,
) -> Profile:
    """Count one pass, then time others: clean ones for the total, hooked ones to divide it over the modules.

    Afterwards the model's gradients, buffers, mode and the random numbers are what they were.

    Args:
        model: As in `count`; so are `args`, `kwargs`, `backward`, `loss` and `ignore`.
        args: Its positional arguments; a lone tensor stands for itself.
        kwargs: Its keyword arguments.
        backward: Whether to go backward from `loss(output)`.
        loss: Output to a scalar; without it, the sum of the floating outputs.
        warmup: Passes that are thrown away first.
        repeats: Clean passes, and hooked ones, that are kept.
        ignore: Names or classes of modules whose own work and time are left out of every total.
        hardware: What the device can do: `"auto"` looks its name up, `"measure"` measures it, else a chip by name or in a TOML file, your
            own figures, or `None`.
        units: Samples and tokens of the batch, as `{"samples": 8, "tokens": 1024}` or a function of the model's arguments that gives
            that; `None` finds them in the shapes.
        logical: As in `count`.

    Raises:
        CountError: An argument is wrong, or times cannot be taken where the model is.
        HardwareError: The chip is not known, or cannot be measured.
    """
    check_logical("measure: ", logical)
    call = ModelCall.of("measure", model, args, kwargs, backward=backward, loss=loss)
    check_whole("measure", "warmup", warmup, least=0)
    check_whole("measure", "repeats", repeats, least=1)
    device = device_of([*call.model.parameters(), *call.model.buffers(), *call.inputs()])
    clock, chip = clock_of(device), hardware_of(hardware, device)
    batch = units_of("measure", units, call.args, call.kwargs)
    with call.untouched():
        profile = counted(call, ignore, logical)
        profile = replace(profile, run=replace(profile.run, hardware=chip, **batch))
        run = Pass(call.run, first="forward", prepare=call.prepare)
        return timed(profile, run, call.model, clock, warmup=warmup, repeats=repeats)


def timed(profile: Profile, run: Pass, model: nn.Module, clock: Clock, *, warmup: int, repeats: int) -> Profile:
    """A counted profile with the time that runs of the same take."""
    timer, overhead = ModuleTimer(ModuleTree({"": model}), clock), hook_overhead(clock)
    facts = replace(profile.run, kind="measure")
    passes = time_passes(run, timer, clock, warmup=warmup, repeats=repeats)
    steps = tuple(replace(step, samples=facts.samples_per_step, tokens=facts.tokens_per_step) for step in passes.steps)
    return attach_module_times(replace(profile, run=facts, steps=steps), passes.hooked, overhead)[0]
