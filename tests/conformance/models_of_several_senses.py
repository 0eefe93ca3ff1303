"""Cases of speech models and of multimodal models from transformers, with random weights."""

from typing import Any

from tests.conformance.architectures import (
    convolution,
    decoder_layer,
    encoder_layer,
    image_convolution,
    published,
    settings,
)
from tests.conformance.at_hand import FUSES_GROUPS
from tests.conformance.making import Family, Made, data, layer, words
from tests.conformance.pencil import Macs, attention, product

__all__ = ["CASES"]

batch = 2
layers = 2
trained = Family("models of several senses").trained

size = 16
patch = 4
hidden = 24
heads = 3
wide = 40
patches = (size // patch) ** 2
length = 7
vocabulary = 20
projection = 10
text_hidden = 16
text_heads = 4
text_wide = 28
text_width = text_hidden // text_heads

eye: dict[str, Any] = {
    "hidden_size": hidden,
    "intermediate_size": wide,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "image_size": size,
    "patch_size": patch,
}
mouth: dict[str, Any] = {
    "vocab_size": vocabulary,
    "hidden_size": text_hidden,
    "intermediate_size": text_wide,
    "num_hidden_layers": layers,
    "num_attention_heads": text_heads,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
images = data(batch, 3, size, size)
of_patches = image_convolution(batch * patches, hidden, patch * patch)
of_eye_layer = encoder_layer(batch, patches + 1, hidden, heads, wide)


def skipped(length: int, heads: int, width: int) -> int:
    """Return the MACs that a causal mask lets the attention of one layer skip."""
    return 2 * batch * heads * (length * (length - 1) // 2) * width


of_clip = (
    of_patches
    + layers * of_eye_layer
    + layers * encoder_layer(batch, length, text_hidden, text_heads, text_wide)
    + product(batch, hidden, projection)
    + product(batch, text_hidden, projection)
    + product(batch, batch, projection)
)

groups = 2
image_word = vocabulary - 1
said = 3
together = patches + said
rows = batch * together
scores = batch * text_heads * together**2
of_mouth_layer = (
    2 * product(rows, text_hidden, text_hidden)
    + 2 * product(rows, text_hidden, groups * text_width)
    + attention(scores, text_width, fused=FUSES_GROUPS)
    + 3 * product(rows, text_hidden, text_wide)
)
of_llava = (
    of_patches
    + (layers - 1) * of_eye_layer
    # The last layer runs forward, but its output is not used.
    + Macs(of_eye_layer.forward)
    + product(batch * patches, hidden, text_hidden)
    + product(batch * patches, text_hidden, text_hidden)
    + layers * of_mouth_layer
    + product(rows, text_hidden, vocabulary)
)
llava = published(
    "LlavaForConditionalGeneration",
    "LlavaConfig",
    vision_config=settings("CLIPVisionConfig", **eye),
    text_config=settings("LlamaConfig", **mouth, num_key_value_heads=groups),
    image_token_id=image_word,
    vision_feature_layer=-2,
    vision_feature_select_strategy="default",
)


def captioned() -> Any:
    """Return token ids: a placeholder for each patch of the image, and then the words."""
    import torch

    row = [image_word] * patches + list(range(3, 3 + said))
    return torch.tensor([row] * batch)


SEEING_AND_READING = (
    trained(
        "CLIP",
        layer(
            published(
                "CLIPModel",
                "CLIPConfig",
                text_config={**mouth, "max_position_embeddings": length},
                vision_config=eye,
                projection_dim=projection,
            ),
            input_ids=words(batch, length, vocabulary),
            pixel_values=images,
        ),
        of_clip,
        executed=of_clip.forward - layers * skipped(length, text_heads, text_width),
    ),
    trained(
        "LLaVA",
        layer(llava, input_ids=Made(captioned), pixel_values=images, use_cache=False),
        of_llava,
        executed=of_llava.forward
        - FUSES_GROUPS * layers * skipped(together, text_heads, text_width),
    ),
)

bands = 5
sources = 6
frames = 2 * sources
of_whisper = (
    product(batch * frames, hidden, bands, 3, gradients=1)
    + product(batch * sources, hidden, hidden, 3)
    + layers * encoder_layer(batch, sources, hidden, heads, wide)
    + layers * decoder_layer(batch, length, hidden, heads, wide, others=sources)
    + product(batch * length, hidden, vocabulary)
)
whisper = published(
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    vocab_size=vocabulary,
    num_mel_bins=bands,
    d_model=hidden,
    encoder_layers=layers,
    decoder_layers=layers,
    encoder_attention_heads=heads,
    decoder_attention_heads=heads,
    encoder_ffn_dim=wide,
    decoder_ffn_dim=wide,
    max_source_positions=sources,
    max_target_positions=length,
    dropout=0.0,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)

samples = 100
kernels = (10, 3)
strides = (5, 2)
channels = 6
heard = (samples - kernels[0]) // strides[0] + 1
steps = (heard - kernels[1]) // strides[1] + 1
around = 4
sections = 2
wave: dict[str, Any] = {
    "vocab_size": vocabulary,
    "hidden_size": hidden,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "intermediate_size": wide,
    "conv_dim": [channels] * 2,
    "conv_kernel": kernels,
    "conv_stride": strides,
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": around,
    "num_conv_pos_embedding_groups": sections,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def of_wave(*, gradients: int) -> Macs:
    """Return the MACs of wav2vec 2.0: two convolutions, a projection, and the transformer.

    Before the transformer, another convolution adds positions. It is padded on both sides, and its
    last output is dropped.
    """
    extraction = product(batch * heard, channels, kernels[0], gradients=gradients) + convolution(
        batch * steps, channels, channels, kernels[1]
    )
    places = convolution(batch * (steps + 1), hidden // sections, hidden, around)
    return (
        extraction
        + product(batch * steps, channels, hidden)
        + places
        + layers * encoder_layer(batch, steps, hidden, heads, wide)
    )


HEARING = (
    trained(
        "Whisper",
        layer(
            whisper,
            input_features=data(batch, bands, frames),
            decoder_input_ids=words(batch, length, vocabulary),
            use_cache=False,
        ),
        of_whisper,
        executed=of_whisper.forward - layers * skipped(length, heads, hidden // heads),
    ),
    trained(
        "wav2vec 2.0, which in training wants its input's gradient",
        layer(
            published("Wav2Vec2ForCTC", "Wav2Vec2Config", **wave), input_values=data(batch, samples)
        ),
        of_wave(gradients=2) + product(batch * steps, hidden, vocabulary),
    ),
    trained(
        "HuBERT, evaluated",
        layer(
            lambda: published("HubertModel", "HubertConfig", **wave)().eval(),
            input_values=data(batch, samples),
        ),
        of_wave(gradients=1),
    ),
)

CASES = (*SEEING_AND_READING, *HEARING)
