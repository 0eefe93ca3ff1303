"""Test that the three scripts of deepspeed.ai/tutorials/flops-profiler run after a changed import.

Calls and arguments are those of the tutorial. What it loads from other packages is replaced:
torchvision's AlexNet by a copy, a pretrained BERT and its tokenizer by small ones, and the device
by the CPU. Another test compares the page `docs/how-to/deepspeed.md` with the text that is printed
today.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lflops import FlopsProfiler, get_model_profile
from tests.support.alexnet import AlexNet
from tests.support.repository import ROOT
from tests.support.warm_python import WarmPython


def alexnet_macs(batch: int) -> int:
    """Return the MACs of AlexNet for a batch, worked out by hand.

    Images of 224 pixels are 55 wide after the first convolution, and 27 and 13 after the pools. A
    convolution has positions × kernel × input channels × output channels. Three linear layers
    follow.
    """
    convolutions = (
        55**2 * 11**2 * 3 * 64
        + 27**2 * 5**2 * 64 * 192
        + 13**2 * 3**2 * (192 * 384 + 384 * 256 + 256 * 256)
    )
    return batch * (convolutions + 256 * 36 * 4096 + 4096 * 4096 + 4096 * 1000)


def get_accelerator() -> Any:
    """Return a stand-in for `deepspeed.accelerator` that does nothing: tests use the CPU."""

    class Accelerator:
        def device(self, _index: int) -> Any:
            return nullcontext()

    return Accelerator()


def test_alexnet(capsys: pytest.CaptureFixture[str]) -> None:
    """The first script of the tutorial returns and prints the right counts.

    It runs on 2 images instead of 256: 1,428,376,960 MACs and 61,100,840 parameters.
    """
    with get_accelerator().device(0):
        model = AlexNet()
        batch_size = 2
        flops, macs, params = get_model_profile(
            model=model,
            input_shape=(batch_size, 3, 224, 224),
            args=None,
            kwargs=None,
            print_profile=True,
            detailed=True,
            module_depth=-1,
            top_modules=1,
            warm_up=1,
            as_string=True,
            output_file=None,
            ignore_modules=None,
        )
    assert 1_428_376_960 == alexnet_macs(2)
    assert ("1.43 GMACs", "61.1 M") == (macs, params)
    printed = capsys.readouterr().out
    assert f"fwd flops per GPU:{flops:>{len(flops) + 54}}" in printed
    assert "(features): Sequential(" in printed
    first_convolution = (
        r"\(0\): Conv2d\(23.3 K = 0.04% Params, 140.55 MMACs = 9.84% MACs, .*, 3, 64, "
        r"kernel_size=\(11, 11\)"
    )
    assert re.search(first_convolution, printed)


class Tokenizer:
    """The part of BERT's tokenizer that the tutorial uses."""

    pad_token = "[PAD]"  # noqa: S105 - a word, no secret

    def __call__(
        self, texts: list[str], *, padding: bool, truncation: bool, return_tensors: str
    ) -> dict[str, Tensor]:
        assert (padding, truncation, return_tensors) == (True, True, "pt")
        # with [CLS] and [SEP]
        length = texts[0].count(self.pad_token) + 2
        ids = torch.zeros(len(texts), length, dtype=torch.long)
        return {
            "input_ids": ids,
            "token_type_ids": torch.zeros_like(ids),
            "attention_mask": torch.ones_like(ids),
        }


def bert_input_constructor(
    batch_size: int, seq_len: int, tokenizer: Tokenizer
) -> dict[str, Tensor]:
    """Return sequences that consist of padding, with a label for each sequence."""
    fake_seq = tokenizer.pad_token * (seq_len - 2)
    inputs = tokenizer([fake_seq] * batch_size, padding=True, truncation=True, return_tensors="pt")
    return {**inputs, "labels": torch.tensor([1] * batch_size)}


def test_bert_with_an_input_constructor(capsys: pytest.CaptureFixture[str]) -> None:
    """The second script of the tutorial returns and prints the right counts for a small BERT.

    It passes only keyword arguments, and the model computes its loss. The batch has 4 sequences of
    16 vectors of width 32. For each vector, each of 2 layers has 4 projections, attention scores
    and weighted sums over 16 vectors, and two linear layers of width 64. For each sequence, there
    are the pooler and 2 classes.
    """
    bert = pytest.importorskip("transformers.models.bert.modeling_bert")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    with get_accelerator().device(0):
        tokenizer = Tokenizer()
        model = bert.BertForSequenceClassification(bert.BertConfig(**sizes))
        batch_size = 4
        seq_len = 16
        flops, macs, _ = get_model_profile(
            model,
            kwargs=bert_input_constructor(batch_size, seq_len, tokenizer),
            print_profile=True,
            detailed=True,
        )
    a_layer = 4 * 32**2 + 2 * 16 * 32 + 2 * 32 * 64
    expected = 4 * (16 * 2 * a_layer + 32**2 + 32 * 2)
    assert f"{expected / 1e6:.2f} MMACs" == macs
    printed = capsys.readouterr().out
    assert re.search(rf"^fwd flops per GPU: +{flops}$", printed, re.MULTILINE)
    assert "(bert): BertModel(" in printed


class Model(nn.Module):
    """A linear layer whose forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        return F.cross_entropy(self.layer(x), target)


def batches(n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Generate batches of 4 vectors with their classes, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        yield torch.rand(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)


def train(*, profile: Callable[[FlopsProfiler], None] | None) -> Tensor:
    """Run the third script of the tutorial, and return the trained weight.

    If there is a function `profile`, step 5 is profiled. Between its forward and its backward, the
    function receives the profiler, and the profile is printed.
    """
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prof = FlopsProfiler(model)
    profile_step = 5 if profile else -1
    print_profile = True
    for step, batch in enumerate(batches(8)):
        if step == profile_step:
            prof.start_profile()

        loss = model(batch)

        if step == profile_step and profile:
            prof.stop_profile()
            profile(prof)
            if print_profile:
                prof.print_model_profile(profile_step=profile_step)
            prof.end_profile()

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.layer.weight.detach()


def test_a_training_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """In a training loop, the profiler returns and prints the counts of one forward.

    A batch through the layer has 4 × 8 × 3 = 96 MACs, and the layer has 27 parameters. The printed
    flops are those that `get_total_flops` returns.
    """
    totals: dict[str, str] = {}

    def ask(prof: FlopsProfiler) -> None:
        totals["flops"] = str(prof.get_total_flops(as_string=True))
        totals["macs"] = str(prof.get_total_macs())
        totals["params"] = str(prof.get_total_params())

    train(profile=ask)
    printed = capsys.readouterr().out
    assert ("96", "27") == (totals["macs"], totals["params"])
    assert "Profile Summary at step 5:" in printed
    assert re.search(rf"^fwd flops per GPU: +{totals['flops']}$", printed, re.MULTILINE)


def test_a_profiled_training_learns_what_one_without_does() -> None:
    """The trained weight is the same to the bit with and without a profiled step."""
    assert torch.equal(train(profile=None), train(profile=lambda _: None))


PAGE = (ROOT / "docs/how-to/deepspeed.md").read_text("utf-8")
MEASURED = (
    "latency",
    "FLOPS per GPU",
    "second",
    "CPU time",
    "cost of timing",
    "MFU",
    "peak live",
    "quartiles",
)
"""Parts of labels whose values differ between machines."""


def shown(whose: str) -> str:
    """Return the output of a profiler as the page shows it, in three blocks."""
    blocks = re.findall(rf"^{whose}:\n\n```text\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    assert 3 == len(blocks)
    return "".join(blocks)


def counts(printed: str) -> list[str]:
    """Return the lines of a printed profile without values that depend on the machine.

    Labels, parameters, MACs and flops remain. Times, rates and notes are removed, because they
    differ between machines and versions of torch.
    """
    printed = printed[printed.index("--- lflops Flops Profiler ---") :]
    printed, _, _ = printed.partition("----------------------------- Where the Step")
    lines = []
    for line in printed.strip().removesuffix("-" * 78).splitlines():
        if line.startswith("note:"):
            continue
        label = line[:70]
        has_value = line[70:72] == "  "
        kept = line
        if has_value and any(part in label for part in MEASURED):
            kept = label
        kept = re.sub(r"(?<=latency - ).*|(?<=MACs, ).*FLOPS.*", "", kept)
        lines.append(kept.rstrip())
    return lines


def test_the_page_shows_what_is_printed_today(warm_python: WarmPython) -> None:
    """The counts on the page are those that the example prints today, and those worked out by hand.

    The model has 512 positions of width 256 and 2 layers. For each position, a layer has 12 × 256²
    MACs in linear layers, and 256 for each of 128 attention scores and 128 weighted values. The
    output has 512 words.
    """
    script = (
        "import runpy, sys; sys.path.insert(0, 'examples'); "
        "runpy.run_path('examples/deepspeed_side_by_side.py', run_name='__main__')"
    )
    ended = warm_python.run(script, "lflops")
    assert 0 == ended.status, ended.err
    printed = counts(ended.out)
    assert [line for line in printed if line] == [line for line in counts(shown("lflops")) if line]
    macs = 512 * (2 * (12 * 256**2 + 2 * 128 * 256) + 512 * 256)
    assert f"{macs:,}" in PAGE
    assert f"('1.89 G', '{macs / 1e6:.2f} MMACs', '1.74 M')" == ended.out.splitlines()[-1]


def labels(printed: str) -> list[str]:
    """Return the labels of figures and depths and the headings, except for the title, in order."""
    found = re.findall(r"^(.{70})  |^(    .*) - |^-+ (.*) -+$", printed, re.MULTILINE)
    return ["".join(each).strip() for each in found if "Flops Profiler" not in each[2]]


def test_every_label_of_deepspeeds_is_there_in_its_order() -> None:
    """All labels that DeepSpeed prints also occur in the text of lflops, in the same order.

    So the two texts can be compared side by side.
    """
    ours = iter(labels(shown("lflops")))
    theirs = labels(shown("DeepSpeed"))
    assert {"params per GPU:", "fwd latency", "Detailed Profile per GPU"} <= set(theirs)
    # `in` consumes the iterator up to the label, so this also checks the order.
    assert [] == [label for label in theirs if label not in ours]


def test_another_count_on_the_page_would_be_seen() -> None:
    """`counts` differs if a count changes in any part of the text, but not if a time changes."""
    lines = [
        "--- lflops Flops Profiler ---",
        f"{'fwd MACs per GPU:':<72}1 MACs",
        "    MACs        - {'Net': '1 MACs'}",
        "Net(1 = 100% Params, 1 MACs = 100% MACs, 1 s = 100% latency, 2 FLOPS)",
    ]
    page = "\n".join(lines)
    assert counts(page) == counts(page.replace("1 s", "2 s"))
    for part in ("  1 MACs", "'1 MACs", ", 1 MACs"):
        assert counts(page) != counts(page.replace(part, part.replace("1", "2")))
