"""Test that the examples run as their docstrings say, and that their counts are correct.

The tests compute the expected MACs from the sizes in each example.
"""

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
"""Number of batches before the counting step, with the default schedule.

The counting step is the last of 2 warm-up steps, after a wait of 5 steps.
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, which contains only the folder of the examples."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    for seed in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        # Lightning sets these variables. The fixture restores them.
        monkeypatch.setenv(seed, "0")
    return tmp_path


def said(name: str, what: str) -> str:
    """Return the rest of the first line that begins with `what` in the docstring of an example."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or ""
    lines = re.findall(rf"^{what} (.*)$", docstring, re.MULTILINE)
    return lines[0]


def run(name: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, Any]:
    """Run an example with the first command in its docstring, and return its global names.

    `more` are additional arguments of the command.
    """
    monkeypatch.setattr(sys, "argv", [*shlex.split(said(name, "python")), *more])
    return runpy.run_path(sys.argv[0], run_name="__main__")


def saved(name: str, folder: Path) -> Profile:
    """Load the profile that the second command in the docstring of the example shows."""
    (path,) = folder.glob(said(name, "lflops show").split()[0])
    return lflops.load(path)


def counted_at(profile: Profile) -> list[int]:
    """Return the indices of the counting steps."""
    return [step.index for step in profile.steps if step.kind == "counting"]


def test_adapters_cost_what_they_train(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A frozen layer has only the gradient of its input in backward.

    The first frozen layer has no backward at all, because no layer before it is trained. For the
    same reason, the first adapter has only the gradient of its weight.
    """
    example = run("finetune_lora.py", monkeypatch)
    batch = example["BATCH"]
    length = example["LENGTH"]
    width = example["WIDTH"]
    layers = example["LAYERS"]
    square = batch * length * width * width
    narrow = batch * length * width * example["RANK"]
    attention = 2 * batch * length * length * width
    head = batch * width * example["CLASSES"]
    profile = saved("finetune_lora.py", folder)
    backward = profile.by_module("backward")

    assert [3 * square] * 2 == [profile.total(f"blocks.{block}.qkv.frozen") for block in (0, 1)]
    assert [0, 3 * square] == [backward[f"blocks.{block}.qkv.frozen"] for block in (0, 1)]
    assert [narrow, 2 * narrow] == [backward[f"blocks.{block}.qkv.down"] for block in (0, 1)]

    # A layer has 3 + 1 squares in attention and 4 + 4 in the MLP. Its two adapters have 1 + 3 and
    # 1 + 1 narrow matmuls.
    assert layers * (12 * square + 6 * narrow + attention) + head == profile.total()
    layers_backward = layers * (12 * square + 2 * 6 * narrow + 2 * attention)
    # The first layer needs no gradient of its input.
    not_needed = 3 * square + narrow
    assert layers_backward + 2 * head - not_needed == backward[""]
    assert f"{backward['']:,}" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary")
def test_the_resnet_is_counted_in_the_precision_that_it_runs_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All MACs of a `bf16-mixed` run are counted as bfloat16.

    Each convolution has two matmuls in backward, except the stem: its input, the images, needs no
    gradient.
    """
    example = run("resnet_images.py", monkeypatch)
    batch = example["BATCH"]
    side = example["SIDE"]
    width = example["WIDTH"]
    blocks = example["BLOCKS"]
    stem = batch * side**2 * 9 * 3 * width
    first = batch * side**2 * 9 * width * width * 2 * blocks
    narrowing = []
    for ratio in (2, 4):
        pixels = batch * (side // ratio) ** 2
        wide = ratio * width
        # A 3 x 3 convolution and the 1 x 1 projection of the residual double the channels.
        doubling = wide * wide // 2 * (9 + 1)
        others = 9 * wide * wide * (2 * blocks - 1)
        narrowing.append(pixels * (doubling + others))
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
    """The profile separates the work of the generator from the work of the discriminator.

    The discriminator learns from two batches, and needs no gradient for their pixels. For the third
    batch, it passes the gradient on to the generator without learning.
    """
    example = run("manual_gan.py", monkeypatch)
    batch = example["BATCH"]
    noise = example["NOISE"]
    width = example["WIDTH"]
    pixels = example["PIXELS"]
    from_noise = batch * noise * width
    to_pixels = batch * width * pixels
    from_pixels = batch * pixels * width
    to_answer = batch * width
    profile = saved("manual_gan.py", folder)

    assert [1, 3, 3] == [
        profile.modules[name].calls for name in ("generator", "discriminator", "loss")
    ]
    assert from_noise + to_pixels == profile.total("generator")
    assert from_noise + 2 * to_pixels == profile.total("generator", phase="backward")
    assert 3 * (from_pixels + to_answer) == profile.total("discriminator")
    learning = from_pixels + 2 * to_answer
    passing = from_pixels + to_answer
    assert 2 * learning + passing == profile.total("discriminator", phase="backward")
    assert [BATCHES_BEFORE] == counted_at(profile)
    assert f"{profile.modules['generator'].backward.flops:,}" in capsys.readouterr().out


# torch.compile itself reads this attribute.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_have_the_same_count_and_one_row_of_time_each(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A compiled block has the MACs of an eager block, but times only for the whole block.

    The backend `aot_eager` generates no code, so the test does not take half a minute.
    """
    example = runpy.run_path(str(EXAMPLES / "compiled.py"), run_name="example")
    example["main"](backend="aot_eager")
    batch = example["BATCH"]
    features = example["FEATURES"]
    width = example["WIDTH"]
    layers = example["LAYERS"]
    embed = batch * features * width
    blocks = layers * 3 * batch * width * width
    head = batch * width * example["CLASSES"]
    compiled = saved("compiled.py", folder)
    (eager_path,) = folder.glob("runs/eager/*.profile.json")
    eager = lflops.load(eager_path)

    for profile in (eager, compiled):
        assert embed + blocks + head == profile.total()
        assert embed + 2 * blocks + 2 * head == profile.total(phase="backward")
    whole = {"", "embed", "body", "head"}
    within = set()
    for block in range(layers):
        whole.add(f"body.{block}")
        within |= {f"body.{block}.{name}" for name in ("norm", "into", "back")}
    assert whole | within == timed_modules(eager)
    assert whole == timed_modules(compiled)
    macs_of_a_step = 3 * (embed + blocks + head) - embed
    assert 2 == capsys.readouterr().out.count(f"{macs_of_a_step:,} MACs a step")


def timed_modules(profile: Profile) -> set[str]:
    """Return the names of the modules whose forward was timed."""
    return {name for name, module in profile.modules.items() if module.forward.seconds}


# Lightning uses a deprecated function of jsonargparse.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("layers", "wait"), [(3, 5), (4, 9)])
def test_a_config_says_what_is_watched(
    layers: int,
    wait: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The YAML file configures the model and the monitor, and the command line overrides it."""
    changed = []
    # The YAML file has 3 layers and a wait of 5 batches.
    if (layers, wait) != (3, 5):
        changed = [f"--model.layers={layers}", f"--trainer.callbacks.schedule.wait={wait}"]
    example = run("lightning_cli.py", monkeypatch, *changed)
    batch = 64
    width = 128
    first = batch * example["FEATURES"] * width
    square = batch * width * width
    last = batch * width
    paths = sorted(folder.glob("runs/cli/lightning_logs/version_0/lflops/*.profile.json"))
    profiles = [lflops.load(path) for path in paths]

    # The second window has the same shapes as the first window, so its steps are not counted again.
    assert [[wait + 2 - 1], []] == [counted_at(profile) for profile in profiles]
    for profile in profiles:
        timed_steps = sum(step.kind == "module_timing" for step in profile.steps)
        # The schedule requests four module-timing steps. If a layer seems slow, which can happen on
        # a busy machine, more steps follow.
        assert timed_steps in {4, 8, 12, 16}
        assert first + (layers - 1) * square + last == profile.total()
        assert first + 2 * (layers - 1) * square + 2 * last == profile.total(phase="backward")
    assert 2 == capsys.readouterr().out.count("<Profile Perceptron")


def test_the_guide_lists_the_examples_of_the_monitor() -> None:
    """The guide for Lightning links to each example that uses the monitor, and to the YAML file."""
    guide = (ROOT / "docs/how-to/lightning.md").read_text()
    watched = {
        path
        for path in EXAMPLES.iterdir()
        if path.suffix in {".py", ".yaml"} and "FlopsMonitor" in path.read_text()
    }
    assert 7 == len(watched)
    assert set() == {path.name for path in watched if f"](../../examples/{path.name})" not in guide}
