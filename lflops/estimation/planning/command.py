"""`lflops plan`: the configurations of a training that fit on some GPUs, by their predicted time."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import asdict
from rich.console import Group, RenderableType

from lflops import units
from lflops.cli.estimate import builder_for
from lflops.cli.output import UsageError, draw, help_of, write_json
from lflops.profile.series import gathered
from lflops.report.terminal.tables import FittedTable, margin, prose, text
from lflops.report.text import counted

if TYPE_CHECKING:
    from lflops.estimation.planning.plan import Configuration, Plan

HELP = help_of(__file__)
# samples of a GPU, where no batch is given
_SHARE = 16


def plan(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=HELP["target"])],
    *,
    gpus: Annotated[int, typer.Option(metavar="N", help=HELP["gpus"])],
    hardware: Annotated[str, typer.Option(metavar="NAME", help=HELP["hardware"])],
    batch: Annotated[int | None, typer.Option(metavar="N", help=HELP["batch"])] = None,
    seq: Annotated[int | None, typer.Option(metavar="N", min=1, help=HELP["seq"])] = None,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help=HELP["optimizer"])] = "adamw",
    fused: Annotated[bool, typer.Option("--fused", help=HELP["fused"])] = False,
    precision: Annotated[str, typer.Option(metavar="NAME", help=HELP["precision"])] = "bf16-mixed",
    network: Annotated[float | None, typer.Option(metavar="N", min=1, help=HELP["network"])] = None,
    devices_per_host: Annotated[int, typer.Option(metavar="N", help=HELP["devices_per_host"])] = 8,
    top: Annotated[int, typer.Option(metavar="N", min=1, help=HELP["top"])] = 12,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help=HELP["trust_remote_code"])
    ] = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help=HELP["save"])] = None,
    as_json: Annotated[bool, typer.Option("--json", help=HELP["as_json"])] = False,
) -> None:
    """Rank meshes, micro batches and checkpointing of a training by the predicted time of a step, of those that fit."""
    # with torch
    from lflops.estimation.from_config import TOKENS, is_config
    from lflops.estimation.optimizer_step import makes_optimizer
    from lflops.estimation.planning.plan import plan as find

    with builder_for(target, seq, remote_code=trust_remote_code) as build:
        found = find(
            build,
            _SHARE * gpus if batch is None else batch,
            gpus=gpus,
            hardware=hardware,
            optimizer=makes_optimizer(target, optimizer, fused=fused) or optimizer,
            precision=precision,
            network=network,
            devices_per_host=devices_per_host,
            progress=sys.stderr.isatty(),
        )
    if save is not None:
        if found.profile is None:
            raise UsageError(
                f"--save {save}: no configuration without a pipeline fits, so there is no profile"
            )
        found.profile.save(save)
    tokens = seq or (TOKENS if is_config(target) else None)
    if as_json:
        write_json(
            {
                **{name: value for name, value in asdict(found).items() if name != "profile"},
                "tokens_of_a_sample": tokens,
            }
        )
    else:
        draw(Group(*_parts(found, tokens, top)))


def _parts(found: "Plan", tokens: int | None, top: int) -> Iterator[RenderableType]:
    of = (
        f"{counted(found.gpus, 'GPU')} of {found.hardware}, {counted(found.batch, 'sample')} a step"
    )
    yield text(f"{of}; {counted(found.estimates, 'estimate')}", "bold")
    if not (found.configurations or found.not_predicted):
        yield text("nothing fits", "yellow")
    if found.configurations:
        yield ""
        yield _table(found.configurations[:top], found.batch, tokens)
        yield text(f"{found.configurations[0].name} has {found.configurations[0].reason}")
        yield prose(
            f"Ties share a place; {_more(found.configurations, top)}! is a tight fit.", "dim"
        )
    # Of a mesh whose other configurations are not predicted either, the one with the lowest bound.
    known = {each.name for each in found.configurations}
    best = [
        *{
            each.name: each for each in reversed(found.not_predicted) if each.name not in known
        }.values()
    ][::-1]
    if rows := sorted(best, key=lambda each: each.least_seconds or 0.0)[:top]:
        yield ""
        reasons = {
            re.sub(r"\d", "", each.why_not or ""): each.why_not
            for each in rows
            # one of those that differ in a number
        }
        yield prose(f"not predicted: {'; '.join(filter(None, reasons.values()))}")
        yield _table(rows, found.batch, tokens)
        yield from (text(f"{each.name} has {each.reason}") for each in rows[:1] if each.reason)
        yield text(
            f"{_more(best, top)}these are lower bounds, and not an order; one line for a mesh, all in --json",
            "dim",
        )
    if found.left_out:
        yield ""
        names = [*gathered((why, name) for name, why in found.left_out.items()).items()]
        yield margin(
            [("left out", prose(f"{', '.join(meshes)}: {why}")) for why, meshes in names[:top]]
        )
        yield from (text(more, "dim") for more in [_more(names, top)] if more)
    yield prose("Expert parallelism is not planned.", "dim")


def _more(rows: Sequence[object], top: int) -> str:
    left = len(rows) - top
    return f"{left} more, --top N lists them; " if left > 0 else ""


def _table(rows: Sequence["Configuration"], batch: int, tokens: int | None) -> FittedTable:
    """Configurations that all have a predicted time, or that all have none."""
    known = [each.predicted for each in rows if each.predicted is not None]
    columns = {"place": [str(each.rank) for each in rows]} if known else {}
    columns["recompute"] = [each.checkpointing for each in rows]
    columns["micro batch"] = [f"{each.micro_batch} x {each.accumulation}" for each in rows]
    columns["memory"] = [
        units.size(each.room.needed_bytes, digits=1)
        + (" !" if each.room.verdict == "tight" else "")
        for each in rows
    ]
    if known:
        columns["time"] = [units.duration(each.seconds) for each in known]
        columns["interval"] = [
            f"{units.duration(each.low)} to {units.duration(each.high)}" for each in known
        ]
        columns["tokens/s" if tokens else "samples/s"] = [
            units.rate(batch * (tokens or 1) / each.seconds) for each in known
        ]
        columns["not hidden"] = [
            units.duration(each.by_kind.get("communication", 0.0)) for each in known
        ]
        again = [
            0.0 if row.checkpointing == "none" else each.recomputed
            for row, each in zip(rows, known, strict=True)
        ]
        columns["recomputing"] = list(map(units.duration, again))
    else:
        columns["at least"] = [units.duration(each.least_seconds) for each in rows]
        parts = {
            "not hidden": [each.tensor_seconds for each in rows],
            "bubble": [each.bubble_seconds for each in rows],
        }
        columns |= {
            column: list(map(units.duration, seconds))
            for column, seconds in parts.items()
            if any(seconds)
        }
    return FittedTable("mesh", [each.name for each in rows], columns)


def add_commands(app: typer.Typer) -> None:
    """`lflops plan`."""
    app.command()(plan)
