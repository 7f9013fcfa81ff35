"""Magnitude pruning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from psm_core.factorization import Factorization, MatrixProduct
from psm_core.methods.base import (
    Method,
    Shape,
    floats_in_budget,
    matrix_shape,
    parameter,
)
from psm_core.progress import Report
from psm_core.sparse import SparseMatrix

_EXPONENTS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Prune(Method):
    """Keep the largest weights of a layer, by magnitude, and store them as one sparse matrix.

    The best approximation with that many non-zeros. `fraction` is the share of weights kept (at
    least one). Indices come on top of the stored floats in bytes.

    In the metric M of a calibration, those with the largest |w_ij|·M_jj^(α/2). α = 1 is the effect of
    each on the outputs (Wanda, Sun et al., ICLR 2024), but what removed weights of correlated inputs do
    can add up: of five α from 0, the magnitude, to 1 the one with the lowest error is taken.
    """

    name = "prune"
    title = "Pruning"
    version = 1
    size_parameter = "fraction"

    fraction: float = parameter("share of the weights kept", float, above=0.0, maximum=1.0)

    def storage(self, shape: Shape) -> int:
        return max(1, floats_in_budget(shape, self.fraction))

    @classmethod
    def smallest(cls, shape: Shape, **fixed: Any) -> Self:
        return cls(fraction=1 / math.prod(shape))

    @classmethod
    def at_budget(cls, shape: Shape, fraction: float, **fixed: Any) -> Self:
        if floats_in_budget(shape, fraction) < 1:
            raise cls.too_small(shape, fraction)
        return cls(fraction=fraction, **fixed)

    def _factorize(self, weight: Tensor, report: Report, metric: Tensor | None) -> Factorization:
        shape = tuple(weight.shape)
        matrix = weight.reshape(matrix_shape(shape))
        kept = pruned(matrix, self.storage(shape), metric)
        return MatrixProduct(self, shape, (SparseMatrix.from_dense(kept),))


def pruned(matrix: Tensor, count: int, metric: Tensor | None) -> Tensor:
    """The matrix with all entries zero but ``count``: the largest, or those that matter in the metric."""
    best = _largest(matrix, matrix.abs(), count)
    if metric is not None:
        square = _square_in(metric, matrix - best)
        for alpha in _EXPONENTS:
            kept = _largest(matrix, matrix.abs() * metric.diagonal() ** (alpha / 2), count)
            if (new := _square_in(metric, matrix - kept)) < square:
                best, square = kept, new
    return best


def _square_in(metric: Tensor, rest: Tensor) -> float:
    return float(((rest @ metric) * rest).sum())


def _largest(matrix: Tensor, scores: Tensor, count: int) -> Tensor:
    """The matrix with all entries zero but those of the largest scores."""
    kept = scores.flatten().topk(count).indices
    sparse = torch.zeros_like(matrix).flatten()
    sparse[kept] = matrix.flatten()[kept]
    return sparse.reshape(matrix.shape)
