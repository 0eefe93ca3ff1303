"""The transforms that the scripts name."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Compose:
    """One after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for each in self.transforms:
            image = each(image)
        return image


class ToTensor:
    """Numbers from 0 to 1, with a dimension of colours."""

    def __call__(self, image: Tensor) -> Tensor:
        return torch.atleast_3d(image).div(255).view(-1, *image.shape[-2:])


class Normalize:
    """By mean and deviation."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(each).view(-1, 1, 1) for each in (mean, std))

    def __call__(self, image: Tensor) -> Tensor:
        return (image - self.mean) / self.std
