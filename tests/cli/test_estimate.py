"""`lflops estimate` as a shell runs it, and what it draws."""

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
WEIGHTS, INPUT, OUTPUT = 5000 * 4, 100 * 4, 50 * 4


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with a module in it."""
    (tmp_path / "planned.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("planned", None)


def estimated(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """The JSON object that it prints."""
    assert 0 == main(["estimate", *args, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_forward_of_the_samples_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, inputs, the layer's and the ReLU's results; no chip, so neither a bound nor a room."""
    found = estimated(capsys, "planned:build", "--batch", "8")
    profile = msgspec.convert(found["profile"], Profile)
    assert profile.memory is not None
    assert (8 * 5000, WEIGHTS + 8 * (INPUT + 2 * OUTPUT)) == (
        profile.total(),
        profile.memory.peak_bytes,
    )
    assert (None, None, [], []) == tuple(
        found[each] for each in ("bounds", "fits", "checkpointed", "sharded")
    )


def test_a_training_on_a_chip(capsys: pytest.CaptureFixture[str]) -> None:
    """An optimizer goes backward.

    A batch by names, a loss of the function's own; the chip has more memory, and needs a while.
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
    """What `lflops show` prints of the saved profile, and two parts more; and a figure."""
    saved, figure = tmp_path / "plan.json", tmp_path / "plan.svg"
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
    assert ["verdict", "by category", "by module", "largest", "at least"] == [
        each
        for each in ("verdict", "by category", "by module", "largest", "at least")
        if f"\n{each}  " in text.removeprefix(shown.rstrip("\n"))
    ]
    assert "estimate" == load(saved).run.kind
    assert "<svg" in figure.read_text("utf-8")


def test_the_time_of_a_step_and_what_a_training_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten million samples keep an H100 busy for longer than the host needs.

    JSON has the same seconds.
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
    assert all(
        each in text
        for each in (
            "\npredicted ",
            "a wide interval: the fitted runs used other code and other versions",
            "\ntokens/s ",
            "GPU-hours",
            "\ncost ",
        )
    )
    assert 0 == main(["estimate", "planned:sized", *options, "--json"])
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    assert predicted["low"] < predicted["seconds"] < predicted["high"]
    assert predicted["seconds"] == pytest.approx(sum(predicted["by_kind"].values()))
    assert 0 == main(["estimate", "planned:sized", *options, "--accumulation", "3", "--json"])
    assert json.loads(capsys.readouterr().out)["predicted"]["seconds"] == pytest.approx(
        3 * predicted["seconds"]
    )  # there is no optimizer


def test_a_step_that_is_not_predicted_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """One sample is too little work."""
    assert 0 == main(
        ["estimate", "planned:build", "--backward", "--dtype", "bf16", "--hardware", "H100 SXM"]
    )
    assert "calls may take longer than the device" in " ".join(capsys.readouterr().out.split())


def test_the_tokens_of_a_training_make_days_and_a_cost() -> None:
    """1,000 tokens in half a second are 2,000/s.

    1e9 of them take 500,000 s of a GPU, 139 hours, which four share.
    """
    predicted = Prediction(
        hardware="chip", seconds=0.5, low=0.4, high=1.0, by_kind={}, by_phase={}, by_module={}
    )
    assert dict(Training(1e9, 2.0, 1000).lines(predicted, 4)) == {
        "tokens/s": "2,000 on a GPU, 8,000 on all 4",
        "1e+09 tokens": "1.4 days (1.2 to 2.9), 139 GPU-hours (111 to 278)",
        "cost": "278 (222 to 556), at 2 a GPU-hour",
    }


def test_memory_in_whole_blocks_and_a_scaled_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """A layer of 20,000 bytes is 40 blocks of 512; an input of 3,200 is 7, each result of 1,600 is 4.

    The notes say what was assumed.
    """
    options = ["--batch", "8", "--round-to", "512"]
    (forward, trained) = (
        msgspec.convert(estimated(capsys, *options, *more)["profile"], Profile)
        for more in (["planned:build"], ["planned:trained", "--optimizer", "sgd", "--grad-scaler"])
    )
    assert forward.memory is not None
    assert (40 + 7 + 4 + 4) * 512 == forward.memory.peak_bytes
    assert {"rounded_up", "gradients_assumed_finite"} == {note.code for note in trained.notes}


def test_a_note_says_that_copies_of_offloaded_activations_are_not_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where they are on the host meanwhile."""
    for options, said in (([], False), (["--offload-activations"], True)):
        assert 0 == main(["estimate", "planned:build", "--backward", *options])
        assert said == (
            "the times do not include their copies" in " ".join(capsys.readouterr().out.split())
        )


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::scatter_", "Meta"),
    reason="collectives do not say what results look like",
)
def test_one_rank_of_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    """Of FSDP2 over four 13 of the 50 rows, over two in two replicas 25, of DDP all.

    The optimizer's state is two of them, and a count.
    """
    for options, rows in ((["--fsdp", "4"], 13), (["--hsdp", "2x2"], 25), (["--ddp", "4"], 50)):
        found = estimated(capsys, "planned:trained", "--optimizer", "adamw", *options)
        assert (
            2 * rows * 100 * 4 + 4 == found["profile"]["memory"]["by_category"]["optimizer_state"]
        )
        assert 4 == found["profile"]["run"]["world_size"]
    for wrong, said in (
        (["--hsdp", "8"], "pass replicas x shards, such as 2x8"),
        (["--fsdp", "2", "--hsdp", "2x2"], "pass either --fsdp or --hsdp"),
        (["--ddp", "2", "--tp", "2"], "--ddp replicates the whole model"),
    ):
        assert 2 == main(["estimate", "planned:trained", *wrong])
        assert said in capsys.readouterr().err


def test_a_figures_path_is_no_part_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    """It goes to stderr."""
    assert 0 == main(["estimate", "planned:build", "--json", "--figure", "plan.png"])
    shown = capsys.readouterr()
    assert "plan.png\n" == shown.err
    assert json.loads(shown.out)


def test_show_has_the_memory_of_any_profile(capsys: pytest.CaptureFixture[str]) -> None:
    """A counted training's as well as an estimated one's.

    What the shell's estimate prints, and the same as JSON.
    """
    model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.ReLU())
    lflops.count(model, torch.randn(8, 100), backward=True).save("counted.json")
    assert 0 == main(["show", "counted.json", "--memory", "--figure", "memory.svg"])
    text = capsys.readouterr().out
    assert [] == [
        each
        for each in ("\npeak  ", "\nby category  ", "\nlargest  ", "\ncheckpointing  ")
        if each not in text
    ]
    assert text.endswith("\nmemory.svg\n")
    assert "<svg" in Path("memory.svg").read_text("utf-8")
    assert 0 == main(["show", "counted.json", "--memory", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert load("counted.json").memory == msgspec.convert(found["memory"], Memory)
    assert [("1", 8 * OUTPUT)] == [
        (each["module"], each["saved_bytes"]) for each in found["checkpointed"]
    ], "what ReLU's backward needs"


def test_show_says_that_memory_was_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Instead of a section without lines; and draws nothing."""
    profile({"": {}}, ()).save("none.json")
    assert 0 == main(["show", "none.json", "--memory"])
    assert capsys.readouterr().out.rstrip().endswith("memory was not counted")
    assert 2 == main(["show", "none.json", "--memory", "--figure", "none.svg"])
    assert 2 == main(["show", "none.json", "--figure", "none.svg"])
    assert 2 == main(["show", "none.json", "--memory", "--flat"])
    said = capsys.readouterr()
    assert [] == [
        each
        for each in (
            "has no memory to draw",
            "--figure draws live memory",
            "--memory can only be combined with --figure and --json",
        )
        if each not in said.err
    ]
    assert "" == said.out


def test_what_builds_may_import_from_the_folder_as_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 times 50 weights, of a module that is imported only when the function is called."""
    (tmp_path / "late.py").write_text(
        "def build(samples):\n    from planned import build\n    return build(samples)\n"
    )
    assert 0 == main(["estimate", "late:build"])
    assert "5.00 k" in capsys.readouterr().out
    sys.modules.pop("late")


LAYERS, HIDDEN, INNER, HEADS, WORDS, LENGTH = 2, 32, 64, 4, 100, 16
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
    """Forward by hand: four square products and three of the inner width a layer, both of attention, and the words."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    tokens = 2 * LENGTH
    by_hand = (
        LAYERS * (tokens * (4 * HIDDEN**2 + 3 * HIDDEN * INNER) + 2 * tokens * LENGTH * HIDDEN)
        + tokens * HIDDEN * WORDS
    )
    options = ["--seq", str(LENGTH), "--batch", "2"]
    for target in ("config.json", str(tmp_path)):
        assert (
            by_hand
            == msgspec.convert(estimated(capsys, target, *options)["profile"], Profile).total()
        )
    plain, again, halved, mixed = (
        msgspec.convert(
            estimated(capsys, "config.json", *options, "--backward", *more)["profile"], Profile
        )
        for more in ([], ["--ac", "full"], ["--dtype", "bfloat16"], ["--precision", "bf16-mixed"])
    )
    assert plain.total(phase="recompute") < again.total(phase="recompute"), (
        "attention alone multiplies again without being asked to"
    )
    parameters = plain.modules[""].parameters
    assert [4 * parameters, 2 * parameters, 4 * parameters] == [
        each.modules[""].parameter_bytes for each in (plain, halved, mixed)
    ]
    assert [{"float32"}, {"bfloat16"}, {"bfloat16"}] == [
        {cell.dtype for cell in each.op_counts if cell.macs} for each in (plain, halved, mixed)
    ]


def profiled(capsys: pytest.CaptureFixture[str], *args: str) -> Profile:
    """The profile in the JSON object that it prints."""
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
    """A function that makes three blocks."""
    (tmp_path / "deep.py").write_text(DEEP)
    yield "deep:build"
    sys.modules.pop("deep", None)


def test_a_function_takes_the_options_of_a_configuration(
    deep: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens, dtype, autocast and checkpointing.

    MACs and bytes by hand; products run again under one policy, not under the other.
    """
    rows, widths = 2 * 6, 64 + 256 + 128
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
    again = {
        policy: profiled(capsys, *options, "--ac", policy).total(phase="recompute")
        for policy in ("none", "selective", "full")
    }
    assert {"none": 0, "selective": 0, "full": rows * 8 * widths} == again


def test_adapters_are_all_that_is_trained(deep: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of rank 2, two for each of six layers of 8 and its width, each with a momentum as large.

    The rest has no gradient.
    """
    found = profiled(capsys, deep, "--lora", "r=2", "--optimizer", "sgd")
    trained = 2 * 2 * 3 * 8 + 2 * 2 * (64 + 256 + 128)
    assert trained == found.modules[""].trainable_parameters
    assert found.memory is not None
    assert 4 * trained == found.memory.most_by_category["gradients"]


def test_adapters_are_trained_over_weights_of_four_bits(
    deep: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """7,168 weights in half a byte each.

    Biases and adapters are in float32, also on one of two ranks that offloads its shards.
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
    """In its step; the other has some."""
    temporary = []
    for fused in ([], ["--fused"]):
        memory = profiled(capsys, deep, "--optimizer", "adamw", *fused).memory
        assert memory is not None
        temporary.append(
            max(
                moment.by_category.temporary
                for moment in memory.timeline
                if moment.phase == "optimizer" and moment.by_category
            )
        )
    assert temporary[0] > temporary[1] == 0


def test_the_best_checkpointing_for_a_budget(deep: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A byte less than nothing recomputed takes: the narrowest block does.

    The text has the table and the code.
    """
    none, full = (
        profiled(capsys, deep, "--batch", "64", "--backward", "--ac", policy).memory
        for policy in ("none", "full")
    )
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
    """Decimal and binary units."""
    assert nbytes == bytes_of(size)


def test_the_largest_batch_fills_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, and for each sample its input, the layer's result and the ReLU's."""
    each = INPUT + 2 * OUTPUT
    for size, samples in ((WEIGHTS + 7 * each, 7), (WEIGHTS + 8 * each - 1, 7), (WEIGHTS, 0)):
        assert (
            samples
            == estimated(capsys, "planned:build", "--batch", "max", "--memory", str(size))[
                "largest_batch"
            ]
        )
    assert 0 == main(
        ["estimate", "planned:build", "--batch", "max", "--memory", str(WEIGHTS + 7 * each)]
    )
    assert capsys.readouterr().out.endswith("largest batch: 7 samples\n")
    assert 0 == main(["estimate", "planned:build", "--batch", "max", "--memory", "1"])
    assert capsys.readouterr().out.endswith(
        "not even one sample fits; the figures below are for one sample\n"
    )


def test_a_rank_computes_in_half_precision(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 5,000 float32 weights each of two ranks keeps half, and computes with whole ones in bfloat16."""
    peaks = [
        estimated(capsys, "planned:build", "--batch", "64", "--backward", "--fsdp", "2", *more)[
            "profile"
        ]["memory"]["by_category"]
        for more in ([], ["--mp", "bf16", "--reduce", "fp32"])
    ]
    assert 2 * peaks[1]["activations"] < 2 * peaks[0]["activations"]


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
    """Only autocast under FSDP2 keeps whole weights, which look as if sharding did not work."""
    found = profiled(capsys, deep, "--backward", *options)
    assert expected == [note.code for note in found.notes if note.code == "casts_are_kept"]


def test_offloaded_shards_are_in_the_memory_of_the_host(
    deep: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 7,640 weights each of two ranks has half, and as many gradients, 2 bytes each.

    The device has none of them, also in a step.
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
        assert "the prediction does not cover copies from and to the host" == why_not(
            found, named("H100")
        )


def test_code_of_a_configuration_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless it is asked for; nothing of it runs."""
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}})
    )
    assert 2 == main(["estimate", str(tmp_path)])
    error = capsys.readouterr().err
    assert "transformers cannot load this configuration without a download" in error
    assert "--trust-remote-code" in error
    assert 1 == error.count("\n")
    assert not (tmp_path / "ran").exists()


WRONG = {
    "no configuration": (["nothing.json"], "nothing.json: no such file: pass a config.json"),
    "not in the cache": (
        ["hf:nobody/nothing"],
        "hf:nobody/nothing: transformers cannot load this configuration without a download",
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
    "no rank": (["planned:build", "--lora", "16x"], "--lora 16x: pass the rank, such as r=16"),
    "quantizes what is trained": (
        ["planned:build", "--quantize", "nf4"],
        "--quantize nf4 applies to the frozen layers below adapters",
    ),
    "quantizes by no name": (
        ["planned:build", "--lora", "r=2", "--quantize", "int4"],
        "--quantize int4: pass one of nf4, nf4-dq",
    ),
    "nothing to adapt": (
        ["planned:nowhere_linear", "--lora", "r=2"],
        "has no blocks with linear layers to adapt",
    ),
    "no budget": (
        ["planned:build", "--ac", "best"],
        "--ac best needs a memory limit: pass --memory, such as 40GB, or --hardware",
    ),
    "two that fill": (
        ["planned:build", "--ac", "best", "--batch", "max"],
        "--ac best and --batch max both fill the memory",
    ),
    "no memory to fill": (
        ["planned:build", "--batch", "max"],
        "--batch max needs a memory limit: pass --memory, such as 40GB, or --hardware",
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
        "pass package.module:function, such as train:build for build in a train.py of this folder",
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
        "planned:alone(): too many positional arguments; lflops calls it with one argument: the number",
    ),
    "wants more than a number": (
        ["planned:sized"],
        "planned:sized(samples, length): missing a required argument: 'length'; lflops calls it",
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
        "--batch 0: pass a number of samples, 1 or more, or max",
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
    """Exit status 2, and what is wrong."""
    assert 2 == main(["estimate", *args])
    error = capsys.readouterr().err
    assert said in error
    assert 1 == error.count("\n")


def remembered(*phases: str) -> Profile:
    """A profile whose timeline has an operator in each of these phases, and each time a byte more is alive."""
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
    """Above the one area of a profile with one category, in the colours of the page."""
    (axes,) = memory_figure(
        analyze(
            remembered(
                "forward", "forward", "backward", "recompute", "recompute", "backward", "optimizer"
            )
        )
    ).axes
    assert ["forward", "backward", "recompute", "backward", "optimizer"] == [
        next(
            phase
            for phase, colour in PHASES.items()
            if Patch(color=colour).get_facecolor() == tuple(area.get_facecolor()[0])
        )
        for area in axes.collections[1:]
    ]


def test_the_figure_has_an_area_for_each_category() -> None:
    """Those that ever hold bytes, by name; the ticks are sizes, and the peak is named in its unit."""
    (axes,) = memory_figure(analyze(small_profile())).axes
    legend = axes.get_legend()
    assert legend is not None
    assert ["parameters", "gradients", "activations", "temporary"] == [
        each.get_text() for each in legend.get_texts()
    ]
    assert "peak 2.93 KiB" in [each.get_text() for each in axes.texts]


def test_what_was_not_counted_is_not_drawn() -> None:
    """An error, not an empty picture."""
    with pytest.raises(ProfileError, match="has no memory to draw"):
        memory_figure(analyze(profile({"": {}}, ())))
