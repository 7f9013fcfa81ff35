"""Joint fit of two sparse factors under one budget of non-zeros.

    minimize  ‖W − A·B‖²_F   subject to   nnz(A) + nnz(B) ≤ N,   W of shape m × n,

with the inner dimension and the share of each factor, row and column left free. Truncated SVD (dense
thin factors), low-rank + sparse ([U I]·[V; S]) and pruning (I·S) are points of this set, so the fit
starts from a low-rank + sparse split of several times the budget and descends from there: Adam steps,
between which entries are removed, the cheapest first. Removing entry a_ik at a stationary point costs
a_ik²·‖row k of B‖², and b_kj costs b_kj²·‖column k of A‖², so all entries compete in one ranking.
"""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

Report = Callable[[int, int, float], None]

_START = 4.0  # budget of the start, in budgets
_LOW_RANK = 0.5  # share of the start that is low-rank
_PRUNING = 0.6  # share of the steps in which entries are removed
_RATE = 0.1  # step size over the root mean square of the entries
_REPORT_EVERY = 0.1  # seconds


def joint(
    target: Tensor, *, nonzeros: int, Q: int, iterations: int, tolerance: float, seed: int, report: Report
) -> list[Tensor]:
    """One or two sparse factors (two only if Q ≥ 2) with at most ``nonzeros`` entries in total, whose
    product approximates ``target`` (m × n). The best of this fit, truncated SVD and pruning.

    ``report(iteration, total, relative_error)`` may raise to stop the fit.
    """
    target = target.detach()
    info = torch.finfo(target.dtype)
    scale = target.abs().amax().clamp_min(info.tiny)
    unit = target / scale
    unit = unit * (unit.abs() > info.eps**2)  # far below rounding: only a source of denormals
    norm = torch.linalg.vector_norm(unit).clamp_min(info.tiny)

    mask = _largest(target.abs().flatten(), nonzeros).view_as(target)
    best = [torch.where(mask, target, 0.0)]
    error = float(torch.linalg.vector_norm(unit * ~mask) / norm)
    if Q >= 2 and error > 0:
        unit, root = unit / norm, (scale.sqrt() * norm.sqrt())
        basis = torch.linalg.svd(unit, full_matrices=False)
        for A, B in (_low_rank(basis, nonzeros), _descend(unit, basis, nonzeros, iterations, report)):
            loss = float(torch.linalg.vector_norm(torch.addmm(unit, A, B, alpha=-1)))
            if loss < error and math.isfinite(loss):
                used = (A != 0).any(0) & (B != 0).any(1)
                best, error = [A[:, used] * root, B[used] * root], loss
    report(iterations, iterations, error)
    return best


def _largest(score: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` largest of a vector of scores, exactly, zeros excluded."""
    if count >= len(score):
        return score > 0
    keep = torch.zeros_like(score, dtype=torch.bool)
    keep[score.topk(count, sorted=False).indices] = True
    return keep & (score > 0)


def _low_rank(basis: tuple[Tensor, Tensor, Tensor], nonzeros: int) -> tuple[Tensor, Tensor]:
    """Truncated SVD of as many floats as ``nonzeros`` allow, singular values shared by both factors."""
    U, s, V = basis
    rank = min(nonzeros // (len(U) + V.shape[1]), len(s))
    root = s[:rank].sqrt()
    return U[:, :rank] * root, root[:, None] * V[:rank]


def _start(target: Tensor, basis: tuple[Tensor, Tensor, Tensor], nonzeros: int) -> tuple[Tensor, Tensor]:
    """Low-rank + sparse split as one product: [U D]·[V; D⁻¹S], or [U SD⁻¹]·[V; D] for a tall target,
    where D balances the norms of the two halves of each inner unit."""
    m, n = target.shape
    total = int(_START * nonzeros)
    U, V = _low_rank(basis, min(int(_LOW_RANK * total), (m + n) * (min(m, n) // 2)))
    rest = torch.addmm(target, U, V, alpha=-1)
    mask = _largest(rest.abs().flatten(), max(total - U.numel() - V.numel(), nonzeros)).view_as(rest)
    S = torch.where(mask, rest, 0.0)
    D = torch.linalg.vector_norm(S, dim=1 if m <= n else 0).sqrt()
    inverse = torch.where(D > 0, 1 / D, 0.0)
    if m <= n:
        return torch.cat([U, torch.diag(D)], 1), torch.cat([V, inverse[:, None] * S])
    return torch.cat([U, S * inverse], 1), torch.cat([V, torch.diag(D)])


def _descend(
    target: Tensor, basis: tuple[Tensor, Tensor, Tensor], nonzeros: int, steps: int, report: Report
) -> tuple[Tensor, Tensor]:
    """Adam steps on the support, which shrinks geometrically to ``nonzeros`` and then stays."""
    factors = _start(target, basis, nonzeros)
    A, B = factors
    masks = [factor != 0 for factor in factors]
    count = sum(int(mask.sum()) for mask in masks)
    rms = math.sqrt(sum(float(factor.square().sum()) for factor in factors) / max(count, 1))
    means = [torch.zeros_like(factor) for factor in factors]
    squares = [torch.zeros_like(factor) for factor in factors]
    tiny, reported = torch.finfo(target.dtype).tiny ** 0.5, -1.0
    for step in range(1, steps + 1):
        progress = step / steps
        rate = _RATE * rms * min(1.0, (1 - progress) / (1 - _PRUNING))
        error = torch.addmm(target, A, B, beta=-1)
        if time.monotonic() - reported > _REPORT_EVERY:
            report(step, steps, float(torch.linalg.vector_norm(error)))
            reported = time.monotonic()
        for factor, slope, mask, mean, square in zip(
            factors, (error @ B.mT, A.mT @ error), masks, means, squares, strict=True
        ):
            slope.mul_(mask)
            mean.lerp_(slope, 0.1)
            square.lerp_(slope.square(), 0.01)
            scale = (square / (1 - 0.99**step)).sqrt_().add_(tiny)
            factor.addcdiv_(mean, scale, value=-rate / (1 - 0.9**step)).mul_(mask)
        if progress <= _PRUNING or step == steps:
            allowed = int(nonzeros * max(count / nonzeros, 1.0) ** max(0.0, 1 - progress / _PRUNING))
            cost = torch.cat([
                (A.square() * B.square().sum(1)).flatten(),
                (B.square() * A.square().sum(0)[:, None]).flatten(),
            ])  # fmt: skip
            keep = _largest(cost, allowed).split([A.numel(), B.numel()])
            masks = [part.view_as(factor) for part, factor in zip(keep, factors, strict=True)]
            for factor, mask in zip(factors, masks, strict=True):
                factor.mul_(mask)
    return A, B
