"""Joint fit of two sparse factors under one budget of non-zeros.

    minimize  ‖W − A·B‖²_F   subject to   nnz(A) + nnz(B) ≤ N,   W of shape m × n,

with the inner dimension and the share of each factor, row and column left free. Truncated SVD (dense
thin factors), low-rank + sparse ([U I]·[V; S]) and pruning (I·S) are points of this set.

The support is searched by annealed exchange, the values by alternating line searches. Around the
current factors, with E = W − AB, entry a_ik of the support costs a_ik²·‖row k of B‖² to remove, and an
entry outside lowers the error by (E Bᵀ)_ik² / ‖row k of B‖² when it enters alone; b_kj likewise with
the columns of A. All entries of both factors, present and absent, compete in one ranking for N places.
Gains are overrated by a factor γ that falls from above 1 to 0: bold exchanges first, none at the end.
Between two exchanges each row of A, then each column of B, makes one exact line search along its
gradient, preconditioned by the norms of the inner units.
"""

import warnings

import torch
from torch import Tensor

from psm_core.methods._palm4msa import Trace
from psm_core.progress import Report

_LOW_RANK = 0.8  # share of the budget that the start spends on low rank, the rest on sparse
_EXCHANGE = 0.95  # share of the iterations with exchanges
_ENTRY = 0.5  # an entering entry takes this part of the value which is best for it alone
_SPARSE = 1 / 8  # density below which a CPU multiplies faster by compressed rows
_SAMPLE = 1 << 16  # scores that a threshold is estimated from


def joint(
    target: Tensor, *, nonzeros: int, Q: int, iterations: int, tolerance: float, seed: int, report: Report
) -> list[Tensor]:
    """One or (Q ≥ 2) two sparse factors with at most ``nonzeros`` entries in total, whose product
    approximates ``target`` (m × n): the best of this fit, truncated SVD and pruning.

    ``report(iteration, total, relative_error)`` may raise to stop the fit. Once the support is final, an
    iteration that lowers the error by less than the fraction ``tolerance`` of it ends the fit.
    """
    target = target.detach()
    info = torch.finfo(target.dtype)
    scale = target.abs().amax().clamp_min(info.tiny)
    unit = target / scale
    unit = unit * (unit.abs() > info.eps**2)  # far below rounding: only a source of denormals
    size = unit.square().mean().sqrt().clamp_min(info.tiny)
    unit, norm = unit / size, max(unit.numel(), 1) ** 0.5
    trace = Trace(report, iterations)

    kept = _largest(target.abs().flatten(), nonzeros).view_as(target)
    best, error = [target * kept], float(torch.linalg.vector_norm(unit * ~kept)) / norm
    if Q >= 2 and error > 0:
        low_rank = _low_rank(unit, nonzeros // sum(target.shape))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support")
            exchanged = _exchange(unit, low_rank, nonzeros, iterations, tolerance, trace)
        for left, right in (low_rank, exchanged):
            loss = float(torch.linalg.vector_norm(torch.addmm(unit, left, right, alpha=-1))) / norm
            if loss < error:
                root = (scale.sqrt() * size.sqrt()).clamp_min(info.tiny)
                best, error = [left * root, right * root], loss
    trace.flush()
    return best


def _low_rank(target: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best factors of this rank or less, (m, r) and (r, n), singular values shared evenly.

    From the eigenvectors of the smaller Gram matrix, sharpened by one subspace iteration.
    """
    m, n = target.shape
    wide = target if m <= n else target.mT
    rank = min(rank, len(wide))
    basis = torch.linalg.eigh(wide @ wide.mT).eigenvectors[:, len(wide) - rank :].flip(1)
    basis = torch.linalg.qr(wide @ (wide.mT @ basis)).Q
    other = basis.mT @ wide
    root = torch.linalg.vector_norm(other, dim=1).sqrt()
    left, right = basis * root, other * torch.where(root > 0, 1 / root, 0.0)[:, None]
    return (left, right) if m <= n else (right.mT, left.mT)


def _start(target: Tensor, low_rank: tuple[Tensor, Tensor], nonzeros: int) -> list[Tensor]:
    """Low-rank + sparse split W ≈ U·V + S as factors Aᵀ (k × m) and B (k × n) of N non-zeros.

    A·B is [U D]·[V; D⁻¹S], or [U SD⁻¹]·[V; D] for a tall target; D balances the two halves of a unit.
    """
    m, n = target.shape
    rank = int(_LOW_RANK * nonzeros / (m + n))
    U, V = low_rank[0][:, :rank], low_rank[1][:rank]
    rest = torch.addmm(target, U, V, alpha=-1)
    S = rest * _largest(rest.abs().flatten(), max(nonzeros - U.numel() - V.numel(), 1)).view_as(rest)
    S = S if m <= n else S.mT
    D = torch.linalg.vector_norm(S, dim=1).sqrt()
    D = torch.where(D > 0, D, D.mean().clamp_min(torch.finfo(D.dtype).tiny))
    halves = [torch.diag(D), S / D[:, None]]
    factors = [
        torch.cat([thin, half]) for thin, half in zip([U.mT, V], halves[:: 1 if m <= n else -1], strict=True)
    ]
    costs = [own.square() * other.square().sum(1, keepdim=True) for own, other in (factors, factors[::-1])]
    keep = _largest(torch.cat([cost.flatten() for cost in costs]), nonzeros)
    parts = torch.split(keep, [cost.numel() for cost in costs])
    return [factor * part.view_as(factor) for factor, part in zip(factors, parts, strict=True)]


def _exchange(
    target: Tensor,
    low_rank: tuple[Tensor, Tensor],
    nonzeros: int,
    iterations: int,
    tolerance: float,
    trace: Trace,
) -> tuple[Tensor, Tensor]:
    """Anneal the support of the start and fit its values; factors A (m × k) and B (k × n)."""
    tiny = torch.finfo(target.dtype).tiny
    factors = _start(target, low_rank, nonzeros)
    boldness = min(1.2 + 8 * nonzeros / target.numel(), 3.0)
    exchanges, norm, previous = int(_EXCHANGE * iterations), target.numel() ** 0.5, torch.inf
    masks = [factor != 0 for factor in factors]
    product = _Product(factors, masks)
    rest = target - product.of(*factors)
    for iteration in range(iterations):
        if 0 < iteration <= exchanges:
            gamma = boldness * (1 - iteration / exchanges)
            scores, values = [], []
            for side, (factor, mask) in enumerate(zip(factors, masks, strict=True)):
                weight = factors[1 - side].square().sum(1, keepdim=True).clamp_min(tiny)
                best = product.against(side, factors, rest) / weight
                scores.append(torch.where(mask, factor, best * gamma**0.5).square_().mul_(weight))
                values.append(torch.where(mask, factor, best.mul_(_ENTRY)))
            masks = _places(scores, nonzeros, exact=iteration == exchanges)
            factors = [value.mul_(mask) for value, mask in zip(values, masks, strict=True)]
            product = _Product(factors, masks)
            rest = target - product.of(*factors)
        for side in (0, 1):
            weight = factors[1 - side].square().sum(1, keepdim=True).clamp_min(tiny)
            direction = product.against(side, factors, rest).mul_(masks[side]).div_(weight)
            change = product.of(*(direction if side == one else factors[one] for one in (0, 1)))
            length = (rest * change).sum(1 - side) / change.square().sum(1 - side).clamp_min_(tiny)
            factors[side].addcmul_(direction, length)
            rest.addcmul_(change, length.unsqueeze(1 - side), value=-1)
        error = torch.linalg.vector_norm(rest) / norm
        trace.add(error)
        if tolerance > 0 and iteration > exchanges:
            if previous - float(error) < tolerance * previous:
                break
            previous = float(error)
    sizes = [torch.linalg.vector_norm(factor, dim=1) for factor in factors]
    used = (sizes[0] > 0) & (sizes[1] > 0)
    balance = (sizes[1][used] / sizes[0][used]).sqrt()[:, None]
    return (factors[0][used] * balance).mT.contiguous(), factors[1][used] / balance


class _Product:
    """The products of one pair of supports, Aᵀ (k × m) and B (k × n), by compressed rows if they pay."""

    def __init__(self, factors: list[Tensor], masks: list[Tensor]) -> None:
        self.units = [_Rows(mask) for mask in masks]
        self.rows = _Rows(masks[0].mT)

    def of(self, left: Tensor, right: Tensor) -> Tensor:
        """A·B, (m, n)."""
        return self.rows.times(left.mT, right)

    def against(self, side: int, factors: list[Tensor], rest: Tensor) -> Tensor:
        """(E·Bᵀ)ᵀ for side 0, (k, m), or Aᵀ·E for side 1, (k, n): downhill for the factor of that side."""
        return self.units[1 - side].times(factors[1 - side], rest.mT if side == 0 else rest)


class _Rows:
    """Support of a matrix, for its products."""

    def __init__(self, mask: Tensor) -> None:
        self.shape = mask.shape
        self.compressed = mask.is_cpu and int(mask.sum()) < _SPARSE * mask.numel()
        if self.compressed:
            self.places = mask.reshape(-1).nonzero().squeeze(1)
            self.columns = (self.places % mask.shape[1]).int()
            self.starts = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()

    def times(self, matrix: Tensor, other: Tensor) -> Tensor:
        if not self.compressed:
            return matrix @ other
        values = matrix.reshape(-1)[self.places]
        return (
            torch.sparse_csr_tensor(self.starts, self.columns, values, self.shape, check_invariants=False)
            @ other
        )


def _largest(score: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` largest of a vector of scores, never more, zeros excluded."""
    if count >= len(score):
        return score > 0
    keep = torch.zeros_like(score, dtype=torch.bool)
    keep[score.topk(count, sorted=False).indices] = True
    return keep & (score > 0)


def _places(scores: list[Tensor], count: int, exact: bool) -> list[Tensor]:
    """Masks of the ``count`` largest of all scores; if not ``exact``, by a threshold from a sample."""
    flat = torch.cat([score.flatten() for score in scores])
    if exact:
        keep = _largest(flat, count)
    else:
        sample = flat[:: max(1, len(flat) // _SAMPLE)]
        rank = max(1, len(sample) - round(count * len(sample) / len(flat)))
        keep = flat > sample.kthvalue(rank).values
    parts = torch.split(keep, [score.numel() for score in scores])
    return [part.view_as(score) for part, score in zip(parts, scores, strict=True)]
