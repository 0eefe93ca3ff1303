"""Random images in place of the data sets."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


class MNIST(Dataset[Any]):
    """Grey images of 28 by 28 with a label of ten."""

    def __init__(
        self,
        root: str,  # noqa: ARG002
        *,
        train: bool = True,
        transform: Callable[[Tensor], Any] | None = None,
        download: bool = False,  # noqa: ARG002
    ) -> None:
        self.data = torch.randint(256, (6_000 if train else 1_000, 28, 28), dtype=torch.uint8)
        self.targets = torch.randint(10, (len(self.data),))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.data[index]
        return (image if self.transform is None else self.transform(image)), int(
            self.targets[index]
        )


class FakeData(MNIST):
    """Colours, of the size that is asked for."""

    def __init__(
        self, image_size: tuple[int, int, int], transform: Callable[[Tensor], Any]
    ) -> None:
        super().__init__("", train=False)
        self.data, self.transform = (
            torch.randint(256, (320, *image_size), dtype=torch.uint8),
            transform,
        )
