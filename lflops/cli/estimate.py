"""`lflops estimate`: what a step would compute and keep, of a model that a function of the user's builds."""

from functools import partial
from typing import Any

import typer
from msgspec.structs import asdict
from rich.console import Group, RenderableType

from lflops.analyze.analysis import Analysis, analyze
from lflops.analyze.memory.checkpointing_plan import CheckpointingPlan
from lflops.analyze.memory.room import room_for
from lflops.analyze.memory.sharding import Sharded, sharded
from lflops.cli import estimate_options as options
from lflops.cli.estimated_step import Step
from lflops.cli.output import UsageError, draw, name_file, save_memory, write_json
from lflops.profile.model import Profile
from lflops.report.terminal.memory import render_checkpointed, render_memory, render_sharded
from lflops.report.terminal.modules import render
from lflops.report.terminal.roofline import render_lower_bound

__all__ = ["estimate"]


def estimate(
    target: options.Target,
    *,
    batch: options.Samples = 1,
    backward: options.Backward = False,
    optimizer: options.Optimizer = None,
    fused: options.Fused = False,
    hardware: options.Hardware = None,
    grad_scaler: options.GradScaler = False,
    round_to: options.RoundTo = 1,
    allocator: options.Allocator = None,
    ranks: options.Ranks = None,
    fsdp: options.Fsdp = None,
    ddp: options.Ddp = None,
    hsdp: options.Hsdp = None,
    tp: options.Tp = None,
    seq: options.Tokens = None,
    dtype: options.Dtype = None,
    precision: options.Precision = None,
    ac: options.Checkpointing = None,
    memory: options.MemorySize = None,
    lora: options.Adapters = None,
    trust_remote_code: options.RemoteCode = False,
    depth: options.Depth = -1,
    save: options.Save = None,
    figure: options.Figure = None,
    as_json: options.AsJson = False,
) -> None:
    """Estimate a step before the run: its work, its memory, and the least time on a chip. Nothing is allocated and nothing is computed."""
    how = {
        "backward": backward or optimizer is not None or ac not in (None, "none"),
        "hardware": hardware,
        "grad_scaler": grad_scaler,
        "round_to": round_to,
        "allocator": allocator,
        "mesh": _mesh(ddp, fsdp, hsdp, tp),
    }
    step = Step(
        target=target,
        samples=batch,
        tokens=seq,
        remote_code=trust_remote_code,
        changes={"dtype": dtype, "precision": precision, "policy": ac, "adapter_rank": lora},
        optimizer=optimizer,
        fused=fused,
        memory=memory,
        how=how,
    )
    profile, plan = step.estimated()
    if save is not None:
        profile.save(save)
    save_memory(profile, figure)
    show = _write if as_json else partial(_draw, depth=depth)
    show(analyze(profile), _sharded(profile, ranks), plan)
    name_file(figure, as_json=as_json)


def _mesh(ddp: int | None, fsdp: int | None, hsdp: str | None, tp: int | None) -> dict[str, int]:
    """Ranks by dimension."""
    if ddp is not None:
        if any(each is not None for each in (fsdp, hsdp, tp)):
            raise UsageError("--ddp replicates the whole model: give --hsdp for replicas of shards, or leave --fsdp, --hsdp and --tp out")
        return {"replica": ddp}
    mesh = {} if fsdp is None else {"data": fsdp}
    if hsdp is not None:
        replicas, _, shards = hsdp.partition("x")
        if fsdp is not None:
            raise UsageError("--hsdp shards as --fsdp does: give one of the two")
        if not (replicas.isdecimal() and shards.isdecimal() and int(replicas) and int(shards)):
            raise UsageError(f"--hsdp {hsdp}: give replicas x shards, as 2x8")
        mesh = {"replica": int(replicas), "data": int(shards)}
    return mesh if tp is None else {**mesh, "tensor": tp}


def _write(analysis: Analysis, of_ranks: tuple[Sharded, ...], plan: CheckpointingPlan | None) -> None:
    profile = analysis.profile
    room = room_for(profile, profile.run.hardware)
    predicted: dict[str, Any] = {"room": room, "bounds": analysis.lower_bound, "checkpointed": analysis.checkpointed, "sharded": of_ranks}
    chosen = None if plan is None else {**asdict(plan), "peak_bytes": plan.peak_bytes, "code": plan.code()}
    predicted["plan"] = None if chosen is None else {name: value for name, value in chosen.items() if name != "profile"}
    write_json({"profile": profile, "fits": None if room is None else room.verdict == "fits", **predicted})


def _sharded(profile: Profile, ranks: int | None) -> tuple[Sharded, ...]:
    try:
        return () if ranks is None else sharded(profile, ranks, profile.run.hardware)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _draw(analysis: Analysis, of_ranks: tuple[Sharded, ...], plan: CheckpointingPlan | None, *, depth: int) -> None:
    """What `lflops show` draws, then memory and the lower bound."""
    try:
        table = render(analysis, depth=depth)
    except ValueError as error:
        raise UsageError(str(error)) from error
    parts: list[RenderableType] = [table, render_memory(analysis)]
    parts += [render_checkpointed(analysis.checkpointed)] if analysis.checkpointed else []
    parts += [render_sharded(of_ranks)] if of_ranks else []
    parts += [render_lower_bound(analysis.lower_bound)] if analysis.lower_bound is not None else []
    draw(Group(*(each for part in parts for each in (part, ""))))
    if plan is not None:
        typer.echo(f"{plan.table()}\n\n{plan.code()}")  # no line of code may be wrapped
