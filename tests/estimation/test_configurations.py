"""Test estimates of transformers configurations other than text: their batches and their memory."""

import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lflops
from lflops.cli.estimate import builder_for
from lflops.estimation.estimate import Estimator, subject_of
from lflops.estimation.from_config import builder_of, offline
from tests.support.cpu_allocator import allocated

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    # Wide enough that the layers need more memory than the workspaces of convolutions.
    "intermediate_size": 1024,
}
CONVOLVED: dict[str, Any] = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}
SPEECH: dict[str, Any] = {
    "conv_dim": [32] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
}
CODED: dict[str, Any] = {
    "encoder_layers": 2,
    "encoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_layers": 2,
    "decoder_ffn_dim": 128,
    "decoder_attention_heads": 4,
    "d_model": 64,
}
BACKBONE = {"embedding_size": 16, "out_features": ["stage4"], **CONVOLVED}
TEXT: dict[str, Any] = {**SMALL, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViTForImageClassification": ("ViTConfig", {**SMALL, "image_size": 64}),
    "Dinov2ForImageClassification": ("Dinov2Config", {**SMALL, "image_size": 70}),
    "SwinForImageClassification": (
        "SwinConfig",
        {"image_size": 64, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]},
    ),
    "ViTMAEForPreTraining": (
        "ViTMAEConfig",
        {
            **SMALL,
            "image_size": 64,
            "decoder_hidden_size": 64,
            "decoder_num_hidden_layers": 2,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 1024,
        },
    ),
    "VideoMAEForVideoClassification": (
        "VideoMAEConfig",
        {**SMALL, "image_size": 64, "num_frames": 8},
    ),
    "CLIPModel": (
        "CLIPConfig",
        {"text_config": TEXT, "vision_config": {**SMALL, "image_size": 64, "patch_size": 16}},
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {
            "text_config": {**TEXT, "model_type": "llama", "num_key_value_heads": 2},
            "vision_config": {
                **SMALL,
                "model_type": "clip_vision_model",
                "image_size": 56,
                "patch_size": 14,
            },
            "image_token_id": 99,
            "image_seq_length": 16,
        },
    ),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {
            **CODED,
            "vocab_size": 100,
            "max_source_positions": 50,
            "max_target_positions": 20,
            "decoder_start_token_id": 3,
            "pad_token_id": 2,
        },
    ),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", {**SMALL, **SPEECH}),
    "ASTForAudioClassification": ("ASTConfig", {**SMALL, "max_length": 64, "num_mel_bins": 32}),
    "DetrForObjectDetection": (
        "DetrConfig",
        {
            **CODED,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone_config": {"model_type": "resnet", **BACKBONE},
            "num_queries": 10,
            "image_size": [64, 96],
        },
    ),
    "YolosForObjectDetection": (
        "YolosConfig",
        {**SMALL, "image_size": [64, 96], "num_detection_tokens": 5},
    ),
}
FUSED = partial(torch.optim.AdamW, fused=True)
"""An optimizer with one operator per step: the others have several for each parameter."""

CONVOLUTIONS = 0.1
"""Relative tolerance of a peak: the workspaces of convolutions differ between CPUs."""


def saved(folder: Path, architecture: str, **changed: Any) -> Path:
    """Save the configuration of an architecture with changed settings; return its folder."""
    kind, settings = CONFIGURATIONS[architecture]
    config = getattr(transformers, kind)(**{**settings, **changed}, architectures=[architecture])
    config.save_pretrained(folder)
    return folder


def summed(out: Any) -> Tensor:
    """Return the sum of all floating-point outputs, a loss for models that compute none."""
    tensors = [each for each in out.values() if isinstance(each, Tensor)]
    sums = [each.sum() for each in tensors if each.is_floating_point()]
    return torch.stack(sums).sum()


@pytest.mark.parametrize("architecture", CONFIGURATIONS)
def test_a_configuration_has_its_parameters_and_the_peak_of_a_real_training(
    architecture: str, tmp_path: Path
) -> None:
    """The number of parameters and the peak match a real model and a real training run.

    transformers builds the real model on the meta device. The real peak is the most memory that the
    CPU allocator handed out in two training steps.
    """
    build = builder_of(str(saved(tmp_path, architecture)), tokens=24)
    estimator = Estimator(caller=architecture, backward=True, optimizer=FUSED)
    profile = estimator.run(lambda: subject_of(architecture, build(4)))
    with torch.device("meta"):
        kind = getattr(transformers, architecture)
        known = kind(kind.config_class.from_pretrained(tmp_path))
    assert sum(each.numel() for each in known.parameters()) == profile.modules[""].parameters

    def begin() -> Callable[[], None]:
        model, batch, loss = build(4)
        optimizer = FUSED(model.parameters())

        def step() -> None:
            (loss or summed)(model(**batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    assert profile.memory is not None
    assert max(allocated(begin, tmp_path)) == pytest.approx(
        profile.memory.peak_bytes, rel=CONVOLUTIONS
    )


def test_an_image_is_as_large_as_its_processor_makes_it(tmp_path: Path) -> None:
    """Without `image_size`, the size comes from the image processor's configuration.

    Without both, the error shows the setting to add.
    """
    folder = saved(tmp_path, "DetrForObjectDetection", image_size=None)
    with pytest.raises(
        lflops.CountError,
        match=r'has no image_size, .*: add "image_size": \[height, width\] to the configuration$',
    ):
        builder_of(str(folder))(1)
    (folder / "preprocessor_config.json").write_text(
        '{"size": {"shortest_edge": 64, "longest_edge": 96}}'
    )
    batch: Any = builder_of(str(folder))(2)[1]
    assert (2, 3, 64, 96) == batch["pixel_values"].shape


def test_the_tokens_of_an_image_are_before_those_of_the_text(tmp_path: Path) -> None:
    """The 16 image tokens precede the 24 text tokens."""
    batch: Any = builder_of(str(saved(tmp_path, "LlavaForConditionalGeneration")), tokens=24)(1)[1]
    assert [99] * 16 + [0] * 24 == batch["input_ids"][0].tolist()


def test_sound_has_as_many_frames_as_tokens_are_asked_for(tmp_path: Path) -> None:
    """wav2vec2 makes one frame of 5 * 2**6 samples, and no layer is dropped at random."""
    model, batch, loss = builder_of(str(saved(tmp_path, "Wav2Vec2ForCTC")), tokens=10)(2)
    given: Any = batch
    assert (2, 3200) == given["input_values"].shape
    assert (0.0, None) == (model.config.layerdrop, loss)  # type: ignore[union-attr]


def test_too_many_layers_are_refused_at_once(tmp_path: Path) -> None:
    """The error names the setting and the limit."""
    folder = saved(tmp_path, "ViTForImageClassification", num_hidden_layers=1_000_000)
    with pytest.raises(
        lflops.CountError,
        match=r"num_hidden_layers=1000000 is too large: pass a configuration with at most 1,000 layers",
    ):
        builder_of(str(folder))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"num_labels": 5_000_000},
            "num_labels=5000000 is too large: pass a configuration with at most 100,000",
        ),
        (
            {"depths": [1, 1, 1, 3000]},
            r"depths=\[1, 1, 1, 3000\] is too large: .* at most 1,000 layers",
        ),
        (
            {"text_config": {"attn_implementation": "someone/kernels"}},
            "attn_implementation='someone/kernels' would load code .*: pass a configuration with 'sdpa' or 'eager'",
        ),
    ],
)
def test_a_setting_is_refused_before_transformers_reads_it(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Settings that make transformers slow or load foreign code are refused first.

    transformers would create five million label names, run for hours, or load somebody's code.
    """
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "swin", **settings}))
    with pytest.raises(lflops.CountError, match=said):
        builder_of(str(tmp_path))


def test_a_size_is_no_number_of_layers(tmp_path: Path) -> None:
    """Sizes are accepted although their names contain the words of limited settings."""
    settings = {"block_size": 32_768, "shared_expert_intermediate_size": 5_632}
    saved(tmp_path, "ViTForImageClassification", **settings)
    assert builder_of(str(tmp_path))(1)


def test_a_class_that_is_no_model_is_not_called(tmp_path: Path) -> None:
    """`architectures` may name anything in transformers; the usual class is used instead."""
    folder = saved(tmp_path, "ViTForImageClassification")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["pipeline"]}))
    assert type(builder_of(str(folder))(1)[0]).__name__ == "ViTForImageClassification"


@pytest.mark.parametrize("before", [None, "0"])
def test_transformers_is_offline_for_a_configuration(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`offline()` disables downloads, because a configuration can name a repository.

    Afterwards the earlier setting is restored.
    """
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    if before is not None:
        monkeypatch.setenv("HF_HUB_OFFLINE", before)
    with offline():
        assert constants.HF_HUB_OFFLINE
        assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert not constants.HF_HUB_OFFLINE
    assert os.environ.get("HF_HUB_OFFLINE") == before


def test_a_configuration_of_text_without_a_class_is_a_language_model(tmp_path: Path) -> None:
    """A text configuration builds a language model, and an image configuration a classifier."""
    for kind, found in (
        (transformers.LlamaConfig(**TEXT), "LlamaForCausalLM"),
        (transformers.ViTConfig(**SMALL), "ViTForImageClassification"),
    ):
        kind.save_pretrained(tmp_path)
        model: nn.Module = builder_of(str(tmp_path))(1)[0]
        assert found == type(model).__name__


def test_a_configuration_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """The current folder is importable for a function, but not for a configuration.

    A configuration may come from a repository that also contains a `transformers.py`.
    """
    folder = saved(tmp_path, "ViTForImageClassification")
    with builder_for(str(folder), None, remote_code=False):
        assert "" not in sys.path
    with builder_for("tests.estimation.planning.test_plan:build", None, remote_code=False):
        assert "" in sys.path
    assert "" not in sys.path
