"""Two small trained networks and 4,000 images of Fashion-MNIST, shipped with the library.

They let every example, test and page run at once and offline. ``python -m psm_core.demo`` trains
the networks again and writes all the shipped files.

>>> from psm_core import demo
>>> network = demo.load_network("fashion-mlp")
>>> images, labels = demo.load_images("test")
>>> logits = network(images[:4].float() / 255)
>>> tuple(logits.shape)
(4, 10)
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import safetensors.torch
import torch
from torch import nn

from psm_core.demo.data import CLASSES
from psm_core.demo.files import (
    SLICE_NAME,
    DemoError,
    network_entry,
    read_checked,
    read_metadata,
    weights_name,
)
from psm_core.demo.networks import INPUT_SHAPE, fashion_cnn, fashion_mlp

__all__ = ["CLASSES", "NETWORKS", "DemoError", "DemoNetwork", "load_images", "load_network"]


@dataclass(frozen=True)
class DemoNetwork:
    """One demonstration network.

    Attributes:
        name: its name, which is also the stem of its weights' file.
        title: a short description for people.
        build: makes the module with fresh random weights.
        input_shape: shape of one input without the batch: channels, height, width.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, int, int] = INPUT_SHAPE

    @property
    def test_accuracy(self) -> float:
        """Share of the 10,000 test images that the shipped weights classify correctly."""
        return self._accuracy("test")

    @property
    def slice_accuracy(self) -> float:
        """The same share of the 2,000 test images of `load_images`."""
        return self._accuracy("slice")

    def _accuracy(self, images: str) -> float:
        return float(network_entry(self.name)[images]["accuracy"])


NETWORKS: dict[str, DemoNetwork] = {
    network.name: network
    for network in (
        DemoNetwork("fashion-cnn", "VGG-style network for Fashion-MNIST", fashion_cnn),
        DemoNetwork("fashion-mlp", "Perceptron with two hidden layers for Fashion-MNIST", fashion_mlp),
    )
}
"""The demonstration networks by name."""


def load_network(name: str, weights: bool = True) -> nn.Module:
    """A demonstration network in evaluation mode, on the CPU, in float32.

    Args:
        name: a key of `NETWORKS`.
        weights: load the shipped trained weights; False leaves the random initial ones.

    Raises:
        DemoError: the name is unknown, or the shipped weights are missing or damaged; it is a
            ValueError.
    """
    if name not in NETWORKS:
        raise DemoError(
            f"no demonstration network is called {name!r}; the known ones are {', '.join(NETWORKS)}"
        )
    network = NETWORKS[name].build().eval()
    if weights:
        expected = network_entry(name)["sha256"]
        network.load_state_dict(safetensors.torch.load(read_checked(weights_name(name), expected)))
    return network


def load_images(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The 2,000 shipped images of one split, 200 of each class, in the original order.

    The images of "test" are from the official test set, on which the networks were never trained;
    those of "train" are from the training set and serve calibration and fine-tuning.

    Args:
        split: "test" or "train".

    Returns:
        Images, uint8, (2000, 1, 28, 28), and labels, int64, (2000,), which index `CLASSES`.
        The networks take ``images.float() / 255``.

    Raises:
        DemoError: another split, or the shipped file is missing or damaged; it is a ValueError.
    """
    if split not in ("test", "train"):
        raise DemoError(f"no split is called {split!r}; the known ones are test, train")
    content = read_checked(SLICE_NAME, read_metadata()["data"]["sha256"])
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    return torch.from_numpy(images), torch.from_numpy(labels)
