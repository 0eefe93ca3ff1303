"""A model by its configuration: the `config.json` of transformers, without weights and without a download."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lflops.errors import CountError

__all__ = ["BY_NAME", "DTYPES", "FromConfig", "is_config"]

BY_NAME = "hf:"
"""Before the name of a model in transformers' cache."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHECKPOINTS = ("none", "full")
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def is_config(target: str) -> bool:
    """Whether a target names a configuration, and no function."""
    return target.startswith(BY_NAME) or target.endswith(".json") or Path(target).is_dir()


@dataclass(frozen=True, kw_only=True)
class FromConfig:
    """What is made of a configuration.

    Attributes:
        target: A `config.json`, the folder that has it, or `hf:` and a name in transformers' cache.
        tokens: Of each sample.
        dtype: Of the parameters, by torch's word.
        precision: `bf16-mixed` or `16-mixed` for autocast; `None` for none.
        checkpointing: `full` recomputes every layer in backward.
        remote_code: Whether Python code that comes with the configuration may run.
    """

    target: str
    tokens: int = 512
    dtype: str = "float32"
    precision: str | None = None
    checkpointing: str = "none"
    remote_code: bool = False

    def __post_init__(self) -> None:
        """Check the words.

        Raises:
            CountError: One of them is unknown.
        """
        for name, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("checkpointing", self.checkpointing, CHECKPOINTS),
            ("precision", self.precision, (None, *MIXED)),
        ):
            if value not in known:
                raise CountError(f"{name}={value!r}: give one of {', '.join(str(each) for each in known if each is not None)}")

    def builder(self) -> Callable[[int], tuple[nn.Module, Mapping[str, Tensor], Callable[[Any], Tensor]]]:
        """From a number of samples to the model in train mode, its batch, and the loss that the model computes.

        Raises:
            CountError: There is no such configuration, or transformers has no language model for it.
        """
        config = self._config()
        kind = self._class(config)

        def build(samples: int) -> tuple[nn.Module, Mapping[str, Tensor], Callable[[Any], Tensor]]:
            model = kind(config).to(DTYPES[self.dtype]).train()
            if self.checkpointing == "full":
                # Older versions of transformers have the second name alone, newer ones warn of it.
                enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
                enable()
            ids = torch.zeros(samples, self.tokens, dtype=torch.long)
            return model, {"input_ids": ids, "labels": ids}, lambda out: out.loss

        return build

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The context in which the model runs."""
        if self.precision is None:
            yield
            return
        with torch.autocast("cpu", MIXED[self.precision]):
            yield

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
