"""Figures that others published, beside the sums that give them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import lflops
from lflops.profile.profile import Profile


class LeNet(nn.Module):
    """Two convolutions and three layers, as fvcore's documentation of its counter draws it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.conv2 = nn.Conv2d(6, 16, 3)
        self.fc1 = nn.Linear(16 * 6 * 6, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


@pytest.fixture(scope="module")
def lenet() -> Profile:
    """One image of 32 by 32."""
    return lflops.count(LeNet(), torch.randn(1, 1, 32, 32))


FVCORE = {"": 274_656, "conv1": 48_600, "conv2": 146_016, "fc1": 69_120, "fc2": 10_080, "fc3": 840}
"""github.com/facebookresearch/fvcore, docs/flop_count.md:

`FlopCountAnalysis(model, input).by_module()`. Its flops are MACs.
"""


def test_lenet_by_module_is_fvcores_table(lenet: Profile) -> None:
    """A 3x3 kernel leaves 30 of 32 positions, a pool half of them, the next kernel 13 of 15, the next pool 6."""
    worked_out = {
        "conv1": 30 * 30 * 6 * 1 * 9,
        "conv2": 13 * 13 * 16 * 6 * 9,
        "fc1": 16 * 6 * 6 * 120,
        "fc2": 120 * 84,
        "fc3": 84 * 10,
    }
    assert FVCORE == {"": sum(worked_out.values()), **worked_out} == lenet.by_module()


def test_lenet_by_operator_is_fvcores_table(lenet: Profile) -> None:
    """On the same page `by_operator()` has conv.

    194616, addmm: 80040; the first is `convolution` in torch.
    """
    convolutions, products = (
        FVCORE["conv1"] + FVCORE["conv2"],
        FVCORE["fc1"] + FVCORE["fc2"] + FVCORE["fc3"],
    )
    assert (
        {"convolution": 194_616, "addmm": 80_040}
        == {"convolution": convolutions, "addmm": products}
        == lenet.by_operator()
    )


def test_lenet_by_module_and_operator_is_fvcores_table(lenet: Profile) -> None:
    """And so has `by_module_and_operator()`: each part has one kind."""
    expected = {
        name: {"convolution" if name.startswith("conv") else "addmm": FVCORE[name]}
        for name in FVCORE
        if name
    }
    assert {
        "": {"convolution": 194_616, "addmm": 80_040},
        **expected,
    } == lenet.by_module_and_operator()


hidden, inner, layers, length, words, positions, segments = 1024, 4096, 24, 128, 30_522, 512, 2
"""BERT-Large, arxiv.org/abs/1810.04805."""


def build(kind: str, attention: str = "sdpa", **sizes: int) -> nn.Module:
    """A BERT without the seconds that random weights take.

    Only what looks things up has to be in order.
    """
    bert = pytest.importorskip("transformers.models.bert.modeling_bert")
    config = bert.BertConfig(**sizes, attn_implementation=attention)
    with torch.device("meta"):
        model = getattr(bert, kind)(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    for name, buffer in model.named_buffers():
        buffer.copy_(torch.arange(config.max_position_embeddings)) if name.endswith(
            "position_ids"
        ) else buffer.zero_()
    whole: nn.Module = model.eval()
    return whole


def large(attention: str, depth: int = layers) -> nn.Module:
    """BERT-Large, or some layers of it."""
    return build(
        "BertForPreTraining",
        attention,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=depth,
        num_attention_heads=16,
    )


def macs_of_a_token(depth: int) -> int:
    """Of a sequence of `length`.

    Projections, scores and sums, up and down; the head for words; and a share of the pooler and its
    head.
    """
    a_layer = 4 * hidden**2 + 2 * length * hidden + 2 * hidden * inner
    head = hidden**2 + hidden * words
    once_a_sequence = hidden**2 + hidden * segments
    whole, rest = divmod(once_a_sequence, length)
    assert rest == 0
    return depth * a_layer + head + whole


def parameters(depth: int) -> int:
    """The words' table is used twice and counted once.

    Layers of four projections, up and down, two norms; pooler and heads.
    """
    embeddings = (words + positions + segments) * hidden + 2 * hidden
    a_layer = (
        4 * (hidden**2 + hidden) + hidden * inner + inner + inner * hidden + hidden + 2 * 2 * hidden
    )
    head = hidden**2 + hidden + 2 * hidden + words
    return (
        embeddings + depth * a_layer + (hidden**2 + hidden) + head + (hidden * segments + segments)
    )


MACS_A_TOKEN, PARAMETERS = 340_592_656, 336_226_108
"""Of BERT-Large at length 128.

The parameters are the 336.23 M of deepspeed.ai/tutorials/flops-profiler. The MACs there, 3139.93 G
for 80 sequences, are without attention's products and decode only the masked words; DeepSpeed
0.19.8 on this model says 3487.67 G, which is all.
"""


def test_the_sums_give_the_published_figures() -> None:
    """Before anything runs."""
    assert (MACS_A_TOKEN, PARAMETERS) == (macs_of_a_token(layers), parameters(layers))
    assert ("336.23", "3487.67") == (
        f"{PARAMETERS / 1e6:.2f}",
        f"{80 * length * MACS_A_TOKEN / 1e9:.2f}",
    )


def test_bert_large_is_what_was_published() -> None:
    """All of it once: one sequence of 128."""
    model = large("sdpa")
    with torch.no_grad():
        profile = lflops.count(
            model, kwargs={"input_ids": torch.zeros(1, length, dtype=torch.long)}
        )
    assert (length * MACS_A_TOKEN, PARAMETERS) == (profile.total(), profile.modules[""].parameters)
    assert () == profile.unsupported


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_two_layers_of_bert_large_cost_the_same_with_and_without_a_fused_kernel(
    attention: str,
) -> None:
    """Back, every product of the forward has two.

    The first layer's too, whose input is looked up and learnt.
    """
    model = large(attention, depth=2)
    profile = lflops.count(
        model, kwargs={"input_ids": torch.zeros(1, length, dtype=torch.long)}, backward=True
    )
    forward = length * macs_of_a_token(2)
    scores = 2 * length**2 * hidden if attention == "sdpa" else 0
    assert (forward, 2 * forward, scores, parameters(2)) == (
        profile.total(),
        profile.total(phase="backward"),
        profile.total(phase="recompute"),
        profile.modules[""].parameters,
    )


def test_bert_base_has_the_published_parameters_and_bytes() -> None:
    """RAF, github.com/awslabs/raf, "Analyze Your Model".

    Parameter #: 109514298.0, Parameter size (MBs): 417.7638931274414.
    """
    width, deep = 768, 4 * 768
    a_layer = 4 * (width**2 + width) + 2 * width * deep + deep + width + 4 * width
    worked_out = (
        (words + positions + segments + 2) * width
        + 12 * a_layer
        + width**2
        + width
        + 2 * width
        + words
    )
    profile = lflops.count(
        build("BertForMaskedLM"), kwargs={"input_ids": torch.zeros(1, 2, dtype=torch.long)}
    )
    assert 109_514_298 == worked_out == profile.modules[""].parameters
    assert profile.memory is not None
    assert (
        4 * worked_out
        == profile.modules[""].parameter_bytes
        == profile.memory.by_category["parameters"]
    )
    assert 417.7638931274414 == 4 * worked_out / 2**20


def test_torchs_own_counter_agrees_on_bert() -> None:
    """Without a fused kernel it misses nothing: two operations for each MAC, there and back."""
    model = build(
        "BertForPreTraining",
        "eager",
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    tokens = torch.zeros(2, 16, dtype=torch.long)
    profile = lflops.count(model, kwargs={"input_ids": tokens}, backward=True)
    with FlopCounterMode(display=False) as theirs:
        output = model(input_ids=tokens)
        (output.prediction_logits.sum() + output.seq_relationship_logits.sum()).backward()
    assert theirs.get_total_flops() == 2 * profile.total(phase=None)
