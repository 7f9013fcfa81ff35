"""Training of the demonstration networks on the full Fashion-MNIST training set.

The schedule is fixed and the last weights are kept: no choice looks at the test images.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from psm_core.demo.data import Images

_CROP_PADDING = 2
_FLIP_PROBABILITY = 0.5
_EVALUATION_BATCH = 500


@dataclass(frozen=True)
class Recipe:
    """How one network is trained, with a one-cycle learning rate.

    Attributes:
        epochs: passes over the training set.
        batch: images a step.
        learning_rate: the peak of the cycle.
        weight_decay: for SGD, the L2 penalty; for AdamW, the decoupled decay.
        optimizer: "sgd" (with Nesterov momentum 0.9) or "adamw".
        crop: also shift each image at random by up to two pixels; flips happen in any case.
        label_smoothing: share of the target spread over all classes.
    """

    epochs: int
    batch: int
    learning_rate: float
    weight_decay: float
    optimizer: str
    crop: bool
    label_smoothing: float


RECIPES: dict[str, Recipe] = {
    "fashion-cnn": Recipe(
        epochs=6,
        batch=128,
        learning_rate=0.06,
        weight_decay=5e-4,
        optimizer="sgd",
        crop=True,
        label_smoothing=0.05,
    ),
    "fashion-mlp": Recipe(
        epochs=30,
        batch=256,
        learning_rate=2e-3,
        weight_decay=0.02,
        optimizer="adamw",
        crop=False,
        label_smoothing=0.05,
    ),
}
"""The recipe of each network of `psm_core.demo.NETWORKS`."""


@dataclass(frozen=True)
class Epoch:
    """Report of an epoch: its number from 1, how many there are, its mean loss, its seconds."""

    number: int
    total: int
    loss: float
    seconds: float


def to_floats(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 images as the float32 images in [0, 1] that the networks take; the shape stays."""
    return pixels.float() / 255


def augment(pixels: torch.Tensor, crop: bool, generator: torch.Generator) -> torch.Tensor:
    """Flip each image left to right with probability 1/2; with ``crop``, shift it by up to 2 px.

    Args:
        pixels: (N, 1, H, W), any type; what a shift moves in from outside is 0.
        crop: whether to shift.
        generator: source of the randomness.

    Returns:
        Images of the same shape and type.
    """
    count, _, height, width = pixels.shape
    if crop:
        padded = functional.pad(pixels, (_CROP_PADDING,) * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        top, left = torch.randint(2 * _CROP_PADDING + 1, (2, count), generator=generator)
        pixels = windows[torch.arange(count), :, top, left]
    flipped = torch.rand(count, 1, 1, 1, generator=generator) < _FLIP_PROBABILITY
    return torch.where(flipped, pixels.flip(-1), pixels)


def train(
    network: nn.Module, images: Images, recipe: Recipe, seed: int, on_epoch: Callable[[Epoch], None]
) -> None:
    """Train ``network`` in place and leave it in evaluation mode.

    The result is a function of the initial weights, the images, the recipe and the seed, on one
    machine with one version of torch and one number of threads.

    Args:
        network: takes float images (N, 1, 28, 28) in [0, 1] and returns logits (N, 10).
        images: the training set.
        recipe: the schedule.
        seed: seeds the order, the augmentation and the dropout.
        on_epoch: called after each epoch.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    network.to(memory_format=torch.channels_last)
    optimizer = _optimizer(network, recipe)
    steps = -(-len(images) // recipe.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        recipe.learning_rate,
        total_steps=steps * recipe.epochs,
        pct_start=0.25,
        cycle_momentum=False,
    )
    for number in range(1, recipe.epochs + 1):
        network.train()
        start, loss_sum = time.perf_counter(), 0.0
        for indices in torch.split(torch.randperm(len(images), generator=generator), recipe.batch):
            batch = images.take(indices)
            inputs = to_floats(augment(batch.pixels, recipe.crop, generator))
            loss = functional.cross_entropy(
                network(inputs), batch.labels, label_smoothing=recipe.label_smoothing
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            loss_sum += loss.item() * len(indices)
        on_epoch(Epoch(number, recipe.epochs, loss_sum / len(images), time.perf_counter() - start))
    network.to(memory_format=torch.contiguous_format)
    network.eval()


def _optimizer(network: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer, which decays weights but no bias or normalisation parameter."""
    parameters = list(network.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=recipe.learning_rate)


@torch.no_grad()
def count_correct(network: nn.Module, images: Images) -> int:
    """How many of the images the network, in its current mode, classifies correctly."""
    correct = 0
    for indices in torch.split(torch.arange(len(images)), _EVALUATION_BATCH):
        batch = images.take(indices)
        predictions = network(to_floats(batch.pixels)).argmax(dim=1)
        correct += int((predictions == batch.labels).sum())
    return correct
