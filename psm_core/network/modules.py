"""The compressed layer: a Linear or Conv2d that stores only factors and computes with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from psm_core.errors import LayerError
from psm_core.sparse import SparseMatrix

if TYPE_CHECKING:
    from psm_core.factorization import Factor, Factorization


@dataclass(frozen=True)
class ConvGeometry:
    """How a Conv2d walks over its input: everything about it but the weight and the bias."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    padding_mode: str
    border: tuple[int, ...]

    @classmethod
    def of(cls, layer: nn.Conv2d) -> ConvGeometry:
        padding = layer.padding if isinstance(layer.padding, str) else tuple(layer.padding)
        return cls(
            tuple(layer.kernel_size),
            tuple(layer.stride),
            padding,
            tuple(layer.dilation),
            layer.padding_mode,
            tuple(layer._reversed_padding_repeated_twice),
        )

    @property
    def pointwise(self) -> bool:
        """Whether each output pixel sees one input pixel: a 1×1 kernel without padding."""
        return self.kernel_size == (1, 1) and not any(self.border)

    def subsample(self, x: Tensor) -> Tensor:
        """What a 1×1 convolution with this stride reads of x."""
        return x[..., :: self.stride[0], :: self.stride[1]]

    def pad(self, x: Tensor) -> Tensor:
        """x with its border filled as the padding mode says."""
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, self.border, mode=mode) if any(self.border) else x

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        """The convolution of x with one dense kernel."""
        if self.padding_mode != "zeros":
            return F.conv2d(self.pad(x), kernel, None, self.stride, 0, self.dilation)
        padding = self.padding if isinstance(self.padding, str) else list(self.padding)
        return F.conv2d(x, kernel, None, self.stride, padding, self.dilation)


def mix_channels(factor: Factor, x: Tensor) -> Tensor:
    """A (rows, channels) factor applied to the channels of x (batch, channels, h, w)."""
    if isinstance(factor, SparseMatrix):
        batch, channels, height, width = x.shape
        mixed = factor.matmul(x.transpose(0, 1).reshape(channels, -1))
        return mixed.reshape(factor.shape[0], batch, height, width).transpose(0, 1)
    return F.conv2d(x, factor[:, :, None, None])


def check_layer(layer: nn.Module) -> None:
    """Raise LayerError with the reason when a layer's weight cannot be replaced by factors."""
    if reason := why_not(layer):
        raise LayerError(f"{type(layer).__name__} cannot be compressed: {reason}")


def why_not(layer: nn.Module) -> str:
    """The reason why a single layer cannot be compressed, or an empty string."""
    if isinstance(layer, CompressedLayer):
        return "it is compressed already"
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        return f"{type(layer).__name__} is neither Linear nor Conv2d"
    if nn.utils.parametrize.is_parametrized(layer):
        return "its weight is parametrized; remove the parametrization first"
    if "weight" not in layer._parameters:
        origin = ", ".join(name for name in layer._parameters if name != "bias")
        return f"its weight is computed from {origin}; make that permanent first"
    if isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels > 1:
        return f"depthwise convolution: each of its {layer.groups} channels has a kernel of its own"
    if isinstance(layer, nn.Conv2d) and layer.groups > 1:
        return f"grouped convolution (groups={layer.groups}): only groups=1 is supported"
    if nn.parameter.is_lazy(layer.weight):
        return "its shape is not known before the first forward pass"
    if not layer.weight.is_floating_point():
        return f"its weight is of type {layer.weight.dtype}, not floating point"
    if layer.weight.numel() == 0:
        return f"its weight is empty, shape {tuple(layer.weight.shape)}"
    return ""


class CompressedLayer(nn.Module):
    """A Linear or Conv2d whose weight is given by the factors of a `Factorization`.

    Dense factors are the parameters `factor_i`; sparse ones are the parameter `values_i` with the
    index buffers `columns_i` and `row_starts_i`, so gradients reach exactly what is stored.
    """

    def __init__(self, factorization: Factorization, layer: nn.Module) -> None:
        super().__init__()
        check_layer(layer)
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        if tuple(layer.weight.shape) != factorization.shape:
            raise LayerError(
                f"factors of a weight of shape {factorization.shape} cannot replace a layer of shape "
                f"{tuple(layer.weight.shape)}; fit this layer's own weight"
            )
        self.family = type(factorization)
        self.method = factorization.method
        self.weight_shape = factorization.shape
        self.history = factorization.history
        self.note = factorization.note
        self.geometry = ConvGeometry.of(layer) if isinstance(layer, nn.Conv2d) else None
        self.factor_shapes = [tuple(factor.shape) for factor in factorization.factors]
        moved = factorization.to(layer.weight.device, layer.weight.dtype)
        trainable = layer.weight.requires_grad
        for i, factor in enumerate(moved.factors):
            if isinstance(factor, SparseMatrix):
                self.register_parameter(f"values_{i}", nn.Parameter(factor.values.clone(), trainable))
                self.register_buffer(f"columns_{i}", factor.columns)
                self.register_buffer(f"row_starts_{i}", factor.row_starts)
            else:
                self.register_parameter(f"factor_{i}", nn.Parameter(factor.clone(), trainable))
        bias = layer.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), bias.requires_grad)
        self.train(layer.training)
        for name in ("in_features", "out_features", "in_channels", "out_channels"):
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))

    def current_factors(self) -> list[Factor]:
        """The factors with their present values, attached to the autograd graph."""
        factors: list[Factor] = []
        for i, shape in enumerate(self.factor_shapes):
            if hasattr(self, f"factor_{i}"):
                factors.append(getattr(self, f"factor_{i}"))
            else:
                values, columns, row_starts = (
                    getattr(self, f"{part}_{i}") for part in ("values", "columns", "row_starts")
                )
                factors.append(SparseMatrix(values, columns, row_starts, (shape[0], shape[1])))
        return factors

    @property
    def weight(self) -> Tensor:
        """Ŵ, rebuilt on demand for code that reads a layer's weight instead of calling it."""
        return self.family.weight_from(self.current_factors(), self.weight_shape)

    def factorization(self) -> Factorization:
        """The factors with their present values, detached."""
        factorization = self.family(
            self.method, self.weight_shape, tuple(self.current_factors()), self.history, self.note
        )
        floating = next(self.parameters())
        return factorization.to(floating.device, floating.dtype).detach()

    def forward(self, x: Tensor) -> Tensor:
        factors = self.current_factors()
        self._check_input(x)
        if self.geometry is None:
            rows = x.reshape(-1, self.weight_shape[1])
            y = self.family.linear(factors, rows).reshape(*x.shape[:-1], self.weight_shape[0])
            return y if self.bias is None else y + self.bias
        batched = x if x.dim() == 4 else x.unsqueeze(0)
        y = self.family.conv2d(factors, batched, self.weight_shape, self.geometry)
        y = y if self.bias is None else y + self.bias[:, None, None]
        return y if x.dim() == 4 else y.squeeze(0)

    def _check_input(self, x: Tensor) -> None:
        """Raise RuntimeError, as dense layers do, for an input that factors might misread."""
        ranks, axis = ((3, 4), -3) if self.geometry else (range(1, x.dim() + 1), -1)
        if x.dim() not in ranks or x.shape[axis] != self.weight_shape[1]:
            raise RuntimeError(
                f"an input of shape {tuple(x.shape)} does not fit a weight of shape {self.weight_shape}"
            )

    def extra_repr(self) -> str:
        shapes = " · ".join("×".join(map(str, shape)) for shape in self.factor_shapes)
        return f"{self.method!r}, weight={tuple(self.weight_shape)}, factors={shapes}"
