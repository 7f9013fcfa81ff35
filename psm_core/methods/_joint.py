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

import math

import torch
from torch import Tensor

from psm_core.methods._engine import Rows, Trace
from psm_core.progress import Report

_LOW_RANK = 2.0  # budgets that go into the low-rank part of the start, before it is cut to one budget
_REST = 0.2  # and into its sparse part
_EXCHANGE = 0.95  # share of the iterations with exchanges
_ENTRY = 0.5  # an entering entry takes this part of the value which is best for it alone
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
    unit, norm = unit / size, math.sqrt(max(unit.numel(), 1))
    trace = Trace(report, iterations)

    def error_of(*factors: Tensor) -> float:
        rest = unit - factors[0] if len(factors) == 1 else torch.addmm(unit, *factors, alpha=-1)
        return float(torch.linalg.vector_norm(rest)) / norm

    kept = _largest(target.abs().flatten(), nonzeros).view_as(target)
    best, error = [target * kept], error_of(unit * kept)
    trace.pulse(error)
    if Q >= 2 and error > 0:
        root = (scale.sqrt() * size.sqrt()).clamp_min(info.tiny)
        low_rank = _low_rank(unit, int(_LOW_RANK * nonzeros / sum(target.shape)))
        bar = min(error, *(_sum_error(unit, low_rank, nonzeros, share) / norm for share in (0.25, 0.5, 0.75)))
        pair = _cut(low_rank, nonzeros // sum(target.shape))
        if (loss := error_of(*pair)) < error:
            best, error = [factor * root for factor in pair], loss
        bar = min(bar, error)
        for attempt, boldness in enumerate((min(1.2 + 10 * nonzeros / target.numel(), 3.5), 1.0), 1):
            trace.total = attempt * iterations
            pair = _exchange(unit, low_rank, nonzeros, iterations, boldness, tolerance, trace)
            if (loss := error_of(*pair)) < error:
                best, error = [factor * root for factor in pair], loss
            if error < bar:
                break  # else too bold for so small a support: once more, with care
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


def _cut(low_rank: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    return low_rank[0][:, :rank], low_rank[1][:rank]


def _sum_error(target: Tensor, low_rank: tuple[Tensor, Tensor], nonzeros: int, share: float) -> float:
    """Error of low-rank + sparse, the former with this share of the non-zeros.

    As a sum, they need no identity beside the sparse part: no point of the set, but an error to beat.
    """
    rank = int(share * nonzeros / sum(target.shape))
    rest = torch.addmm(target, *_cut(low_rank, rank), alpha=-1)
    kept = _largest(rest.abs().flatten(), nonzeros - rank * sum(target.shape)).view_as(rest)
    return float(torch.linalg.vector_norm(rest * ~kept))


def _start(target: Tensor, low_rank: tuple[Tensor, Tensor], nonzeros: int) -> list[Tensor]:
    """Low-rank + sparse split W ≈ U·V + S as factors Aᵀ (k × m) and B (k × n) of N non-zeros.

    A·B is [U D]·[V; D⁻¹S], or [U SD⁻¹]·[V; D] for a tall target; D balances the two halves of a unit.
    """
    m, n = target.shape
    U, V = low_rank
    rest = torch.addmm(target, U, V, alpha=-1)
    S = rest * _largest(rest.abs().flatten(), math.ceil(_REST * nonzeros)).view_as(rest)
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
    boldness: float,
    tolerance: float,
    trace: Trace,
) -> tuple[Tensor, Tensor]:
    """Anneal the support of the start and fit its values; factors A (m × k) and B (k × n)."""
    tiny = torch.finfo(target.dtype).tiny
    factors = _start(target, low_rank, nonzeros)
    exchanges, norm, previous = int(_EXCHANGE * iterations), math.sqrt(target.numel()), torch.inf
    masks = [factor != 0 for factor in factors]
    product = _Product(masks)
    rest = target - product.of(*factors)
    for iteration in range(iterations):
        if 0 < iteration <= exchanges:
            gamma = boldness * (1 - iteration / (exchanges + 1))
            weights = [factor.square().sum(1, keepdim=True) for factor in reversed(factors)]
            bests = []
            for side, weight in enumerate(weights):
                bests.append(product.against(side, factors, rest) / weight.clamp_min(tiny))
                trace.pulse()
            scores, values = [], []
            for side, (factor, mask) in enumerate(zip(factors, masks, strict=True)):
                # a unit with one side empty is worth what the best entry would make of it
                hope = gamma * bests[1 - side].square().amax(1, keepdim=True)
                weight = torch.where(weights[side] > 0, weights[side], hope)
                gain = bests[side] * gamma**0.5
                scores.append(torch.where(mask, factor, gain).square_().mul_(weight))
                values.append(torch.where(mask, factor, bests[side] * _ENTRY))
            masks = _places(scores, nonzeros, exact=iteration == exchanges)
            factors = [value.mul_(mask) for value, mask in zip(values, masks, strict=True)]
            product = _Product(masks)
            rest = target - product.of(*factors)
        for side in (0, 1):
            weight = factors[1 - side].square().sum(1, keepdim=True).clamp_min(tiny)
            direction = product.against(side, factors, rest).mul_(masks[side]).div_(weight)
            trace.pulse()
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

    def __init__(self, masks: list[Tensor]) -> None:
        self.rows = Rows(masks[0], transposed=True)
        self.units = [Rows(mask) for mask in masks]

    def of(self, left: Tensor, right: Tensor) -> Tensor:
        """A·B, (m, n)."""
        return self.rows.times(left, right)

    def against(self, side: int, factors: list[Tensor], rest: Tensor) -> Tensor:
        """(E·Bᵀ)ᵀ for side 0, (k, m), or Aᵀ·E for side 1, (k, n): downhill for the factor of that side."""
        return self.units[1 - side].times(factors[1 - side], rest.mT if side == 0 else rest)


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
