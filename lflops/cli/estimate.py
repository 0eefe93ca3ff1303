"""`lflops estimate`: what a step would compute and keep, of a model that a function of the user's builds."""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Group

from lflops.analyze.analysis import Analysis, analyze
from lflops.analyze.memory.room import room_for
from lflops.analyze.memory.sharding import Sharded, sharded
from lflops.cli import estimate_options as options
from lflops.cli.output import UsageError, draw, name_file, save_memory, write_json
from lflops.errors import LflopsError
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
    hardware: options.Hardware = None,
    grad_scaler: options.GradScaler = False,
    round_to: options.RoundTo = 1,
    allocator: options.Allocator = None,
    ranks: options.Ranks = None,
    fsdp: options.Fsdp = None,
    hsdp: options.Hsdp = None,
    tp: options.Tp = None,
    seq: options.Tokens = None,
    dtype: options.Dtype = None,
    precision: options.Precision = None,
    ac: options.Checkpointing = None,
    trust_remote_code: options.RemoteCode = False,
    depth: options.Depth = -1,
    save: options.Save = None,
    figure: options.Figure = None,
    as_json: options.AsJson = False,
) -> None:
    """Estimate a step before the run: its work, its memory, and the least time on a chip. Nothing is allocated and nothing is computed."""
    how = {
        "backward": backward or optimizer is not None,
        "hardware": hardware,
        "grad_scaler": grad_scaler,
        "round_to": round_to,
        "allocator": allocator,
        "mesh": _mesh(fsdp, hsdp, tp),
    }
    words = {"tokens": seq, "dtype": dtype, "precision": precision, "checkpointing": ac, "remote_code": trust_remote_code or None}
    with _modules_of_this_folder():
        profile = _estimated(target, batch, optimizer, how, words)
    if save is not None:
        profile.save(save)
    save_memory(profile, figure)
    analysis, of_ranks = analyze(profile), _sharded(profile, ranks)
    if as_json:
        _write(analysis, of_ranks)
    else:
        _draw(analysis, of_ranks, depth)
    name_file(figure, as_json=as_json)


def _mesh(fsdp: int | None, hsdp: str | None, tp: int | None) -> dict[str, int]:
    """Ranks by dimension."""
    mesh = {} if fsdp is None else {"data": fsdp}
    if hsdp is not None:
        replicas, _, shards = hsdp.partition("x")
        if fsdp is not None:
            raise UsageError("--hsdp shards as --fsdp does: give one of the two")
        if not (replicas.isdecimal() and shards.isdecimal() and int(replicas) and int(shards)):
            raise UsageError(f"--hsdp {hsdp}: give replicas x shards, as 2x8")
        mesh = {"replica": int(replicas), "data": int(shards)}
    return mesh if tp is None else {**mesh, "tensor": tp}


def _write(analysis: Analysis, of_ranks: tuple[Sharded, ...]) -> None:
    profile = analysis.profile
    room = room_for(profile, profile.run.hardware)
    predicted = {"room": room, "bounds": analysis.lower_bound, "checkpointed": analysis.checkpointed, "sharded": of_ranks}
    write_json({"profile": profile, "fits": None if room is None else room.verdict == "fits", **predicted})


def _sharded(profile: Profile, ranks: int | None) -> tuple[Sharded, ...]:
    try:
        return () if ranks is None else sharded(profile, ranks, profile.run.hardware)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _draw(analysis: Analysis, of_ranks: tuple[Sharded, ...], depth: int) -> None:
    """What `lflops show` draws, then memory and the lower bound."""
    try:
        table = render(analysis, depth=depth)
    except ValueError as error:
        raise UsageError(str(error)) from error
    parts = [table, render_memory(analysis)]
    parts += [render_checkpointed(analysis.checkpointed)] if analysis.checkpointed else []
    parts += [render_sharded(of_ranks)] if of_ranks else []
    parts += [render_lower_bound(analysis.lower_bound)] if analysis.lower_bound is not None else []
    draw(Group(*(each for part in parts for each in (part, ""))))


def _function(target: str) -> Callable[[int], Any]:
    """The function that the user named."""
    module, _, name = target.partition(":")
    if not module or not name or module.endswith(".py"):
        raise UsageError(f"{target!r}: give package.module:function, as train:build for build in a train.py of this folder")
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{target}: {error}") from error
    if not callable(function):
        raise UsageError(f"{target}: {function!r} is no function")
    return function  # type: ignore[no-any-return]


@contextlib.contextmanager
def _modules_of_this_folder() -> Iterator[None]:
    """Found as `python -m` finds them, also when the user's function imports them only as it runs."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _estimated(target: str, samples: int, optimizer: str | None, how: Mapping[str, Any], words: Mapping[str, Any]) -> Profile:
    from lflops.collect.estimate.estimate import Estimator, subject_of  # with torch
    from lflops.collect.estimate.from_config import FromConfig, is_config
    from lflops.collect.estimate.optimizer_step import optimizer_named

    given = {name: value for name, value in words.items() if value is not None}
    around: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if is_config(target):
        configured = FromConfig(target=target, **given)
        build, around = configured.builder(), configured.autocast()
    elif given:
        raise UsageError("--seq, --dtype, --precision, --ac and --trust-remote-code are for a configuration: the function decides these")
    else:
        build = _function(target)
        _check_arguments(target, build)
    makes = None if optimizer is None else optimizer_named(optimizer)
    estimator = Estimator(asker=target, optimizer=makes, progress=sys.stderr.isatty(), **how)
    try:
        with around:
            return estimator.run(lambda: subject_of(target, build(samples)))
    except LflopsError:
        raise
    except Exception as error:
        where = "".join(f"; {note.removeprefix(f'{target}: ')}" for note in getattr(error, "__notes__", ()))
        raise UsageError(f"{target} failed: {type(error).__name__}: {error}{where}") from error


def _check_arguments(target: str, build: Callable[..., Any]) -> None:
    """See that it can be called with a number."""
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # native code has none
        return
    try:
        signature.bind(1)
    except TypeError as error:
        raise UsageError(
            f"{target}{signature}: {error}: it is called with one argument, the number of samples that --batch gives"
        ) from error
