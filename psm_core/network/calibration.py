"""Second moments of what layers receive: the metric in which an error of a weight is one of its outputs.

A layer computes y = Wx, where a convolution's x is a patch of its input. Over inputs with second moment
C = E[xxᵀ], an approximation Ŵ changes the outputs by E‖Wx − Ŵx‖² = tr((W − Ŵ) C (W − Ŵ)ᵀ).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from psm_core.device import choose_device
from psm_core.errors import CalibrationError, ParameterError
from psm_core.network.data import Dataset, load_data, run_network
from psm_core.network.layers import compressible_layers, get_layer
from psm_core.network.models import tensors_hash
from psm_core.network.modules import ConvGeometry

DAMPING = 0.01
"""What a fit adds to the diagonal of C, in units of its mean. Another value changes results: raise the
versions of the methods with it."""

LARGEST = 16_384
"""The most inputs of a layer: their second moment takes 2 GB."""

_BLOCK = 2**22  # input values multiplied at a time
_STRIPE = 256  # rows of C computed at a time


@dataclass(frozen=True, eq=False)
class Calibration:
    """C = XᵀX / N of the N inputs (rows of X) that a layer of n inputs received.

    `second_moment` (n, n) is float64, on the CPU; a convolution's n = in·kh·kw inputs are in the order
    of its weight's entries. `samples` is N.

    Raises:
        ParameterError: the second moment is of another type or shape, not finite, or cannot be one.
    """

    second_moment: Tensor
    samples: int

    def __post_init__(self) -> None:
        moment, given = self.second_moment, type(self.second_moment).__name__
        if isinstance(moment, Tensor):
            given = f"{moment.dtype} of shape {tuple(moment.shape)} on {moment.device}"
            square = moment.dim() == 2 and moment.shape[0] == moment.shape[1] > 0
            if square and moment.dtype == torch.float64 and moment.is_cpu and bool(moment.isfinite().all()):
                self._check_signs()
                return
        raise ParameterError(f"expected finite second moments (n, n), float64 on the CPU, got {given}")

    def _check_signs(self) -> None:
        """Raise ParameterError unless C can be XᵀX / N: symmetric, and no mean square below zero."""
        scale = float(self.second_moment.abs().max())
        skew = float((self.second_moment - self.second_moment.mT).abs().max())
        least = float(self.second_moment.diagonal().min())
        if skew > 1e-6 * scale or least < 0:
            raise ParameterError(
                f"expected a second moment XᵀX / N, which is symmetric with a diagonal of at least 0; got a "
                f"difference of {skew:.2g} to its transpose and a diagonal down to {least:.2g}"
            )

    @property
    def size(self) -> int:
        """The inputs of the layer, n."""
        return self.second_moment.shape[0]

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the second moment's bytes."""
        return tensors_hash({"second_moment": self.second_moment})

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ParameterError unless these are statistics of a weight of this shape."""
        inputs = math.prod(shape[1:])
        if inputs != self.size:
            raise ParameterError(
                f"calibration statistics of a layer with {self.size:,} inputs do not fit a weight of "
                f"shape {'×'.join(map(str, shape))}, which has {inputs:,}; calibrate this layer itself"
            )

    def regularised(self) -> Calibration:
        """C for a fit: mean 1 on the diagonal, and safely positive definite.

        (C / c + εI) / (1 + ε) with c = tr C / n and ε = `DAMPING`. Inputs that were always zero, or fewer
        samples than inputs, leave C singular, and weights that no sample tests would be free to take
        any value. The identity where all inputs were zero.
        """
        mean = self.second_moment.diagonal().mean()
        if mean == 0:
            return Calibration(torch.eye(self.size, dtype=torch.float64), self.samples)
        moment = self.second_moment / mean
        moment.diagonal().add_(DAMPING)
        return Calibration(moment.div_(1 + DAMPING), self.samples)

    def norm(self, matrix: Tensor) -> float:
        """‖A C^½‖_F = tr(A C Aᵀ)^½ of A (out, n): the root mean square of the outputs Ax, in float64."""
        rows = matrix.detach().reshape(matrix.shape[0], -1).to("cpu", torch.float64)
        square = float(((rows @ self.second_moment) * rows).sum())
        return 0.0 if square < 0 else math.sqrt(square)  # NaN stays NaN


def calibrate(
    model: nn.Module,
    data: Dataset | str,
    layers: Iterable[str] | None = None,
    device: str = "auto",
    on_batch: Callable[[int, int], None] | None = None,
) -> dict[str, Calibration]:
    """Second moments of the inputs of layers, from one pass of the data through the network.

    `data` is a dataset or the name of one, `layers` the names of compressible layers: by default all
    that are called. The network runs in evaluation mode, on `device`, and is left as it was. Blocks of
    inputs are multiplied in their own precision (float32 at the least) and added in float64; patches of
    a convolution are laid out for one block at a time. `on_batch` receives the samples done and all of
    them; it cancels by raising.

    Raises:
        UnknownNameError: the model has no layer of a name, or there is no such demonstration data.
        LayerError: a layer cannot be compressed.
        CalibrationError: a named layer is never called, or receives NaN or infinite values, or has
            more than `LARGEST` inputs.
        DataError: the data cannot be read, or does not fit the network.
    """
    dataset = load_data(data) if isinstance(data, str) else data
    named = layers is not None
    names = list(compressible_layers(model) if layers is None else dict.fromkeys(layers))
    moments = {name: _Moment(name, get_layer(model, name)) for name in names}
    place = choose_device(device, next(iter(model.parameters())))
    if next(iter(model.parameters())).device.type != place.type:
        model = copy.deepcopy(model).to(place)
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(moment.receive, with_kwargs=True)
        for name, moment in moments.items()
    ]
    try:
        run_network(model, dataset, on_batch=on_batch)
    finally:
        for hook in hooks:
            hook.remove()
    idle = [name for name, moment in moments.items() if not moment.samples]
    if idle and (named or len(idle) == len(names)):
        raise CalibrationError(
            f"layer '{idle[0]}' is never called on '{dataset.source}', so that nothing is known of its "
            "inputs; leave it out, or fit it without calibration"
        )
    return {name: moment.calibration() for name, moment in moments.items() if moment.samples}


class _Moment:
    """The running sum of xxᵀ of one layer, its lower triangle only."""

    def __init__(self, name: str, layer: nn.Linear | nn.Conv2d) -> None:
        self.name, self.samples = name, 0
        self.size = layer.weight[0].numel()
        self.geometry = ConvGeometry.of(layer) if isinstance(layer, nn.Conv2d) else None
        if self.size > LARGEST:
            raise CalibrationError(
                f"layer '{name}' has {self.size:,} inputs, their second moment would take "
                f"{8e-9 * self.size**2:.1f} GB; expected at most {LARGEST:,}: fit it without calibration"
            )
        self.sum: Tensor | None = None

    def receive(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the inputs of one call of the layer."""
        x: Tensor = (args[0] if args else kwargs["input"]).detach()
        if not bool(x.isfinite().all()):
            raise self.unsound("NaN or infinite values")
        if self.sum is None:
            # MPS has no float64.
            place = "cpu" if x.device.type == "mps" else x.device
            self.sum = torch.zeros(self.size, self.size, dtype=torch.float64, device=place)
        for block in self.blocks(x if x.dtype == torch.float64 else x.float()):
            self.samples += block.shape[1]
            for start in range(0, self.size, _STRIPE):
                part = block[start:] @ block[start : start + _STRIPE].mT
                self.sum[start:, start : start + _STRIPE] += part.to(self.sum)

    def blocks(self, x: Tensor) -> Iterator[Tensor]:
        """The inputs as columns (n, rows), a bounded number at a time."""
        if self.geometry is None:
            rows = x.reshape(-1, self.size)
            yield from (block.mT for block in torch.split(rows, max(1, _BLOCK // self.size)))
            return
        geometry, (down, right) = self.geometry, self.geometry.stride
        padded = geometry.pad(x if x.dim() == 4 else x.unsqueeze(0)).transpose(0, 1)
        tall, wide = (d * (k - 1) for k, d in zip(geometry.kernel_size, geometry.dilation, strict=True))
        height = (padded.shape[2] - tall - 1) // down + 1
        width = (padded.shape[3] - wide - 1) // right + 1
        lines = max(1, _BLOCK // (self.size * width))  # of outputs in a block
        for images in torch.split(padded, max(1, lines // height), dim=1):
            for top in range(0, height, lines):
                last = min(top + lines, height) - 1
                strip = images[:, :, top * down : last * down + tall + 1].contiguous()
                seen = [
                    strip[:, :, y : strip.shape[2] - tall + y : down, z : strip.shape[3] - wide + z : right]
                    for y in range(0, tall + 1, geometry.dilation[0])
                    for z in range(0, wide + 1, geometry.dilation[1])
                ]
                yield torch.stack(seen, dim=1).reshape(self.size, -1)

    def calibration(self) -> Calibration:
        """What was summed, as a mean; it ends here."""
        assert self.sum is not None
        mean = self.sum.cpu().tril_().div_(self.samples)
        if not bool(mean.isfinite().all()):
            raise self.unsound("values that are too large to be squared")
        mean += mean.tril(-1).mT
        return Calibration(mean, self.samples)

    def unsound(self, values: str) -> CalibrationError:
        """The error for inputs without a second moment."""
        return CalibrationError(
            f"layer '{self.name}' receives {values}; repair the network's weights or the data, or fit "
            "without calibration"
        )
