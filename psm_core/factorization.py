"""What `fit` returns: the factors of one weight, their counts, and the module that computes with them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from psm_core.errors import CheckpointError, first_line
from psm_core.network.modules import CompressedLayer, ConvGeometry, mix_channels
from psm_core.sparse import SparseMatrix

if TYPE_CHECKING:
    from psm_core.methods.base import Method
    from psm_core.network.calibration import Calibration

Factor = Tensor | SparseMatrix
_ROWS = 256  # compared at a time


@dataclass(frozen=True, eq=False)
class Factorization(ABC):
    """Factors of a weight W, in the order in which they multiply.

    Subclasses say how factors combine (`weight_from`) and how they act on an input (`linear`,
    `conv2d`); counting, storage and the module follow from the factors alone.
    """

    method: Method
    shape: tuple[int, ...]
    factors: tuple[Factor, ...]
    history: tuple[float, ...] = ()
    note: str = ""

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[Factorization]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Factorization.kinds[cls.kind] = cls

    @staticmethod
    @abstractmethod
    def weight_from(factors: Sequence[Factor], shape: tuple[int, ...]) -> Tensor:
        """Ŵ of the given shape, differentiable in the factors."""

    @staticmethod
    @abstractmethod
    def linear(factors: Sequence[Factor], x: Tensor) -> Tensor:
        """Ŵx for each row of x (batch, in), without forming Ŵ: shape (batch, out)."""

    @staticmethod
    @abstractmethod
    def conv2d(
        factors: Sequence[Factor], x: Tensor, shape: tuple[int, ...], geometry: ConvGeometry
    ) -> Tensor:
        """The convolution of x (batch, in, h, w) with Ŵ, without forming Ŵ where that is cheaper."""

    def reconstruct(self) -> Tensor:
        """Ŵ, a tensor of the weight's shape."""
        return self.weight_from(self.factors, self.shape).detach()

    def relative_error(self, weight: Tensor) -> float:
        """‖W − Ŵ‖_F / ‖W‖_F, computed in float64 from `reconstruct()`; 0 where both are zero."""
        dense, approximation = weight.detach(), self.reconstruct()
        lost, norm = 0.0, 0.0
        for rows, others in zip(torch.split(dense, _ROWS), torch.split(approximation, _ROWS), strict=True):
            exact = rows.to("cpu", torch.float64)
            norm = math.hypot(norm, float(exact.norm()))
            lost = math.hypot(lost, float((exact - others.to("cpu", torch.float64)).norm()))
        return _ratio(lost, norm)

    def output_error(self, weight: Tensor, calibration: Calibration) -> float:
        """‖(W − Ŵ) C^½‖_F / ‖W C^½‖_F with C the second moment of the layer's inputs, in float64.

        The root mean square error of the outputs, the bias left out, relative to that of the outputs;
        0 where both are zero.

        Raises:
            ParameterError: the calibration is that of another shape.
        """
        calibration.check(self.shape)
        dense = weight.detach().to("cpu", torch.float64)
        difference = dense - self.reconstruct().to("cpu", torch.float64)
        return _ratio(calibration.norm(difference), calibration.norm(dense))

    @cached_property
    def parameters(self) -> int:
        """Floats actually stored: the non-zeros of sparse factors, all entries of dense ones."""
        return sum(f.values.numel() if isinstance(f, SparseMatrix) else f.numel() for f in self.factors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the stored tensors on disk, sparse indices included."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors written to a file, `0`, `1.values`, `1.bitmap` …, on the CPU."""
        stored: dict[str, Tensor] = {}
        for i, factor in enumerate(self.factors):
            if isinstance(factor, SparseMatrix):
                stored |= {f"{i}.{name}": tensor for name, tensor in factor.pack().items()}
            else:
                stored[str(i)] = factor.detach().cpu().contiguous()
        return stored

    def layout(self) -> dict[str, Any]:
        """The JSON that, with `tensors()`, rebuilds this factorization."""
        return {
            "kind": self.kind,
            **self.method.to_json(),
            "shape": list(self.shape),
            "factors": [
                {"shape": list(f.shape), "sparse": isinstance(f, SparseMatrix)} for f in self.factors
            ],
            "history": list(self.history),
            "note": self.note,
        }

    @staticmethod
    def from_tensors(
        method: Method, layout: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Factorization:
        """Rebuild a factorization from what `layout()` and `tensors()` gave.

        Raises:
            CheckpointError: a tensor is missing or does not fit the layout.
        """
        factors: list[Factor] = []
        try:
            family = Factorization.kinds[layout["kind"]]
            for i, spec in enumerate(layout["factors"]):
                shape = tuple(int(n) for n in spec["shape"])
                if spec["sparse"]:
                    prefix = f"{i}."
                    parts = {
                        name.removeprefix(prefix): tensor
                        for name, tensor in tensors.items()
                        if name.startswith(prefix)
                    }
                    factors.append(SparseMatrix.unpack(parts, (shape[0], shape[1])))
                elif tuple(tensors[str(i)].shape) != shape:
                    found = tuple(tensors[str(i)].shape)
                    raise CheckpointError(f"factor {i} has shape {found}, its layout says {shape}")
                else:
                    factors.append(tensors[str(i)])
            rebuilt = family(
                method,
                tuple(int(n) for n in layout["shape"]),
                tuple(factors),
                tuple(float(error) for error in layout["history"]),
                str(layout["note"]),
            )
            with torch.device("meta"):
                expected = rebuilt.weight_from(
                    [torch.empty(tuple(f.shape)) for f in factors], rebuilt.shape
                ).shape
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(
                f"stored factors do not fit their description: {first_line(error)}"
            ) from None
        if tuple(expected) != rebuilt.shape:
            raise CheckpointError(f"stored factors multiply to {tuple(expected)}, not {rebuilt.shape}")
        return rebuilt

    def scaled(self, exponent: int) -> Factorization:
        """The factors of 2^exponent · Ŵ, whole powers of two shared evenly: exact in floating point."""
        share, rest = divmod(exponent, len(self.factors))
        powers = [share + (i < rest) for i in range(len(self.factors))]
        return replace(self, factors=tuple(map(_times_power, self.factors, powers)))

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Factorization:
        """The same factors on another device or in another floating type."""
        moved: list[Factor] = []
        for factor in self.factors:
            if isinstance(factor, SparseMatrix):
                moved.append(
                    replace(
                        factor,
                        values=factor.values.to(device, dtype),
                        columns=factor.columns.to(device),
                        row_starts=factor.row_starts.to(device),
                    )
                )
            else:
                # In the order of the file, so that a reload computes the same bits.
                moved.append(factor.to(device, dtype).contiguous())
        return replace(self, factors=tuple(moved))

    def detach(self) -> Factorization:
        """The same factors, cut off from any autograd graph."""
        cut = [
            replace(f, values=f.values.detach()) if isinstance(f, SparseMatrix) else f.detach()
            for f in self.factors
        ]
        return replace(self, factors=tuple(cut))

    def to_module(self, layer: nn.Module) -> CompressedLayer:
        """A module in place of `layer` (Linear or Conv2d) that stores and computes with the factors.

        Bias, stride, padding, dilation, dtype and device are those of the layer.

        Raises:
            LayerError: the layer is grouped, of another kind, or of another shape.
        """
        return CompressedLayer(self, layer)


class MatrixProduct(Factorization):
    """W, seen as a matrix out × (in·kh·kw), as a product S₁S₂…S_Q of dense or sparse matrices.

    SVD (two thin dense factors), pruning (one sparse factor) and PSM are all of this form.
    """

    kind = "matrix-product"

    @staticmethod
    def weight_from(factors: Sequence[Factor], shape: tuple[int, ...]) -> Tensor:
        last = factors[-1]
        product = _dense(last)
        for factor in reversed(factors[:-1]):
            product = factor.matmul(product)
        return product.reshape(shape)

    @staticmethod
    def linear(factors: Sequence[Factor], x: Tensor) -> Tensor:
        columns = x.T
        for factor in reversed(factors):
            columns = factor.matmul(columns)
        return columns.T

    @staticmethod
    def conv2d(
        factors: Sequence[Factor], x: Tensor, shape: tuple[int, ...], geometry: ConvGeometry
    ) -> Tensor:
        last = factors[-1]
        if geometry.pointwise:
            x = mix_channels(last, geometry.subsample(x))
        else:
            x = geometry.convolve(x, _dense(last).reshape(-1, *shape[1:]))
        for factor in reversed(factors[:-1]):
            x = mix_channels(factor, x)
        return x


def _ratio(difference: float, norm: float) -> float:
    """A relative error; 0 where both are zero."""
    return difference / norm if norm else (0.0 if difference == 0.0 else math.inf)


class ShortcutProduct(MatrixProduct):
    """W as a product of two matrices, the identity of W's smaller side added to the end of one.

    Wide (out ≤ in·kh·kw): W ≈ (A + [0 I])·B, the last outputs of B going straight to those of the layer
    as well. Tall: W ≈ A·(B + [0; I]), the inputs going straight to the last columns of A. The ones are
    implied by the shape; A (out × k) and B (k × in·kh·kw) are stored.
    """

    kind = "shortcut-product"

    def scaled(self, exponent: int) -> Factorization:
        """On the factor that has no ones."""
        left, right = self.factors
        if _is_wide(self.shape):
            return replace(self, factors=(left, _times_power(right, exponent)))
        return replace(self, factors=(_times_power(left, exponent), right))

    @staticmethod
    def weight_from(factors: Sequence[Factor], shape: tuple[int, ...]) -> Tensor:
        left, right = factors
        inner = _dense(right)
        if _is_wide(shape):
            product = left.matmul(inner) + inner[-shape[0] :]
        else:
            product = left.matmul(_with_identity(inner))
        return product.reshape(shape)

    @staticmethod
    def linear(factors: Sequence[Factor], x: Tensor) -> Tensor:
        left, right = factors
        columns = x.T
        inner = right.matmul(columns)
        if right.shape[1] < left.shape[0]:
            head, tail = inner[: -right.shape[1]], inner[-right.shape[1] :]
            return left.matmul(torch.cat([head, tail + columns])).T
        return (left.matmul(inner) + inner[-left.shape[0] :]).T

    @staticmethod
    def conv2d(
        factors: Sequence[Factor], x: Tensor, shape: tuple[int, ...], geometry: ConvGeometry
    ) -> Tensor:
        left, right = factors
        if _is_wide(shape):
            inner = MatrixProduct.conv2d((right,), x, shape, geometry)
            return mix_channels(left, inner) + inner[:, -shape[0] :]
        if geometry.pointwise:
            x = geometry.subsample(x)
            inner = mix_channels(right, x)
            head, tail = inner[:, : -shape[1]], inner[:, -shape[1] :]
            return mix_channels(left, torch.cat([head, tail + x], 1))
        return MatrixProduct.conv2d((left, _with_identity(_dense(right))), x, shape, geometry)


def _is_wide(shape: tuple[int, ...]) -> bool:
    return shape[0] <= math.prod(shape[1:])


def _dense(factor: Factor) -> Tensor:
    return factor.to_dense() if isinstance(factor, SparseMatrix) else factor


def _with_identity(matrix: Tensor) -> Tensor:
    """B + [0; I]."""
    rows, cols = matrix.shape
    return matrix + torch.eye(rows, cols, dtype=matrix.dtype, device=matrix.device).roll(rows - cols, 0)


def _times_power(factor: Factor, exponent: int) -> Factor:
    """2^exponent times a factor."""
    if isinstance(factor, SparseMatrix):
        return replace(factor, values=factor.values * 2.0**exponent)
    return factor * 2.0**exponent
