"""Stands in for torchvision, for scripts that read MNIST: random images, which need no download."""

from torchvision import datasets, transforms, utils

__all__ = ["datasets", "transforms", "utils"]
