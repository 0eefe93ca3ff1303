"""A model by its configuration.

The `config.json` of transformers, without weights and without a download.
"""

import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial, wraps
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lflops.errors import CountError
from lflops.estimation.fake_tensors import Answers

# before the name of a model in transformers' cache
BY_NAME = "hf:"


def is_config(target: str) -> bool:
    """Whether a target names a configuration, and no function."""
    return target.startswith(BY_NAME) or target.endswith(".json") or Path(target).is_dir()


# of a sample, where nothing is given
TOKENS = 512
Batch = Mapping[str, Tensor | bool]
Builder = Callable[[int], tuple[nn.Module, Batch, Callable[[Any], Tensor] | None]]
"""From a number of samples to a model in train mode, its batch, and the loss that the model computes;

`None` where it needs values.
"""

# layers; each takes some milliseconds to build and to run, so what is deeper would seem to hang
DEEPEST = 10_000

ONE_LABEL = (
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
    "ForSequenceClassification",
)
TOKEN_LABELS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForConditionalGeneration",
    "ForImageTextToText",
)
"""Ends of the names of classes: what they take as labels.

The losses of others need values, as a detector's and CTC.
"""

AUTO = (
    "CausalLM",
    "ImageTextToText",
    "ImageClassification",
    "SpeechSeq2Seq",
    "CTC",
    "AudioClassification",
    "ObjectDetection",
    "Seq2SeqLM",
)
"""Tasks by which a configuration without a class finds one, in this order."""


def builder_of(target: str, *, tokens: int = TOKENS, remote_code: bool = False) -> Builder:
    """Make the function that builds the model of a `config.json`, of the folder that has it, or of `hf:` and a name in transformers' cache.

    Each sample has so many tokens; of sound so many frames, where the configuration has no length.
    Images have the configuration's size. Python code that comes with the configuration runs only if
    `remote_code` allows it.
    """
    config = _config(target, remote_code=remote_code)
    kind = _class(config, remote_code=remote_code)
    _check_depth(target, config.to_dict())

    def build(samples: int) -> tuple[nn.Module, Batch, Callable[[Any], Tensor] | None]:
        model = kind(config).float().train()
        if model.main_input_name == "pixel_values":
            vars(model)["forward"] = wraps(model.forward)(partial(_run_finite, model.forward))
        batch = _batch(target, config, model, samples, tokens)
        has_loss = (
            "labels" in batch
            or "return_loss" in batch
            or type(model).__name__.endswith("ForPreTraining")
        )
        return model, batch, (lambda out: out.loss) if has_loss else None

    return build


def _run_finite(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a forward. Some vision models ask whether all their activations are finite: yes."""
    with Answers({torch.isfinite: torch.ones((), dtype=torch.bool)}):
        return forward(*args, **kwargs)


def _check_depth(target: str, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            _check_depth(target, value)
        elif "layer" in str(name) and isinstance(value, int) and value > DEEPEST:
            raise CountError(
                f"{target}: {name}={value}: models of up to {DEEPEST:,} layers are estimated"
            )


def _batch(target: str, config: Any, model: Any, samples: int, tokens: int) -> Batch:
    """Zeros for the inputs that the model takes, and the labels that its loss takes, by the sizes of the configuration."""
    taken, name = inspect.signature(model.forward).parameters, type(model).__name__
    seen = (
        config.vision_config
        if "pixel_values" in taken and hasattr(config, "vision_config")
        else None
    )
    batch: dict[str, Tensor | bool] = {}
    if seen is not None or model.main_input_name != "input_ids":
        main = "pixel_values" if seen is not None else model.main_input_name
        batch[main] = torch.zeros(
            samples, *_shape(target, main, config if seen is None else seen, tokens)
        )
    ids = _ids(config, seen, samples, tokens)
    if seen is not None or not batch:
        batch["input_ids"] = ids
    if "return_loss" in taken:
        batch["return_loss"] = True
    elif "labels" in taken and name.endswith(ONE_LABEL):
        batch["labels"] = torch.zeros(samples, dtype=torch.long)
    elif "labels" in taken and (name.endswith(TOKEN_LABELS) or list(batch) == ["input_ids"]):
        batch["labels"] = ids
    return batch


def _ids(config: Any, seen: Any, samples: int, tokens: int) -> Tensor:
    """Tokens of text, after those that stand for an image."""
    length = min(tokens, getattr(config, "max_target_positions", None) or tokens)
    if seen is None:
        return torch.zeros(samples, length, dtype=torch.long)
    ids = torch.zeros(
        samples,
        min(length, getattr(config.text_config, "max_position_embeddings", length)),
        dtype=torch.long,
    )
    image = getattr(config, "image_token_id", None)
    if image is None:
        return ids
    places = getattr(config, "image_seq_length", None) or (seen.image_size // seen.patch_size) ** 2
    return torch.cat([torch.full((samples, places), image), ids], 1)


def _shape(target: str, main: str, config: Any, tokens: int) -> tuple[int, ...]:
    """The shape of one sample of an image, a video or sound."""
    if main == "pixel_values":
        return _image(target, config)
    if main == "input_features" and hasattr(config, "num_mel_bins"):
        return config.num_mel_bins, 2 * config.max_source_positions
    if main == "input_values" and hasattr(config, "conv_stride"):
        return (tokens * prod(config.conv_stride),)
    if main == "input_values" and hasattr(config, "num_mel_bins"):
        return config.max_length, config.num_mel_bins
    raise CountError(
        f"{target}: its configuration has no sizes for {main}: give a function that builds the model and its batch"
    )


def _image(target: str, config: Any) -> tuple[int, ...]:
    """Channels, height and width of an image; of a video the frames before them."""
    size = getattr(config, "image_size", None) or _of_processor(target)
    if size is None:
        missing = "has no image_size, nor is its preprocessor_config.json there"
        raise CountError(
            f'{target}: the configuration {missing}: add "image_size": [height, width] to it'
        )
    height, width = (size, size) if isinstance(size, int) else size
    frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
    return (*frames, getattr(config, "num_channels", 3), height, width)


def _of_processor(target: str) -> tuple[int, int] | None:
    """Height and width of the images that the processor makes at the most.

    `None` without its file.
    """
    path = (
        Path(target) / "preprocessor_config.json"
        if Path(target).is_dir()
        else Path(target).with_name("preprocessor_config.json")
    )
    if not path.is_file():
        return None
    size: Any = json.loads(path.read_text()).get("size")
    if isinstance(size, Mapping):
        shortest = size.get("shortest_edge")
        return size.get("height", shortest), size.get("width", size.get("longest_edge", shortest))
    return None if size is None else (size, size)


def _config(target: str, *, remote_code: bool) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise CountError(
            f"{target}: transformers is not installed, which builds models by their configuration"
        ) from error
    name = target.removeprefix(BY_NAME)
    if not target.startswith(BY_NAME) and not Path(name).exists():
        raise CountError(
            f"{target}: no such file: give a config.json, its folder, or {BY_NAME} and a name in transformers' cache"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.from_pretrained(
                name, local_files_only=True, trust_remote_code=remote_code
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = (
            "; it brings its own code: allow that with --trust-remote-code"
            if "remote_code" in str(error)
            else ""
        )
        raise CountError(
            f"{target}: transformers has no configuration of it here: {reason}{hint}"
        ) from error
    config.use_cache = False
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if hasattr(config, name):
            setattr(
                config,
                name,
                0.0,
                # no layer is left out by chance, which is the most that a step needs
            )
    return config


def _class(config: Any, *, remote_code: bool) -> Callable[[Any], Any]:
    import transformers

    for name in getattr(config, "architectures", None) or ():
        if (found := getattr(transformers, name, None)) is not None:
            return found  # type: ignore[no-any-return]
    autos: list[Any] = [getattr(transformers, f"AutoModelFor{task}") for task in AUTO]
    general: Any = next((auto for auto in autos if type(config) in auto._model_mapping), None)  # noqa: SLF001 - it has no public name
    if general is None:
        general = autos[0] if remote_code else transformers.AutoModel
    return lambda config: general.from_config(config, trust_remote_code=remote_code)
