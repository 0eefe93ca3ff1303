"""Export `FlopsCallback`, the callback for the Trainer of transformers, under a public name."""

from lflops.integrations.huggingface import FlopsCallback

__all__ = ["FlopsCallback"]
