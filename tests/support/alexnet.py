"""AlexNet, a model that many users try first."""

import torch
from torch import Tensor, nn


class AlexNet(nn.Module):
    """The AlexNet of torchvision, after arxiv.org/abs/1404.5997.

    `width` divides the number of channels of every layer. With 1 it is the original model.
    """

    def __init__(self, width: int = 1, classes: int = 1000) -> None:
        super().__init__()
        sizes = [64 // width, 192 // width, 384 // width, 256 // width, 256 // width]
        # Kernel size, stride and padding of each convolution.
        kernels = [(11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1)]
        pooled = {0, 1, 4}
        layers: list[nn.Module] = []
        channels = 3
        for index, (size, kernel) in enumerate(zip(sizes, kernels, strict=True)):
            layers.append(nn.Conv2d(channels, size, *kernel))
            layers.append(nn.ReLU(inplace=True))
            if index in pooled:
                layers.append(nn.MaxPool2d(3, 2))
            channels = size
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        deep = 4096 // width
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(sizes[-1] * 36, deep),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(deep, deep),
            nn.ReLU(inplace=True),
            nn.Linear(deep, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
