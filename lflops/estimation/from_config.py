"""Build a model from a `config.json` of transformers, without weights and without a download."""

import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial, wraps
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lflops.errors import CountError
from lflops.estimation.fake_tensors import Answers
from lflops.files import read

BY_NAME = "hf:"
"""Prefix of a target that is the name of a model in transformers' cache, such as `hf:gpt2`."""


def is_config(target: str) -> bool:
    """Return whether the argument of a command is a configuration, and not a function."""
    return target.startswith(BY_NAME) or target.endswith(".json") or Path(target).is_dir()


TOKENS = 512
"""Default number of tokens per sample."""

Batch = Mapping[str, Tensor | bool]

Loss = Callable[[Any], Tensor]
"""A function that returns the loss from the output of a model."""

Builder = Callable[[int], tuple[nn.Module, Batch, Loss | None]]
"""A function that takes a number of samples, and returns a model, a batch and a loss function.

The model is in train mode. The loss function is `None` if the loss cannot be computed without the
values of tensors.
"""

DEEPEST = 1_000
"""Maximum number of layers, blocks, stages or experts.

A deeper model takes so long to build and to run that the command seems to hang.
"""

MOST_LABELS = 100_000
"""Maximum number of labels. transformers creates a name for each label."""

# Pattern for the names of settings that count layers, blocks, stages or experts.
_REPEATED = re.compile(r"layer|depth|block|stage|repeat|expert")
_SIZE = re.compile(r"size|dim|width|capacity|channel|length|position|inter|freq|step|_id|index")
"""Pattern for the names of settings that are sizes, although `_REPEATED` matches them.

For example, `block_size` contains the word `block`, but it is not limited by `DEEPEST`.
"""

_IMPLEMENTATION = "_implementation"
"""Ending of the names of settings that select an implementation of attention or of experts.

A value with a slash is the name of a repository that contains the code.
"""

ONE_LABEL = (
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
    "ForSequenceClassification",
)
"""Endings of the names of transformers classes that need one label per sample."""

TOKEN_LABELS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForConditionalGeneration",
    "ForImageTextToText",
)
"""Endings of the names of transformers classes that need one label per token.

A model that reads only text gets one label per token even if its class is neither in this list nor
in `ONE_LABEL`. For most other models, no loss is computed, because losses such as CTC need the
values of tensors.
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
"""Tasks for which a model class is looked up if a configuration does not name a class.

The first task with a class for the configuration is used.
"""


def builder_of(target: str, *, tokens: int = TOKENS, remote_code: bool = False) -> Builder:
    """Return a function that builds a model and a batch from a transformers configuration.

    Images have the size that the configuration specifies.

    Args:
        target: A `config.json`, its folder, or `hf:` and a name in transformers' cache.
        tokens: Tokens per sample. For an audio model whose configuration specifies no length, this
            is the number of frames.
        remote_code: Whether Python code in the folder of the configuration may run.
    """
    config = _config(target, remote_code=remote_code)
    kind = _class(config, remote_code=remote_code)
    _check_settings(target, config.to_dict())

    def build(samples: int) -> tuple[nn.Module, Batch, Loss | None]:
        model = kind(config).train()
        if any(each.dtype is not torch.float32 for each in model.parameters()):
            model = model.float()
        if model.main_input_name == "pixel_values":
            vars(model)["forward"] = wraps(model.forward)(partial(_run_finite, model.forward))
        batch = _batch(target, config, model, samples, tokens)
        is_pretraining = type(model).__name__.endswith("ForPreTraining")
        has_loss = is_pretraining or "labels" in batch or "return_loss" in batch
        return model, batch, attrgetter("loss") if has_loss else None

    return build


def _run_finite(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a forward pass in which `torch.isfinite` always returns true.

    Some vision models check whether activations are finite, but fake tensors have no values.
    """
    with Answers({torch.isfinite: torch.ones((), dtype=torch.bool)}):
        return forward(*args, **kwargs)


@contextmanager
def offline() -> Iterator[None]:
    """Prevent transformers from downloading files inside a context."""
    variable = "HF_HUB_OFFLINE"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    # huggingface_hub reads the variable only when it is imported, so its constant is set as well.
    constants = sys.modules.get("huggingface_hub.constants")
    was_offline = getattr(constants, variable, None)
    if constants is not None:
        setattr(constants, variable, True)
    try:
        yield
    finally:
        if constants is not None:
            setattr(constants, variable, was_offline)
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _check_settings(target: str, settings: Mapping[str, Any]) -> None:
    """Raise an error for settings that would take too much memory or time, or load other code.

    Other code is the code of another repository, for example an implementation of attention.
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            _check_settings(target, value)
        elif str(name).endswith(_IMPLEMENTATION) and "/" in str(value):
            raise CountError(
                f"{target}: {name}={value!r} would load code from another repository, which lflops "
                "refuses: pass a configuration with 'sdpa' or 'eager'"
            )
        else:
            _check_number(target, str(name), value)


def _check_number(target: str, name: str, value: Any) -> None:
    """Raise an error if a setting is a number of layers, experts or labels that is too large.

    `value` is the value of the setting. If it is a list of numbers, their sum is checked.
    """
    numbers = value if isinstance(value, list) else [value]
    number = sum(each for each in numbers if isinstance(each, int))
    if name == "num_labels" and number > MOST_LABELS:
        raise CountError(
            f"{target}: {name}={value} is too large: pass a configuration with at most "
            f"{MOST_LABELS:,} labels"
        )
    if _REPEATED.search(name) and not _SIZE.search(name) and number > DEEPEST:
        raise CountError(
            f"{target}: {name}={value!r:.60} is too large: "
            f"pass a configuration with at most {DEEPEST:,} layers, blocks, stages or experts"
        )


def _batch(target: str, config: Any, model: Any, samples: int, tokens: int) -> Batch:
    """Return a batch for a model: inputs and labels with the sizes from the configuration.

    All elements are zero, except for placeholder tokens of images.
    """
    parameters = inspect.signature(model.forward).parameters
    vision = None
    if "pixel_values" in parameters:
        vision = getattr(config, "vision_config", None)
    batch: dict[str, Tensor | bool] = {}
    if vision is not None:
        batch["pixel_values"] = torch.zeros(samples, *_image(target, vision))
    elif model.main_input_name != "input_ids":
        shape = _shape(target, model.main_input_name, config, tokens)
        batch[model.main_input_name] = torch.zeros(samples, *shape)
    ids = _ids(config, vision, samples, tokens)
    if vision is not None or not batch:
        batch["input_ids"] = ids
    if "return_loss" in parameters:
        batch["return_loss"] = True
        return batch
    if "labels" not in parameters:
        return batch
    class_name = type(model).__name__
    if class_name.endswith(ONE_LABEL):
        batch["labels"] = torch.zeros(samples, dtype=torch.long)
    elif class_name.endswith(TOKEN_LABELS) or list(batch) == ["input_ids"]:
        batch["labels"] = ids
    return batch


def _ids(config: Any, vision: Any, samples: int, tokens: int) -> Tensor:
    """Return token ids for a number of samples. The ids of the text are zero.

    If the model also reads images, the placeholder tokens of an image come before the text.
    """
    length = min(tokens, getattr(config, "max_target_positions", None) or tokens)
    if vision is None:
        return torch.zeros(samples, length, dtype=torch.long)
    length = min(length, getattr(config.text_config, "max_position_embeddings", length))
    ids = torch.zeros(samples, length, dtype=torch.long)
    image_token = getattr(config, "image_token_id", None)
    if image_token is None:
        return ids
    patches = getattr(config, "image_seq_length", None)
    if not patches:
        patches = (vision.image_size // vision.patch_size) ** 2
    return torch.cat([torch.full((samples, patches), image_token), ids], 1)


def _shape(target: str, main: str, config: Any, tokens: int) -> tuple[int, ...]:
    """Return the shape of one sample of a model's main input: an image, a video or audio.

    `main` is the name of this input, such as `pixel_values`.
    """
    if main == "pixel_values":
        return _image(target, config)
    if main == "input_features" and hasattr(config, "num_mel_bins"):
        return config.num_mel_bins, 2 * config.max_source_positions
    if main == "input_values" and hasattr(config, "conv_stride"):
        return (tokens * prod(config.conv_stride),)
    if main == "input_values" and hasattr(config, "num_mel_bins"):
        return config.max_length, config.num_mel_bins
    raise CountError(
        f"{target}: the configuration does not specify the size of {main}: "
        "pass a function that builds the model and its batch"
    )


def _image(target: str, config: Any) -> tuple[int, ...]:
    """Return the shape of an image, [channels, height, width], or of a video with frames first."""
    size = getattr(config, "image_size", None) or _processor_size(target)
    if size is None:
        raise CountError(
            f"{target}: the image size is unknown, because the configuration has no image_size, "
            "and there is no preprocessor_config.json: "
            'add "image_size": [height, width] to the configuration'
        )
    if isinstance(size, int):
        size = (size, size)
    height, width = size
    image = (getattr(config, "num_channels", 3), height, width)
    return (config.num_frames, *image) if hasattr(config, "num_frames") else image


def _processor_size(target: str) -> tuple[int, int] | None:
    """Return the height and width of an image from `preprocessor_config.json`.

    Returns `None` if the file does not exist or has no size. If the file has limits for the edges
    instead of a size, the largest image is assumed.
    """
    folder = Path(target) if Path(target).is_dir() else Path(target).parent
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return None
    size: Any = json.loads(read(path)).get("size")
    if isinstance(size, Mapping):
        shortest = size.get("shortest_edge")
        return size.get("height", shortest), size.get("width", size.get("longest_edge", shortest))
    return None if size is None else (size, size)


def _config(target: str, *, remote_code: bool) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise CountError(
            f"{target}: building a model from its configuration needs the package transformers: "
            "install it with pip install transformers"
        ) from error
    name = target.removeprefix(BY_NAME)
    if not target.startswith(BY_NAME) and not Path(name).exists():
        raise CountError(
            f"{target}: no such file: pass a config.json, its folder, "
            f"or {BY_NAME}NAME for a model in the Hugging Face cache"
        )
    _check_file(target, Path(name))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.from_pretrained(
                name, local_files_only=True, trust_remote_code=remote_code
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "remote_code" in str(error):
            reason += "; the model has its own code: pass --trust-remote-code to run it"
        raise CountError(
            f"{target}: transformers cannot load this configuration from local files: {reason}"
        ) from error
    config.use_cache = False
    # Random skipping of layers is turned off, so the estimate is for the largest step.
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return config


def _check_file(target: str, path: Path) -> None:
    """Raise an error for a configuration file that transformers must not read.

    Pipes and devices are refused, because their content may never end. Huge files are refused, and
    so are files with a setting such as a million layers.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        return
    try:
        content = read(file)
    except OSError as error:
        raise CountError(f"{file}: {error.strerror}: pass a config.json, or its folder") from error
    # If the file is not JSON, transformers raises an error later.
    with suppress(ValueError, RecursionError):
        settings = json.loads(content)
        if isinstance(settings, dict):
            _check_settings(target, settings)


def _class(config: Any, *, remote_code: bool) -> Callable[[Any], Any]:
    import transformers

    for name in getattr(config, "architectures", None) or ():
        found: Any = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    autos: list[Any] = [getattr(transformers, f"AutoModelFor{task}") for task in AUTO]
    general = autos[0] if remote_code else transformers.AutoModel
    for auto in autos:
        if type(config) in auto._model_mapping:  # noqa: SLF001 - it has no public name
            general = auto
            break
    return partial(general.from_config, trust_remote_code=remote_code)
