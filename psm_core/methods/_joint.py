"""Joint fit of sparse factors under one budget of non-zeros.

Truncated SVD (two dense thin factors), low-rank + sparse and pruning (one factor) are points of the set
that `_exchange` searches. The search starts from low-rank + sparse of several times the budget, cut to
it by the ranking of the search; what it finds is returned where it is better than those three.

In a metric C (second moment of a layer's inputs) the columns of W are scaled by √C_jj, so that M has a
unit diagonal. Inputs are strongly correlated: each of many entries can then remove the same error, and a
ranking of entries one by one goes wrong. The support is therefore searched in a metric whose leading
eigenvalues are cut off at a few units, and the values are fitted on it in the full one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from psm_core.methods._exchange import (
    Pair,
    Problem,
    inverse,
    largest,
    low_rank_plus_sparse,
    refit,
    search,
)
from psm_core.methods._trace import Trace
from psm_core.methods.prune import pruned
from psm_core.progress import Report

_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the budget in the low-rank part of what the fit has to beat
_EXACT_SIDE = 1024  # side up to which all eigenvectors are computed, and the leading ones taken
_COLUMNS = 64  # of a block between two chances to report
_REFIT = 0.5  # iterations on the final support, in the full metric, for each one of the search


@dataclass(frozen=True)
class JointFit:
    """Factors whose product, from left to right, approximates a target.

    With ``ones``, the identity of the smaller side is added to the end of the factor that has this side:
    (A + [0 I])·B for a wide target, A·(B + [0; I]) for a tall one.
    """

    factors: list[Tensor]
    ones: bool = False


def joint(
    target: Tensor, *, nonzeros: int, iterations: int, tolerance: float, seed: int, report: Report,
    metric: Tensor | None = None,
) -> JointFit:  # fmt: skip
    """Two sparse factors, or one, with at most ``nonzeros`` entries in total, whose product
    approximates ``target`` (m × n): the best of this fit, truncated SVD, pruning and sums of both.

    ``metric`` is a symmetric positive semi-definite C (n × n); its scale does not matter. Errors, the
    reported ones included, are then ‖(W − Ŵ)C^½‖_F / ‖WC^½‖_F. ``target`` is overwritten.
    ``report(iteration, total, relative_error)`` may raise to stop the fit. Once the support is final, an
    iteration that lowers the error by less than the fraction ``tolerance`` of it ends the fit.
    """
    info = torch.finfo(target.dtype)
    trace = Trace(report, iterations)
    widths = torch.ones_like(target[0])  # of the columns, in the metric
    kept = None if metric is None else pruned(target, nonzeros, metric) != 0
    if metric is not None and metric.any():
        widths, metric = _unit_diagonal(metric)
    if metric is not None and int(metric.count_nonzero()) <= len(metric):  # columns do not meet
        metric = None
    unit = target.detach().contiguous().mul_(widths)
    top = unit.abs().amax().clamp_min(info.tiny)
    unit.mul_(unit.abs() > top * info.eps**2)  # far below rounding: only a source of denormals
    exponent = torch.linalg.vector_norm(unit / top).div(math.sqrt(unit.numel())).mul(top).log2().round()
    scale = torch.where(unit.any(), exponent, 0).exp2()  # a power of two: the entries stay exact
    unit.div_(scale)
    problem = Problem(unit, metric, nonzeros, trace)
    random = torch.Generator().manual_seed(seed)

    budget, floats = nonzeros / unit.numel(), sum(unit.shape)
    rank = int(min(1 + 12 * budget, 3) * nonzeros / floats)
    low_rank = _low_rank(problem, rank, random)
    kept = largest(unit, nonzeros) if kept is None else kept
    errors = {0.0: float(problem.error(unit * ~kept))}
    for share in _SHARES if rank else ():
        trace.pulse(min(errors.values()))
        errors[share] = float(_sum_error(problem, low_rank, share))
    share = min(errors, key=errors.__getitem__)
    error = bar = errors[share]
    best: JointFit | None = None
    if error > 0:
        bold = min(1.5 + 12 * budget, 4.5)
        nothing = low_rank[0][:, :0], low_rank[1][:0]
        # γ at the beginning, start (of pruning, without a low-rank part), largest eigenvalue of the metric
        attempts = [(bold, low_rank, 0.0), (2.0, nothing, 0.0), (1.0, nothing, 0.0)]
        refits = 0
        if metric is not None:
            eigen = _leading(metric.matmul, metric, len(metric) // 8 + 1, random, trace)
            attempts = [(bold, low_rank, 4.0), (bold, low_rank, 1.0), (1.0, nothing, 1.0)]
            refits = math.ceil(_REFIT * iterations)
        for attempt, (boldness, start, clip) in enumerate(attempts, 1):
            trace.total = attempt * (iterations + refits)
            within = problem
            if metric is not None:
                within = Problem(unit, _clipped(metric, *eigen, clip), nonzeros, trace, reported=problem)
            pair = search(within, low_rank_plus_sparse(within, start), iterations, boldness, tolerance)
            if refits:
                pair = refit(Pair(problem, pair.factors), refits, tolerance)
            if (loss := float(pair.error)) < error:
                best, error = _unpadded(pair), loss
            del pair
            if error < bar:
                break  # else too bold for so small a support: once more, with care
    trace.flush()
    if best is None:
        best = _sum(problem, low_rank, share) if share else JointFit([unit * kept])
    return _rescaled(best, scale, widths)


def _unit_diagonal(metric: Tensor) -> tuple[Tensor, Tensor]:
    """√C_jj, and C scaled to a unit diagonal."""
    widths = metric.diagonal().clamp_min(0).sqrt()
    widths = widths.clamp_min(1e-6 * float(widths.max()))
    unit = metric / widths / widths[:, None]
    unit.diagonal().fill_(1.0)
    return widths / widths.max(), unit


def _leading(
    times: Callable[[Tensor], Tensor], like: Tensor, rank: int, random: torch.Generator, trace: Trace
) -> tuple[Tensor, Tensor]:
    """Leading eigenvalues and eigenvectors of a symmetric operator of the size of ``like``'s rows.

    All are computed where that is quick; else they come from block power iteration (Halko, Martinsson &
    Tropp, SIAM Review 2011), in pieces between which the trace reports.
    """
    side = len(like)
    rank = min(rank, side if side <= _EXACT_SIDE else side // 2)

    def image(basis: Tensor) -> Tensor:
        parts = []
        for part in torch.split(basis, _COLUMNS, dim=1):
            parts.append(times(part))
            trace.pulse()
        return torch.cat(parts, 1)

    if side <= _EXACT_SIDE:
        values, vectors = torch.linalg.eigh(image(torch.eye(side, dtype=like.dtype, device=like.device)))
        return values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    basis = torch.randn(side, rank + 16, generator=random, dtype=torch.float64).to(like)
    for _ in range(4):
        basis = torch.linalg.qr(image(basis)).Q
        trace.pulse()
    values, turn = torch.linalg.eigh(basis.mT @ image(basis))
    return values.flip(0)[:rank], (basis @ turn.flip(1))[:, :rank]


def _clipped(metric: Tensor, values: Tensor, vectors: Tensor, most: float) -> Tensor:
    """The metric with its leading eigenvalues cut off, and a unit diagonal again, which adds a little."""
    clipped = metric - (vectors * (values - most).clamp_min(0)) @ vectors.mT
    clipped.diagonal().fill_(1.0)
    return clipped


def _low_rank(problem: Problem, rank: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Best factors of this rank or less in the metric, (m, r) and (r, n), of equal size in each unit.

    The best U·V in the metric projects W on the leading eigenvectors of W M Wᵀ.
    """
    target = problem.target
    flip = problem.metric is None and len(target) > target.shape[1]
    wide = target.mT if flip else target
    times = (lambda x: wide @ (wide.mT @ x)) if problem.metric is None else problem.gram
    rank = min(rank, *wide.shape)
    if rank == 0:
        return target[:, :0], target[:0]
    _, basis = _leading(times, wide, rank, random, problem.trace)
    problem.trace.pulse()
    if problem.metric is None and len(wide) <= _EXACT_SIDE:  # squares lose half of the digits: one step on W
        basis = torch.linalg.qr(wide @ (wide.mT @ basis)).Q
    other = basis.mT @ wide
    problem.trace.pulse()
    roots = torch.linalg.vector_norm(other, dim=1).sqrt()
    left, right = basis * roots, other * inverse(roots)[:, None]
    return (right.mT, left.mT) if flip else (left, right)


def _split(problem: Problem, low_rank: tuple[Tensor, Tensor], share: float) -> tuple[Tensor, Tensor, Tensor]:
    """W ≈ U·V + S with this share of the places for U and V: U, V and what these leave of W, for S."""
    rank = min(int(share * problem.nonzeros / sum(problem.target.shape)), low_rank[0].shape[1])
    left, right = low_rank[0][:, :rank], low_rank[1][:rank]
    return left, right, torch.addmm(problem.target, left, right, alpha=-1)


def _places_left(problem: Problem, left: Tensor) -> int:
    return problem.nonzeros - left.shape[1] * sum(problem.target.shape)


def _sum_error(problem: Problem, low_rank: tuple[Tensor, Tensor], share: float) -> Tensor:
    left, _, rest = _split(problem, low_rank, share)
    if share < 1:
        rest *= ~largest(rest, _places_left(problem, left))
    return problem.error(rest)


def _sum(problem: Problem, low_rank: tuple[Tensor, Tensor], share: float) -> JointFit:
    """Low-rank + sparse as a product; the low-rank part alone where its share is 1."""
    left, right, rest = _split(problem, low_rank, share)
    if share == 1:
        return JointFit([left, right])
    rest *= largest(rest, _places_left(problem, left))
    m, n = rest.shape
    none = rest.new_zeros(min(m, n), min(m, n))
    if m <= n:
        return JointFit([torch.cat([left, none], 1), torch.cat([right, rest])], ones=True)
    return JointFit([torch.cat([left, rest], 1), torch.cat([right, none])], ones=True)


def _unpadded(pair: Pair) -> JointFit:
    """The factors without their ones and without empty units; of equal size in each unit without a one."""
    count = min(pair.problem.target.shape)
    side = pair.problem.side_of_ones
    del pair.residual
    factors = [factor.dense() for factor in pair.factors]
    pair.problem.ones(factors[side]).zero_()
    free = len(factors[0]) - count
    sizes = [torch.linalg.vector_norm(factor[:free], dim=1) for factor in factors]
    used = (sizes[0] > 0) & (sizes[1] > 0)
    has_ones = bool(factors[1 - side][free:].any())
    kept = torch.cat([used, torch.full((count,), has_ones, device=used.device)])
    for i, (own, other) in enumerate((sizes, sizes[::-1])):
        factors[i][:free] *= (other * inverse(own)).sqrt()[:, None]
        factors[i] = factors[i][kept]
    return JointFit([factors[0].mT, factors[1]], has_ones)


def _rescaled(fit: JointFit, scale: Tensor, widths: Tensor) -> JointFit:
    """The fit of the target, from that of the target in units of ``scale`` and of the ``widths`` of its
    columns. The ones stay ones: the scale of their units goes to the other factor."""
    if len(fit.factors) == 1:
        return JointFit([fit.factors[0].mul_(scale).div_(widths)])
    left, right = fit.factors
    right = right.div_(widths)
    root = scale.sqrt()
    free = left.shape[1] - (min(len(left), right.shape[1]) if fit.ones else 0)
    left[:, :free] *= root
    right[:free] *= root
    if fit.ones and len(left) <= right.shape[1]:
        right[free:] *= scale
    elif fit.ones:
        left[:, free:] *= scale / widths
        right[free:] *= widths[:, None]
    return JointFit([left.contiguous(), right], fit.ones)
