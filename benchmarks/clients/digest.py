"""Compute digests of weights, losses and random states, which are equal if every bit is equal."""

import hashlib
import random
from collections.abc import Mapping
from typing import Any


def digest(value: Any) -> str:
    """A digest of tensors, numbers and texts in dictionaries and lists."""
    import torch

    sha = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            plain = part.detach().cpu().contiguous()
            sha.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
            sha.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, Mapping):
            for key in sorted(part, key=str):
                sha.update(str(key).encode())
                add(part[key])
        elif isinstance(part, (list, tuple)):
            sha.update(str(len(part)).encode())
            for each in part:
                add(each)
        else:
            sha.update(repr(part).encode())

    add(value)
    return sha.hexdigest()[:16]


def digest_of_random_states() -> str:
    """A digest of the states of the random generators of Python, numpy and torch."""
    import numpy as np
    import torch

    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    numpy_state = states[2]
    return digest(
        [states[0], states[1], [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]]]
    )
