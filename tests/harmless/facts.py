"""Collect the facts to compare: a run's results to the bit, and what it leaves in the process."""

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
"""Names of metrics that are measured, so their values differ from run to run."""
SECONDS = 20
"""Seconds in which threads of the monitor must end. After that, they count as left behind."""


def digest(value: Any) -> str:
    """Return a short text that is equal for values that are equal to the bit."""
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """Return a copy in which tensors are their bits, and other objects the names of their types."""
    if isinstance(value, Tensor):
        # A DTensor has `to_local`.
        local = value.to_local() if hasattr(value, "to_local") else value
        return bits(local)
    if isinstance(value, Mapping):
        return {repr(_plain(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str | int | float | bool | bytes | None):
        return value
    return type(value).__name__


def own(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the user's metrics, without the monitor's metrics.

    The value of a measured metric is replaced by "measured".
    """
    kept = {}
    for name, value in metrics.items():
        if "lflops" in name:
            continue
        if MEASURED.search(name):
            kept[name] = "measured"
        elif isinstance(value, Tensor) and value.numel() == 1:
            kept[name] = repr(value.item())
        else:
            kept[name] = repr(value)
    return kept


def says(text: str) -> None:
    """Print a line as the user's program does. The judge compares these lines."""
    print(f"user: {text}", flush=True)  # noqa: T201 - it is what a user does


def random_state() -> Facts:
    """Return the states of the random number generators of torch, Python and NumPy."""
    return {name: digest(value) for name, value in random_numbers().items()}


def of_modules(model: nn.Module) -> Facts:
    """Return weights and gradients to the bit, and the attributes, hooks and flags of modules."""
    facts: Facts = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            facts[f"weights: {name}"] = digest(tensor)
    for name, parameter in model.named_parameters():
        facts[f"gradient: {name}"] = digest(parameter.grad)
    for name, module in model.named_modules():
        hooks = []
        for key, value in sorted(vars(module).items()):
            if "hooks" in key and isinstance(value, dict) and value:
                hooks.append((key, len(value)))
        facts[f"module: {name}"] = (
            type(module).__name__,
            sorted(vars(module)),
            hooks,
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
    """Return the states of optimizers to the bit, their hooks, and their attributes' names."""
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
    """Return the names of the attributes of objects.

    A wrapped method shows, because it is an attribute of the instance.
    """
    return {f"attributes of the {name}": sorted(vars(each)) for name, each in objects.items()}


def checkpoints(folder: Path) -> Facts:
    """Return the names of the user's files, and the contents of checkpoints and CSV logs.

    Files of lflops are left out.
    """
    files: list[str] = []
    facts: Facts = {"files": files}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file() or "lflops" in name:
            continue
        if "tfevents" not in path.name:
            files.append(name)
        if path.suffix in {".ckpt", ".pt", ".bin"} and path.name != "training_args.bin":
            loaded = torch.load(path, weights_only=False)
            contents: Facts = {}
            for key, value in loaded.items():
                if key not in {"callbacks", "loops"}:
                    contents[key] = digest(value)
            contents["callbacks"] = sorted(loaded.get("callbacks", ()))
            facts[f"in {name}"] = contents
        elif path.suffix == ".csv":
            facts[f"in {name}"] = _rows(path.read_text("utf-8"))
    return facts


def _rows(text: str) -> list[dict[str, str]]:
    """Return the rows of a CSV log that have metrics of the user."""
    header, *lines = [line.split(",") for line in text.splitlines()]
    rows = []
    for line in lines:
        pairs = zip(header, line, strict=True)
        row = {name: value for name, value in pairs if value and "lflops" not in name}
        if row.keys() - {"step", "epoch"}:
            rows.append(row)
    return rows


class Recorder:
    """Records the calls of a logger, without the metrics of the monitor."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, dict[str, str]]] = []

    def add(self, metrics: Mapping[str, Any], step: Any) -> None:
        """Record one call.

        A call that has metrics of the monitor, and otherwise only the epoch and the step, is not
        recorded. Some loggers add the epoch to all calls.
        """
        kept = own(metrics)
        has_user_metrics = bool(kept.keys() - {"epoch", "step"})
        has_lflops_metrics = any("lflops" in name for name in metrics)
        if has_user_metrics or not has_lflops_metrics:
            self.entries.append((step, kept))


@contextlib.contextmanager
def around(facts: Facts) -> Iterator[None]:
    """Add to `facts` how a training run ends, and what it leaves in the process.

    An exception of the run is recorded and not raised.
    """
    before = _process()
    facts["outcome"] = "ended"
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - any error is compared
        facts["outcome"] = f"{type(error).__name__}: {error}"
    facts |= random_state()
    for thread in threading.enumerate():
        if thread.name.startswith("lflops"):
            thread.join(SECONDS)
    # Objects in reference cycles do not count as left behind.
    gc.collect()
    after = _process()
    facts["left in the process"] = [
        name for name in differences(before, after) if name not in IGNORED
    ]
    facts["left open"] = _opened(before["files"], after["files"])
    facts["hooks on every module"] = {name: len(value) for name, value in global_hooks().items()}


def _opened(before: list[str], after: list[str]) -> dict[str, int]:
    """Count the files that were opened and not closed, by their names.

    Numbers and temporary folders differ from run to run, so they are removed from the names.
    Connections to other ranks last as long as the monitor, and matplotlib keeps the fonts open that
    it has used. Both are left out.
    """
    opened = Counter(file for file in after if not re.search(KEPT_OPEN, file)) - Counter(before)
    kinds = Counter(re.sub(r"\d+|/tmp\S*/", "", file) for file in opened.elements())
    return dict(sorted(kinds.items()))


KEPT_OPEN = r"^socket:|/site-packages/|\.ttf$"
"""Names of files that may stay open. The folder of a font depends on the system."""


def _process() -> Facts:
    return names() | process() | modes() | global_hooks()


IGNORED = {"files"}
"""Differences that are left out, because the fact "left open" has them."""
