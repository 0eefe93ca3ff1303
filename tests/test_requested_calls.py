"""Test that counts agree with published numbers.

Each published number is also computed from the sizes of the model.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import lflops
from lflops.profile.profile import Profile


class LeNet(nn.Module):
    """Two convolutions and three linear layers, as in fvcore's documentation of its counter."""

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
    """Count one image of 32 by 32 pixels."""
    return lflops.count(LeNet(), torch.randn(1, 1, 32, 32))


FVCORE = {"": 274_656, "conv1": 48_600, "conv2": 146_016, "fc1": 69_120, "fc2": 10_080, "fc3": 840}
"""Result of `FlopCountAnalysis(model, input).by_module()` in fvcore's documentation.

The page is docs/flop_count.md in github.com/facebookresearch/fvcore. fvcore counts a MAC as one
flop.
"""


def test_lenet_by_module_is_fvcores_table(lenet: Profile) -> None:
    """The MACs of each module are those of fvcore, and those computed from the sizes.

    A side of 32 becomes 30 after the first 3 x 3 kernel, 15 after the pooling, 13 after the second
    kernel, and 6 after the second pooling.
    """
    worked_out = {
        "conv1": 30 * 30 * 6 * 1 * 9,
        "conv2": 13 * 13 * 16 * 6 * 9,
        "fc1": 16 * 6 * 6 * 120,
        "fc2": 120 * 84,
        "fc3": 84 * 10,
    }
    assert FVCORE == {"": sum(worked_out.values()), **worked_out} == lenet.by_module()


def test_lenet_by_operator_is_fvcores_table(lenet: Profile) -> None:
    """The MACs of each operator are those of `by_operator()` on the same page.

    The page lists conv: 194616 and addmm: 80040. The operator `conv` is called `convolution` in
    torch.
    """
    convolutions = FVCORE["conv1"] + FVCORE["conv2"]
    matmuls = FVCORE["fc1"] + FVCORE["fc2"] + FVCORE["fc3"]
    published = {"convolution": 194_616, "addmm": 80_040}
    assert published == {"convolution": convolutions, "addmm": matmuls} == lenet.by_operator()


def test_lenet_by_module_and_operator_is_fvcores_table(lenet: Profile) -> None:
    """The MACs by module and operator are those of `by_module_and_operator()` on the same page.

    Each layer has only one kind of operator.
    """
    assert {
        "": {"convolution": 194_616, "addmm": 80_040},
        "conv1": {"convolution": FVCORE["conv1"]},
        "conv2": {"convolution": FVCORE["conv2"]},
        "fc1": {"addmm": FVCORE["fc1"]},
        "fc2": {"addmm": FVCORE["fc2"]},
        "fc3": {"addmm": FVCORE["fc3"]},
    } == lenet.by_module_and_operator()


# The sizes of BERT-Large are from arxiv.org/abs/1810.04805. The length is chosen here.
hidden = 1024
inner = 4096
layers = 24
length = 128
words = 30_522
positions = 512
segments = 2


def build(kind: str, attention: str = "sdpa", **sizes: int) -> nn.Module:
    """Build a BERT model without spending seconds on random weights.

    Only the buffers with position indices need valid values, because embeddings look them up.
    """
    bert = pytest.importorskip("transformers.models.bert.modeling_bert")
    config = bert.BertConfig(**sizes, attn_implementation=attention)
    with torch.device("meta"):
        model = getattr(bert, kind)(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    for name, buffer in model.named_buffers():
        if name.endswith("position_ids"):
            buffer.copy_(torch.arange(config.max_position_embeddings))
        else:
            buffer.zero_()
    whole: nn.Module = model.eval()
    return whole


def large(attention: str, depth: int = layers) -> nn.Module:
    """Build BERT-Large, or a model with only some of its layers."""
    return build(
        "BertForPreTraining",
        attention,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=depth,
        num_attention_heads=16,
    )


def macs_of_a_token(depth: int) -> int:
    """Return the MACs of a token in a sequence of `length` tokens.

    A layer has four projections, the scores of attention and their weighted sums, and two linear
    layers of the MLP. Each token also has the head that predicts words, and its share of the pooler
    and of the pooler's head, which run once per sequence.
    """
    a_layer = 4 * hidden**2 + 2 * length * hidden + 2 * hidden * inner
    head = hidden**2 + hidden * words
    once_a_sequence = hidden**2 + hidden * segments
    whole, rest = divmod(once_a_sequence, length)
    assert rest == 0
    return depth * a_layer + head + whole


def parameters(depth: int) -> int:
    """Return the number of parameters of a BERT-Large model with `depth` layers.

    The table of words is used twice and counted once. A layer has four projections, two linear
    layers of the MLP, and two norms. The pooler and the heads follow.
    """
    embeddings = (words + positions + segments) * hidden + 2 * hidden
    projections = 4 * (hidden**2 + hidden)
    mlp = hidden * inner + inner + inner * hidden + hidden
    norms = 2 * 2 * hidden
    a_layer = projections + mlp + norms
    head = hidden**2 + hidden + 2 * hidden + words
    pooler = hidden**2 + hidden
    pooler_head = hidden * segments + segments
    return embeddings + depth * a_layer + pooler + head + pooler_head


MACS_A_TOKEN = 340_592_656
"""MACs of a token in BERT-Large, with sequences of 128 tokens.

DeepSpeed 0.19.8 reports 3487.67 G for 80 sequences of this model, which is the same number. The
page deepspeed.ai/tutorials/flops-profiler lists only 3139.93 G: without the matmuls of attention,
and with predictions only for the masked words.
"""

PARAMETERS = 336_226_108
"""Parameters of BERT-Large, the 336.23 M on the page deepspeed.ai/tutorials/flops-profiler."""


def test_the_sums_give_the_published_figures() -> None:
    """The sizes of the model give the published numbers, before any model is counted."""
    assert macs_of_a_token(layers) == MACS_A_TOKEN
    assert parameters(layers) == PARAMETERS
    assert f"{PARAMETERS / 1e6:.2f}" == "336.23"
    assert f"{80 * length * MACS_A_TOKEN / 1e9:.2f}" == "3487.67"


def test_bert_large_is_what_was_published() -> None:
    """The count of BERT-Large for one sequence of 128 tokens has the published numbers."""
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
    """Two layers have the same MACs with fused and with eager attention.

    In backward, each matmul of forward has two matmuls. This includes the first layer, whose input
    is the output of a trained embedding. Only the fused kernel computes the scores again, as
    recompute.
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
    """BERT-Base has the parameters and the bytes that RAF publishes.

    The section "Analyze Your Model" of github.com/awslabs/raf prints: Parameter #: 109514298.0,
    Parameter size (MBs): 417.7638931274414.
    """
    width = 768
    deep = 4 * 768
    a_layer = 4 * (width**2 + width) + 2 * width * deep + deep + width + 4 * width
    embeddings = (words + positions + segments + 2) * width
    head = width**2 + width + 2 * width + words
    worked_out = embeddings + 12 * a_layer + head
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
    """`FlopCounterMode` counts 2 FLOPs for each MAC of forward and backward.

    With eager attention, it misses no operator.
    """
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
