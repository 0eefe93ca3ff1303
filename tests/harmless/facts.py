"""What is compared: a training's results to the bit, and what is left in the process behind it."""

import contextlib
import gc
import hashlib
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.harmless.case import Facts
from tests.support.process_state import (
    bits,
    differences,
    global_hooks,
    modes,
    names,
    process,
    random_numbers,
)

__all__ = [
    "Recorder",
    "around",
    "attributes",
    "checkpoints",
    "digest",
    "of_modules",
    "of_optimizers",
    "own",
    "random_state",
    "says",
]

MEASURED = re.compile(
    r"runtime$|_per_second$|_per_sec$|train/time|validate/time|^DeviceStatsMonitor"
)
"""Metrics that differ from run to run."""
SECONDS = 20
"""That threads of the monitor may take to end, before they count as left behind."""


def digest(value: Any) -> str:
    """A short text for a value: equal for values that are equal to the bit."""
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return bits(getattr(value, "to_local", lambda: value)())
    if isinstance(value, Mapping):
        return {repr(_plain(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return (
        value
        if isinstance(value, str | int | float | bool | bytes | None)
        else type(value).__name__
    )


def own(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The user's metrics, without those of the monitor.

    Of what is measured on this machine only that it is there.
    """
    return {
        name: "measured"
        if MEASURED.search(name)
        else repr(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
        for name, value in metrics.items()
        if "lflops" not in name
    }


def says(text: str) -> None:
    """Print as the user's program; the judge compares these lines."""
    print(f"user: {text}", flush=True)  # noqa: T201 - it is what a user does


def random_state() -> Facts:
    """The generators of torch, Python and NumPy."""
    return {name: digest(value) for name, value in random_numbers().items()}


def of_modules(model: nn.Module) -> Facts:
    """Weights and gradients to the bit, and what hangs on the modules.

    Names of attributes, hooks, flags.
    """
    facts = {
        f"weights: {name}": digest(tensor)
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor)
    }
    facts |= {f"gradient: {name}": digest(each.grad) for name, each in model.named_parameters()}
    for name, module in model.named_modules():
        hooks = {
            key: len(value)
            for key, value in vars(module).items()
            if "hooks" in key and isinstance(value, dict) and value
        }
        facts[f"module: {name}"] = (
            type(module).__name__,
            sorted(vars(module)),
            sorted(hooks.items()),
            module.training,
        )
    for name, each in model.named_parameters():
        facts[f"hooks of {name}"] = (
            len(each._backward_hooks or {}),
            len(each._post_accumulate_grad_hooks or {}),
            sorted(vars(each)),
        )
    return facts


def of_optimizers(optimizers: Any) -> Facts:
    """Their states to the bit, their hooks, and their names of attributes."""
    facts: Facts = {}
    for number, optimizer in enumerate(optimizers):
        facts[f"optimizer {number}"] = digest(optimizer.state_dict())
        facts[f"optimizer {number}: attributes"] = sorted(vars(optimizer))
        facts[f"optimizer {number}: hooks"] = [
            len(getattr(optimizer, name, ()))
            for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        ]
    return facts


def attributes(**objects: Any) -> Facts:
    """The names of the attributes of objects.

    Methods that are wrapped are attributes of the instance.
    """
    return {f"attributes of the {name}": sorted(vars(each)) for name, each in objects.items()}


def checkpoints(folder: Path) -> Facts:
    """The user's files, and what is in those that torch has written."""
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "lflops" not in str(path.relative_to(folder))
    ]
    facts: Facts = {
        "files": [str(path.relative_to(folder)) for path in paths if "tfevents" not in path.name]
    }
    for path in paths:
        if path.suffix in {".ckpt", ".pt", ".bin"} and path.name != "training_args.bin":
            loaded = torch.load(path, weights_only=False)
            facts[f"in {path.relative_to(folder)}"] = {
                key: digest(value)
                for key, value in loaded.items()
                if key not in {"callbacks", "loops"}
            } | {"callbacks": sorted(loaded.get("callbacks", ()))}
        elif path.suffix == ".csv":
            facts[f"in {path.relative_to(folder)}"] = _columns(path.read_text("utf-8"))
    return facts


def _columns(text: str) -> list[dict[str, str]]:
    header, *rows = [line.split(",") for line in text.splitlines()]
    kept = [
        {
            name: value
            for name, value in zip(header, row, strict=True)
            if value and "lflops" not in name
        }
        for row in rows
    ]
    return [row for row in kept if row.keys() - {"step", "epoch"}]


class Recorder:
    """What a logger is given, without what is the monitor's."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, dict[str, str]]] = []

    def add(self, metrics: Mapping[str, Any], step: Any) -> None:
        """Note one call.

        Some loggers are given the epoch with all else, so that alone is nobody's.
        """
        kept = own(metrics)
        if kept.keys() - {"epoch", "step"} or not any("lflops" in name for name in metrics):
            self.entries.append((step, kept))


@contextlib.contextmanager
def around(facts: Facts) -> Iterator[None]:
    """Note how a training ends, and what it leaves in the process; an exception goes no further."""
    before = _process()
    facts["outcome"] = "ended"
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what is compared
        facts["outcome"] = f"{type(error).__name__}: {error}"
    facts |= random_state()
    for thread in threading.enumerate():
        if thread.name.startswith("lflops"):
            thread.join(SECONDS)
    gc.collect()  # what is in cycles is not kept
    after = _process()
    facts["left in the process"] = [
        name for name in differences(before, after) if name not in IGNORED
    ]
    # matplotlib keeps the fonts open that it has drawn with; which file that is, depends on what
    # the system has installed.
    facts["left open"] = _kinds(
        *(
            [file for file in state["files"] if not file.endswith(".ttf")]
            for state in (after, before)
        )
    )
    facts["hooks on every module"] = {name: len(value) for name, value in global_hooks().items()}


def _kinds(after: list[str], before: list[str]) -> dict[str, int]:
    """Files that are open and were not, without numbers that differ from run to run.

    Connections to other ranks last as long as the monitor, and matplotlib keeps its fonts open:
    neither is looked at.
    """
    opened = Counter(
        each for each in after if not re.search("^socket:|/site-packages/", each)
    ) - Counter(before)
    return dict(
        sorted(Counter(re.sub(r"\d+|/tmp\S*/", "", each) for each in opened.elements()).items())
    )


def _process() -> Facts:
    return names() | process() | modes() | global_hooks()


IGNORED = {"files"}
"""What `left open` tells."""
