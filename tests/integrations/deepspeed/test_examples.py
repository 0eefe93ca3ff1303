"""The three scripts of deepspeed.ai/tutorials/flops-profiler, with the import changed: the same calls, the same arguments.

And our page.

What they fetch from elsewhere is written out or made small: torchvision's AlexNet, a pretrained
BERT and its tokenizer, a device to be on.
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
    """224 pixels are 55 after the first kernel, 27 and 13 after the pools.

    Positions by kernel by channels in and out; then the layers.
    """
    convolutions = (
        55**2 * 11**2 * 3 * 64
        + 27**2 * 5**2 * 64 * 192
        + 13**2 * 3**2 * (192 * 384 + 384 * 256 + 256 * 256)
    )
    return batch * (convolutions + 256 * 36 * 4096 + 4096 * 4096 + 4096 * 1000)


def get_accelerator() -> Any:
    """Of `deepspeed.accelerator`: here there is but the CPU."""

    class Accelerator:
        def device(self, _index: int) -> Any:
            return nullcontext()

    return Accelerator()


def test_alexnet(capsys: pytest.CaptureFixture[str]) -> None:
    """The first script, on 2 pictures in place of 256.

    1,428,376,960 MACs and 61,100,840 parameters.
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
    assert re.search(
        r"\(0\): Conv2d\(23.3 K = 0.04% Params, 140.55 MMACs = 9.84% MACs, .*, 3, 64, kernel_size=\(11, 11\)",
        printed,
    )


class Tokenizer:
    """What is used of BERT's."""

    pad_token = "[PAD]"  # noqa: S105 - a word, no secret

    def __call__(
        self, texts: list[str], *, padding: bool, truncation: bool, return_tensors: str
    ) -> dict[str, Tensor]:
        assert (padding, truncation, return_tensors) == (True, True, "pt")
        length = texts[0].count(self.pad_token) + 2  # [CLS] and [SEP]
        ids = torch.zeros(len(texts), length, dtype=torch.long)
        return {
            "input_ids": ids,
            "token_type_ids": torch.zeros_like(ids),
            "attention_mask": torch.ones_like(ids),
        }


def bert_input_constructor(
    batch_size: int, seq_len: int, tokenizer: Tokenizer
) -> dict[str, Tensor]:
    """Sequences of nothing but padding, and a label for each."""
    fake_seq = tokenizer.pad_token * (seq_len - 2)
    inputs = tokenizer([fake_seq] * batch_size, padding=True, truncation=True, return_tensors="pt")
    return {**inputs, "labels": torch.tensor([1] * batch_size)}


def test_bert_with_an_input_constructor(capsys: pytest.CaptureFixture[str]) -> None:
    """The second script, on a small BERT: keyword arguments alone, the loss within the model.

    4 sequences of 16 vectors of 32: 4 projections, scores and sums, up and down to 64 in each of 2
    layers; pooler and 2 classes once.
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
        batch_size, seq_len = 4, 16
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
    """One that gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, target = batch
        return F.cross_entropy(self.layer(x), target)


def batches(n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each of 4 vectors with their classes."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        yield torch.rand(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)


def train(*, profile: Callable[[FlopsProfiler], None] | None) -> Tensor:
    """The third script: step 5 is profiled, and printed between its forward and its backward.

    Returns what was learnt.
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
    """One batch through one layer is 4 * 8 * 3 MACs and 27 parameters.

    The flops are those that are printed.
    """
    asked: list[Any] = []
    train(
        profile=lambda prof: asked.extend(
            [prof.get_total_flops(as_string=True), prof.get_total_macs(), prof.get_total_params()]
        )
    )
    printed = capsys.readouterr().out
    assert ["96", "27"] == [str(each) for each in asked[1:]]
    assert "Profile Summary at step 5:" in printed
    assert re.search(rf"^fwd flops per GPU: +{asked[0]}$", printed, re.MULTILINE)


def test_a_profiled_training_learns_what_one_without_does() -> None:
    """To the last bit."""
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


def shown(whose: str) -> str:
    """What the page says that a profiler printed, in its three blocks."""
    blocks = re.findall(rf"^{whose}:\n\n```text\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    assert 3 == len(blocks)
    return "".join(blocks)


def counts(printed: str) -> list[str]:
    """The lines without what a clock, a machine or another torch would change.

    Labels, parameters, MACs, flops.
    """
    printed = printed[printed.index("--- lflops Flops Profiler ---") :].partition(
        "----------------------------- Where the Step"
    )[0]
    lines = printed.strip().removesuffix("-" * 78).splitlines()
    lines = [
        line[:70] if any(label in line[:70] for label in MEASURED) and line[70:72] == "  " else line
        for line in lines
    ]
    lines = [line for line in lines if not line.startswith("note:")]
    return [re.sub(r"(?<=latency - ).*|(?<=MACs, ).*FLOPS.*", "", line).rstrip() for line in lines]


def test_the_page_shows_what_is_printed_today(warm_python: WarmPython) -> None:
    """By hand: 512 positions.

    12 * 256^2 for the products of a layer, 256 for each of 128 scores and sums; 512 words.
    """
    script = "import runpy, sys; sys.path.insert(0, 'examples'); runpy.run_path('examples/deepspeed_side_by_side.py', run_name='__main__')"
    ended = warm_python.run(script, "lflops")
    assert 0 == ended.status, ended.err
    printed = counts(ended.out)
    assert [line for line in printed if line] == [line for line in counts(shown("lflops")) if line]
    macs = 512 * (2 * (12 * 256**2 + 2 * 128 * 256) + 512 * 256)
    assert f"{macs:,}" in PAGE
    assert f"('1.89 G', '{macs / 1e6:.2f} MMACs', '1.74 M')" == ended.out.splitlines()[-1]


def labels(printed: str) -> list[str]:
    """The labels of the figures and of the depths' lines, and the headings but the first, in their order."""
    found = re.findall(r"^(.{70})  |^(    .*) - |^-+ (.*) -+$", printed, re.MULTILINE)
    return ["".join(each).strip() for each in found if "Flops Profiler" not in each[2]]


def test_every_label_of_deepspeeds_is_there_in_its_order() -> None:
    """So that the two can be laid side by side; what is ours stands between."""
    ours = iter(labels(shown("lflops")))
    theirs = labels(shown("DeepSpeed"))
    assert {"params per GPU:", "fwd latency", "Detailed Profile per GPU"} <= set(theirs)
    assert [] == [label for label in theirs if label not in ours]


def test_another_count_on_the_page_would_be_seen() -> None:
    """In each part; another time would not."""
    figure, kinds, model = (
        f"{'fwd MACs per GPU:':<72}1 MACs",
        "    MACs        - {'Net': '1 MACs'}",
        "Net(1 = 100% Params, 1 MACs = 100% MACs",
    )
    page = "\n".join(
        ["--- lflops Flops Profiler ---", figure, kinds, f"{model}, 1 s = 100% latency, 2 FLOPS)"]
    )
    assert counts(page) == counts(page.replace("1 s", "2 s"))
    for part in ("  1 MACs", "'1 MACs", ", 1 MACs"):
        assert counts(page) != counts(page.replace(part, part.replace("1", "2")))
