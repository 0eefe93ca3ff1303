"""Test `lflops estimate`, `lflops show --memory`, and the figure of live memory.

The expected MACs and bytes are worked out by hand from the small models in `SOURCE` and `DEEP`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from matplotlib.patches import Patch

import lflops
from lflops import Profile, ProfileError, load
from lflops.analysis.analysis import analyze
from lflops.cli.estimate import Training, bytes_of
from lflops.cli.main import main
from lflops.estimation.prediction import Prediction, why_not
from lflops.hardware.chips import named
from lflops.profile.profile import Memory
from lflops.report.figures.pictures import PHASES, memory_figure
from tests.support.profile_builders import profile, small_profile

SOURCE = """
import torch
from torch import nn

def build(samples):
    return nn.Sequential(nn.Linear(100, 50, bias=False), nn.ReLU()), torch.randn(samples, 100)

def trained(samples):
    return build(samples)[0], {"input": torch.randn(samples, 100)}, lambda out: out.square().mean()

def wrong(samples):
    return 3

def fails(samples):
    raise ZeroDivisionError("no reason")

def alone():
    return build(1)

def sized(samples, length):
    return build(samples)

def misfit(samples):
    return nn.Sequential(nn.Linear(100, 50), nn.Linear(60, 10)), torch.randn(samples, 100)

def nowhere_linear(samples):
    return nn.Sequential(nn.ReLU()), torch.randn(samples, 100)

def asks(samples):
    return build(samples)[0], (torch.randn(samples, 100),), lambda out: out if out.sum() > 0 else -out
"""
# Bytes of the weights of `build`, and of one sample of its input and of its output.
WEIGHTS = 5000 * 4
INPUT = 100 * 4
OUTPUT = 50 * 4


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change to a folder with the module `planned`."""
    (tmp_path / "planned.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("planned", None)


def estimated(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """Run `lflops estimate`, and return the JSON object that it prints."""
    assert 0 == main(["estimate", *args, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_forward_of_the_samples_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The peak has the weights, the inputs, and the results of the layer and of ReLU.

    Without a chip, there is no lower bound of the time, and it is unknown whether the step fits.
    """
    found = estimated(capsys, "planned:build", "--batch", "8")
    profile = msgspec.convert(found["profile"], Profile)
    assert profile.memory is not None
    assert 8 * 5000 == profile.total()
    assert WEIGHTS + 8 * (INPUT + 2 * OUTPUT) == profile.memory.peak_bytes
    assert found["bounds"] is None
    assert found["fits"] is None
    assert [] == found["checkpointed"]
    assert [] == found["sharded"]


def test_a_training_on_a_chip(capsys: pytest.CaptureFixture[str]) -> None:
    """`--optimizer` implies a backward pass. The batch is a dict, and the function returns a loss.

    The step fits into the chip's memory, and there is a lower bound of its time.
    """
    found = estimated(
        capsys,
        "planned:trained",
        "--batch",
        "8",
        "--optimizer",
        "adamw",
        "--hardware",
        "NVIDIA H200",
        "--ranks",
        "4",
    )
    profile = msgspec.convert(found["profile"], Profile)
    assert profile.memory is not None
    assert (8 * 5000, 2 * WEIGHTS + 4) == (
        profile.total(phase="backward"),
        profile.memory.by_category["optimizer_state"],
    )
    assert (True, "fits", "H200 SXM") == (
        found["fits"],
        found["memory_fit"]["verdict"],
        found["memory_fit"]["chip"],
    )
    assert found["bounds"]["seconds"] == pytest.approx(sum(found["bounds"]["by_phase"].values()))
    assert ["forward", "backward", "optimizer"] == list(found["bounds"]["by_phase"])
    assert [WEIGHTS, WEIGHTS, WEIGHTS // 4] == [
        each["parameter_bytes"] for each in found["sharded"]
    ]
    assert [] == found["checkpointed"], (
        "the optimizer's step is the peak, and no activation is left there"
    )


def test_the_text_has_the_model_its_memory_and_the_bound(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The text begins with the output of `lflops show` for the saved profile.

    Then it has the memory and the lower bound, and the path of the figure.
    """
    saved = tmp_path / "plan.json"
    figure = tmp_path / "plan.svg"
    options = [
        "--batch",
        "8",
        "--backward",
        "--hardware",
        "NVIDIA H200",
        "--ranks",
        "4",
        "--save",
        str(saved),
        "--figure",
        str(figure),
    ]
    assert 0 == main(["estimate", "planned:build", *options])
    text = capsys.readouterr().out
    assert 0 == main(["show", str(saved)])
    shown = capsys.readouterr().out
    assert text.startswith(shown.rstrip("\n"))
    assert text.endswith(f"\n{figure}\n")
    added = text.removeprefix(shown.rstrip("\n"))
    for label in ("fit", "by category", "by module", "largest", "at least"):
        assert f"\n{label}  " in added
    assert "estimate" == load(saved).run.kind
    assert "<svg" in figure.read_text("utf-8")


def test_the_time_of_a_step_and_what_a_training_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """The text has the predicted step time and the cost of the run, and JSON has the same seconds.

    Ten million samples keep an H100 busy for longer than the host needs to launch the work.
    """
    options = [
        "--batch",
        "10000000",
        "--seq",
        "1",
        "--backward",
        "--dtype",
        "bf16",
        "--hardware",
        "H100 SXM",
    ]
    assert 0 == main(["estimate", "planned:sized", *options, "--tokens", "1e9", "--price", "2"])
    text = capsys.readouterr().out
    for part in (
        "\npredicted ",
        "the prediction was fitted to runs with other code and versions",
        "\ntokens/s ",
        "GPU-hours",
        "\ncost ",
    ):
        assert part in text
    assert 0 == main(["estimate", "planned:sized", *options, "--json"])
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    assert predicted["low"] < predicted["seconds"] < predicted["high"]
    assert predicted["seconds"] == pytest.approx(sum(predicted["by_kind"].values()))
    assert 0 == main(["estimate", "planned:sized", *options, "--accumulation", "3", "--json"])
    accumulated = json.loads(capsys.readouterr().out)["predicted"]
    # There is no optimizer, so three batches take three times as long.
    assert accumulated["seconds"] == pytest.approx(3 * predicted["seconds"])


def test_a_step_that_is_not_predicted_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """One sample is so little work that the host may be the limit, so there is no prediction."""
    assert 0 == main(
        ["estimate", "planned:build", "--backward", "--dtype", "bf16", "--hardware", "H100 SXM"]
    )
    assert "operators may take the host longer than running them takes the device" in " ".join(
        capsys.readouterr().out.split()
    )


def test_the_tokens_of_a_training_make_days_and_a_cost() -> None:
    """1,000 tokens in half a second are 2,000 tokens/s.

    1e9 tokens take 500,000 s of a GPU, which are 139 hours. Four GPUs share them.
    """
    predicted = Prediction(
        hardware="chip", seconds=0.5, low=0.4, high=1.0, by_kind={}, by_phase={}, by_module={}
    )
    assert dict(Training(1e9, 2.0, 1000).lines(predicted, 4)) == {
        "tokens/s": "2,000 on each GPU, 8,000 on all 4 GPUs",
        "1e+09 tokens": "1.4 days (1.2 to 2.9), 139 GPU-hours (111 to 278)",
        "cost": "278 (222 to 556), at 2 per GPU-hour",
    }


def test_memory_in_whole_blocks_and_a_scaled_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """`--round-to` rounds each allocation up, and `--grad-scaler` assumes finite gradients.

    The weights of 20,000 bytes take 40 blocks of 512 bytes, the input of 3,200 bytes takes 7, and
    each result of 1,600 bytes takes 4. Notes state both assumptions.
    """
    options = ["--batch", "8", "--round-to", "512"]
    forward = profiled(capsys, "planned:build", *options)
    trained = profiled(capsys, "planned:trained", "--optimizer", "sgd", "--grad-scaler", *options)
    assert forward.memory is not None
    assert (40 + 7 + 4 + 4) * 512 == forward.memory.peak_bytes
    assert {"rounded_up", "gradients_assumed_finite"} == {note.code for note in trained.notes}


def test_a_note_says_that_copies_of_offloaded_activations_are_not_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With `--offload-activations`, a note says that the times do not include the copies."""
    note = "the times do not include their copies"
    assert 0 == main(["estimate", "planned:build", "--backward"])
    assert note not in " ".join(capsys.readouterr().out.split())
    assert 0 == main(["estimate", "planned:build", "--backward", "--offload-activations"])
    assert note in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::scatter_", "Meta"),
    reason="collectives have no implementation for meta tensors",
)
def test_one_rank_of_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    """The optimizer state of a rank depends on its share of the 50 rows of weights.

    FSDP2 over four ranks has 13 rows, HSDP over two ranks in two replicas has 25, and DDP has all.
    The state has two numbers for each weight, and a step count.
    """
    for options, rows in ((["--fsdp", "4"], 13), (["--hsdp", "2x2"], 25), (["--ddp", "4"], 50)):
        found = estimated(capsys, "planned:trained", "--optimizer", "adamw", *options)
        assert (
            2 * rows * 100 * 4 + 4 == found["profile"]["memory"]["by_category"]["optimizer_state"]
        )
        assert 4 == found["profile"]["run"]["world_size"]
    for wrong, said in (
        (["--hsdp", "8"], "pass replicas x shards, such as 2x8"),
        (["--fsdp", "2", "--hsdp", "2x2"], "--fsdp and --hsdp both shard the model"),
        (["--ddp", "2", "--tp", "2"], "--ddp cannot be combined with --fsdp, --hsdp or --tp"),
    ):
        assert 2 == main(["estimate", "planned:trained", *wrong])
        assert said in capsys.readouterr().err


def test_a_figures_path_is_no_part_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The path of the figure is printed on stderr, so stdout has only JSON."""
    assert 0 == main(["estimate", "planned:build", "--json", "--figure", "plan.png"])
    shown = capsys.readouterr()
    assert "plan.png\n" == shown.err
    assert json.loads(shown.out)


def test_show_has_the_memory_of_any_profile(capsys: pytest.CaptureFixture[str]) -> None:
    """`lflops show --memory` prints the memory of a counted profile, as a text and as JSON.

    The text has the same parts as the output of `lflops estimate`.
    """
    model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.ReLU())
    lflops.count(model, torch.randn(8, 100), backward=True).save("counted.json")
    assert 0 == main(["show", "counted.json", "--memory", "--figure", "memory.svg"])
    text = capsys.readouterr().out
    for label in ("peak", "by category", "largest", "checkpointing"):
        assert f"\n{label}  " in text
    assert text.endswith("\nmemory.svg\n")
    assert "<svg" in Path("memory.svg").read_text("utf-8")
    assert 0 == main(["show", "counted.json", "--memory", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert load("counted.json").memory == msgspec.convert(found["memory"], Memory)
    # Checkpointing ReLU saves the output that its backward needs.
    assert [("1", 8 * OUTPUT)] == [
        (each["module"], each["saved_bytes"]) for each in found["checkpointed"]
    ]


def test_show_says_that_memory_was_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Without counted memory, the text says so, and a figure is an error.

    `--figure` needs `--memory`, which cannot be combined with `--flat`.
    """
    profile({"": {}}, ()).save("none.json")
    assert 0 == main(["show", "none.json", "--memory"])
    assert capsys.readouterr().out.rstrip().endswith("the profile has no memory data")
    assert 2 == main(["show", "none.json", "--memory", "--figure", "none.svg"])
    assert 2 == main(["show", "none.json", "--figure", "none.svg"])
    assert 2 == main(["show", "none.json", "--memory", "--flat"])
    said = capsys.readouterr()
    assert "has no memory data" in said.err
    assert "--figure draws live memory" in said.err
    assert "--memory can only be combined with --figure and --json" in said.err
    assert "" == said.out


def test_what_builds_may_import_from_the_folder_as_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The function may import a module of the current folder when it is called.

    The imported model has 100 * 50 weights.
    """
    (tmp_path / "late.py").write_text(
        "def build(samples):\n    from planned import build\n    return build(samples)\n"
    )
    assert 0 == main(["estimate", "late:build"])
    assert "5.00 k" in capsys.readouterr().out
    sys.modules.pop("late")


LAYERS = 2
HIDDEN = 32
INNER = 64
HEADS = 4
WORDS = 100
LENGTH = 16
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
}


def test_a_model_by_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config.json of transformers, or its folder, is a model. Its options change the profile.

    The MACs of forward are worked out by hand from the matmuls of a Llama model.
    """
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    tokens = 2 * LENGTH
    # Queries, keys, values and outputs; then the three matmuls of the MLP.
    linear = tokens * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
    attention = 2 * tokens * LENGTH * HIDDEN
    head = tokens * HIDDEN * WORDS
    by_hand = LAYERS * (linear + attention) + head
    options = ["--seq", str(LENGTH), "--batch", "2"]
    for target in ("config.json", str(tmp_path)):
        assert by_hand == profiled(capsys, target, *options).total()

    training = ["config.json", *options, "--backward"]
    plain = profiled(capsys, *training)
    checkpointed = profiled(capsys, *training, "--ac", "full")
    # Without checkpointing, only the backward of attention recomputes a matmul.
    assert plain.total(phase="recompute") < checkpointed.total(phase="recompute")

    halved = profiled(capsys, *training, "--dtype", "bfloat16")
    mixed = profiled(capsys, *training, "--precision", "bf16-mixed")
    parameters = plain.modules[""].parameters
    for given, parameter_bytes, dtype in (
        (plain, 4 * parameters, "float32"),
        (halved, 2 * parameters, "bfloat16"),
        (mixed, 4 * parameters, "bfloat16"),
    ):
        assert parameter_bytes == given.modules[""].parameter_bytes
        assert {dtype} == {cell.dtype for cell in given.op_counts if cell.macs}


def profiled(capsys: pytest.CaptureFixture[str], *args: str) -> Profile:
    """Run `lflops estimate`, and return the profile in the JSON object that it prints."""
    return msgspec.convert(estimated(capsys, *args)["profile"], Profile)


DEEP = """
import torch
from torch import nn

def block(width):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))

def build(samples, tokens=4):
    return nn.Sequential(*(block(width) for width in (64, 256, 128))), torch.randn(samples, tokens, 8), lambda out: out.square().mean()
"""


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[str]:
    """The target of a function that makes a model of three blocks."""
    (tmp_path / "deep.py").write_text(DEEP)
    yield "deep:build"
    sys.modules.pop("deep", None)


def test_a_function_takes_the_options_of_a_configuration(
    deep: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options for tokens, dtype, autocast and checkpointing also apply to a function.

    The MACs and bytes are worked out by hand. `--ac selective` does not recompute linear layers,
    and `--ac full` recomputes the first layer of each block.
    """
    rows = 2 * 6
    widths = 64 + 256 + 128
    options = [deep, "--batch", "2", "--seq", "6", "--backward"]
    plain = profiled(capsys, *options)
    parameters = 2 * 8 * widths + widths + 3 * 8
    assert (rows * 2 * 8 * widths, 4 * parameters) == (
        plain.total(),
        plain.modules[""].parameter_bytes,
    )
    for more, dtype, nbytes in (
        (["--dtype", "bfloat16"], "bfloat16", 2),
        (["--precision", "bf16-mixed"], "bfloat16", 4),
    ):
        changed = profiled(capsys, *options, *more)
        assert nbytes * parameters == changed.modules[""].parameter_bytes
        assert {dtype} == {cell.dtype for cell in changed.op_counts if cell.macs}
    for policy, macs in (("none", 0), ("selective", 0), ("full", rows * 8 * widths)):
        checkpointed = profiled(capsys, *options, "--ac", policy)
        assert macs == checkpointed.total(phase="recompute")


def test_adapters_are_all_that_is_trained(deep: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--lora`, only the adapters have gradients.

    Each of the six layers has two adapters of rank 2, between 8 features and the block's width.
    """
    found = profiled(capsys, deep, "--lora", "r=2", "--optimizer", "sgd")
    trained = 2 * 2 * 3 * 8 + 2 * 2 * (64 + 256 + 128)
    assert trained == found.modules[""].trainable_parameters
    assert found.memory is not None
    assert 4 * trained == found.memory.most_by_category["gradients"]


def test_adapters_are_trained_over_weights_of_four_bits(
    deep: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--quantize nf4`, each of the 7,168 frozen weights takes half a byte.

    The biases and the adapters are in float32. One of two ranks that offloads its shards to the
    host has half of these bytes there, and half of the gradients of what is trained.
    """
    options = [deep, "--lora", "r=2", "--quantize", "NF4", "--optimizer", "sgd"]
    rest = 4 * (448 + 24 + 2 * 2 * 3 * 8 + 2 * 2 * 448)
    assert 7168 // 2 + rest == profiled(capsys, *options).modules[""].parameter_bytes
    offloaded = profiled(capsys, *options, "--fsdp", "2", "--cpu-offload")
    trained = 4 * (2 * 2 * 3 * 8 + 2 * 2 * 448)
    assert [{"bytes": (7168 // 2 + rest + trained) // 2}] == [
        note.values for note in offloaded.notes if note.code == "cpu_offload"
    ]


def test_a_fused_optimizer_has_no_temporary_tensors(
    deep: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fused optimizer needs no temporary memory in its step, but the default one does."""

    def most_temporary(*options: str) -> int:
        memory = profiled(capsys, deep, "--optimizer", "adamw", *options).memory
        assert memory is not None
        temporary = []
        for moment in memory.timeline:
            if moment.phase == "optimizer" and moment.by_category:
                temporary.append(moment.by_category.temporary)
        return max(temporary)

    assert most_temporary() > 0
    assert most_temporary("--fused") == 0


def test_the_best_checkpointing_for_a_budget(deep: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If the step needs one byte more than the limit, only the narrowest block is checkpointed.

    The text has the table and the code of the plan.
    """
    options = [deep, "--batch", "64", "--backward"]
    none = profiled(capsys, *options, "--ac", "none").memory
    full = profiled(capsys, *options, "--ac", "full").memory
    assert none is not None
    assert full is not None
    budget = f"{none.peak_bytes - 1}B"
    found = estimated(capsys, deep, "--batch", "64", "--ac", "best", "--memory", budget)
    assert {"0": "full", "1": "none", "2": "none"} == found["plan"]["policies"]
    assert (
        full.peak_bytes
        <= found["plan"]["peak_bytes"]
        == found["profile"]["memory"]["peak_bytes"]
        < none.peak_bytes
    )
    assert 0 == main(["estimate", deep, "--batch", "64", "--ac", "best", "--memory", budget])
    text = capsys.readouterr().out
    assert "\nfits: " in text
    assert text.endswith(f"\n\n{found['plan']['code']}\n")


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [("40GB", 40e9), ("37.5 GiB", 37.5 * 2**30), ("4e10", 4e10), ("12", 12), ("1 kb", 1000)],
)
def test_a_size_is_read_as_people_write_it(size: str, nbytes: float) -> None:
    """A size may have a decimal or a binary unit, or none, which means bytes."""
    assert nbytes == bytes_of(size)


def test_the_largest_batch_fills_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """The memory has the weights, and for each sample its input and the results of both layers."""
    options = ["planned:build", "--batch", "max", "--memory"]
    each = INPUT + 2 * OUTPUT
    for size, samples in ((WEIGHTS + 7 * each, 7), (WEIGHTS + 8 * each - 1, 7), (WEIGHTS, 0)):
        assert samples == estimated(capsys, *options, str(size))["largest_batch"]
    assert 0 == main(["estimate", *options, str(WEIGHTS + 7 * each)])
    assert capsys.readouterr().out.endswith("largest batch: 7 samples\n")
    assert 0 == main(["estimate", *options, "1"])
    assert capsys.readouterr().out.endswith(
        "not even one sample fits; the figures above are for one sample\n"
    )


def test_a_rank_computes_in_half_precision(capsys: pytest.CaptureFixture[str]) -> None:
    """With `--mp bf16`, a rank of FSDP2 computes in bfloat16, so its activations are smaller."""
    options = ["planned:build", "--batch", "64", "--backward", "--fsdp", "2"]
    plain = estimated(capsys, *options)["profile"]["memory"]["by_category"]
    halved = estimated(capsys, *options, "--mp", "bf16", "--reduce", "fp32")
    in_half_precision = halved["profile"]["memory"]["by_category"]
    assert in_half_precision["activations"] < plain["activations"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--fsdp", "2", "--precision", "bf16-mixed"), ["casts_are_kept"]),
        (("--fsdp", "2", "--mp", "bf16"), []),
        (("--precision", "bf16-mixed"), []),
    ],
)
def test_autocast_of_gathered_weights_is_noted(
    options: tuple[str, ...], expected: list[str], deep: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under FSDP2, autocast keeps casts of the gathered weights. A note explains this memory.

    Without the note, it would look as if sharding did not work.
    """
    found = profiled(capsys, deep, "--backward", *options)
    assert expected == [note.code for note in found.notes if note.code == "casts_are_kept"]


def test_offloaded_shards_are_in_the_memory_of_the_host(
    deep: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--cpu-offload`, parameters and gradients are on the host, and not on the device.

    Each of two ranks has half of the 7,640 weights and as many gradients, with 2 bytes each.
    """
    for more in ([], ["--optimizer-in-backward"]):
        found = profiled(
            capsys,
            deep,
            "--fsdp",
            "2",
            "--dtype",
            "bf16",
            "--optimizer",
            "sgd",
            "--cpu-offload",
            *more,
        )
        assert [{"bytes": 2 * 2 * 7640 // 2}] == [
            note.values for note in found.notes if note.code == "cpu_offload"
        ]
        assert found.memory is not None
        assert (
            0
            == found.memory.timeline[0].by_category.parameters
            == found.memory.most_by_category["gradients"]
        )
        assert "the prediction does not cover copies between the host and the device" == why_not(
            found, named("H100")
        )


def test_code_of_a_configuration_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code of a configuration does not run without `--trust-remote-code`."""
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}})
    )
    assert 2 == main(["estimate", str(tmp_path)])
    error = capsys.readouterr().err
    assert "transformers cannot load this configuration from local files" in error
    assert "--trust-remote-code" in error
    assert 1 == error.count("\n")
    assert not (tmp_path / "ran").exists()


WRONG = {
    "no configuration": (["nothing.json"], "nothing.json: no such file: pass a config.json"),
    "not in the cache": (
        ["hf:nobody/nothing"],
        "hf:nobody/nothing: transformers cannot load this configuration from local files",
    ),
    "an option of configurations": (
        ["planned:build", "--trust-remote-code"],
        "--trust-remote-code applies only to a configuration",
    ),
    "takes no tokens": (["planned:build", "--seq", "8"], "and the tokens per sample (--seq)"),
    "no dtype": (
        ["planned:build", "--dtype", "int8"],
        "--dtype int8: pass one of float32, bfloat16, float16",
    ),
    "no policy": (
        ["planned:build", "--ac", "some"],
        "--ac some: pass one of none, selective, selective-op, full, best",
    ),
    "no blocks": (["planned:build", "--ac", "full"], "planned:build: Sequential has no blocks"),
    "no rank": (
        ["planned:build", "--lora", "16x"],
        "--lora 16x: pass the rank of the adapters, such as r=16",
    ),
    "quantizes what is trained": (
        ["planned:build", "--quantize", "nf4"],
        "--quantize nf4 applies only to layers with adapters",
    ),
    "quantizes by no name": (
        ["planned:build", "--lora", "r=2", "--quantize", "int4"],
        "--quantize int4: pass one of nf4, nf4-dq",
    ),
    "nothing to adapt": (
        ["planned:nowhere_linear", "--lora", "r=2"],
        "has no blocks with linear layers, to which --lora could add adapters",
    ),
    "no budget": (
        ["planned:build", "--ac", "best"],
        "--ac best needs a memory limit: pass a size, such as --memory 40GB, or a chip",
    ),
    "two that fill": (
        ["planned:build", "--ac", "best", "--batch", "max"],
        "--ac best and --batch max cannot be combined, because each of them fills the memory",
    ),
    "no memory to fill": (
        ["planned:build", "--batch", "max"],
        "--batch max needs a memory limit: pass a size, such as --memory 40GB, or a chip",
    ),
    "computes on one rank": (
        ["planned:build", "--mp", "bf16"],
        "--mp applies only to FSDP2: pass --fsdp or --hsdp",
    ),
    "offloads on one rank": (
        ["planned:build", "--cpu-offload"],
        "--cpu-offload applies only to FSDP2: pass --fsdp or --hsdp",
    ),
    "computes in no dtype": (
        ["planned:build", "--fsdp", "2", "--mp", "int8"],
        "--mp int8: pass one of float32",
    ),
    "a budget for nothing": (
        ["planned:build", "--memory", "40GB"],
        "--memory applies only to --ac best",
    ),
    "no size": (
        ["planned:build", "--ac", "best", "--memory", "much"],
        "--memory much: pass a size, such as 40GB or 37GiB",
    ),
    "fuses nothing": (["planned:build", "--fused"], "--fused needs an optimizer"),
    "is not fused": (
        ["planned:build", "--fused", "--optimizer", "rmsprop"],
        "has no fused implementation",
    ),
    "no function": (["planned"], "pass package.module:function"),
    "a file": (
        ["planned.py:build"],
        "pass package.module:function; for example, train:build is the function build in train.py",
    ),
    "no module": (["nowhere:build"], "No module named 'nowhere'"),
    "no such name": (["planned:nothing"], "has no attribute 'nothing'"),
    "not to be called": (["planned:SOURCE.x"], "has no attribute 'SOURCE'"),
    "gives no model": (
        ["planned:wrong"],
        "the function returned 3: it must return (model, batch) or (model, batch, loss)",
    ),
    "fails": (["planned:fails"], "planned:fails failed: ZeroDivisionError: no reason"),
    "takes no number": (
        ["planned:alone"],
        (
            "planned:alone(): too many positional arguments; lflops calls this function with one argument: "
            "the number"
        ),
    ),
    "wants more than a number": (
        ["planned:sized"],
        "planned:sized(samples, length): missing a required argument: 'length'; lflops calls this function",
    ),
    "does not fit": (["planned:misfit"], "[1, 50] X [60, 10].; in 1 (Linear)"),
    "no loss to scale": (
        ["planned:build", "--optimizer", "sgd", "--grad-scaler"],
        "grad_scaler=True needs a loss to scale",
    ),
    "asks for a value": (["planned:asks", "--backward"], "planned.py:30, in <lambda>"),
    "no optimizer": (
        ["planned:build", "--optimizer", "magic"],
        "optimizer='magic': pass one of adadelta",
    ),
    "no chip": (["planned:build", "--hardware", "Abacus"], "hardware='Abacus'"),
    "no samples": (
        ["planned:build", "--batch", "0"],
        "--batch 0: pass max, or a number of samples of at least 1",
    ),
    "no picture": (
        ["planned:build", "--figure", "plan.nothing"],
        "plan.nothing: the figure cannot be written",
    ),
}


@pytest.mark.parametrize(("args", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_is_one_line(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command exits with status 2, and prints the reason in one line."""
    assert 2 == main(["estimate", *args])
    error = capsys.readouterr().err
    assert said in error
    assert 1 == error.count("\n")


def remembered(*phases: str) -> Profile:
    """Return a profile with one operator in each of these phases.

    Each operator leaves one byte more of live memory.
    """
    timeline = [
        ("mm", "", phase, place, place, (0, 0, 0, 0, 0, place))
        for place, phase in enumerate(phases)
    ]
    memory = {
        "source": "fake",
        "peak_bytes": len(phases),
        "peak_index": len(phases) - 1,
        "by_category": {},
        "by_module": {},
        "alive": [],
        "timeline": timeline,
    }
    return profile({"": {}}, (), memory=msgspec.convert(memory, Memory))


def test_the_figure_has_a_band_for_each_stretch_of_a_phase() -> None:
    """Neighboring operators of one phase share a band, which has the color of the phase.

    The first area of the figure is the live memory of the only category.
    """
    phases = ("forward", "forward", "backward", "recompute", "recompute", "backward", "optimizer")
    (axes,) = memory_figure(analyze(remembered(*phases))).axes
    phase_of_color = {Patch(color=color).get_facecolor(): phase for phase, color in PHASES.items()}
    bands = [phase_of_color[tuple(area.get_facecolor()[0])] for area in axes.collections[1:]]
    assert ["forward", "backward", "recompute", "backward", "optimizer"] == bands


def test_the_figure_has_an_area_for_each_category() -> None:
    """Each category that ever has bytes is in the legend. The peak is named with its unit."""
    (axes,) = memory_figure(analyze(small_profile())).axes
    legend = axes.get_legend()
    assert legend is not None
    assert ["parameters", "gradients", "activations", "temporary"] == [
        each.get_text() for each in legend.get_texts()
    ]
    assert "peak 2.93 KiB" in [each.get_text() for each in axes.texts]


def test_what_was_not_counted_is_not_drawn() -> None:
    """Drawing memory that was not counted is an error, not an empty figure."""
    with pytest.raises(ProfileError, match="has no memory data"):
        memory_figure(analyze(profile({"": {}}, ())))
