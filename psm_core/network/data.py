"""Labelled inputs by name: one string each."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from psm_core import demo
from psm_core.errors import DataError, PsmError, UnknownNameError, first_line
from psm_core.network.models import evaluating, tensor_bytes
from psm_core.progress import JobCancelled

BATCH = 250
BATCH_VALUES = 2**22
"""The most input values in a batch: a batch of large images is smaller."""
SOURCES = ("demo:test", "demo:train", "the path of a .npz file with arrays x and y")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs (N, …) and integer labels (N,). uint8 images are given to a network as [0, 1] floats."""

    source: str
    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def images(self) -> bool:
        """Whether a network gets floats (else whole numbers, such as tokens)."""
        return self.inputs.dtype == torch.uint8 or self.inputs.is_floating_point()

    @property
    def batch_size(self) -> int:
        """How many inputs a network runs at a time."""
        return max(1, min(BATCH, BATCH_VALUES // self.inputs[0].numel()))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the inputs and labels."""
        digest = hashlib.sha256()
        for tensor in (self.inputs, self.labels):
            digest.update(f"{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            digest.update(tensor_bytes(tensor))
        return digest.hexdigest()

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Floating-point inputs and labels, `size` at a time."""
        for start in range(0, len(self), size):
            inputs = self.inputs[start : start + size]
            floats = inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs
            yield floats, self.labels[start : start + size]


def load_data(source: str) -> Dataset:
    """The data of a source string.

    `demo:test` (2,000 Fashion-MNIST images no demonstration network was trained on), `demo:train`
    (2,000 they were trained on), or a `.npz` file with inputs `x` (N, …) and labels `y` (N,).

    Raises:
        UnknownNameError: no such demonstration data.
        DataError: the file is missing, damaged, or does not hold matching x and y.
    """
    prefix, _, name = source.partition(":")
    if prefix == "demo":
        if name not in ("test", "train"):
            raise UnknownNameError("demonstration data", name, ("test", "train"))
        images, labels = demo.load_images(name)
        return Dataset(source, images, labels)
    if not os.path.isfile(source):
        raise DataError(f"no data at '{source}'; expected {', '.join(SOURCES)}")
    try:
        with np.load(source, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in ("x", "y")}
    except Exception as error:  # a damaged archive can raise almost anything
        raise DataError(
            f"'{source}' cannot be read ({first_line(error)}); expected a .npz with x and y"
        ) from None
    if not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise DataError(f"'{source}' holds something else than arrays; expected a .npz with x and y")
    return _checked(source, arrays["x"], arrays["y"])


def _checked(source: str, x: np.ndarray, y: np.ndarray) -> Dataset:
    """A dataset of arrays that fit each other."""
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y) or x.size == 0:
        raise DataError(
            f"'{source}' holds x of shape {x.shape} and y of shape {y.shape}; expected x (N, …) and "
            "y (N,) with the same N ≥ 1"
        )
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"'{source}' holds labels of type {y.dtype}; expected class numbers from 0")
    if y.min() < 0 or y.max() >= 2**31:
        raise DataError(f"'{source}' holds labels {y.min()} to {y.max()}; expected class numbers from 0")
    if np.issubdtype(x.dtype, np.floating):
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
    is_tokens = np.issubdtype(x.dtype, np.integer) and x.dtype != np.uint8 and x.ndim == 2
    if is_tokens:
        x = x.astype(np.int64)
    if not is_tokens and x.dtype != np.uint8 and not (x.dtype == np.float32 and np.isfinite(x).all()):
        raise DataError(f"'{source}' holds x of type {x.dtype}; expected uint8, tokens or finite floats")
    return Dataset(source, torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)))


def run_network(
    model: nn.Module,
    dataset: Dataset,
    receive: Callable[[Tensor, Tensor], None] | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> None:
    """Pass all inputs through a network in evaluation mode, on its device; it is left as it was.

    `receive` gets the outputs and labels of each batch. `on_batch` gets the samples done and all of
    them; it cancels by raising.

    Raises:
        DataError: the network cannot run these inputs.
    """
    first = next(iter(model.parameters()))
    done = 0
    try:
        with evaluating(model), torch.no_grad():
            for inputs, labels in dataset.batches(dataset.batch_size):
                moved = inputs.to(first.device)
                outputs = model(moved.to(first.dtype) if moved.is_floating_point() else moved)
                if receive is not None:
                    receive(outputs, labels)
                done += len(labels)
                if on_batch is not None:
                    on_batch(done, len(dataset))
    except (PsmError, JobCancelled):
        raise
    except Exception as error:  # whatever the model's own code raises
        raise DataError(
            f"the network cannot run inputs of shape {tuple(dataset.inputs.shape[1:])} from "
            f"'{dataset.source}': {first_line(error)}"
        ) from error
