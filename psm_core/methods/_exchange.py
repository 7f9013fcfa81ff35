"""The search behind the joint fit: two sparse factors, their support annealed, their values line-searched.

    minimize  ‖(W − (A + [0 I])·B) M^½‖²_F   over A (m × k), B (k × n) with nnz(A) + nnz(B) ≤ N

for a wide W (m ≤ n); for a tall one the ones are in the right factor, W ≈ A·(B + [0; I]). They are implied,
not stored: low-rank + sparse, [U I]·[V; S], is then a point of the set at no extra cost, and the first
factor may still share the rows of S among the rows of W.

Around the current factors, with R = (W − Ŵ)M, an absent entry a_ik lowers the squared error by
(R Bᵀ)_ik² / q_k, q_k = b_k M b_kᵀ, when it enters alone, and a present one is worth as much at the value
that is best for it alone; b_kj likewise with p_k = ‖a_k‖² and AᵀR (M has a unit diagonal). All entries of
both factors compete in one ranking for N places (about N, by the threshold of a sample, until the last
time). Gains of absent ones are multiplied by a factor γ that falls from above 1 to 0: bold exchanges first,
none at the end. Between two exchanges each row of A, then each column of B (with a metric, in which columns
depend on each other, all of B) makes one exact line search along its gradient, preconditioned by q and p.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from psm_core.methods._operand import Operand
from psm_core.methods._trace import Trace

_REST = 0.1  # budgets that go into the sparse part of the start
_EXCHANGE = 0.95  # share of the iterations with exchanges
_ENTRY = 0.5  # an entering entry takes this part of the value which is best for it alone
_SAMPLE = 1 << 15  # scores that a threshold is estimated from
_LIMIT = 100.0  # norm of the entries beside a one
_WORK = 1 << 32  # multiplications between two chances to report


class Problem:
    """A target W (m × n) of mean square 1, a metric M (n × n, unit diagonal) or none, and N places.

    Errors are reported in the metric of another problem of the same target, if one is given.
    """

    def __init__(
        self, target: Tensor, metric: Tensor | None, nonzeros: int, trace: Trace,
        reported: Problem | None = None,
    ) -> None:  # fmt: skip
        self.target, self.metric, self.nonzeros, self.trace = target, metric, nonzeros, trace
        self.reported = reported
        self.side_of_ones = 0 if target.shape[0] <= target.shape[1] else 1
        self.tiny = torch.finfo(target.dtype).tiny
        self.square = (target * self.in_metric(target)).sum().clamp_min(self.tiny)

    def in_metric(self, matrix: Tensor) -> Tensor:
        """``matrix`` (rows × n) times M."""
        if self.metric is None:
            return matrix
        rows = max(_WORK // self.metric.numel(), 16) if matrix.is_cpu else len(matrix)
        parts = []
        for part in torch.split(matrix, rows):
            parts.append(part @ self.metric)
            self.trace.pulse()
        return torch.cat(parts)

    def ones(self, factor: Tensor) -> Tensor:
        """The places of the ones in the factor of their side, as a view."""
        return factor[len(factor) - min(self.target.shape) :].diagonal()

    def gram(self, columns: Tensor) -> Tensor:
        """W M Wᵀ times (m × r) columns."""
        return self.target @ self.in_metric((self.target.mT @ columns).mT).mT

    def error(self, rest: Tensor) -> Tensor:
        """Relative error of an approximation that leaves this rest."""
        return ((rest * self.in_metric(rest)).sum().clamp_min(0) / self.square).sqrt()


class Pair:
    """The factors Aᵀ (k × m) and B (k × n), ones included, and what they leave of the target."""

    def __init__(self, problem: Problem, factors: list[Operand]) -> None:
        self.problem, self.factors = problem, factors
        rest = factors[0].transposed.times(factors[1].dense()).neg_().add_(problem.target)
        self.residual = problem.in_metric(rest)  # R
        self.square = (rest * self.residual).sum()
        self.reported = None if problem.reported is None else problem.reported.error(rest)

    @property
    def error(self) -> Tensor:
        """Relative error, on its device."""
        return (self.square.abs() / self.problem.square).sqrt()

    def downhill(self, side: int) -> Tensor:
        """(R Bᵀ)ᵀ for side 0, (k × m), or Aᵀ R for side 1, (k × n); zero at the ones, which stay."""
        slope = self.factors[1 - side].times(self.residual.mT if side == 0 else self.residual)
        if side == self.problem.side_of_ones:
            self.problem.ones(slope).zero_()
        return slope

    def weights(self, side: int) -> Tensor:
        """q for side 0, p for side 1, (k,)."""
        other = self.factors[1 - side]
        if side == 0 and self.problem.metric is not None:
            return (other.dense() * other.times(self.problem.metric)).sum(1)
        return other.row_squares()

    def improve(self, side: int) -> None:
        """One exact line search for each row of A (side 0), or for each column of B or all of it (1)."""
        own = self.factors[side]
        slope = own.at_support(self.downhill(side)) * own.by_row(inverse(self.weights(side)))
        step = own.with_values(slope)
        left, right = (step, self.factors[1]) if side == 0 else (self.factors[0], step)
        change = left.transposed.times(right.dense())
        seen = self.problem.in_metric(change)
        gain, curvature = (change * self.residual).sum(1 - side), (change * seen).sum(1 - side)
        if side == 1 and self.problem.metric is not None:  # all of B at once: shares of the sums
            curvature, gain = (x.sum().expand_as(x) / len(x) for x in (curvature, gain))
        length = gain / curvature.clamp_min(self.problem.tiny)
        self.factors[side] = own.with_values(own.values + slope * own.by_column(length))
        self.residual.addcmul_(seen, length.unsqueeze(1 - side), value=-1)
        self.square = self.square - (length * gain).sum()


def search(
    problem: Problem, start: list[Operand], iterations: int, boldness: float, tolerance: float
) -> Pair:
    """Anneal the support from ``start``, and fit the values. ``boldness`` is γ at the beginning.

    Once the support is final, an iteration that lowers the error by less than the fraction ``tolerance``
    of it ends the search.
    """
    exchanges = int(_EXCHANGE * iterations)
    pair = Pair(problem, start)
    previous = math.inf
    for iteration in range(iterations):
        if 0 < iteration <= exchanges:
            gamma = boldness * (1 - iteration / (exchanges + 1))
            pair = Pair(problem, _exchange(pair, gamma, is_last=iteration == exchanges))
        previous, has_converged = _step(pair, previous, tolerance)
        if has_converged and iteration > exchanges:
            break
    return pair


def refit(pair: Pair, iterations: int, tolerance: float) -> Pair:
    """Fit the values on the support as it is."""
    previous = math.inf
    for _ in range(iterations):
        previous, has_converged = _step(pair, previous, tolerance)
        if has_converged:
            break
    return pair


def _step(pair: Pair, previous: float, tolerance: float) -> tuple[float, bool]:
    """Improve both sides; the error if it was needed, and whether it fell by too little."""
    pair.improve(0)
    pair.improve(1)
    error = pair.error
    pair.problem.trace.add(error if pair.reported is None else pair.reported)
    if tolerance <= 0:
        return previous, False
    return float(error), previous - float(error) < tolerance * previous


def low_rank_plus_sparse(problem: Problem, low_rank: tuple[Tensor, Tensor]) -> list[Operand]:
    """W ≈ U·V + S as factors Aᵀ (k × m) and B (k × n) of at most N entries beside the ones."""
    m, n = problem.target.shape
    rest = torch.addmm(problem.target, *low_rank, alpha=-1)
    share = _REST if low_rank[0].shape[1] else 1.0
    rest.mul_(largest(rest, math.ceil(share * problem.nonzeros)))
    eye = torch.eye(min(m, n), dtype=rest.dtype, device=rest.device)
    halves = (eye, rest) if m <= n else (rest.mT, eye)
    factors = [
        torch.cat([thin, half]).contiguous()
        for thin, half in zip((low_rank[0].mT, low_rank[1]), halves, strict=True)
    ]
    del rest, eye, halves
    problem.trace.pulse()
    weights = [_row_squares(factor) for factor in reversed(factors)]
    ones = problem.ones(factors[problem.side_of_ones])
    ones.zero_()  # no rivals for a place
    keeps = ranked(factors, weights, problem.nonzeros)
    ones.fill_(1.0)
    problem.ones(keeps[problem.side_of_ones]).fill_(True)
    problem.trace.pulse()
    pulse = problem.trace.pulse
    return [Operand.of(factor, pulse, keep) for factor, keep in zip(factors, keeps, strict=True)]


def _balance(problem: Problem, factors: list[Tensor]) -> None:
    """Scale the two sides of each unit against each other, so that neither drifts out of range.

    They come to the same norm; in a unit with a one, which cannot be scaled, the entries beside it are kept
    below ``_LIMIT``, where the one no longer matters.
    """
    problem.ones(factors[problem.side_of_ones]).zero_()
    norms = [torch.linalg.vector_norm(factor, dim=1) for factor in factors]
    ratio = (norms[1] * inverse(norms[0])).sqrt()
    ratio = torch.where(ratio > 0, ratio, 1.0)
    free = len(ratio) - min(problem.target.shape)
    beside = norms[problem.side_of_ones][free:].clamp_min(_LIMIT) / _LIMIT
    ratio[free:] = 1 / beside if problem.side_of_ones == 0 else beside
    factors[0].mul_(ratio[:, None])
    factors[1].div_(ratio[:, None])


def _exchange(pair: Pair, gamma: float, is_last: bool) -> list[Operand]:
    """The factors on the N places that the ranking gives now; the pair given is used up."""
    problem, places = pair.problem, pair.problem.side_of_ones
    weights = [pair.weights(side) for side in (0, 1)]
    sizes = [factor.row_squares() for factor in pair.factors]
    bests = []
    for side, own in enumerate(pair.factors):
        best = pair.downhill(side).mul_(gamma**0.5 * inverse(weights[side])[:, None])
        bests.append(own.put_into(best, own.values + own.at_support(best) / gamma**0.5))
    problem.ones(bests[places]).zero_()  # no rivals for a place
    del pair.residual
    keeps = ranked(bests, weights, problem.nonzeros, is_exact=is_last)
    problem.ones(keeps[places]).fill_(True)

    def place(side: int, best: Tensor) -> Tensor:
        """Entering entries as they are in ``best``, and what stays of the present ones."""
        problem.trace.pulse()
        return pair.factors[side].put_into(best, pair.factors[side].values).mul_(keeps[side])

    entering = [place(side, best.mul_(_ENTRY / gamma**0.5)) for side, best in enumerate(bests)]
    # Both sides of a unit that grows at once would overshoot: what enters is scaled by the growth.
    grown = [_row_squares(factor) for factor in entering]
    shrink = [(sizes[1 - side] * inverse(grown[1 - side])).clamp_max(1) for side in (0, 1)]
    factors = [place(side, factor.mul_(shrink[side][:, None])) for side, factor in enumerate(entering)]
    _balance(problem, factors)
    problem.ones(factors[places]).fill_(1.0)
    pulse = problem.trace.pulse
    return [Operand.of(factor, pulse, keep) for factor, keep in zip(factors, keeps, strict=True)]


def largest(matrix: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` largest magnitudes, never more, zeros excluded."""
    return ranked([matrix], [matrix.new_ones(len(matrix))], count)[0]


def ranked(values: list[Tensor], weights: list[Tensor], count: int, is_exact: bool = True) -> list[Tensor]:
    """Masks of the ``count`` entries of largest value²·weight, a weight for each row; zeros excluded.

    From a sample of the scores one knows about where the threshold is; only entries that may be on either
    side of it are sorted. If not ``is_exact``, the threshold is that of the sample.
    """
    total = sum(matrix.numel() for matrix in values)
    if count >= total:
        return [matrix != 0 for matrix in values]
    stride = -(-total // _SAMPLE) | 1  # odd, so that it does not fall on the same columns of each row
    samples = []
    for matrix, weight in zip(values, weights, strict=True):
        rows = torch.arange(0, matrix.numel(), stride, device=matrix.device) // matrix.shape[1]
        samples.append(matrix.flatten()[::stride].square() * weight[rows])
    sample = torch.cat(samples)
    rank = round(count * len(sample) / total)
    if not is_exact:
        return _above(values, weights, sample.kthvalue(len(sample) - max(rank, 1) + 1).values)
    sample = sample.sort().values
    spread = round(4 * math.sqrt(rank)) + 2 if stride > 1 else 0
    top = torch.full_like(sample[0], torch.inf)
    high = sample[len(sample) - rank + spread] if rank > spread else top
    low = sample[max(len(sample) - rank - spread, 0)]
    for least, most in ((low, high), (torch.zeros_like(top), top)):
        keeps, maybe = _above(values, weights, most), _above(values, weights, least)
        near = [(new & ~keep).flatten().nonzero().squeeze(1) for new, keep in zip(maybe, keeps, strict=True)]
        missing = count - sum(int(keep.count_nonzero()) for keep in keeps)
        if 0 <= missing <= sum(len(places) for places in near):
            break
    scores = torch.cat(
        [
            matrix.reshape(-1)[places].square() * weight[places // matrix.shape[1]]
            for matrix, weight, places in zip(values, weights, near, strict=True)
        ]
    )
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen[scores.topk(min(missing, len(scores)), sorted=False).indices] = True
    for keep, places, part in zip(keeps, near, torch.split(chosen, [len(p) for p in near]), strict=True):
        keep.view(-1)[places] = part
    return keeps


def _above(values: list[Tensor], weights: list[Tensor], threshold: Tensor) -> list[Tensor]:
    """Masks of the entries whose value²·weight exceeds a threshold."""
    masks = []
    for matrix, weight in zip(values, weights, strict=True):
        bar = (threshold * inverse(weight)).sqrt()
        bar = torch.where(weight > 0, bar, torch.inf)[:, None]
        masks.append(((matrix > bar) | (matrix < -bar)).contiguous())
    return masks


def _row_squares(matrix: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1)
    return norms.square()


def inverse(weight: Tensor) -> Tensor:
    """1/weight, zero for units that are empty."""
    return torch.where(weight > 0, 1 / weight.clamp_min(torch.finfo(weight.dtype).tiny), 0.0)
