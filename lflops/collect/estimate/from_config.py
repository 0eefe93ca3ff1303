"""A model by its configuration: the `config.json` of transformers, without weights and without a download."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lflops.errors import CountError

BY_NAME = "hf:"  # before the name of a model in transformers' cache


def is_config(target: str) -> bool:
    """Whether a target names a configuration, and no function."""
    return target.startswith(BY_NAME) or target.endswith(".json") or Path(target).is_dir()


Builder = Callable[[int], tuple[nn.Module, Mapping[str, Tensor], Callable[[Any], Tensor]]]
"""From a number of samples to a model in train mode, its batch, and the loss that the model computes."""


def builder_of(target: str, *, tokens: int = 512, remote_code: bool = False) -> Builder:
    """What builds the model of a `config.json`, of the folder that has it, or of `hf:` and a name in transformers' cache.

    Each sample has so many tokens. Python code that comes with the configuration runs only if `remote_code` allows it.
    """
    config = _config(target, remote_code=remote_code)
    kind = _class(config, remote_code=remote_code)

    def build(samples: int) -> tuple[nn.Module, Mapping[str, Tensor], Callable[[Any], Tensor]]:
        model = kind(config).float().train()
        ids = torch.zeros(samples, tokens, dtype=torch.long)
        return model, {"input_ids": ids, "labels": ids}, lambda out: out.loss

    return build


def _config(target: str, *, remote_code: bool) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise CountError(f"{target}: transformers is not installed, which builds models by their configuration") from error
    name = target.removeprefix(BY_NAME)
    if not target.startswith(BY_NAME) and not Path(name).exists():
        raise CountError(f"{target}: no such file: give a config.json, its folder, or {BY_NAME} and a name in transformers' cache")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = "; it brings its own code: allow that with --trust-remote-code" if "remote_code" in str(error) else ""
        raise CountError(f"{target}: transformers has no configuration of it here: {reason}{hint}") from error
    config.use_cache = False
    return config


def _class(config: Any, *, remote_code: bool) -> Callable[[Any], Any]:
    import transformers

    for name in getattr(config, "architectures", None) or ():
        if (found := getattr(transformers, name, None)) is not None:
            return found  # type: ignore[no-any-return]
    general: Any = transformers.AutoModelForCausalLM
    return lambda config: general.from_config(config, trust_remote_code=remote_code)
