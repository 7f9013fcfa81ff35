"""PALM4MSA: proximal alternating linearized minimization for multi-layer sparse approximation.

    minimize  ‖W − λ·S₁S₂…S_Q‖²_F   over λ and S_q ∈ E_q,   W of shape m × n, m ≤ n,

where S₁ … S_{Q−1} are m × m and S_Q is m × n (a tall W is transposed first). Each factor in turn takes
a gradient step of length 1/c, c slightly above λ²‖L‖₂²‖R‖₂² (L, R: the products of the factors on its
left and right), and is projected onto its sparsity set E_q; then λ = ⟨W, P⟩ / ‖P‖²_F, P = S₁…S_Q.

Sources: Le Magoarou & Gribonval, "Flexible multilayer sparse approximations of matrices and
applications", IEEE JSTSP 2016; Giffon et al., "PSM-nets", IJCNN 2021 (the union constraint).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from psm_core.methods._engine import Rows, Trace
from psm_core.progress import Report

Stage = tuple[list[Tensor], Tensor]  # factors of unit norm, λ

CONSTRAINTS = ("splincol", "row", "column", "global")
_TRANSPOSED = {"row": "column", "column": "row"}
_MARGIN = 1.001  # c exceeds the Lipschitz constant by this factor


def palm4msa(
    target: Tensor, *, K: int, Q: int, constraint: str = "splincol",
    iterations: int, tolerance: float, seed: int, report: Report,
) -> list[Tensor]:  # fmt: skip
    """Q sparse factors whose product, left to right, approximates ``target`` (m × n): flat PALM4MSA.

    The factor with the longer side starts at zero and is updated first, the others start as the
    identity. λ is kept apart until the end, then shared evenly by the factors; the best iterate is
    returned. Stops after ``iterations``, or once an iteration lowers the relative error by less than
    the fraction ``tolerance`` of it. ``report(iteration, total, relative_error)`` may raise.
    """
    fit = _Fit(K, constraint, iterations, tolerance, seed, Trace(report, iterations))
    return _normalized(target, Q, fit, _flat)


def hierarchical(
    target: Tensor, *, K: int, Q: int, constraint: str = "splincol",
    iterations: int, tolerance: float, seed: int, report: Report,
) -> list[Tensor]:  # fmt: skip
    """As :func:`palm4msa`, one factor after another: split ``target`` in two, split the square residual
    again, and re-optimize all factors on ``target`` after each split; ``iterations`` for each stage.

    While r factors are still to come out of the residual, it may hold Kʳ entries where they hold K:
    no product of r such factors needs more.
    """
    trace = Trace(report, iterations * max(2 * Q - 3, 1))
    return _normalized(target, Q, _Fit(K, constraint, iterations, tolerance, seed, trace), _split)


def project(matrix: Tensor, K: int, constraint: str) -> Tensor:
    """Nearest matrix of a sparsity set: kept entries unchanged, exact zeros elsewhere.

    "row" keeps the K largest magnitudes of each row, "column" of each column, "splincol" the union of
    both, "global" the K·max(rows, cols) largest of the matrix. Ties never exceed these counts.
    """
    if constraint not in CONSTRAINTS:
        raise ValueError(f"constraint must be one of {', '.join(CONSTRAINTS)}, not {constraint!r}")
    rows, cols = matrix.shape
    size = matrix.abs()
    keep = torch.zeros_like(matrix, dtype=torch.bool)
    if constraint == "global":
        count = min(K * max(rows, cols), matrix.numel())
        keep.view(-1)[size.view(-1).topk(count, sorted=False).indices] = True
    if constraint in ("row", "splincol"):
        keep.scatter_(1, size.topk(min(K, cols), dim=1, sorted=False).indices, True)
    if constraint in ("column", "splincol"):
        keep.scatter_(0, size.topk(min(K, rows), dim=0, sorted=False).indices, True)
    return matrix * keep


class _Fit:
    """The settings of one fit, shared by its stages."""

    def __init__(
        self, K: int, constraint: str, iterations: int, tolerance: float, seed: int, trace: Trace
    ) -> None:
        self.K, self.constraint, self.iterations, self.tolerance = K, constraint, iterations, tolerance
        self.random, self.trace = torch.Generator().manual_seed(seed), trace


def _normalized(
    target: Tensor, Q: int, fit: _Fit, scheme: Callable[[Tensor, int, _Fit], Stage]
) -> list[Tensor]:
    """Make ``target`` wide and of unit size for ``scheme``, and undo both on the factors."""
    tall = target.shape[0] > target.shape[1]
    matrix = target.detach().mT.contiguous() if tall else target.detach()
    if tall:
        fit.constraint = _TRANSPOSED.get(fit.constraint, fit.constraint)
    info = torch.finfo(matrix.dtype)
    scale = matrix.abs().amax().clamp_min(info.tiny)
    unit = matrix / scale
    if Q == 1:
        factors = [project(matrix, fit.K, fit.constraint)]
        lost = torch.linalg.vector_norm((matrix - factors[0]) / scale)
        fit.trace.total = 1
        fit.trace.add(lost / torch.linalg.vector_norm(unit).clamp_min(info.tiny))
    else:
        unit = unit * (unit.abs() > info.eps**2)  # far below rounding: only a source of denormals
        factors, lam = scheme(unit, Q, fit)
        share = lam.abs().pow(1 / Q) * scale.pow(1 / Q)  # λ·scale itself could overflow
        factors = [factor * share for factor in factors]
        factors[0] = factors[0] * lam.sign()
    fit.trace.flush()
    return [factor.mT.contiguous() for factor in reversed(factors)] if tall else factors


def _flat(target: Tensor, Q: int, fit: _Fit) -> Stage:
    return _stage(target, _start(target, Q), target.new_ones(()), [fit.K] * Q, fit)


def _split(target: Tensor, Q: int, fit: _Fit) -> Stage:
    factors, lam, sizes = [target], target.new_ones(()), [0]
    for left in range(Q - 1, 0, -1):
        residual, *rest = factors
        pair, gain = _stage(residual, _start(residual, 2), target.new_ones(()), [fit.K**left, fit.K], fit)
        factors, lam, sizes = [*pair, *rest], lam * gain, [fit.K**left, fit.K, *sizes[1:]]
        if rest:
            factors, lam = _stage(target, factors, lam, sizes, fit)
    return factors, lam


def _start(target: Tensor, Q: int) -> list[Tensor]:
    eye = torch.eye(len(target), dtype=target.dtype, device=target.device)
    return [eye] * (Q - 1) + [torch.zeros_like(target)]


def _stage(target: Tensor, factors: list[Tensor], lam: Tensor, sizes: list[int], fit: _Fit) -> Stage:
    """Best iterate of ``fit.iterations`` sweeps over ``factors``, from the last (wide) to the first.

    The wide dimension enters four products a sweep only: Lᵀ(LS − W) in the step of the wide factor S,
    SSᵀ and WSᵀ after it. From G = RRᵀ and H = WRᵀ the rest follows among square matrices.
    """
    *square, wide = factors
    tiny = torch.finfo(target.dtype).tiny
    energy = target.square().sum().clamp_min(tiny)
    probes = torch.randn(2, len(factors), len(target), generator=fit.random, dtype=torch.float64).to(target)
    best, best_lam, lowest = list(factors), lam, torch.full_like(lam, torch.inf)
    previous = torch.inf
    for sweep in range(fit.iterations):
        power = 50 if sweep == 0 else 8  # power iterations, from the singular vectors of the last sweep
        lefts = [square[0]]
        for factor in square[1:]:
            lefts.append(_times(lefts[-1], factor))

        slope = _residual(lefts[-1], lam * wide, target)
        bound = lam * _gain(lefts[-1], probes[0, -1], power) ** 2
        wide, lam = _step(wide, slope, bound, lam, sizes[-1], fit)
        rows = Rows(wide != 0)
        G, H = rows.times(wide, wide.mT), rows.times(wide, target.mT).mT
        fit.trace.pulse()

        for q in range(len(square) - 1, -1, -1):
            slope, bound = lam * _times(square[q], G), lam * _gain(G, probes[0, q], power)
            if q:
                slope = _residual(lefts[q - 1], slope, H)
                bound = bound * _gain(lefts[q - 1], probes[1, q], power) ** 2
            else:
                slope = slope - H
            square[q], lam = _step(square[q], slope, bound, lam, sizes[q], fit)
            if q:
                G, H = _times(square[q], _times(square[q], G).mT), _times(square[q], H.mT).mT
        inner = (H * square[0]).sum()
        lam = inner / (_times(square[0], G) * square[0]).sum().clamp_min(tiny)
        error = (1 - lam * inner / energy).clamp_min(0).sqrt()

        better = error < lowest  # decided on the device: no wait for the host
        lowest, best_lam = torch.where(better, error, lowest), torch.where(better, lam, best_lam)
        best = [torch.where(better, new, old) for new, old in zip([*square, wide], best, strict=True)]
        fit.trace.add(error)
        if fit.tolerance > 0:
            if previous - float(error) < fit.tolerance * previous:
                break
            previous = float(error)
    fit.trace.flush()
    return best, best_lam


def _step(
    factor: Tensor, slope: Tensor, bound: Tensor, lam: Tensor, K: int, fit: _Fit
) -> tuple[Tensor, Tensor]:
    """Projected gradient step: the gradient is λ·``slope`` and c is λ·``bound``, so λ/c is 1/``bound``.

    The new factor has unit norm, its size goes into λ; a zero factor stays as it is.
    """
    length = 1 / (_MARGIN * bound).clamp_min(torch.finfo(factor.dtype).tiny)
    factor = project(factor - slope * length, K, fit.constraint)
    norm = torch.linalg.vector_norm(factor)
    norm = torch.where(norm > 0, norm, torch.ones_like(norm))
    return factor / norm, lam * norm


def _times(sparse: Tensor, other: Tensor) -> Tensor:
    return Rows(sparse != 0).times(sparse, other)


def _residual(left: Tensor, inner: Tensor, target: Tensor) -> Tensor:
    """Lᵀ(L·M − T)."""
    return Rows(left != 0, transposed=True).times(left, _times(left, inner) - target)


def _gain(matrix: Tensor, probe: Tensor, steps: int) -> Tensor:
    """Spectral norm by power iteration from ``probe``, which is updated."""
    tiny = torch.finfo(matrix.dtype).tiny
    size = torch.zeros_like(probe[0])
    for _ in range(steps):
        unit = probe / torch.linalg.vector_norm(probe).clamp_min(tiny)
        image = matrix @ unit
        size = torch.linalg.vector_norm(image)
        probe.copy_(matrix.mT @ image)
    return size
