"""`lflops estimate`: estimate the work and memory of a training step before the run."""

import contextlib
import gc
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from msgspec.structs import asdict, replace
from rich.console import Group, RenderableType

from lflops.analysis.analysis import Analysis, analyze
from lflops.cli.output import BYTES, UsageError, draw, name_file, save_memory, write_json
from lflops.cli.progress import ProgressLine
from lflops.cli.shared_options import Depth, Fused, TokensPerSample, TrustRemoteCode
from lflops.errors import LflopsError
from lflops.estimation.prediction import Prediction, predict, why_not
from lflops.extras import needed
from lflops.memory.peak import Sharded, memory_fit_of, sharded
from lflops.profile.notes import Note
from lflops.profile.profile import Profile
from lflops.report.terminal.memory import render_checkpointed, render_memory, render_sharded
from lflops.report.terminal.modules import render
from lflops.report.terminal.roofline import render_lower_bound, render_prediction

_TARGET = (
    "The model, as a configuration or as a function that builds the model. A configuration is a "
    "config.json of transformers, the folder of such a file, or hf:NAME for a model in the local "
    "cache of transformers. Nothing is downloaded. A function is written as PACKAGE.MODULE:BUILD. "
    "PACKAGE.MODULE is searched for in the current folder first. BUILD is called with the number "
    "of samples, and returns (model, batch) or (model, batch, loss). The batch is a tuple of the "
    "model's arguments, a tensor, or a mapping of keyword arguments. The loss is a function that "
    "receives the model's output and returns a scalar."
)
_AC = (
    "Activation checkpointing of the blocks: none, full, selective, selective-op or best. "
    "With full, everything in a block is recomputed. "
    "selective recomputes everything except linear layers, convolutions and fused attention. "
    "selective-op also recomputes every second linear layer, as torchtitan does. best searches for "
    "the checkpointing with the least extra work that fits into --memory, or into the memory of "
    "the --hardware chip. Every value except none implies --backward."
)
_JSON = (
    "Print one JSON object with the keys profile, fits (true or false), memory_fit (the memory of "
    "the chip and the memory that the step needs), bounds (lower bounds on the step time), "
    "predicted (the predicted step time), checkpointed (a row for each block), sharded (the memory "
    "of a rank under ZeRO), plan (only with --ac best) and largest_batch (only with --batch max). "
    "Unknown values are null."
)


def estimate(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=_TARGET)],
    *,
    batch: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="Number of samples on each rank. max searches for the largest number that fits "
            "into --memory, or into the memory of the --hardware chip.",
        ),
    ] = "1",
    backward: Annotated[
        bool,
        typer.Option(
            "--backward",
            help="Also run backward from the loss. Without a loss, backward starts from the sum of "
            "the outputs.",
        ),
    ] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Optimizer with its default settings: the name of an optimizer in torch.optim, "
            "such as adamw, or adamw8bit. Two steps are estimated, because the optimizer allocates "
            "its state in the first step. Implies --backward.",
        ),
    ] = None,
    optimizer_in_backward: Annotated[
        bool,
        typer.Option(
            "--optimizer-in-backward",
            help="Update each parameter during backward, as soon as its gradient is complete.",
        ),
    ] = False,
    fused: Fused = False,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The chip: a name that `lflops hardware` lists, or a TOML file. The output then "
            "says whether the step fits into the memory of this chip, and how long it takes at "
            "least.",
        ),
    ] = None,
    grad_scaler: Annotated[
        bool,
        typer.Option(
            "--grad-scaler",
            help="Scale the loss, and unscale the gradients, as torch.amp.GradScaler does.",
        ),
    ] = False,
    round_to: Annotated[
        int,
        typer.Option(
            metavar="BYTES",
            min=1,
            help="Round the memory of each tensor up to a multiple of BYTES. torch's CUDA "
            "allocator rounds to 512.",
        ),
    ] = 1,
    allocator: Annotated[
        str | None,
        typer.Option(
            metavar="SETTINGS",
            help="Simulate torch's CUDA allocator with these settings. They are written as in "
            "PYTORCH_ALLOC_CONF, for example expandable_segments:True. If --hardware is an NVIDIA "
            "or AMD GPU, the allocator is simulated without this option too.",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Also compute the memory that each of N ranks needs under ZeRO stages 1, 2 and 3.",
        ),
    ] = None,
    fsdp: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Estimate one of N ranks under FSDP2. fully_shard is applied to each block and "
            "then to the model.",
        ),
    ] = None,
    ddp: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Estimate one of N ranks under DistributedDataParallel, with its gradient "
            "buckets.",
        ),
    ] = None,
    hsdp: Annotated[
        str | None,
        typer.Option(
            metavar="RxN",
            help="Estimate one rank under HSDP, for example 2x8. The model has R replicas, and "
            "FSDP2 shards each replica over N ranks.",
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Estimate one of N ranks under tensor parallelism. The model's tp_plan determines "
            "how its layers are split.",
        ),
    ] = None,
    seq: TokensPerSample = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Dtype of the model's parameters and floating-point inputs: fp32, bf16, fp16, or "
            "the name of a torch dtype.",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Precision of autocast: bf16-mixed or 16-mixed. Default: no autocast.",
        ),
    ] = None,
    mp: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Dtype in which FSDP2 computes, for example bf16. The sharded parameters keep "
            "their dtype. Only with --fsdp or --hsdp.",
        ),
    ] = None,
    reduce: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Dtype in which gradients are reduced, for example fp32. Default: the dtype of "
            "--mp. Only with --fsdp or --hsdp.",
        ),
    ] = None,
    ac: Annotated[str | None, typer.Option(metavar="HOW", help=_AC)] = None,
    chunked_loss: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Split the sequence into N chunks, and compute the logits and the loss of one "
            "chunk at a time. Backward recomputes the logits of each chunk. Only for a language "
            "model of transformers.",
        ),
    ] = None,
    compiled_loss: Annotated[
        bool,
        typer.Option(
            "--compiled-loss",
            help="Compute the loss in one pass over the logits, as compiled code does. Only for a "
            "language model of the package transformers.",
        ),
    ] = False,
    offload_activations: Annotated[
        bool,
        typer.Option(
            "--offload-activations",
            help="Keep activations in host memory until backward needs them. The time of the "
            "copies is not included.",
        ),
    ] = False,
    cpu_offload: Annotated[
        bool,
        typer.Option(
            "--cpu-offload",
            help="Keep sharded parameters, gradients and optimizer state in host memory. The time "
            "of the copies is not included. Only with --fsdp or --hsdp.",
        ),
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory that tensors may occupy, for example 40GB. Only with --ac best or --batch "
            "max.",
        ),
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(
            metavar="r=N",
            help="Freeze the model, and train adapters of rank N on the linear layers of its "
            "blocks.",
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="Store the weights of the layers with adapters in 4 bits, as bitsandbytes does: "
            "nf4, or nf4-dq for double quantization as in QLoRA. Only with --lora.",
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    accumulation: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of micro-batches per step, for the predicted time. Each micro-batch has "
            "--batch samples.",
        ),
    ] = 1,
    tokens: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of tokens in the whole training run, for example 1e12. If the step time "
            "can be predicted, the output then has the days and GPU-hours of the run.",
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Price of a GPU-hour, with which the output shows the cost of the run. Requires "
            "--tokens.",
        ),
    ] = None,
    depth: Depth = -1,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the profile to this file. lflops show and lflops diff can read it.",
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the live memory over the step into this file: .png, .svg or .pdf.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
) -> None:
    """Estimate the work, the memory and the least time of a training step before the run.

    The model runs on fake tensors, which have shapes but no values. This needs no GPU and almost no
    memory.
    """
    searches_policy = ac == "best"
    searches_batch = batch == "max"
    samples = 1 if searches_batch else _positive("--batch", batch, _SAMPLES)
    _check_search(memory, hardware, policy=searches_policy, batch=searches_batch)
    _check_optimizer(optimizer, grad_scaler=grad_scaler, fused=fused, early=optimizer_in_backward)
    if price is not None and tokens is None:
        raise UsageError("--price needs --tokens: pass both")
    memory_bytes = bytes_of(memory) if memory else None
    adapter_rank = _adapter_rank(lora)
    mesh = _mesh(ddp, fsdp, hsdp, tp)
    _check_fsdp_options(mesh, mp, reduce, cpu_offload=cpu_offload)

    with ProgressLine("loading torch") as progress:
        # Imported here because these modules import torch, which most commands do not need.
        from lflops.estimation.changes import Changes, mixed_precision
        from lflops.estimation.estimate import Estimator
        from lflops.estimation.largest_batch import search_batch
        from lflops.estimation.optimizer_step import makes_optimizer

        policy: Any = "none" if searches_policy or ac is None else ac
        quantized: Any = quantize and quantize.lower()
        changes = Changes(
            dtype=dtype,
            precision=precision,
            adapter_rank=adapter_rank,
            quantized=quantized,
            policy=policy,
            chunks=chunked_loss,
            compiled_loss=compiled_loss,
            offload=offload_activations,
        )
        progress.stage = "estimating"
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
            progress=progress.operators,
        )
        plan = None
        largest = None
        with builder_for(target, seq, remote_code=trust_remote_code) as build:

            def subject(number: int = samples) -> Any:
                return changes.applied(target, build(number))

            if searches_policy:
                plan = needed("search", "--ac best")(estimator, subject, memory_bytes)
                profile: Profile = plan.profile
            elif searches_batch:
                largest, profile = search_batch(estimator, subject, memory_bytes)
            else:
                profile = estimator.run(subject)
        if offload_activations:
            profile = replace(profile, notes=(*profile.notes, _COPIES_NOT_TIMED))
        if precision is not None and "data" in mesh:
            profile = replace(profile, notes=(*profile.notes, _CASTS_ARE_KEPT))
    if save is not None:
        profile.save(save)
    save_memory(profile, figure)
    samples_of_a_rank = (largest or samples) * accumulation
    training = _training(target, tokens, price, samples_of_a_rank, seq)
    predicted = predict(profile, accumulation=accumulation)
    estimated = _Estimate(analyze(profile), _sharded(profile, ranks), plan, largest, predicted)
    estimated.print(depth, training, as_json=as_json)
    name_file(figure, as_json=as_json)


_SAMPLES = "max, or a number of samples of at least 1"
_COPIES_NOT_TIMED = Note(code="copies_not_timed", subject="", values={})
_CASTS_ARE_KEPT = Note(code="casts_are_kept", subject="", values={})


def _check_search(memory: str | None, hardware: str | None, *, policy: bool, batch: bool) -> None:
    """Check the options of the two searches, `--ac best` and `--batch max`.

    `policy` and `batch` are true if the respective search is requested. Only one search is allowed.
    It needs a memory limit, and `memory` is not allowed without a search.
    """
    if policy and batch:
        raise UsageError(
            "--ac best and --batch max cannot be combined, because each of them fills the memory: "
            "pass only one of them"
        )
    if not policy and not batch:
        if memory is not None:
            raise UsageError(
                "--memory applies only to --ac best and --batch max: leave --memory out, or pass "
                "--hardware to see whether the step fits on a chip"
            )
    elif memory is None and hardware is None:
        option = "--ac best" if policy else "--batch max"
        raise UsageError(
            f"{option} needs a memory limit: pass a size, such as --memory 40GB, or a chip with "
            "--hardware"
        )


def _check_optimizer(optimizer: str | None, *, grad_scaler: bool, fused: bool, early: bool) -> None:
    if fused and optimizer is None:
        raise UsageError("--fused needs an optimizer: pass --optimizer")
    if early and optimizer is None:
        raise UsageError("--optimizer-in-backward needs an optimizer: pass --optimizer")
    if early and grad_scaler:
        raise UsageError(
            "--optimizer-in-backward and --grad-scaler cannot be combined, because a GradScaler "
            "needs all gradients before the optimizer runs: pass only one of them"
        )


def _adapter_rank(lora: str | None) -> int | None:
    if lora is None:
        return None
    return _positive(
        "--lora", lora.removeprefix("r="), "the rank of the adapters, such as r=16", lora
    )


def _training(
    target: str, tokens: float | None, price: float | None, samples: int, seq: int | None
) -> "Training | None":
    """Return the data of the whole training run, or `None` if its number of tokens is unknown.

    `samples` is the number of samples per rank and step, and `seq` is the number of tokens per
    sample.
    """
    if tokens is None:
        return None
    return Training(tokens, price, samples * (seq or _tokens_of_a_sample(target)))


class Training(NamedTuple):
    """A whole training run. Its duration and cost follow from the predicted time of a step.

    Attributes:
        tokens: Number of tokens in the whole run.
        price: Price of a GPU-hour, or `None` if the user did not pass it.
        tokens_of_a_rank: Number of tokens that one rank processes in a step.
    """

    tokens: float
    price: float | None
    tokens_of_a_rank: int

    def lines(self, predicted: Prediction, ranks: int) -> Iterator[tuple[str, str]]:
        """Yield a label and a text for the tokens per second, the duration and the cost of the run.

        `ranks` is the number of GPUs.
        """
        speed = self.tokens_of_a_rank / predicted.seconds
        on_all = ""
        if ranks > 1:
            on_all = f", {speed * ranks:,.0f} on all {ranks} GPUs"
        yield "tokens/s", f"{speed:,.0f} on each GPU{on_all}"

        def interval(amount: float, unit: str = "", digits: int = 0) -> str:
            low = amount * predicted.low / predicted.seconds
            high = amount * predicted.high / predicted.seconds
            return f"{amount:,.{digits}f}{unit} ({low:,.{digits}f} to {high:,.{digits}f})"

        hours = self.tokens / speed / 3600
        days = interval(hours / ranks / 24, " days", 1)
        yield f"{self.tokens:g} tokens", f"{days}, {interval(hours, ' GPU-hours')}"
        if self.price is not None:
            yield "cost", f"{interval(hours * self.price)}, at {self.price:g} per GPU-hour"


class _Estimate(NamedTuple):
    """The result of `lflops estimate`.

    Attributes:
        analysis: The analysis of the estimated profile.
        of_ranks: Memory of a rank under each stage of ZeRO. Empty without `--ranks`.
        plan: Checkpointing plan that `--ac best` found. `None` without this option.
        largest: Largest batch that `--batch max` found; 0 if not even one sample fits. `None`
            without this option.
        predicted: The predicted time of a step, or `None` if it cannot be predicted.
    """

    analysis: Analysis
    of_ranks: tuple[Sharded, ...]
    plan: Any | None
    largest: int | None
    predicted: Prediction | None

    def as_json(self) -> dict[str, object]:
        profile = self.analysis.profile
        fit = memory_fit_of(profile, profile.run.hardware)
        plan = None
        if self.plan is not None:
            plan = asdict(self.plan)
            plan |= {"peak_bytes": self.plan.peak_bytes, "code": self.plan.code()}
            del plan["profile"]
        return {
            "profile": profile,
            "fits": None if fit is None else fit.verdict == "fits",
            "largest_batch": self.largest,
            "memory_fit": fit,
            "bounds": self.analysis.lower_bound,
            "predicted": self.predicted,
            "checkpointed": self.analysis.checkpointed,
            "sharded": self.of_ranks,
            "plan": plan,
        }

    def print(self, depth: int, training: Training | None, *, as_json: bool) -> None:
        if as_json:
            write_json(self.as_json())
            return
        try:
            parts: list[RenderableType] = [render(self.analysis, depth=depth)]
        except ValueError as error:
            raise UsageError(str(error)) from error
        parts += self._tables(training)
        spaced: list[RenderableType] = []
        for part in parts:
            spaced += [part, ""]
        draw(Group(*spaced))
        if self.plan is not None:
            # Lines of code must not be wrapped.
            typer.echo(f"{self.plan.table()}\n\n{self.plan.code()}")
        if self.largest is not None:
            typer.echo(self._largest_batch(self.largest))

    def _tables(self, training: Training | None) -> Iterator[RenderableType]:
        """Yield the tables that are printed below the table of modules."""
        analysis = self.analysis
        yield render_memory(analysis)
        if analysis.checkpointed:
            yield render_checkpointed(analysis.checkpointed)
        if self.of_ranks:
            yield render_sharded(self.of_ranks)
        if analysis.chip is not None:
            lines: Iterator[tuple[str, str]] = iter(())
            if training is not None and self.predicted is not None:
                lines = training.lines(self.predicted, analysis.profile.run.world_size)
            why = why_not(analysis.profile, analysis.chip)
            yield render_prediction(self.predicted, why, lines)
        if analysis.lower_bound is not None:
            yield render_lower_bound(analysis.lower_bound)

    def _largest_batch(self, largest: int) -> str:
        ranks = self.analysis.profile.run.world_size
        where = ""
        if ranks > 1:
            where = f" on each of {ranks} ranks"
        if not largest:
            return f"not even one sample{where} fits; the figures above are for one sample"
        return f"largest batch: {largest} samples{where}"


def _sharded(profile: Profile, ranks: int | None) -> tuple[Sharded, ...]:
    if ranks is None:
        return ()
    try:
        return sharded(profile, ranks, profile.run.hardware)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _tokens_of_a_sample(target: str) -> int:
    from lflops.estimation.from_config import TOKENS, is_config

    if not is_config(target):
        raise UsageError("--tokens needs the number of tokens per sample: pass --seq")
    return TOKENS


def _mesh(ddp: int | None, fsdp: int | None, hsdp: str | None, tp: int | None) -> dict[str, int]:
    """Return the size of each dimension of the device mesh, keyed by the dimension's name."""
    if ddp is not None:
        if (fsdp, hsdp, tp) != (None, None, None):
            raise UsageError(
                "--ddp cannot be combined with --fsdp, --hsdp or --tp, because it replicates the "
                "whole model: pass only --ddp, or pass --hsdp to replicate a model that FSDP2 "
                "shards"
            )
        return {"replica": ddp}
    mesh = {}
    if fsdp is not None:
        if hsdp is not None:
            raise UsageError("--fsdp and --hsdp both shard the model: pass only one of them")
        mesh["data"] = fsdp
    if hsdp is not None:
        replicas, _, shards = hsdp.partition("x")
        wanted = "replicas x shards, such as 2x8"
        mesh["replica"] = _positive("--hsdp", replicas, wanted, hsdp)
        mesh["data"] = _positive("--hsdp", shards, wanted, hsdp)
    if tp is not None:
        mesh["tensor"] = tp
    return mesh


def _check_fsdp_options(
    mesh: dict[str, int], mp: str | None, reduce: str | None, *, cpu_offload: bool
) -> None:
    """Raise an error if an FSDP2 option is passed without FSDP2."""
    if "data" in mesh:
        return
    for option, is_given in (("--mp", mp is not None), ("--reduce", reduce is not None)):
        if is_given:
            raise UsageError(
                f"{option} applies only to FSDP2: pass --fsdp or --hsdp"
                + ("" if cpu_offload else ", or pass --precision for autocast")
            )
    if cpu_offload:
        raise UsageError("--cpu-offload applies only to FSDP2: pass --fsdp or --hsdp")


def _positive(option: str, number: str, wanted: str, given: str | None = None) -> int:
    """Parse a positive whole number from the value of an option.

    If `number` is only a part of the value, `given` is the whole value. `given` and `wanted`, a
    description of valid values, are used in the error text.
    """
    if not number.isdecimal() or not int(number):
        raise UsageError(f"{option} {given or number}: pass {wanted}")
    return int(number)


def bytes_of(size: str) -> float:
    """Parse a size such as `40GB`, `37.5 GiB` or `4e10` into bytes.

    Raises `UsageError` for any other text.
    """
    found = re.fullmatch(r"([0-9.]+(?:[eE]\+?[0-9]+)?)\s*([A-Za-z]*)", size.strip())
    units: dict[str, int] = {"": 1} | {name.lower(): factor for name, factor in BYTES.items()}
    try:
        if found is not None and found[2].lower() in units:
            return float(found[1]) * units[found[2].lower()]
    except ValueError:
        pass
    raise UsageError(f"--memory {size}: pass a size, such as 40GB or 37GiB")


@contextlib.contextmanager
def builder_for(
    target: str, tokens: int | None, *, remote_code: bool
) -> Iterator[Callable[[int], Any]]:
    """Yield a function that builds the target's model and a batch with a given number of samples.

    While the context is open, a target that is a function can import modules in the current folder.
    For a target that is a configuration, transformers downloads nothing. Errors in the context name
    the target.
    """
    from lflops.estimation.from_config import is_config, offline

    with contextlib.ExitStack() as undo:
        if is_config(target):
            undo.enter_context(offline())
        else:
            # As with `python -m`, the function can import from the current folder while it runs.
            sys.path.insert(0, "")
            undo.callback(sys.path.remove, "")
        yield from _built(target, tokens, remote_code=remote_code)


def _built(target: str, tokens: int | None, *, remote_code: bool) -> Iterator[Callable[[int], Any]]:
    try:
        build = _builder(target, tokens, remote_code=remote_code)
        # Without `freeze`, every full garbage collection would visit all objects of torch and
        # transformers, although they stay alive.
        gc.freeze()
        yield build
    except (LflopsError, UsageError):
        raise
    except Exception as error:
        message = f"{target} failed: {type(error).__name__}: {error}"
        for note in getattr(error, "__notes__", ()):
            message += f"; {note.removeprefix(f'{target}: ')}"
        raise UsageError(message) from error
    finally:
        gc.unfreeze()


def _builder(target: str, tokens: int | None, *, remote_code: bool) -> Callable[[int], Any]:
    from lflops.estimation.estimate import subject_of
    from lflops.estimation.from_config import TOKENS, builder_of, is_config

    if is_config(target):
        configured = builder_of(target, remote_code=remote_code, tokens=tokens or TOKENS)
        return lambda samples: subject_of(target, configured(samples))
    if remote_code:
        raise UsageError(
            f"--trust-remote-code applies only to a configuration, but {target} is a function: "
            "leave --trust-remote-code out"
        )
    build = _function(target)
    more = [] if tokens is None else [tokens]
    _check_arguments(target, build, [1, *more])
    return lambda samples: subject_of(target, build(samples, *more))


def _function(target: str) -> Callable[..., Any]:
    """Import the function that a target names."""
    module, _, name = target.partition(":")
    if not module or not name or module.endswith(".py"):
        raise UsageError(
            f"{target!r} is neither a configuration nor a function: pass package.module:function; "
            "for example, train:build is the function build in train.py in this folder"
        )
    try:
        function: Any = attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{target}: {error}") from error
    if not callable(function):
        raise UsageError(f"{target}: {function!r} is not a function")
    return function  # type: ignore[no-any-return]


def _check_arguments(target: str, build: Callable[..., Any], arguments: list[int]) -> None:
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):
        # Native functions have no signature.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        passed = "one argument: the number of samples (--batch)"
        if len(arguments) > 1:
            passed = (
                "two arguments: the number of samples (--batch) and the tokens per sample (--seq)"
            )
        raise UsageError(
            f"{target}{signature}: {error}; lflops calls this function with {passed}"
        ) from error
