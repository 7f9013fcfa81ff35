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

    In the metric M = LLᵀ of a calibration the best is Ŵ = PW, P the projector on the first r left
    singular vectors of WL: the principal components of the outputs.
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

    def _factorize(self, weight: Tensor, report: Report, metric: Tensor | None) -> Factorization:
        left, right = truncated_svd(weight.reshape(matrix_shape(tuple(weight.shape))), self.rank, metric)
        return MatrixProduct(self, tuple(weight.shape), (left, right))


def truncated_svd(matrix: Tensor, rank: int, metric: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Factors (m × r) and (r × n) of the best rank-r approximation (in the metric M, n × n), balanced."""
    if metric is None:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        root = s[:rank].sqrt()
        return u[:, :rank] * root, root[:, None] * vh[:rank]
    exact = double(matrix)
    left = torch.linalg.svd(exact @ torch.linalg.cholesky(double(metric)), full_matrices=False).U[:, :rank]
    right = left.mT @ exact
    root = torch.linalg.vector_norm(right, dim=1).sqrt()
    factors = left * root, right * torch.where(root > 0, 1 / root, 0.0)[:, None]
    return factors[0].to(matrix.dtype).to(matrix.device), factors[1].to(matrix.dtype).to(matrix.device)


def double(tensor: Tensor) -> Tensor:
    """In float64, on the CPU where the device has none."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()
