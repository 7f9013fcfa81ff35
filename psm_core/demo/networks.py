"""The two demonstration architectures, written with nothing but torch.

Both take images of Fashion-MNIST as floats in [0, 1] of shape (N, 1, 28, 28) and return logits of
shape (N, 10). The normalisation by the data set's mean and deviation happens inside, so a caller
never needs it.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

INPUT_SHAPE = (1, 28, 28)
"""Shape of one image: channels, height, width."""

PIXEL_MEAN = 0.2860
"""Mean of all pixels of the 60,000 training images, on the scale [0, 1]."""

PIXEL_STD = 0.3530
"""Standard deviation of all pixels of the 60,000 training images, on the scale [0, 1]."""

_CLASS_COUNT = 10


def normalise(images: torch.Tensor) -> torch.Tensor:
    """Shift and scale images from [0, 1] to about zero mean and unit deviation; the shape stays."""
    return (images - PIXEL_MEAN) / PIXEL_STD


class FashionCNN(nn.Module):
    """A small VGG: six 3x3 convolutions in three stages, then two linear layers (1.2 M parameters).

    Each stage has two blocks of convolution, batch normalisation and ReLU, and ends with a 2x2 max
    pooling, so the feature maps go 28 -> 14 -> 7 -> 3 while the channels go through ``widths``.

    Args:
        widths: channels of the three stages.
        hidden: neurons of ``classifier.fc1``.
        dropout: probability of dropping a hidden neuron, in training mode only.
    """

    def __init__(
        self, widths: tuple[int, int, int] = (32, 64, 128), hidden: int = 768, dropout: float = 0.3
    ) -> None:
        super().__init__()
        blocks: OrderedDict[str, nn.Module] = OrderedDict()
        channels, index = INPUT_SHAPE[0], 0
        for stage, width in enumerate(widths, start=1):
            for _ in range(2):
                index += 1
                blocks[f"conv{index}"] = nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False)
                blocks[f"bn{index}"] = nn.BatchNorm2d(width)
                blocks[f"relu{index}"] = nn.ReLU()
                channels = width
            blocks[f"pool{stage}"] = nn.MaxPool2d(2)
        side = INPUT_SHAPE[1] // 2 ** len(widths)
        self.features = nn.Sequential(blocks)
        self.classifier = nn.Sequential(
            OrderedDict(
                fc1=nn.Linear(channels * side * side, hidden),
                relu=nn.ReLU(),
                dropout=nn.Dropout(dropout),
                fc2=nn.Linear(hidden, _CLASS_COUNT),
            )
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (N, 10) of float images (N, 1, 28, 28) in [0, 1]."""
        maps: torch.Tensor = self.features(normalise(images))
        logits: torch.Tensor = self.classifier(maps.flatten(1))
        return logits


class FashionMLP(nn.Module):
    """A perceptron 784 -> hidden -> hidden -> 10 with ReLU (0.67 M parameters).

    Args:
        hidden: neurons of each of the two hidden layers.
        dropout: probability of dropping a hidden neuron, in training mode only.
    """

    def __init__(self, hidden: int = 512, dropout: float = 0.2) -> None:
        super().__init__()
        channels, height, width = INPUT_SHAPE
        self.fc1 = nn.Linear(channels * height * width, hidden)
        self.relu1 = nn.ReLU()
        self.dropout1 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, hidden)
        self.relu2 = nn.ReLU()
        self.dropout2 = nn.Dropout(dropout)
        self.fc3 = nn.Linear(hidden, _CLASS_COUNT)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (N, 10) of float images (N, 1, 28, 28) in [0, 1]."""
        hidden = self.dropout1(self.relu1(self.fc1(normalise(images).flatten(1))))
        hidden = self.dropout2(self.relu2(self.fc2(hidden)))
        logits: torch.Tensor = self.fc3(hidden)
        return logits


def fashion_cnn() -> FashionCNN:
    """The convolutional demonstration network, with fresh random weights."""
    return FashionCNN()


def fashion_mlp() -> FashionMLP:
    """The fully connected demonstration network, with fresh random weights."""
    return FashionMLP()
