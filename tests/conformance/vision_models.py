"""Cases of vision transformers from transformers, with random weights.

Images require no gradient, so the first matmul has only one matmul in backward.
"""

from typing import Any

from tests.conformance.architectures import (
    convolution,
    decoder_layer,
    encoder_layer,
    image_convolution,
    perceptron,
    seeing,
    settings,
)
from tests.conformance.convolutional_models import of_resnet, resnet_channels, resnet_places, stages
from tests.conformance.making import Family
from tests.conformance.pencil import NOTHING, Macs, attention, product

__all__ = ["CASES"]

batch = 2
size = 32
labels = 5
layers = 2
hidden = 24
heads = 3
wide = 40
trained = Family("vision models").trained


patch = 8
patches = (size // patch) ** 2
of_patches = image_convolution(batch * patches, hidden, patch * patch)
transformer: dict[str, Any] = {
    "hidden_size": hidden,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "image_size": size,
    "patch_size": patch,
}
ratio = 2

TRANSFORMERS = (
    trained(
        "ViT",
        seeing(
            size,
            "ViTForImageClassification",
            "ViTConfig",
            **transformer,
            intermediate_size=wide,
            num_labels=labels,
        ),
        of_patches
        + layers * encoder_layer(batch, patches + 1, hidden, heads, wide)
        + product(batch, hidden, labels),
    ),
    trained(
        "DINOv2",
        seeing(size, "Dinov2Model", "Dinov2Config", **transformer, mlp_ratio=ratio),
        of_patches + layers * encoder_layer(batch, patches + 1, hidden, heads, ratio * hidden),
    ),
)

window = 4
depths = (2, 1)
embedding = 12


def swin_stage(side: int, channels: int, heads: int) -> Macs:
    """Return the MACs of a Swin block: attention within windows, and a perceptron.

    A trained bias is added to the scores, for which there is no fused kernel.
    """
    places = batch * side * side
    attended = attention(places * heads * min(side, window) ** 2, channels // heads, fused=False)
    return (
        4 * product(places, channels, channels)
        + attended
        + perceptron(places, channels, 4 * channels)
    )


merged = 2 * embedding
swin_side = size // 4
TRANSFORMERS_OF_STAGES = (
    trained(
        "Swin",
        seeing(
            size,
            "SwinForImageClassification",
            "SwinConfig",
            image_size=size,
            patch_size=4,
            embed_dim=embedding,
            depths=list(depths),
            num_heads=[2, 4],
            window_size=window,
            num_labels=labels,
        ),
        image_convolution(batch * swin_side**2, embedding, 4 * 4)
        + depths[0] * swin_stage(swin_side, embedding, 2)
        + product(batch * (swin_side // 2) ** 2, 4 * embedding, merged)
        + depths[1] * swin_stage(swin_side // 2, merged, 4)
        + product(batch, merged, labels),
    ),
)

narrow = 8
broad = 16
reduction = 2
decoder = 12


def segformer_block(side: int, channels: int, heads: int, reduced: int) -> Macs:
    """Return the MACs of a SegFormer block.

    Attention goes from all positions to fewer positions, which a convolution merges. The perceptron
    has a depthwise convolution inside.
    """
    places = batch * side**2
    fewer = batch * (side // reduced) ** 2
    merging = convolution(fewer, channels, channels, reduced**2) if reduced > 1 else NOTHING
    projections = 2 * product(places, channels, channels) + 2 * product(fewer, channels, channels)
    attended = attention(places * heads * (side // reduced) ** 2, channels // heads)
    linear = perceptron(places, channels, ratio * channels)
    depthwise = convolution(places, 1, ratio * channels, 3 * 3)
    return merging + projections + attended + linear + depthwise


half = size // 2
quarter = size // 4
SEGMENTATION = (
    trained(
        "SegFormer",
        seeing(
            size,
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[reduction, 1],
            hidden_sizes=[narrow, broad],
            patch_sizes=[3, 3],
            strides=[2, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[ratio, ratio],
            decoder_hidden_size=decoder,
            num_labels=labels,
            drop_path_rate=0.0,
        ),
        image_convolution(batch * half**2, narrow, 3 * 3)
        + segformer_block(half, narrow, 1, reduction)
        + convolution(batch * quarter**2, narrow, broad, 3 * 3)
        + segformer_block(quarter, broad, 2, 1)
        + product(batch * half**2, narrow, decoder)
        + product(batch * quarter**2, broad, decoder)
        + product(batch * half**2, 2 * decoder, decoder)
        + product(batch * half**2, decoder, labels),
    ),
)

objects = 6
positions = resnet_places
memory = batch * positions
found = batch * objects
corners = 4
of_decoder = decoder_layer(batch, objects, hidden, heads, wide, others=positions)
detr = {
    "d_model": hidden,
    "encoder_layers": layers,
    "decoder_layers": 1,
    "encoder_attention_heads": heads,
    "decoder_attention_heads": heads,
    "encoder_ffn_dim": wide,
    "decoder_ffn_dim": wide,
    "num_queries": objects,
    "num_labels": labels,
    "dropout": 0.0,
}
DETECTION = (
    trained(
        "DETR, its backbone frozen",
        seeing(
            size,
            "DetrForObjectDetection",
            "DetrConfig",
            **detr,
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=settings("ResNetConfig", **stages, out_features=["stage2"]),
        ),
        Macs(of_resnet.forward)
        + product(memory, resnet_channels, hidden, gradients=1)
        + layers * encoder_layer(batch, positions, hidden, heads, wide)
        + of_decoder
        # The values of the first attention are zeros, which require no gradient.
        + Macs(0, -found * hidden * hidden)
        + product(found, hidden, labels + 1)
        + 2 * product(found, hidden, hidden)
        + product(found, hidden, corners),
    ),
)

CASES = (*TRANSFORMERS, *TRANSFORMERS_OF_STAGES, *SEGMENTATION, *DETECTION)
