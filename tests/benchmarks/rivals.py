"""What psm_core does not contain: pyfaust's PALM4MSA, and a sum of low-rank and sparse."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from psm_core.sparse import SparseMatrix


@dataclass(frozen=True)
class Approximation:
    """An approximation of a matrix by a sum or a product of dense and sparse parts."""

    matrix: Tensor
    parts: list[Tensor]

    def error(self, target: Tensor) -> float:
        """‖W − Ŵ‖ / ‖W‖ in float64."""
        exact = target.double()
        return float((exact - self.matrix.double()).norm() / exact.norm())

    @property
    def floats(self) -> int:
        """Non-zeros of all parts."""
        return sum(int(part.count_nonzero()) for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes in the format that psm_core itself stores factors in."""
        tensors: list[Tensor] = []
        for part in self.parts:
            dense = bool((part != 0).all())
            tensors += [part] if dense else SparseMatrix.from_dense(part).pack().values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def has_pyfaust() -> bool:
    """Whether pyfaust is installed."""
    return importlib.util.find_spec("pyfaust") is not None


def pyfaust_palm4msa(target: Tensor, K: int, Q: int, iterations: int) -> Any:
    """A Faust of Q factors in splincol(K), from its own start; a tall target is transposed first.

    In float32, in which it takes half the time it takes in float64, with the same errors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pyfaust import proj
        from pyfaust.fact import palm4msa
        from pyfaust.factparams import ParamsPalm4MSA, StoppingCriterion

    wide = _wide(target).numpy().astype("float32", order="F")
    m, n = wide.shape
    shapes = [(m, m)] * (Q - 1) + [(m, n)]
    sets = [proj.splincol(shape, K).constraint for shape in shapes]
    return palm4msa(wide, ParamsPalm4MSA(sets, StoppingCriterion(iterations), is_update_way_R2L=True))


def of_faust(faust: Any, target: Tensor) -> Approximation:
    """What a Faust of a target is, with its factors."""
    factors = [faust.factors(i) for i in range(faust.numfactors())]
    dense = [torch.as_tensor(f.toarray() if hasattr(f, "toarray") else f).float() for f in factors]
    matrix = torch.as_tensor(faust.toarray())
    return Approximation(matrix.mT if len(target) > target.shape[1] else matrix, dense)


def low_rank_plus_sparse(target: Tensor, floats: int, shares: int, sweeps: int) -> Approximation:
    """W ≈ UV + S with r·(m + n) + nnz(S) ≤ floats: the best over ranks that take 0 to all of the floats.

    From S = 0, in turn the best UV of rank r for W − S, by truncated SVD, and the best S for W − UV, which
    holds its largest entries (GoDec, Zhou & Tao, ICML 2011). Each step lowers the error.
    """
    wide = _wide(target)
    m, n = wide.shape
    best: tuple[float, Tensor, Tensor] | None = None
    for rank in sorted({round(share * floats / (shares * (m + n))) for share in range(shares + 1)}):
        rank = min(rank, m, floats // (m + n))
        sparse = torch.zeros_like(wide)
        for _ in range(sweeps):
            basis = _leading(wide - sparse, rank)
            low = basis @ (basis.mT @ (wide - sparse))
            sparse = _largest(wide - low, floats - rank * (m + n))
            if rank == 0:
                break
        error = float((wide - low - sparse).norm())
        if best is None or error < best[0]:
            best = error, low, sparse
            factors = [basis, basis.mT @ low, sparse]
    assert best is not None
    _, low, sparse = best
    return Approximation((low + sparse).mT if wide is not target else low + sparse, factors)


def _wide(target: Tensor) -> Tensor:
    return target if len(target) <= target.shape[1] else target.mT


def _leading(matrix: Tensor, rank: int) -> Tensor:
    """The leading left singular vectors (m, rank) of a wide matrix."""
    return torch.linalg.eigh(matrix @ matrix.mT).eigenvectors.flip(1)[:, :rank]


def _largest(matrix: Tensor, count: int) -> Tensor:
    """A matrix with all entries zero but the largest."""
    flat = matrix.flatten()
    kept = flat.abs().topk(count).indices
    return torch.zeros_like(flat).index_copy_(0, kept, flat[kept]).view_as(matrix)
