"""PALM4MSA: proximal alternating linearized minimization for multi-layer sparse approximation.

    minimize  ‖(W − λ·S₁S₂…S_Q) C^½‖²_F   over λ and S_q ∈ E_q,   W of shape m × n, m ≤ n,

where S₁ … S_{Q−1} are m × m and S_Q is m × n (a tall W is transposed first), and C is the identity or the
second moment of the layer's inputs. Each factor in turn takes a gradient step of length 1/c and is
projected onto its sparsity set E_q; c is slightly above λ²‖L‖₂²‖R C Rᵀ‖₂ (L, R: the products of the factors
on its left and right), the norms estimated by warm-started power iteration. Then λ = ⟨W, P⟩ / ‖P‖²,
P = S₁…S_Q, in the inner product of C.

Sources: Le Magoarou & Gribonval, "Flexible multilayer sparse approximations of matrices and
applications", IEEE JSTSP 2016; Giffon et al., "PSM-nets", IJCNN 2021 (the union constraint, and the
fit on activations).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from psm_core.methods._operand import Operand
from psm_core.methods._sparsity_sets import TRANSPOSED, project, support
from psm_core.methods._trace import Trace
from psm_core.progress import Report

Stage = tuple[list[Operand], Tensor]  # factors of unit norm, λ

ORDERS = ("right-to-left", "left-to-right")
_MARGIN = 1.001  # c exceeds the Lipschitz constant by this factor
_AT_ONCE = 1 << 20  # entries of a gradient computed at a time on a CPU
_FIRST_STEPS, _STEPS = 5, 2  # power iterations: in the first sweep, and from the vectors of the last one


def palm4msa(
    target: Tensor, *, K: int, Q: int, constraint: str = "splincol", order: str = "right-to-left",
    iterations: int, tolerance: float, seed: int, report: Report, metric: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Q sparse factors whose product, left to right, approximates ``target`` (m × n): flat PALM4MSA.

    ``order`` is that of the updates within an iteration, with the factor of the longer side taken as the
    rightmost: the factor updated first starts at zero, the others as the identity. λ is kept apart until
    the end, then shared evenly by the factors; the best iterate is returned. Stops after ``iterations``,
    or once an iteration lowers the relative error by less than the fraction ``tolerance`` of it.
    ``report(iteration, total, relative_error)`` may raise.

    ``metric`` is a symmetric positive semi-definite C of shape n × n; its scale does not matter. The
    fit starts from what is found without it, and as many iterations again lower the error in C. Those
    are the ones reported, with this error; until then iteration 0 is.
    """
    fit = _Fit(K, constraint, order, iterations, tolerance, seed, Trace(report, iterations))
    return _normalized(target, Q, fit, _flat, metric)


def hierarchical(
    target: Tensor, *, K: int, Q: int, constraint: str = "splincol", order: str = "right-to-left",
    iterations: int, tolerance: float, seed: int, report: Report, metric: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """As :func:`palm4msa`, one factor after another: split ``target`` in two, split the square residual
    again, and re-optimize all factors on ``target`` after each split; ``iterations`` for each stage, the
    one in the ``metric`` included.

    While r factors are still to come out of the residual, it may hold Kʳ entries where they hold K:
    no product of r such factors needs more.
    """
    trace = Trace(report, iterations * max(2 * Q - 3, 1))
    fit = _Fit(K, constraint, order, iterations, tolerance, seed, trace)
    return _normalized(target, Q, fit, _split, metric)


@dataclass
class _Fit:
    """The settings of one fit, shared by its stages."""

    K: int
    constraint: str
    order: str
    iterations: int
    tolerance: float
    seed: int
    trace: Trace

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {self.order!r}")
        self.random = torch.Generator().manual_seed(self.seed)

    def operand(self, matrix: Tensor) -> Operand:
        return Operand.of(matrix, self.trace.pulse)

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Iterations inside count as iteration 0 of those that follow."""
        trace, report = self.trace, self.trace.report
        trace.report = lambda iteration, total, error: report(0, self.iterations, 1.0)
        yield
        trace.report, trace.total, trace.done, trace.error = report, self.iterations, 0, 1.0

    def start(self, target: Tensor, Q: int) -> list[Operand]:
        """Identities, and zero for the factor that is updated first."""
        eye = torch.eye(*target.shape, dtype=target.dtype, device=target.device)
        factors = [eye[:, : len(target)]] * (Q - 1) + [eye]
        first = Q - 1 if self.order == "right-to-left" else 0
        factors[first] = torch.zeros_like(factors[first])
        return [self.operand(factor) for factor in factors]


def _normalized(
    target: Tensor, Q: int, fit: _Fit, scheme: Callable[[Tensor, int, _Fit], Stage], metric: Tensor | None
) -> list[Tensor]:
    """Make ``target`` wide and of unit size for ``scheme``, and undo both on the factors."""
    tall = target.shape[0] > target.shape[1]
    matrix = target.detach().mT.contiguous() if tall else target.detach()
    if tall:
        fit.constraint = TRANSPOSED.get(fit.constraint, fit.constraint)
    info = torch.finfo(matrix.dtype)
    scale = matrix.abs().amax().clamp_min(info.tiny)
    if metric is not None and not metric.any():
        metric = None
    if Q == 1 and metric is None:
        factors = [project(matrix, fit.K, fit.constraint)]
        lost = torch.linalg.vector_norm((matrix - factors[0]) / scale)
        fit.trace.total = 1
        fit.trace.add(lost / torch.linalg.vector_norm(matrix / scale).clamp_min(info.tiny))
    else:
        unit = _without_dust(matrix / scale)
        if metric is None:
            operands, lam = scheme(unit, Q, fit)
        else:
            with fit.silence():
                operands, lam = scheme(unit, Q, fit)
            C = metric.detach() / metric.diagonal().amax()
            C.diagonal().add_(len(C) * info.eps)  # what rounding leaves of it must stay positive
            sides = (fit.operand(C), None) if tall else (None, fit.operand(C))
            operands, lam = _Sweeps(unit, operands, lam, [fit.K] * Q, fit, *sides).run(is_begun=True)
        share = lam.abs().pow(1 / Q) * scale.pow(1 / Q)  # λ·scale itself could overflow
        shares = [share * lam.sign()] + [share] * (Q - 1)
        factors = [f.with_values(f.values * size).dense() for f, size in zip(operands, shares, strict=True)]
    fit.trace.flush()
    return [factor.mT.contiguous() for factor in reversed(factors)] if tall else factors


def _without_dust(matrix: Tensor) -> Tensor:
    """Entries far below rounding, in a matrix of unit size, are only a source of denormals."""
    return matrix * (matrix.abs() > torch.finfo(matrix.dtype).eps ** 2)


def _flat(target: Tensor, Q: int, fit: _Fit) -> Stage:
    return _Sweeps(target, fit.start(target, Q), target.new_ones(()), [fit.K] * Q, fit).run()


def _split(target: Tensor, Q: int, fit: _Fit) -> Stage:
    if Q == 1:
        return _flat(target, Q, fit)
    factors, lam, sizes = [fit.operand(target)], target.new_ones(()), [0]
    for left in range(Q - 1, 0, -1):
        residual, rest = factors[0].dense(), factors[1:]
        pair_sizes = [fit.K**left, fit.K]
        pair, gain = _Sweeps(residual, fit.start(residual, 2), target.new_ones(()), pair_sizes, fit).run()
        factors, lam, sizes = [*pair, *rest], lam * gain, [*pair_sizes, *sizes[1:]]
        if rest:
            factors, lam = _Sweeps(target, factors, lam, sizes, fit).run(is_begun=True)
    return factors, lam


class _Sweeps:
    """Sweeps of PALM4MSA over the factors of one target, with a metric B on its left or C on its right.

    The wide dimension enters four products a sweep only: Lᵀ(λLS − W) in the step of the wide factor S,
    and SSᵀ and WSᵀ after it. From G = RRᵀ and H = WRᵀ the rest follows among square matrices. With a
    metric they are G = RCRᵀ and H = BWCRᵀ, and Lᵀ(λLS − W) becomes Lᵀ(BλLS − BW)C.
    """

    def __init__(
        self, target: Tensor, factors: list[Operand], lam: Tensor, sizes: list[int], fit: _Fit,
        B: Operand | None = None, C: Operand | None = None,
    ) -> None:  # fmt: skip
        self.factors, self.lam, self.sizes, self.fit, self.B, self.C = list(factors), lam, sizes, fit, B, C
        self.tiny = torch.finfo(target.dtype).tiny
        self.target = target
        if B is not None:
            self.target = B.times(target)
        if C is not None:
            self.target = C.times(target.mT).mT.contiguous()
        self.energy = (self.target * target).sum().clamp_min(self.tiny)
        random = torch.randn(2, len(factors), len(target), 1, generator=fit.random, dtype=torch.float64)
        self.probes = random.to(target)
        self.steps = _FIRST_STEPS
        self.gain_of_C = target.new_ones(())
        if C is not None:
            probe = torch.randn(target.shape[1], 1, generator=fit.random, dtype=torch.float64)
            self.gain_of_C = self._gain(C.times, probe.to(target))

    def run(self, is_begun: bool = False) -> Stage:
        """The best iterate; with ``is_begun`` the start is one of them."""
        fit, previous = self.fit, torch.inf
        pairs = self._grams() if is_begun or fit.order == "left-to-right" else []
        best, best_lam, lowest = list(self.factors), self.lam, torch.full_like(self.lam, torch.inf)
        if is_begun:
            self.lam, lowest = self._scale(*pairs[0])
            best_lam = self.lam
        for _ in range(fit.iterations):
            if fit.order == "right-to-left":
                pair = self._from_the_right()
            else:
                pairs = self._from_the_left(pairs)
                pair = pairs[0]
            self.lam, error = self._scale(*pair)
            self.steps = _STEPS
            del pair

            better = error < lowest
            lowest, best_lam = torch.where(better, error, lowest), torch.where(better, self.lam, best_lam)
            best = _choose(better, self.factors, best)
            fit.trace.add(error)
            if fit.tolerance > 0:
                if previous - float(error) < fit.tolerance * previous:
                    break
                previous = float(error)
        fit.trace.flush()
        return best, best_lam

    def _from_the_right(self) -> tuple[Tensor, Tensor]:
        self._update_wide()
        G, H = self._grams_of_wide()
        for q in range(len(self.factors) - 2, -1, -1):
            self._update_square(q, G, H)
            if q:
                G, H = self._fold(q, G, H)
        return G, H

    def _from_the_left(self, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        for q in range(len(self.factors) - 1):
            self._update_square(q, *pairs.pop(0))
        self._update_wide()
        return self._grams()

    def _grams(self) -> list[tuple[Tensor, Tensor]]:
        """G and H for each square factor, from left to right."""
        pairs = [self._grams_of_wide()]
        for q in range(len(self.factors) - 2, 0, -1):
            pairs.insert(0, self._fold(q, *pairs[0]))
        return pairs

    def _grams_of_wide(self) -> tuple[Tensor, Tensor]:
        wide = self.factors[-1]
        return wide.times(self._in_metric(wide).mT), wide.times(self.target.mT).mT

    def _in_metric(self, wide: Operand) -> Tensor:
        """S·C."""
        return wide.dense() if self.C is None else wide.times(self.C.dense())

    def _fold(self, q: int, G: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
        """G and H once factor q joins R."""
        factor = self.factors[q]
        return factor.times(factor.times(G).mT), factor.times(H.mT).mT

    def _scale(self, G: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
        """The best λ and the relative error with it, from G and H of the first factor."""
        if len(self.factors) > 1:
            first, image = self.factors[0], self.factors[0].times(G)
        else:
            first, image = self.fit.operand(torch.eye(len(G), dtype=G.dtype, device=G.device)), G
        if self.B is not None:
            image = self.B.times(image)
        inner = first.inner(H)
        lam = inner / first.inner(image).clamp_min(self.tiny)
        return lam, (1 - lam * inner / self.energy).clamp_min(0).sqrt()

    def _update_wide(self) -> None:
        q = len(self.factors) - 1
        slope = self._slope(q, self.lam * self._in_metric(self.factors[q]), self.target)
        self._step(q, slope, self.lam * self._gain_of_left(q) * self.gain_of_C)

    def _update_square(self, q: int, G: Tensor, H: Tensor) -> None:
        slope = self._slope(q, self.lam * self.factors[q].times(G), H)
        gain_of_right = self._gain(lambda x: G @ x, self.probes[0, q])
        self._step(q, slope, self.lam * self._gain_of_left(q) * gain_of_right)

    def _slope(self, q: int, inner: Tensor, target: Tensor) -> Tensor:
        """Lᵀ(B·L·inner − target), L the product of the factors left of q; overwrites ``inner``.

        By columns, so that no second matrix of this size is needed.
        """
        step = max(_AT_ONCE // len(inner), 16) if inner.is_cpu else inner.shape[1]
        for part, wanted in zip(torch.split(inner, step, 1), torch.split(target, step, 1), strict=True):
            image = part
            for factor in reversed(self.factors[:q]):
                image = factor.times(image)
            if self.B is not None:
                image = self.B.times(image)
            image = image.sub_(wanted)
            for factor in self.factors[:q]:
                image = factor.transposed.times(image)
            if image is not part:
                part.copy_(image)
        return inner

    def _gain_of_left(self, q: int) -> Tensor:
        """‖LᵀBL‖₂."""
        if q == 0 and self.B is None:
            return torch.ones_like(self.lam)
        zero = torch.zeros_like(self.probes[1, q])
        return self._gain(lambda x: self._slope(q, x, zero), self.probes[1, q])

    def _gain(self, times: Callable[[Tensor], Tensor], probe: Tensor) -> Tensor:
        """Largest eigenvalue of a positive operator, by power iteration from ``probe``, which is updated."""
        image = probe
        size: Tensor = torch.linalg.vector_norm(probe)
        for _ in range(self.steps):
            image = times(image / size.clamp_min(self.tiny))
            size = torch.linalg.vector_norm(image)
        probe.copy_(torch.where(size > 0, image, probe))
        return size

    def _step(self, q: int, slope: Tensor, bound: Tensor) -> None:
        """Projected gradient step: the gradient is λ·``slope`` and c is λ·``bound``, so λ/c is 1/``bound``.

        The new factor has unit norm, its size goes into λ; a zero factor stays as it is.
        """
        length = bound.sign() / (_MARGIN * bound.abs()).clamp_min(self.tiny)  # λ may be negative
        moved = self.factors[q].add_to(slope.mul_(-length))
        keep = support(moved, self.sizes[q], self.fit.constraint)
        factor = Operand.of(moved, self.fit.trace.pulse, keep)
        norm = torch.linalg.vector_norm(factor.values)
        norm = torch.where(norm > 0, norm, torch.ones_like(norm))
        self.factors[q] = factor.with_values(_without_dust(factor.values / norm))
        self.lam = self.lam * norm


def _choose(better: Tensor, new: list[Operand], old: list[Operand]) -> list[Operand]:
    """Decided on the device: an accelerator, where operands are dense, is not waited for."""
    if better.is_cpu:
        return list(new) if better else old
    return [a.with_values(torch.where(better, a.values, b.values)) for a, b in zip(new, old, strict=True)]
