"""AlexNet, a model that many users try first."""

import torch
from torch import Tensor, nn


class AlexNet(nn.Module):
    """As torchvision has it, arxiv.org/abs/1404.5997.

    `width` divides its channels, and 1 is the real one.
    """

    def __init__(self, width: int = 1, classes: int = 1000) -> None:
        super().__init__()
        sizes = [64 // width, 192 // width, 384 // width, 256 // width, 256 // width]
        kernels, pooled = [(11, 4, 2), (5, 1, 2), (3, 1, 1), (3, 1, 1), (3, 1, 1)], {0, 1, 4}
        layers: list[nn.Module] = []
        for index, (before, after, (kernel, stride, padding)) in enumerate(
            zip([3, *sizes], sizes, kernels, strict=False)
        ):
            layers += [nn.Conv2d(before, after, kernel, stride, padding), nn.ReLU(inplace=True)]
            layers += [nn.MaxPool2d(3, 2)] if index in pooled else []
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
