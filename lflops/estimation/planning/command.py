"""`lflops plan`: rank the training configurations that fit on some GPUs by predicted step time."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import asdict
from rich.console import Group, RenderableType

from lflops import units
from lflops.cli.estimate import builder_for
from lflops.cli.output import UsageError, draw, write_json
from lflops.cli.progress import ProgressLine
from lflops.cli.shared_options import Fused, TokensPerSample, TrustRemoteCode
from lflops.report.terminal.tables import FittedTable, margin, prose, text
from lflops.report.text import counted

if TYPE_CHECKING:
    from lflops.estimation.planning.plan import Configuration, Plan

# Samples per GPU if no batch is passed.
_SAMPLES_PER_GPU = 16


def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="The model: a config.json, its folder, hf:NAME, or PACKAGE.MODULE:BUILD. The help "
            "of lflops estimate explains these forms.",
        ),
    ],
    *,
    gpus: Annotated[int, typer.Option(metavar="N", help="Number of GPUs.")],
    hardware: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The GPU model: a name that `lflops hardware` lists, or a TOML file.",
        ),
    ],
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of samples in a step, on all GPUs together. Default: 16 for each GPU.",
        ),
    ] = None,
    seq: TokensPerSample = None,
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Optimizer with its default settings: the name of an optimizer in torch.optim, "
            "such as adamw, or adamw8bit.",
        ),
    ] = "adamw",
    fused: Fused = False,
    precision: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Precision of the run: bf16-mixed, 16-mixed, bf16-true, 16-true or 32-true. With "
            "a mixed precision, FSDP2 computes in bf16 or fp16, and reduces gradients in float32.",
        ),
    ] = "bf16-mixed",
    network: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Network bandwidth from a GPU to other hosts, in bytes/s, for example 50e9. "
            "Default: the bandwidth in the vendor's reference servers, such as a DGX.",
        ),
    ] = None,
    devices_per_host: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Number of GPUs in each host. Tensor parallelism is planned only within a host.",
        ),
    ] = 8,
    top: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of rows in each table.")
    ] = 12,
    trust_remote_code: TrustRemoteCode = False,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the profile of the best plan without a pipeline to this file. "
            "lflops show and lflops diff can read it.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object with configurations (with a predicted time), not_predicted "
            "(configurations that fit, but have no predicted time), left_out (with reasons) and "
            "more. Unknown values are null.",
        ),
    ] = False,
) -> None:
    """Find meshes, micro batches and checkpointing that fit, and rank them by step time.

    The step times are predicted.
    """
    if batch is None:
        batch = _SAMPLES_PER_GPU * gpus
    with ProgressLine("loading torch") as progress:
        # Imported here because these modules import torch.
        from lflops.estimation.from_config import TOKENS, is_config
        from lflops.estimation.optimizer_step import makes_optimizer
        from lflops.estimation.planning.plan import plan as find

        with builder_for(target, seq, remote_code=trust_remote_code) as build:
            found = find(
                build,
                batch,
                gpus=gpus,
                hardware=hardware,
                optimizer=makes_optimizer(target, optimizer, fused=fused) or optimizer,
                precision=precision,
                network=network,
                devices_per_host=devices_per_host,
                progress=progress.estimates,
            )
    if save is not None:
        if found.profile is None:
            raise UsageError(
                f"--save {save}: there is no profile to save, because no configuration without a "
                "pipeline fits: leave --save out"
            )
        found.profile.save(save)
    tokens = seq
    if not tokens and is_config(target):
        tokens = TOKENS
    if as_json:
        values = asdict(found)
        del values["profile"]
        write_json({**values, "tokens_of_a_sample": tokens})
    else:
        draw(Group(*_parts(found, tokens, top)))


def _parts(found: "Plan", tokens: int | None, top: int) -> Iterator[RenderableType]:
    gpus = f"{counted(found.gpus, 'GPU')} ({found.hardware})"
    samples = f"{counted(found.batch, 'sample')} per step"
    yield text(f"{gpus}, {samples}, from {counted(found.estimates, 'estimate')}", "bold")
    if not found.configurations and not found.not_predicted:
        yield text("No configuration fits into memory.", "yellow")
    if found.configurations:
        yield from _predicted(found, tokens, top)
    if found.not_predicted:
        yield from _bounds(found, top)
    if found.left_out:
        yield from _left_out(found, top)
    yield prose("Plans contain no expert parallelism.", "dim")


def _predicted(found: "Plan", tokens: int | None, top: int) -> Iterator[RenderableType]:
    first = found.configurations[0]
    yield ""
    yield _time_table(found.configurations[:top], found.batch, tokens)
    if first.reason:
        yield text(f"In addition to the model's work, {first.name} needs {first.reason}.")
    if first.predicted is not None and first.predicted.widened:
        yield prose(f"The intervals are wide: {'; '.join(first.predicted.widened)}.", "dim")
    more = _more(found.configurations, top)
    yield prose(
        f"Configurations that tie have the same place. The mark ! stands for one that barely fits "
        f"into memory. {more}".rstrip(),
        "dim",
    )


def _bounds(found: "Plan", top: int) -> Iterator[RenderableType]:
    """Yield a table with lower bounds of the step time, for meshes without a predicted time.

    Each mesh is shown once, with the configuration that has the lowest bound.
    """
    predicted = {each.name for each in found.configurations}
    best: dict[str, Configuration] = {}
    for each in found.not_predicted:
        if each.name not in predicted:
            best.setdefault(each.name, each)
    if not best:
        return
    rows = sorted(best.values(), key=lambda each: each.least_seconds or 0.0)[:top]
    # Reasons that differ only in a number are shown once.
    reasons: dict[str, str] = {}
    for each in rows:
        if each.why_not:
            reasons[re.sub(r"\d", "", each.why_not)] = each.why_not
    yield ""
    yield prose(f"No step time is predicted for these meshes: {'; '.join(reasons.values())}.")
    yield _bound_table(rows)
    if rows[0].reason:
        yield text(f"In addition to the model's work, {rows[0].name} needs {rows[0].reason}.")
    remark = (
        "The times are lower bounds: do not rank the meshes by these times. --json prints all "
        "configurations."
    )
    yield text(f"{remark} {_more(list(best), top)}".rstrip(), "dim")


def _left_out(found: "Plan", top: int) -> Iterator[RenderableType]:
    meshes_of_reason: dict[str, list[str]] = {}
    for name, reason in found.left_out.items():
        meshes_of_reason.setdefault(reason, []).append(name)
    rows = []
    for reason, meshes in meshes_of_reason.items():
        rows.append(("left out", prose(f"{', '.join(meshes)}: {reason}")))
    yield ""
    yield margin(rows[:top])
    more = _more(rows, top)
    if more:
        yield text(more, "dim")


def _more(rows: Sequence[object], top: int) -> str:
    hidden = len(rows) - top
    if hidden <= 0:
        return ""
    return f"{hidden} more rows are hidden: pass a larger --top."


def _time_table(rows: Sequence["Configuration"], batch: int, tokens: int | None) -> FittedTable:
    throughput = "tokens/s" if tokens else "samples/s"
    lines = []
    for row in rows:
        cells = {"place": str(row.place)} | _settings(row)
        predicted = row.predicted
        if predicted is not None:
            recomputed = 0.0
            if row.checkpointing != "none":
                recomputed = predicted.recomputed
            exposed = predicted.by_kind.get("communication", 0.0)
            cells["time"] = units.duration(predicted.seconds)
            cells["interval"] = (
                f"{units.duration(predicted.low)} to {units.duration(predicted.high)}"
            )
            cells[throughput] = units.rate(batch * (tokens or 1) / predicted.seconds)
            cells["exposed"] = units.duration(exposed)
            cells["recomputing"] = units.duration(recomputed)
        lines.append((row.name, cells))
    return FittedTable.of_rows("mesh", lines)


def _bound_table(rows: Sequence["Configuration"]) -> FittedTable:
    has_exposed = any(row.tensor_seconds for row in rows)
    has_bubble = any(row.bubble_seconds for row in rows)
    lines = []
    for row in rows:
        cells = _settings(row)
        cells["at least"] = units.duration(row.least_seconds)
        if has_exposed:
            cells["exposed"] = units.duration(row.tensor_seconds)
        if has_bubble:
            cells["bubble"] = units.duration(row.bubble_seconds)
        lines.append((row.name, cells))
    return FittedTable.of_rows("mesh", lines)


def _settings(row: "Configuration") -> dict[str, str]:
    """Return the table cells that show the settings and the memory of a configuration."""
    memory = units.size(row.memory_fit.needed_bytes, digits=1)
    if row.memory_fit.verdict == "tight":
        memory += " !"
    return {
        "recompute": row.checkpointing,
        "micro batch": f"{row.micro_batch} x {row.accumulation}",
        "memory": memory,
    }


def add_commands(app: typer.Typer) -> None:
    """Add `lflops plan`."""
    app.command()(plan)
