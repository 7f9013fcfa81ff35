"""Accuracy of a network on labelled data, with its sample size and 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from psm_core.errors import DataError
from psm_core.network.data import Dataset, load_data, run_network
from psm_core.network.models import card_of

METRIC_VERSION = 1


@dataclass(frozen=True)
class Evaluation:
    """`correct` of `samples` labels predicted; `low` and `high` bound the accuracy at 95 %."""

    accuracy: float
    low: float
    high: float
    samples: int
    correct: int
    data: str

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def wilson(correct: int, samples: int) -> tuple[float, float]:
    """The 95 % score interval of a proportion (Wilson 1927).

    >>> low, high = wilson(8, 10)
    >>> round(low, 4), round(high, 4)
    (0.4902, 0.9433)
    """
    z = 1.959964  # the normal quantile of 97.5 %
    share = correct / samples
    centre = share + z * z / (2 * samples)
    spread = z * math.sqrt(share * (1 - share) / samples + z * z / (4 * samples * samples))
    scale = 1 + z * z / samples
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def default_data(model: nn.Module, source: str = "") -> Dataset | None:
    """The named data, or the default data of the model's card; None when there is neither."""
    name = source or card_of(model).data
    return load_data(name) if name else None


def evaluate(
    model: nn.Module,
    data: Dataset | str = "",
    on_batch: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Top-1 accuracy of a network on data (the default data of its card when none is named).

    Runs on the device of the model's parameters. `on_batch` receives the samples done and all of
    them; it cancels by raising.

    Raises:
        DataError: there is no data, or it does not fit the network.
    """
    dataset = default_data(model, data) if isinstance(data, str) else data
    if dataset is None:
        raise DataError("this model has no data of its own; name some with --data, such as file.npz")
    correct = 0

    def receive(logits: torch.Tensor, labels: torch.Tensor) -> None:
        nonlocal correct
        if not isinstance(logits, torch.Tensor) or logits.dim() != 2:
            raise DataError("the network gives no class scores; expected outputs (N, classes)")
        if bool(logits.isnan().any()):
            raise DataError("the network's outputs are not numbers (NaN); its weights are not sound")
        if int(labels.max()) >= logits.shape[1]:
            raise DataError(
                f"label {int(labels.max())} in '{dataset.source}' is beyond the network's "
                f"{logits.shape[1]} classes; expected 0 to {logits.shape[1] - 1}"
            )
        correct += int((logits.argmax(1).cpu() == labels).sum())

    run_network(model, dataset, receive, on_batch)
    samples = len(dataset)
    low, high = wilson(correct, samples)
    return Evaluation(correct / samples, low, high, samples, correct, dataset.source)
