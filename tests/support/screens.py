"""Draw the screens of the commands from handmade profiles, for a terminal with a chosen width.

`python -m tests.support.screens` writes all of them to `tests/golden/`.
"""

import io
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from unittest.mock import patch

from msgspec.structs import replace

from lflops.analysis.analysis import analyze
from lflops.cli.main import main
from lflops.hardware.chips import lookup
from lflops.profile.notes import Note
from lflops.profile.profile import Allocation, Memory, Moment, OpCount, Profile
from lflops.profile.records import ByCategory, Phase, Rank
from lflops.profile.steps import Step
from lflops.report.log_text import log_text
from tests.memory.snapshots.test_causes import logits
from tests.support.profile_builders import (
    cell,
    clocked,
    product,
    profile,
    run,
    small_comparison,
    small_profile,
    spread,
    untimed,
    weights,
)
from tests.support.repository import ROOT
from tests.support.traces_by_hand import small_gpu_trace

__all__ = [
    "GOLDEN",
    "SCREENS",
    "WIDTHS",
    "deep_model",
    "drawn_screen",
    "gpt_training",
    "write_golden",
]

GOLDEN = ROOT / "tests" / "golden"
WIDTHS = (80, 120)
"""Widths of the screens in `tests/golden/`. The log does not depend on the width."""

TOKENS = 512
WIDTH = 256
BLOCKS = 6
SLOW = "blocks.2.mlp.0"
"""The module that `gpt_training` can make slower."""
MILLISECONDS = {
    "norm1": 0.2,
    "qkv": 1.2,
    "out": 0.4,
    "norm2": 0.2,
    "mlp.0": 1.6,
    "mlp.1": 0.3,
    "mlp.2": 1.6,
}
"""Self time of each layer of a block in forward. Backward takes twice as long."""

SCREENS: Mapping[str, tuple[str, ...]] = {
    "show": ("show", "gpt.json"),
    "show-by-time": ("show", "gpt.json", "--sort", "time", "--phase", "all", "--depth", "2"),
    "show-flat": ("show", "gpt.json", "--flat", "--phase", "forward"),
    "show-operators": ("show", "gpt.json", "--operators"),
    "show-memory": ("show", "gpt.json", "--memory"),
    "show-ranks": ("show", "small.json"),
    "show-markdown": ("show", "gpt.json", "--format", "markdown", "--depth", "1"),
    "show-latex": ("show", "gpt.json", "--format", "latex", "--depth", "1"),
    "show-csv": ("show", "gpt.json", "--format", "csv", "--depth", "1"),
    "roofline": ("roofline", "gpt.json", "--top", "8"),
    "why": ("why", "slow.json"),
    "why-markdown": ("why", "slow.json", "--format", "markdown"),
    "why-json": ("why", "slow.json", "--format", "json"),
    "diff": ("diff", "gpt.json", "slow.json", "--max-regress", "50%"),
    "estimate": ("estimate", "train:build", "--backward"),
    "trace-show": ("trace", "show", "rank1.pt.trace.json"),
    "memory": ("memory", "snapshot.pickle"),
    "hardware": ("hardware", "NVIDIA H100 80GB HBM3"),
}
"""The command line of each screen."""


_LONG_FRACTION = re.compile(r"\d+\.\d{10,}")


def gpt_training(*, slow: float = 1.0) -> Profile:
    """Return the profile of a GPT with six blocks on an H100, for 4 sequences of 128 tokens.

    A linear layer has tokens x weights MACs in forward, and twice as many in backward.

    Args:
        slow: Factor by which the layer `SLOW` is slower.
    """
    layers = {"qkv": 3 * WIDTH**2, "out": WIDTH**2, "mlp.0": 4 * WIDTH**2, "mlp.2": 4 * WIDTH**2}
    kinds = {
        "norm1": "LayerNorm",
        "qkv": "Linear",
        "out": "Linear",
        "norm2": "LayerNorm",
        "mlp": "Sequential",
        "mlp.0": "Linear",
        "mlp.1": "GELU",
        "mlp.2": "Linear",
    }
    a_block = sum(layers.values())
    rows: dict[str, dict[str, object]] = {
        "": weights(0, BLOCKS * a_block + 2 * TOKENS * WIDTH) | {"class_name": "GPT"},
        "tokens": weights(TOKENS * WIDTH) | {"class_name": "Embedding"},
        "blocks": weights(0, BLOCKS * a_block) | {"class_name": "Sequential"},
    }
    cells: list[OpCount] = []
    own: dict[tuple[str, Phase], float] = {}
    passes: tuple[tuple[Phase, int], ...] = (("forward", 1), ("backward", 2))
    for block in range(BLOCKS):
        rows[f"blocks.{block}"] = weights(0, a_block) | {"class_name": "Block"}
        for name, kind in kinds.items():
            path = f"blocks.{block}.{name}"
            below = layers["mlp.0"] + layers["mlp.2"] if name == "mlp" else 0
            rows[path] = weights(layers.get(name, 0), below) | {"class_name": kind}
        for name, milliseconds in MILLISECONDS.items():
            path = f"blocks.{block}.{name}"
            for phase, times in passes:
                if name in layers:
                    macs = times * TOKENS * layers[name]
                    moved = times * 4 * layers[name]
                    cells.append(product(path, "aten::mm", phase, macs=macs, bytes_moved=moved))
                else:
                    operator = "aten::native_layer_norm" if "norm" in name else "aten::gelu"
                    cells.append(cell(path, operator, phase, flops=8, bytes_moved=2**20))
                own[path, phase] = times * 1e-3 * milliseconds * (slow if path == SLOW else 1.0)
    rows["head"] = weights(TOKENS * WIDTH) | {"class_name": "Linear"}
    for phase, times in passes:
        macs = times * TOKENS**2 * WIDTH
        cells.append(product("head", "aten::mm", phase, macs=macs, bytes_moved=times * 2**20))
        own["head", phase] = times * 1e-3
        own["tokens", phase] = times * 2e-4
    return _stepped(clocked(profile(_sorted(rows), cells), own), slow)


def _sorted(rows: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """Return the modules in the order of the model, with each container before its submodules."""
    blocks = [name for name in rows if name.startswith("blocks")]
    return {name: rows[name] for name in ("", "tokens", *blocks, "head")}


def _stepped(given: Profile, slow: float) -> Profile:
    """Return the profile with five unprofiled steps, memory, and a chip.

    Forward and backward of a step take as long as all modules together.
    """
    forward = 1e-3 * (
        BLOCKS * sum(MILLISECONDS.values()) + 1.2 + (slow - 1.0) * MILLISECONDS["mlp.0"]
    )
    phases = {
        "data": 4e-3,
        "transfer": 1e-4,
        "forward": forward,
        "backward": 2 * forward,
        "optimizer": 7e-3,
        "other": 1e-3,
    }
    steps = []
    for n, noise in enumerate((0.99, 1.01, 1.0, 0.98, 1.02)):
        step = Step(
            index=5 + n,
            kind="unprofiled",
            seconds=sum(phases.values()) * noise,
            phases={phase: seconds * noise for phase, seconds in phases.items()},
            samples=4,
        )
        steps.append(step)
    of = run(
        kind="training",
        stage="train",
        step=12,
        window=0,
        device_name="NVIDIA H100 80GB HBM3",
        device_type="cuda",
        hardware=lookup("NVIDIA H100 80GB HBM3"),
        shapes={"0": (4, 128)},
        samples_per_step=4,
        tokens_per_step=TOKENS,
        observer_ratio=1.04,
    )
    note = Note(code="few_unprofiled_steps", subject="", values={"steps": 5})
    return replace(given, run=of, steps=tuple(steps), notes=(note,), memory=_memory())


def _memory() -> Memory:
    """Return the memory of a step with a peak of 48 MiB, of which 20 MiB are activations."""
    mib = 2**20
    by_category = {"parameters": 19 * mib, "activations": 20 * mib, "gradients": 9 * mib}
    most = {"parameters": 19 * mib, "activations": 24 * mib, "gradients": 19 * mib}
    return Memory(
        source="counted",
        peak_bytes=48 * mib,
        peak_index=1,
        by_category=by_category,
        most_by_category=most,
        by_module={"blocks.0": 40 * mib, "head": 8 * mib},
        alive=(Allocation("activations", "aten::mm", "head", "forward", mib),),
        timeline=(
            Moment(
                "aten::mm",
                "blocks.0.qkv",
                "forward",
                19 * mib,
                0,
                ByCategory(19 * mib, 0, 0, 0, 0, 0),
            ),
            Moment(
                "aten::mm",
                "blocks.0.qkv",
                "backward",
                48 * mib,
                1,
                ByCategory(19 * mib, 9 * mib, 0, 20 * mib, 0, 0),
            ),
        ),
    )


def ranks_training() -> Profile:
    """Return the small profile with reports of both ranks. Rank 1 is slow in the head."""
    given = small_profile()
    second = Rank(
        rank=1,
        node="1",
        host="node1",
        device="cpu",
        coordinates={"dp": 1},
        status="ok",
        step=spread(3e-3),
        macs=1408,
    )
    return replace(given, ranks=(given.ranks[0], second), rank_comparison=small_comparison())


def deep_model(depth: int = 40) -> Profile:
    """Return the profile of a chain of nested modules, with a second module at each level.

    By default the chain is so deep that its indentation is wider than 80 columns.
    """
    kinds = {"": "Model"}
    for level in range(1, depth + 1):
        kinds[".".join(["inner"] * level)] = "Wrapper"
    for level in range(1, depth + 1):
        kinds[".".join([*(["inner"] * (level - 1)), "outer"])] = "Linear"
    rows = {name: {"class_name": kind} for name, kind in kinds.items()}
    own: dict[tuple[str, Phase], float] = {}
    cells = []
    for index, name in enumerate(rows):
        if name:
            own[name, "forward"] = 1e-3
            macs = 10**6 + index
            cells.append(product(name, "aten::mm", "forward", macs=macs, bytes_moved=1))
    return clocked(profile(rows, cells), own)


def _estimated() -> Profile:
    """Return the profile that the command `estimate` shows: the GPT without times."""
    given = untimed(gpt_training())
    estimate = replace(
        given.run, kind="estimate", stage=None, step=None, window=None, observer_ratio=None
    )
    return replace(given, run=estimate, notes=())


def files(folder: Path) -> None:
    """Write the files that the commands in `SCREENS` read."""
    profiles: dict[str, Profile] = {
        "gpt": gpt_training(),
        "slow": gpt_training(slow=5.0),
        "small": ranks_training(),
        "deep": deep_model(),
    }
    for name, each in profiles.items():
        each.save(folder / f"{name}.json")
    small_gpu_trace().write(folder / "rank1.pt.trace.json")
    (folder / "snapshot.pickle").write_bytes(pickle.dumps(logits().snapshot()))


def drawn_screen(arguments: tuple[str, ...], width: int, folder: Path) -> str:
    """Return the output of a command on a terminal without colors.

    Args:
        arguments: The command line. Names of files in the folder are replaced by their paths.
        width: Width of the terminal.
        folder: The folder to which `files` has written.
    """
    given = []
    for argument in arguments:
        path = folder / argument
        given.append(str(path) if path.is_file() else argument)
    written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    built = patch("lflops.cli.estimate._builder", lambda *_, **__: None)
    estimated = patch("lflops.estimation.estimate.Estimator.run", lambda *_: _estimated())
    with (
        patch.dict(os.environ, {"COLUMNS": str(width)}),
        redirect_stdout(written),
        built,
        estimated,
    ):
        status = main(given)
        written.flush()
    assert status in {0, 1}, f"{arguments} ended with {status}"
    text = written.buffer.getvalue().decode().replace(str(folder), "FOLDER")
    return _LONG_FRACTION.sub(_rounded, text)


def _rounded(number: re.Match[str]) -> str:
    """Round a number of a JSON object. Python 3.12 and later add floats more exactly."""
    return f"{float(number[0]):.12g}"


def golden_screens(folder: Path) -> Mapping[str, Callable[[], str]]:
    """Return for each file in `tests/golden/`, by its name, the function that draws it."""
    drawing: dict[str, Callable[[], str]] = {
        "log": lambda: f"{log_text(analyze(gpt_training()))}\n"
    }
    for name, arguments in SCREENS.items():
        for width in WIDTHS:
            drawing[f"{name}-{width}"] = partial(drawn_screen, arguments, width, folder)
    return drawing


def write_golden() -> None:
    """Draw all screens and write them to `tests/golden/`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files(folder)
        for name, draw in golden_screens(folder).items():
            path = GOLDEN / f"{name}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text(draw(), "utf-8")
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    write_golden()
