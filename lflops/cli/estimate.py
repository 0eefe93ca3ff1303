"""`lflops estimate`: what a step would compute and keep, of a model that a function of the user's builds."""

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from msgspec.structs import asdict, replace
from rich.console import Group, RenderableType

from lflops.analysis.analysis import Analysis, analyze
from lflops.cli.output import BYTES, UsageError, draw, help_of, name_file, save_memory, write_json
from lflops.errors import LflopsError
from lflops.estimation.prediction import Prediction, predict, why_not
from lflops.extras import needed
from lflops.memory.peak import Sharded, room_for, sharded
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.report.terminal.memory import render_checkpointed, render_memory, render_sharded
from lflops.report.terminal.modules import render
from lflops.report.terminal.roofline import render_lower_bound, render_prediction

HELP = help_of(__file__)


def estimate(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=HELP["target"])],
    *,
    batch: Annotated[str, typer.Option(metavar="N", help=HELP["batch"])] = "1",
    backward: Annotated[bool, typer.Option("--backward", help=HELP["backward"])] = False,
    optimizer: Annotated[str | None, typer.Option(metavar="NAME", help=HELP["optimizer"])] = None,
    optimizer_in_backward: Annotated[
        bool, typer.Option("--optimizer-in-backward", help=HELP["optimizer_in_backward"])
    ] = False,
    fused: Annotated[bool, typer.Option("--fused", help=HELP["fused"])] = False,
    hardware: Annotated[str | None, typer.Option(metavar="NAME", help=HELP["hardware"])] = None,
    grad_scaler: Annotated[bool, typer.Option("--grad-scaler", help=HELP["grad_scaler"])] = False,
    round_to: Annotated[int, typer.Option(metavar="BYTES", min=1, help=HELP["round_to"])] = 1,
    allocator: Annotated[
        str | None, typer.Option(metavar="SETTINGS", help=HELP["allocator"])
    ] = None,
    ranks: Annotated[int | None, typer.Option(metavar="N", min=1, help=HELP["ranks"])] = None,
    fsdp: Annotated[int | None, typer.Option(metavar="N", min=1, help=HELP["fsdp"])] = None,
    ddp: Annotated[int | None, typer.Option(metavar="N", min=1, help=HELP["ddp"])] = None,
    hsdp: Annotated[str | None, typer.Option(metavar="RxN", help=HELP["hsdp"])] = None,
    tp: Annotated[int | None, typer.Option(metavar="N", min=1, help=HELP["tp"])] = None,
    seq: Annotated[int | None, typer.Option(metavar="N", min=1, help=HELP["seq"])] = None,
    dtype: Annotated[str | None, typer.Option(metavar="NAME", help=HELP["dtype"])] = None,
    precision: Annotated[str | None, typer.Option(metavar="NAME", help=HELP["precision"])] = None,
    mp: Annotated[str | None, typer.Option(metavar="NAME", help=HELP["mp"])] = None,
    reduce: Annotated[str | None, typer.Option(metavar="NAME", help=HELP["reduce"])] = None,
    ac: Annotated[str | None, typer.Option(metavar="HOW", help=HELP["ac"])] = None,
    chunked_loss: Annotated[
        int | None, typer.Option(metavar="N", min=1, help=HELP["chunked_loss"])
    ] = None,
    compiled_loss: Annotated[
        bool, typer.Option("--compiled-loss", help=HELP["compiled_loss"])
    ] = False,
    offload_activations: Annotated[
        bool, typer.Option("--offload-activations", help=HELP["offload_activations"])
    ] = False,
    cpu_offload: Annotated[bool, typer.Option("--cpu-offload", help=HELP["cpu_offload"])] = False,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help=HELP["memory"])] = None,
    lora: Annotated[str | None, typer.Option(metavar="r=N", help=HELP["lora"])] = None,
    quantize: Annotated[str | None, typer.Option(metavar="HOW", help=HELP["quantize"])] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help=HELP["trust_remote_code"])
    ] = False,
    accumulation: Annotated[int, typer.Option(metavar="N", min=1, help=HELP["accumulation"])] = 1,
    tokens: Annotated[float | None, typer.Option(metavar="N", min=1, help=HELP["tokens"])] = None,
    price: Annotated[float | None, typer.Option(metavar="N", min=0, help=HELP["price"])] = None,
    depth: Annotated[int, typer.Option(metavar="N", help=HELP["depth"])] = -1,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help=HELP["save"])] = None,
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help=HELP["figure"])] = None,
    as_json: Annotated[bool, typer.Option("--json", help=HELP["as_json"])] = False,
) -> None:
    """Estimate a step before the run: its work, its memory, and the least time on a chip.

    Nothing is allocated and nothing is computed.
    """
    searches = ac == "best"
    is_largest = batch == "max"
    samples = (
        1
        if is_largest
        else _whole(f"--batch {batch}", batch, "a number of samples, 1 or more, or max")
    )
    if searches and is_largest:
        raise UsageError("--ac best and --batch max both fill the memory: give one of them")
    if (searches or is_largest) and memory is None and hardware is None:
        raise UsageError(
            f"{'--ac best' if searches else '--batch max'}: give --memory, as 40GB, or --hardware"
        )
    if memory is not None and not (searches or is_largest):
        raise UsageError(
            "--memory is for --ac best and --batch max; --hardware says whether a step fits"
        )
    if fused and optimizer is None:
        raise UsageError("--fused is for an optimizer: give --optimizer")
    if optimizer_in_backward and (optimizer is None or grad_scaler):
        raise UsageError(
            "--optimizer-in-backward is for an optimizer: give --optimizer, and no --grad-scaler, which needs all gradients"
        )
    if price is not None and tokens is None:
        raise UsageError("--price is for --tokens: give it as well")
    budget = None if memory is None else bytes_of(memory)
    rank = (
        None
        if lora is None
        else _whole(f"--lora {lora}", lora.removeprefix("r="), "the rank, as r=16")
    )
    mesh = _mesh(ddp, fsdp, hsdp, tp)
    ofs = [
        name
        for name, given in (
            ("--mp", mp),
            ("--reduce", reduce),
            ("--cpu-offload", cpu_offload or None),
        )
        if given is not None
    ]
    if ofs and "data" not in mesh:
        raise UsageError(
            f"{ofs[0]} is FSDP2's: give --fsdp or --hsdp"
            + ("" if cpu_offload else "; --precision is autocast")
        )

    # with torch
    from lflops.estimation.changes import Changes, mixed_precision
    from lflops.estimation.estimate import Estimator
    from lflops.estimation.largest_batch import search_batch
    from lflops.estimation.optimizer_step import makes_optimizer

    policy: Any = "none" if searches or ac is None else ac
    of_model: dict[str, Any] = {
        "dtype": dtype,
        "precision": precision,
        "adapter_rank": rank,
        "quantized": quantize and quantize.lower(),
    }
    changes = Changes(
        **of_model,
        policy=policy,
        chunks=chunked_loss,
        compiled_loss=compiled_loss,
        offload=offload_activations,
    )
    estimator = Estimator(
        caller=target,
        backward=backward or optimizer is not None or ac not in (None, "none"),
        optimizer=makes_optimizer(target, optimizer, fused=fused),
        hardware=hardware,
        grad_scaler=grad_scaler,
        round_to=round_to,
        allocator=allocator,
        mesh=mesh,
        in_backward=optimizer_in_backward,
        mixed=mixed_precision(mp, reduce),
        offload=cpu_offload,
        progress=sys.stderr.isatty(),
    )
    with builder_for(target, seq, remote_code=trust_remote_code) as build:

        def subject(number: int = samples) -> Any:
            return changes.applied(target, build(number))

        with changes.autocast():
            plan = needed("search", "--ac best")(estimator, subject, budget) if searches else None
            found = (
                search_batch(estimator, subject, budget)
                if is_largest
                else (None, plan.profile if plan else estimator.run(subject))
            )
            largest, profile = found
    remarks = [Note(code="copies_not_timed", subject="", values={})] if offload_activations else []
    profile = replace(profile, notes=(*profile.notes, *remarks))
    if save is not None:
        profile.save(save)
    save_memory(profile, figure)
    rank_tokens = (
        0
        if tokens is None
        else (largest or samples) * accumulation * (seq or _tokens_of_a_sample(target))
    )
    training = None if tokens is None else Training(tokens, price, rank_tokens)
    predicted = predict(profile, accumulation=accumulation)
    show = partial(
        _write if as_json else partial(_draw, depth=depth, training=training), predicted=predicted
    )
    show(analyze(profile), _sharded(profile, ranks), plan, largest)
    name_file(figure, as_json=as_json)


class Training(NamedTuple):
    """A whole training, of which a step was estimated."""

    tokens: float
    # of a GPU-hour
    price: float | None
    # in a step
    tokens_of_a_rank: int

    def lines(self, predicted: Prediction, ranks: int) -> Iterator[tuple[str, str]]:
        """Tokens a second, and the days, hours and cost of all of them."""
        speed = self.tokens_of_a_rank / predicted.seconds
        yield (
            "tokens/s",
            f"{speed:,.0f} on a GPU"
            + (f", {speed * ranks:,.0f} on all {ranks}" if ranks > 1 else ""),
        )
        hours = self.tokens / speed / 3600

        def interval(amount: float, unit: str = "", digits: int = 0) -> str:
            low, high = (
                f"{amount * end / predicted.seconds:,.{digits}f}"
                for end in (predicted.low, predicted.high)
            )
            return f"{amount:,.{digits}f}{unit} ({low} to {high})"

        yield (
            f"{self.tokens:g} tokens",
            f"{interval(hours / ranks / 24, ' days', 1)}, {interval(hours, ' GPU-hours')}",
        )
        if self.price is not None:
            yield "cost", f"{interval(hours * self.price)}, at {self.price:g} a GPU-hour"


def _tokens_of_a_sample(target: str) -> int:
    from lflops.estimation.from_config import TOKENS, is_config

    if not is_config(target):
        raise UsageError("--tokens: give --seq, the tokens of each sample")
    return TOKENS


def _mesh(ddp: int | None, fsdp: int | None, hsdp: str | None, tp: int | None) -> dict[str, int]:
    if ddp is not None:
        if any(each is not None for each in (fsdp, hsdp, tp)):
            raise UsageError(
                "--ddp replicates the whole model: give --hsdp for replicas of shards, or leave --fsdp, --hsdp and --tp out"
            )
        return {"replica": ddp}
    mesh = {} if fsdp is None else {"data": fsdp}
    if hsdp is not None:
        if fsdp is not None:
            raise UsageError("--hsdp shards as --fsdp does: give one of the two")
        replicas, shards = (
            _whole(f"--hsdp {hsdp}", each, "replicas x shards, as 2x8")
            for each in hsdp.partition("x")[::2]
        )
        mesh = {"replica": replicas, "data": shards}
    return mesh if tp is None else {**mesh, "tensor": tp}


def _whole(option: str, given: str, wanted: str) -> int:
    if not given.isdecimal() or not int(given):
        raise UsageError(f"{option}: give {wanted}")
    return int(given)


def _write(
    analysis: Analysis,
    of_ranks: tuple[Sharded, ...],
    plan: Any | None,
    largest: int | None,
    *,
    predicted: Prediction | None,
) -> None:
    profile = analysis.profile
    room = room_for(profile, profile.run.hardware)
    chosen = (
        None
        if plan is None
        else {**asdict(plan), "peak_bytes": plan.peak_bytes, "code": plan.code()}
    )
    shown = {
        "profile": profile,
        "fits": None if room is None else room.verdict == "fits",
        "largest_batch": largest,
        "room": room,
        "bounds": analysis.lower_bound,
        "predicted": predicted,
        "checkpointed": analysis.checkpointed,
        "sharded": of_ranks,
        "plan": None
        if chosen is None
        else {name: value for name, value in chosen.items() if name != "profile"},
    }
    write_json(shown)


def _sharded(profile: Profile, ranks: int | None) -> tuple[Sharded, ...]:
    try:
        return () if ranks is None else sharded(profile, ranks, profile.run.hardware)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _draw(
    analysis: Analysis,
    of_ranks: tuple[Sharded, ...],
    plan: Any | None,
    largest: int | None,
    *,
    depth: int,
    training: Training | None,
    predicted: Prediction | None,
) -> None:
    try:
        table = render(analysis, depth=depth)
    except ValueError as error:
        raise UsageError(str(error)) from error
    parts: list[RenderableType] = [table, render_memory(analysis)]
    parts += [render_checkpointed(analysis.checkpointed)] if analysis.checkpointed else []
    parts += [render_sharded(of_ranks)] if of_ranks else []
    parts += [render_lower_bound(analysis.lower_bound)] if analysis.lower_bound is not None else []
    if analysis.chip is not None:
        more = (
            training.lines(predicted, analysis.profile.run.world_size)
            if training is not None and predicted is not None
            else ()
        )
        parts.append(render_prediction(predicted, why_not(analysis.profile, analysis.chip), more))
    draw(Group(*(each for part in parts for each in (part, ""))))
    if plan is not None:
        # no line of code may be wrapped
        typer.echo(f"{plan.table()}\n\n{plan.code()}")
    if largest is not None:
        each = (
            f" on each of {analysis.profile.run.world_size} ranks"
            if analysis.profile.run.world_size > 1
            else ""
        )
        typer.echo(
            f"largest batch: {largest} samples{each}"
            if largest
            else f"not even one sample{each} fits: this is the step with one"
        )


def bytes_of(size: str) -> float:
    """The bytes of a size as people write it.

    `40GB`, `37.5 GiB`, `4e10`; anything else is a `UsageError`.
    """
    found = re.fullmatch(r"([0-9.]+(?:[eE]\+?[0-9]+)?)\s*([A-Za-z]*)", size.strip())
    units = {"": 1} | {name.lower(): factor for name, factor in BYTES.items()}
    unit = None if found is None else units.get(found[2].lower())
    try:
        return float(found[1]) * unit  # type: ignore[index, operator]
    except (TypeError, ValueError):
        raise UsageError(f"--memory {size}: give a size, as 40GB or 37GiB") from None


@contextlib.contextmanager
def builder_for(
    target: str, tokens: int | None, *, remote_code: bool
) -> Iterator[Callable[[int], Any]]:
    """What makes the subject of a target from a number of samples.

    Modules of this folder are found, and errors are named by the target.
    """
    sys.path.insert(
        0,
        "",
        # as `python -m` does, also for what the user's function imports only as it runs
    )
    try:
        yield _maker(target, tokens, remote_code=remote_code)
    except (LflopsError, UsageError):
        raise
    except Exception as error:
        where = "".join(
            f"; {note.removeprefix(f'{target}: ')}" for note in getattr(error, "__notes__", ())
        )
        raise UsageError(f"{target} failed: {type(error).__name__}: {error}{where}") from error
    finally:
        sys.path.remove("")


def _maker(target: str, tokens: int | None, *, remote_code: bool) -> Callable[[int], Any]:
    from lflops.estimation.estimate import subject_of
    from lflops.estimation.from_config import TOKENS, builder_of, is_config

    more = [] if tokens is None else [tokens]
    if is_config(target):
        configured = builder_of(target, remote_code=remote_code, tokens=tokens or TOKENS)
        return lambda samples: subject_of(target, configured(samples))
    if remote_code:
        raise UsageError("--trust-remote-code is for a configuration")
    build: Callable[..., Any] = _function(target)
    _check_arguments(target, build, [1, *more])
    return lambda samples: subject_of(target, build(samples, *more))


def _function(target: str) -> Callable[[int], Any]:
    module, _, name = target.partition(":")
    if not module or not name or module.endswith(".py"):
        raise UsageError(
            f"{target!r}: give package.module:function, as train:build for build in a train.py of this folder"
        )
    try:
        function: Any = attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{target}: {error}") from error
    if not callable(function):
        raise UsageError(f"{target}: {function!r} is no function")
    return function  # type: ignore[no-any-return]


def _check_arguments(target: str, build: Callable[..., Any], arguments: list[int]) -> None:
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):
        # native code has none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UsageError(
            f"{target}{signature}: {error}: it is called with one argument, the number of samples that --batch gives"
            + (", and with the tokens of --seq" if len(arguments) > 1 else "")
        ) from error
