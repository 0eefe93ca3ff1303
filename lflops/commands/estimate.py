"""`lflops estimate`: what a step would compute and keep, of a model that a function of the user's builds."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from lflops.analyze.bounds import bounds
from lflops.commands.output import UsageError, draw, write_json
from lflops.errors import LflopsError
from lflops.profile import Profile
from lflops.report.bounds import render_bounds
from lflops.report.memory import render_memory
from lflops.report.table import render

__all__ = ["estimate"]


def estimate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE.MODULE:BUILD",
            help="A function that is called with the number of samples and returns (model, batch) or (model, batch, loss). The batch is a "
            "tuple of the model's arguments, one tensor, or a mapping of keyword arguments; the loss a function from its output to a "
            "scalar. The module is looked for here first.",
        ),
    ],
    *,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="The number of samples.")] = 1,
    backward: Annotated[bool, typer.Option("--backward", help="Go backward as well, from the loss or the sum of the outputs.")] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of torch.optim, as adamw, in its own settings. Two steps are run; implies --backward."),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(metavar="NAME", help="A chip that `lflops hardware` lists: whether it fits, and how short a step can be.")
    ] = None,
    depth: Annotated[int, typer.Option(metavar="N", help="How many levels of the tree below the root; -1 is all.")] = -1,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the profile, for lflops show and diff.")] = None,
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw live memory over the step, as .png, .svg or .pdf.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: profile, bounds (or null), fits (the chip's memory; or null).")
    ] = False,
) -> None:
    """Estimate a step before the run: its work, its memory, and the least time on a chip. Nothing is allocated and nothing is computed."""
    profile = _estimated(target, _found(target), batch, backward=backward, optimizer=optimizer, hardware=hardware)
    if save is not None:
        profile.save(save)
    if figure is not None:
        from lflops.report.memory_figure import save_memory_figure  # with matplotlib, which no other part of the shell waits for

        save_memory_figure(profile, figure)
    bound = bounds(profile)
    if as_json:
        chip = profile.run.hardware
        room = None if chip is None or chip.memory_bytes is None or profile.memory is None else profile.memory.fits(chip.memory_bytes)
        write_json({"profile": profile, "bounds": bound, "fits": room})
        return
    try:
        table = render(profile, depth=depth)
    except ValueError as error:
        raise UsageError(str(error)) from error
    draw(Group(table, "", render_memory(profile), *(() if bound is None else ("", render_bounds(bound)))))


def _found(target: str) -> Callable[[int], Any]:
    """The function that the user named."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise UsageError(f"{target!r}: give package.module:function")
    sys.path.insert(0, "")  # as `python -m` does
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{target}: {error}") from error
    finally:
        sys.path.remove("")
    if not callable(found):
        raise UsageError(f"{target}: {found!r} is no function")
    return found  # type: ignore[no-any-return]


def _estimated(
    target: str, build: Callable[[int], Any], samples: int, *, backward: bool, optimizer: str | None, hardware: str | None
) -> Profile:
    from lflops.collect.estimate import Estimate, optimizer_named, subject_of  # with torch

    makes = None if optimizer is None else optimizer_named(optimizer)
    asked = Estimate(asker=target, backward=backward or makes is not None, optimizer=makes, hardware=hardware, progress=sys.stderr.isatty())
    try:
        return asked.of(lambda: subject_of(target, build(samples)))
    except LflopsError:
        raise
    except Exception as error:
        raise UsageError(f"{target} failed: {type(error).__name__}: {error}") from error
