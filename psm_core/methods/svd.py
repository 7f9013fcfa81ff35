"""Truncated singular value decomposition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psm_core.factorization import Factorization, MatrixProduct
from psm_core.methods.base import Method, Shape, matrix_shape, parameter
from psm_core.progress import Report


@dataclass(frozen=True)
class SVD(Method):
    """The best approximation of a given rank: W ≈ U·V with U (out × r) and V (r × in·kh·kw).

    With W = Σ σ_i u_i v_iᵀ, the error of rank r is exactly (Σ_{i>r} σ_i²)^½ (Eckart & Young 1936).
    √σ is given to each side, so that both factors have entries of the same scale. A convolution
    becomes a kh×kw convolution to r channels, then a 1×1 one. Stores r·(out + in·kh·kw) floats.
    """

    name = "svd"
    title = "SVD"
    version = 1
    size_parameter = "rank"

    rank: int = parameter("number of singular values kept", int, minimum=1)

    def storage(self, shape: Shape) -> int:
        return self.rank * sum(matrix_shape(shape))

    @classmethod
    def largest(cls, shape: Shape, name: str, **fixed: Any) -> float:
        return min(matrix_shape(shape)) if name == "rank" else super().largest(shape, name)

    def _factorize(self, weight: Tensor, report: Report) -> Factorization:
        left, right = truncated_svd(weight.reshape(matrix_shape(tuple(weight.shape))), self.rank)
        return MatrixProduct(self, tuple(weight.shape), (left, right))


def truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors (m × r) and (r × n) of the best rank-r approximation, balanced."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * vh[:rank]
