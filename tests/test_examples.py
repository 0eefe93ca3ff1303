"""The examples run as their docstrings say, and what they count can be worked out with a pencil."""

import ast
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import lflops
from lflops import Profile
from tests.support.lightning_runs import LIGHTNINGS_WARNINGS
from tests.support.repository import ROOT

pytestmark = LIGHTNINGS_WARNINGS

EXAMPLES = ROOT / "examples"
BATCHES_BEFORE = 5 + 2 - 1
"""Before the one that a monitor counts, where it was not told of another schedule."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which has the examples and nothing else."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    for seed in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(seed, "0")  # Lightning sets them, and this takes them back
    return tmp_path


def said(name: str, what: str) -> str:
    """The rest of the first line of an example's docstring that begins so."""
    (line, *_) = re.findall(
        rf"^{what} (.*)$",
        ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or "",
        re.MULTILINE,
    )
    return line


def run(name: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, Any]:
    """What the example has named, once its first command has run."""
    monkeypatch.setattr(sys, "argv", [*shlex.split(said(name, "python")), *more])
    return runpy.run_path(sys.argv[0], run_name="__main__")


def saved(name: str, folder: Path) -> Profile:
    """The one that the example's docstring shows."""
    (path,) = folder.glob(said(name, "lflops show").split()[0])
    return lflops.load(path)


def counted_at(profile: Profile) -> list[int]:
    """Indices of the steps that were counted."""
    return [step.index for step in profile.steps if step.kind == "counting"]


def test_adapters_cost_what_they_train(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A frozen layer has the gradient of its input alone, and not that where nothing before it is trained."""
    example = run("finetune_lora.py", monkeypatch)
    batch, length, width, layers = (
        example[name] for name in ("BATCH", "LENGTH", "WIDTH", "LAYERS")
    )
    square, narrow = batch * length * width * width, batch * length * width * example["RANK"]
    attention, head = 2 * batch * length * length * width, batch * width * example["CLASSES"]
    profile = saved("finetune_lora.py", folder)
    backward = profile.by_module("backward")

    assert [3 * square] * 2 == [profile.total(f"blocks.{block}.qkv.frozen") for block in (0, 1)]
    assert [0, 3 * square] == [backward[f"blocks.{block}.qkv.frozen"] for block in (0, 1)]
    assert [narrow, 2 * narrow] == [backward[f"blocks.{block}.qkv.down"] for block in (0, 1)]
    assert layers * (12 * square + 6 * narrow + attention) + head == profile.total()
    assert (
        layers * (12 * square + 2 * 6 * narrow + 2 * attention) + 2 * head - 3 * square - narrow
        == backward[""]
    )
    assert f"{backward['']:,}" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary")
def test_the_resnet_is_counted_in_the_precision_that_it_runs_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The images need no gradient, so the stem's convolution has one product in backward, and every other two."""
    example = run("resnet_images.py", monkeypatch)
    batch, side, width, blocks = (example[name] for name in ("BATCH", "SIDE", "WIDTH", "BLOCKS"))
    stem = batch * side**2 * 9 * 3 * width
    first = batch * side**2 * 9 * width * width * 2 * blocks
    narrowing = [
        batch
        * (side // ratio) ** 2
        * (wide * wide // 2 * (9 + 1) + 9 * wide * wide * (2 * blocks - 1))
        for ratio, wide in ((2, 2 * width), (4, 4 * width))
    ]
    head = batch * 4 * width * example["CLASSES"]
    profile = saved("resnet_images.py", folder)

    assert [stem, first, *narrowing, head] == [
        profile.total(name) for name in ("stem", "stages.0", "stages.1", "stages.2", "head")
    ]
    assert 2 * profile.total() - stem == profile.total(phase="backward")
    assert {"bfloat16"} == {cell.dtype for cell in profile.op_counts if cell.macs}
    assert [3 + 2 - 1] == counted_at(profile)
    assert f"stem      {stem / profile.total():7.1%} of the MACs" in capsys.readouterr().out


def test_each_network_of_the_gan_costs_what_its_turns_ask_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The discriminator learns from two batches, without a gradient for the pixels, and passes one on to the generator without learning."""
    example = run("manual_gan.py", monkeypatch)
    batch, noise, width, pixels = (example[name] for name in ("BATCH", "NOISE", "WIDTH", "PIXELS"))
    from_noise, to_pixels, from_pixels, to_answer = (
        batch * each for each in (noise * width, width * pixels, pixels * width, width)
    )
    profile = saved("manual_gan.py", folder)

    assert [1, 3, 3] == [
        profile.modules[name].calls for name in ("generator", "discriminator", "loss")
    ]
    assert from_noise + to_pixels == profile.total("generator")
    assert from_noise + 2 * to_pixels == profile.total("generator", phase="backward")
    assert 3 * (from_pixels + to_answer) == profile.total("discriminator")
    learning, passing = from_pixels + 2 * to_answer, from_pixels + to_answer
    assert 2 * learning + passing == profile.total("discriminator", phase="backward")
    assert [BATCHES_BEFORE] == counted_at(profile)
    assert f"{profile.modules['generator'].backward.flops:,}" in capsys.readouterr().out


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # dynamo's own doing
def test_compiled_blocks_have_the_same_count_and_one_row_of_time_each(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of torch's compilers the one that generates no code, which takes a moment instead of half a minute."""
    example = runpy.run_path(str(EXAMPLES / "compiled.py"), run_name="example")
    example["main"](backend="aot_eager")
    batch, features, width, layers = (
        example[name] for name in ("BATCH", "FEATURES", "WIDTH", "LAYERS")
    )
    embed, blocks, head = (
        batch * features * width,
        layers * 3 * batch * width * width,
        batch * width * example["CLASSES"],
    )
    compiled = saved("compiled.py", folder)
    (eager,) = map(lflops.load, folder.glob("runs/eager/*.profile.json"))

    for profile in (eager, compiled):
        assert embed + blocks + head == profile.total()
        assert embed + 2 * blocks + 2 * head == profile.total(phase="backward")
    whole = {"", "embed", "body", "head", *(f"body.{block}" for block in range(layers))}
    within = {
        f"body.{block}.{name}" for block in range(layers) for name in ("norm", "into", "back")
    }
    assert whole | within == {
        name for name, module in eager.modules.items() if module.forward.seconds
    }
    assert whole == {name for name, module in compiled.modules.items() if module.forward.seconds}
    assert 2 == capsys.readouterr().out.count(
        f"{3 * (embed + blocks + head) - embed:,} MACs a step"
    )


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # Lightning's, of what it asks jsonargparse for
@pytest.mark.parametrize(("layers", "wait"), [(3, 5), (4, 9)])
def test_a_config_says_what_is_watched(
    layers: int,
    wait: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the command line what is different this time."""
    changed = (
        []
        if (layers, wait) == (3, 5)
        else [f"--model.layers={layers}", f"--trainer.callbacks.schedule.wait={wait}"]
    )
    example = run("lightning_cli.py", monkeypatch, *changed)
    batch, width = 64, 128
    first, square, last = batch * example["FEATURES"] * width, batch * width * width, batch * width
    paths = sorted(folder.glob("runs/cli/lightning_logs/version_0/lflops/*.profile.json"))
    profiles = [lflops.load(path) for path in paths]

    # The second window has the first one's shapes, and needs no count of its own.
    assert [[wait + 2 - 1], []] == [counted_at(profile) for profile in profiles]
    # Where a layer seems slow, as by chance on a busy machine, more steps are hooked than the four
    # that are asked for.
    assert all(
        sum(step.kind == "module_timing" for step in profile.steps) in {4, 8, 12, 16}
        for profile in profiles
    )
    for profile in profiles:
        assert first + (layers - 1) * square + last == profile.total()
        assert first + 2 * (layers - 1) * square + 2 * last == profile.total(phase="backward")
    assert 2 == capsys.readouterr().out.count("<Profile Perceptron")


def test_the_guide_lists_the_examples_of_the_monitor() -> None:
    """With a link to each, as to the config of the one that has one."""
    guide = (ROOT / "docs/how-to/lightning.md").read_text()
    watched = {
        path
        for path in EXAMPLES.iterdir()
        if path.suffix in {".py", ".yaml"} and "FlopsMonitor" in path.read_text()
    }
    assert 7 == len(watched)
    assert set() == {path.name for path in watched if f"](../../examples/{path.name})" not in guide}
