"""The public place of `FlopsCallback`, the callback for the Trainer of transformers."""

from lflops.integrations.huggingface import FlopsCallback

__all__ = ["FlopsCallback"]
