"""Cases of language models from transformers, with random weights.

In every matmul, both operands require a gradient. Embeddings have no matmuls.
"""

from typing import Any

from torch import nn

from tests.conformance.architectures import decoder_layer, encoder_layer, perceptron, published
from tests.conformance.at_hand import FUSES_GROUPS
from tests.conformance.case import Build
from tests.conformance.making import Family, layer, words
from tests.conformance.pencil import Macs, attention, product

__all__ = ["CASES"]

batch = 2
length = 5
layers = 2
vocabulary = 13
hidden = 24
heads = 6
groups = 2
wide = 40
width = hidden // heads
tokens = batch * length
scores = batch * heads * length * length
triangle = batch * heads * length * (length + 1) // 2
trained = Family("language models").trained
inference = Family("language models").inference

text = words(batch, length, vocabulary)
no_ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def reading(make: Any, **options: Any) -> Build:
    """Return a `Build` of a model that receives text."""
    return layer(make, input_ids=text, **options)


def writing(make: Any) -> Build:
    """Return a `Build` of a causal model that receives text, without a cache."""
    return reading(make, use_cache=False)


def evaluated(make: Any) -> Any:
    """Return a function that creates the model in evaluation mode, so without dropout."""
    return lambda: make().eval()


common: dict[str, Any] = {
    "vocab_size": vocabulary,
    "hidden_size": hidden,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
}
to_words = product(tokens, hidden, vocabulary)


def bert(**options: Any) -> Any:
    """Return a function that creates BERT with its heads for pretraining."""
    return published(
        "BertForPreTraining", "BertConfig", **common, intermediate_size=wide, **options
    )


two_classes = 2
sizes = {
    "batch": batch,
    "length": length,
    "layers": layers,
    "hidden": hidden,
    "heads": heads,
    "wide": wide,
    "vocabulary": vocabulary,
}


def of_bert(
    *,
    fused: bool,
    batch: int,
    length: int,
    layers: int,
    hidden: int,
    heads: int,
    wide: int,
    vocabulary: int,
) -> Macs:
    """Return the MACs of BERT: its layers, its head for masked words, and that for sentences.

    The first head has a transform and a decoder. The second has a pooler and a classifier.
    """
    words = product(batch * length, hidden, hidden) + product(batch * length, hidden, vocabulary)
    sentences = product(batch, hidden, hidden) + product(batch, hidden, two_classes)
    return (
        layers * encoder_layer(batch, length, hidden, heads, wide, fused=fused) + words + sentences
    )


spans = length
"""Number of relative positions on each side in DeBERTa."""
buckets = 4
"""Number of relative positions on each side in DeBERTa-v2."""


def of_deberta(places: int) -> Macs:
    """Return the MACs of a DeBERTa layer.

    Its scores have two more terms: from words to positions, and from positions to words.
    """
    both = 2 * product(scores // length, places, width)
    return (
        both
        + 2 * product(places, hidden, hidden)
        + encoder_layer(batch, length, hidden, heads, wide, fused=False)
    )


relative = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "max_position_embeddings": 2 * length,
    "pad_token_id": 0,
}
READERS = (
    trained("BERT with dropout", reading(bert()), of_bert(fused=False, **sizes)),
    trained(
        "BERT, eager", reading(bert(attn_implementation="eager")), of_bert(fused=False, **sizes)
    ),
    trained("BERT without dropout", reading(evaluated(bert())), of_bert(fused=True, **sizes)),
    inference("BERT in inference", reading(evaluated(bert())), of_bert(fused=True, **sizes)),
    trained(
        "DeBERTa",
        reading(
            published("DebertaModel", "DebertaConfig", **common, intermediate_size=wide, **relative)
        ),
        layers * of_deberta(2 * spans),
    ),
    trained(
        "DeBERTa-v2",
        reading(
            published(
                "DebertaV2Model",
                "DebertaV2Config",
                **common,
                intermediate_size=wide,
                **relative,
                position_buckets=buckets,
                norm_rel_ebd="layer_norm",
                share_att_key=True,
            )
        ),
        layers * of_deberta(2 * buckets),
    ),
)


gated = 3 * product(tokens, hidden, wide)


def of_llama(head: int = width, feedforward: Macs = gated, *, fused: bool = FUSES_GROUPS) -> Macs:
    """Return the MACs of a Llama layer, in which groups of heads share keys and values.

    By default, its perceptron has a gate.
    """
    queries_and_output = 2 * product(tokens, hidden, heads * head)
    keys_and_values = 2 * product(tokens, hidden, groups * head)
    attended = attention(scores, head, fused=fused)
    return queries_and_output + keys_and_values + attended + feedforward


grouped: dict[str, Any] = {
    **common,
    **no_ends,
    "num_key_value_heads": groups,
    "intermediate_size": wide,
}
llama = published("LlamaForCausalLM", "LlamaConfig", **grouped)
head = 10
window = 3
alternating = 3


def checkpointed() -> nn.Module:
    """Create a Llama with activation checkpointing of every layer."""
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


experts = 4
chosen = 2
mixture = product(tokens, hidden, experts) + 3 * product(tokens * chosen, hidden, wide)


def mixtral(**options: Any) -> Any:
    """Return a function that creates Mixtral, which uses a few of its experts for each token."""
    fields = {**grouped, "num_local_experts": experts, "num_experts_per_tok": chosen, **options}
    return published("MixtralForCausalLM", "MixtralConfig", **fields)


def of(each: Macs, count: int = layers) -> Macs:
    """Return the MACs of a model: its layers and its head."""
    return count * each + to_words


def causal(each: Macs, head: int = width, count: int = layers) -> int:
    """Return the executed MACs of forward if attention skips the part above the diagonal."""
    return of(each, count).forward - count * 2 * (scores - triangle) * head


def causal_in_groups(each: Macs, head: int = width) -> int:
    """Return the executed MACs of forward if heads share keys.

    Without a fused kernel for such heads, nothing is skipped.
    """
    return causal(each, head) if FUSES_GROUPS else of(each).forward


gpt = {
    "vocab_size": vocabulary,
    "n_embd": hidden,
    "n_layer": layers,
    "n_head": heads,
    "n_positions": length,
}
no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
of_gpt = encoder_layer(batch, length, hidden, heads, 4 * hidden)
of_head = of_llama(head)
mixed = of_llama(feedforward=mixture)
WRITERS = (
    trained(
        "GPT-2",
        writing(published("GPT2LMHeadModel", "GPT2Config", **gpt, **no_dropout, **no_ends)),
        of(of_gpt),
        executed=causal(of_gpt),
    ),
    trained("Llama", writing(llama), of(of_llama()), executed=causal_in_groups(of_llama())),
    trained(
        "Llama, checkpointed",
        writing(checkpointed),
        # Each layer runs again up to the operands of its last matmul, which is not run again.
        of(of_llama())
        + Macs(recompute=layers * (of_llama().forward - product(tokens, wide, hidden).forward)),
        executed=causal_in_groups(of_llama()),
    ),
    trained(
        "Mistral with a sliding window",
        writing(published("MistralForCausalLM", "MistralConfig", **grouped, sliding_window=window)),
        # With a mask, the keys are repeated instead of shared, so there is a fused kernel.
        of(of_llama(fused=True)),
    ),
    trained(
        "Qwen3 with wider heads",
        writing(published("Qwen3ForCausalLM", "Qwen3Config", **grouped, head_dim=head)),
        of(of_head),
        executed=causal_in_groups(of_head, head),
    ),
    trained(
        "Mixtral, its experts one product",
        writing(mixtral()),
        of(mixed),
        executed=causal_in_groups(mixed),
    ),
    trained(
        "Mixtral, its experts one by one",
        writing(mixtral(experts_implementation="eager")),
        of(mixed),
        executed=causal_in_groups(mixed),
    ),
    inference(
        "Llama in inference",
        writing(evaluated(llama)),
        of(of_llama()),
        executed=causal_in_groups(of_llama()),
    ),
)

inner = 2 * hidden
state = 4
rank = 3
kernel = 4
of_mamba = (
    product(tokens, hidden, 2 * inner)
    # The convolution is padded on both sides, and the additional outputs are dropped.
    + product(batch, length + kernel - 1, inner, kernel)
    + product(tokens, inner, rank + 2 * state)
    + product(tokens, rank, inner)
    + product(tokens, inner, state)
    + product(tokens, inner, hidden)
)
mamba = published(
    "MambaForCausalLM",
    "MambaConfig",
    vocab_size=vocabulary,
    hidden_size=hidden,
    num_hidden_layers=layers,
    state_size=state,
    time_step_rank=rank,
    conv_kernel=kernel,
    **no_ends,
)

source = 7
deeper = 3
narrow = 5
t5: dict[str, Any] = {
    "vocab_size": vocabulary,
    "d_model": hidden,
    "d_kv": narrow,
    "d_ff": wide,
    "num_layers": layers,
    "num_decoder_layers": deeper,
    "num_heads": heads,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}


def of_t5(rows: int, others: int, pairs: int, *, fused: bool) -> Macs:
    """Return the MACs of an attention of T5, from `rows` queries to `others` keys.

    Within a sequence, a trained bias is added to the scores, for which there is no fused kernel.
    """
    return (
        2 * product(rows, hidden, heads * narrow)
        + 2 * product(others, hidden, heads * narrow)
        + attention(pairs, narrow, fused=fused)
    )


of_source = of_t5(
    batch * source, batch * source, batch * heads * source * source, fused=False
) + perceptron(batch * source, hidden, wide)
of_target = of_t5(tokens, tokens, scores, fused=False) + perceptron(tokens, hidden, wide)
of_both = of_t5(tokens, batch * source, batch * heads * length * source, fused=True)
of_decoder = decoder_layer(batch, length, hidden, heads, wide, others=source)
of_bart = (
    layers * encoder_layer(batch, source, hidden, heads, wide) + deeper * of_decoder + to_words
)
OTHERS = (
    trained("Mamba, step by step", writing(mamba), of(of_mamba)),
    trained(
        "T5",
        layer(
            published("T5ForConditionalGeneration", "T5Config", **t5),
            input_ids=words(batch, source, vocabulary),
            decoder_input_ids=text,
            use_cache=False,
        ),
        layers * of_source + deeper * (of_target + of_both) + to_words,
    ),
    trained(
        "BART",
        layer(
            published(
                "BartForConditionalGeneration",
                "BartConfig",
                vocab_size=vocabulary,
                d_model=hidden,
                encoder_layers=layers,
                decoder_layers=deeper,
                encoder_attention_heads=heads,
                decoder_attention_heads=heads,
                encoder_ffn_dim=wide,
                decoder_ffn_dim=wide,
                max_position_embeddings=2 * length,
                dropout=0.0,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=2,
                forced_eos_token_id=None,
            ),
            input_ids=words(batch, source, vocabulary),
            decoder_input_ids=text,
            use_cache=False,
        ),
        of_bart,
        executed=of_bart.forward - deeper * 2 * (scores - triangle) * width,
    ),
)

CASES = (*READERS, *WRITERS, *OTHERS)
