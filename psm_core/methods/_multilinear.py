"""Products of several dense factors, fitted in the metric of a layer's inputs.

    minimize  ‖(W − Ŵ) M^½‖²_F   over the factors of Ŵ,   W and Ŵ of shape (out, n), M (n, n).

Ŵ is linear in each factor when the others are fixed, Ŵ = A_k(f_k), so that each is a least-squares
problem of its own: A_k*(A_k(f_k) M) = A_k*(W M). Some steps of conjugate gradients from the present
factor lower its error without forming the matrix of the problem; the adjoint A_k* is the derivative's.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from psm_core.progress import Report

_STEPS = 10  # of conjugate gradients for one factor


def refine(
    factors: Sequence[Tensor],
    build: Callable[[Sequence[Tensor]], Tensor],
    target: Tensor,
    metric: Tensor,
    *,
    sweeps: int,
    tolerance: float,
    report: Report,
) -> list[Tensor]:
    """Factors of which ``build`` gives the product (out, n), no worse in the metric than those given.

    Sweeps over the factors end when one lowers the error by less than the fraction ``tolerance`` of it.
    ``report(sweep, sweeps, relative_error)`` may raise to stop the work.
    """
    tiny = torch.finfo(target.dtype).tiny
    norm = float((target @ metric * target).sum().clamp_min(tiny).sqrt())
    current = list(factors)
    rest = target - build(current)
    pull = rest @ metric  # of the error on Ŵ

    def error() -> float:
        return float((rest * pull).sum().clamp_min(0).sqrt()) / norm

    best, lowest = list(current), error()
    for sweep in range(1, sweeps + 1):
        previous = lowest
        for k, value in enumerate(current):

            def product(factor: Tensor, k: int = k) -> Tensor:
                return build([*current[:k], factor, *current[k + 1 :]])

            adjoint = torch.func.vjp(product, value)[1]
            (direction,) = adjoint(pull)
            size = direction.square().sum()
            for _ in range(_STEPS):
                change = product(direction)
                seen = change @ metric
                length = size / (change * seen).sum().clamp_min(tiny)
                value = value + length * direction
                rest, pull = rest - length * change, pull - length * seen
                (slope,) = adjoint(pull)
                before, size = size, slope.square().sum()
                direction = slope + size / before.clamp_min(tiny) * direction
            current[k] = value
            report(sweep, sweeps, error())
        rest = target - build(current)  # without the rounding of the steps
        pull = rest @ metric
        if (found := error()) < lowest:
            best, lowest = list(current), found
        if not math.isfinite(found) or previous - found <= tolerance * previous:
            break
    return best
