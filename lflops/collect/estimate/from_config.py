"""A model by its configuration: the `config.json` of transformers, without weights and without a download."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lflops.errors import CountError

__all__ = ["BY_NAME", "FromConfig", "is_config"]

BY_NAME = "hf:"
"""Before the name of a model in transformers' cache."""


def is_config(target: str) -> bool:
    """Whether a target names a configuration, and no function."""
    return target.startswith(BY_NAME) or target.endswith(".json") or Path(target).is_dir()


@dataclass(frozen=True, kw_only=True)
class FromConfig:
    """What is made of a configuration."""

    target: str  # a `config.json`, the folder that has it, or `hf:` and a name in transformers' cache
    tokens: int = 512  # of each sample
    remote_code: bool = False  # whether Python code that comes with the configuration may run

    def builder(self) -> Callable[[int], tuple[nn.Module, Mapping[str, Tensor], Callable[[Any], Tensor]]]:
        """From a number of samples to the model in train mode, its batch, and the loss that the model computes."""
        config = self._config()
        kind = self._class(config)

        def build(samples: int) -> tuple[nn.Module, Mapping[str, Tensor], Callable[[Any], Tensor]]:
            model = kind(config).float().train()
            ids = torch.zeros(samples, self.tokens, dtype=torch.long)
            return model, {"input_ids": ids, "labels": ids}, lambda out: out.loss

        return build

    def _config(self) -> Any:
        try:
            from transformers import AutoConfig
        except ImportError as error:
            raise CountError(f"{self.target}: transformers is not installed, which builds models by their configuration") from error
        name = self.target.removeprefix(BY_NAME)
        if not self.target.startswith(BY_NAME) and not Path(name).exists():
            raise CountError(f"{self.target}: no such file: give a config.json, its folder, or {BY_NAME} and a name in transformers' cache")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=self.remote_code)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            hint = "; it brings its own code: allow that with --trust-remote-code" if "remote_code" in str(error) else ""
            raise CountError(f"{self.target}: transformers has no configuration of it here: {reason}{hint}") from error
        config.use_cache = False
        return config

    def _class(self, config: Any) -> Callable[[Any], Any]:
        """The class that the configuration names, else the causal language model of its kind."""
        import transformers

        for name in getattr(config, "architectures", None) or ():
            if (found := getattr(transformers, name, None)) is not None:
                return found  # type: ignore[no-any-return]
        general: Any = transformers.AutoModelForCausalLM
        return lambda config: general.from_config(config, trust_remote_code=self.remote_code)
