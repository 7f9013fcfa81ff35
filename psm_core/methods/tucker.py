"""Tucker-2 decomposition over the channel modes of a convolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import tensorly
import torch
from tensorly.decomposition import partial_tucker
from torch import Tensor

from psm_core.factorization import Factor, Factorization, MatrixProduct
from psm_core.methods._multilinear import refine
from psm_core.methods.base import Method, Shape, floats_in_budget, parameter
from psm_core.methods.svd import SVD, truncated_svd
from psm_core.network.modules import ConvGeometry, mix_channels
from psm_core.progress import Report


@dataclass(frozen=True)
class Tucker(Method):
    """W ≈ core ×₁ U ×₂ V: a core (r_out × r_in × kh × kw) between two channel mixings.

    U (out × r_out) and V (in × r_in) have orthonormal columns. Start: truncated HOSVD; then sweeps
    of higher-order orthogonal iteration (De Lathauwer et al. 2000) by TensorLy's `partial_tucker`.
    As a layer: 1×1 convolution, kh×kw convolution with the core, 1×1 convolution (Kim et al. 2016).
    Stores out·r_out + in·r_in + r_out·r_in·kh·kw floats. In the metric of a calibration, as many sweeps of
    alternating least squares follow.

    For a Linear layer the decomposition is the SVD of rank min(r_out, r_in), and is stored as such.
    """

    name = "tucker"
    title = "Tucker"
    version = 1
    size_parameter = "rank_out"

    rank_out: int = parameter("rank over the output channels", int, minimum=1)
    rank_in: int = parameter("rank over the input channels", int, minimum=1)
    iterations: int = parameter("sweeps of orthogonal iteration", int, default=10, minimum=1, maximum=1000)
    tolerance: float = parameter(
        "stop when a sweep lowers the relative error by less than this share of it",
        float,
        default=1e-5,
        minimum=0.0,
    )

    def storage(self, shape: Shape) -> int:
        if len(shape) == 2:
            return SVD(min(self.rank_out, self.rank_in)).storage(shape)
        rank_out, rank_in = self._ranks(shape)
        return _stored(shape, rank_out, rank_in)

    def _ranks(self, shape: Shape) -> tuple[int, int]:
        """The ranks in use: more than rank·kh·kw of the other side adds floats and no precision."""
        area = math.prod(shape[2:])
        return min(self.rank_out, self.rank_in * area), min(self.rank_in, self.rank_out * area)

    @classmethod
    def largest(cls, shape: Shape, name: str, **fixed: Any) -> float:
        if name == "rank_out":
            return shape[0]
        return shape[1] if name == "rank_in" else super().largest(shape, name)

    @classmethod
    def smallest(cls, shape: Shape, **fixed: Any) -> Self:
        return cls(**{"rank_out": 1, "rank_in": 1, **fixed})

    @classmethod
    def at_budget(cls, shape: Shape, fraction: float, **fixed: Any) -> Self:
        """The pair of ranks closest below the budget, of those within a factor 1.5 of balance.

        Balanced means the same share of both sides; the closest pair of all where none is.
        """
        budget = floats_in_budget(shape, fraction)
        if len(shape) == 2:
            if (rank := budget // sum(shape)) < 1:
                raise cls.too_small(shape, fraction, **fixed)
            return cls(**{"rank_out": rank, "rank_in": rank, **fixed})
        out, channels, *kernel = shape
        area = math.prod(kernel)
        outs = [fixed["rank_out"]] if "rank_out" in fixed else range(1, out + 1)
        best = (False, 0, 0.0, 0, 0)
        for rank_out in outs:
            room = (budget - out * rank_out) // (channels + rank_out * area)
            rank_in = fixed.get("rank_in", min(channels, room, rank_out * area))
            if not 0 < rank_in <= room or rank_out > rank_in * area:
                continue
            imbalance = abs(math.log(rank_out / out / (rank_in / channels)))
            stored = _stored(shape, rank_out, rank_in)
            best = max(best, (imbalance <= math.log(1.5), stored, -imbalance, rank_out, rank_in))
        *_, rank_out, rank_in = best
        if not rank_out:
            raise cls.too_small(shape, fraction, **fixed)
        return cls(**{**fixed, "rank_out": rank_out, "rank_in": rank_in})

    def _factorize(self, weight: Tensor, report: Report, metric: Tensor | None) -> Factorization:
        shape = tuple(weight.shape)
        if weight.dim() == 2:
            factors = truncated_svd(weight, min(self.rank_out, self.rank_in), metric)
            note = "For a Linear layer the Tucker decomposition is the SVD; it is stored as one."
            return MatrixProduct(self, shape, factors, note=note)
        ranks = list(self._ranks(shape))
        note = "" if ranks == [self.rank_out, self.rank_in] else f"Ranks {ranks} give the same Ŵ."
        norm = float(weight.norm())
        state: Any = "svd"
        previous = math.inf
        with tensorly.backend_context("pytorch", local_threadsafe=True):
            for iteration in range(1, self.iterations + 1):
                # TensorLy takes no callback: one sweep a call, each from where the last one ended.
                state, _ = partial_tucker(weight, ranks, modes=[0, 1], n_iter_max=1, init=state)
                core, (left, right) = state
                # U and V are orthonormal, so ‖W − Ŵ‖² = ‖W‖² − ‖core‖².
                lost = max(0.0, 1.0 - (float(core.norm()) / norm) ** 2) if norm else 0.0
                if metric is None:
                    report(iteration, self.iterations, math.sqrt(lost))
                if previous - math.sqrt(lost) < self.tolerance * previous < math.inf:
                    break
                previous = math.sqrt(lost)
                state = (core, [left.clone(), right.clone()])
        if metric is not None:
            left, core, right = refine(
                (left, core, right), lambda parts: TuckerProduct.weight_from(parts, shape).flatten(1),
                weight.flatten(1), metric,
                sweeps=self.iterations, tolerance=self.tolerance, report=report,
            )  # fmt: skip
            (left, outer), (right, inner) = torch.linalg.qr(left), torch.linalg.qr(right)
            core = torch.einsum("ca,abyx,db->cdyx", outer, core, inner)
        return TuckerProduct(self, shape, (left, core, right), note=note)


def _stored(shape: Shape, rank_out: int, rank_in: int) -> int:
    """Floats of a Tucker-2 decomposition of these ranks."""
    out, channels, *kernel = shape
    return out * rank_out + channels * rank_in + rank_out * rank_in * math.prod(kernel)


class TuckerProduct(Factorization):
    """Ŵ[o, i, y, x] = Σ_ab U[o, a] · core[a, b, y, x] · V[i, b], stored as (U, core, V)."""

    kind = "tucker-2"

    def scaled(self, exponent: int) -> Factorization:
        """On the core alone: U and V stay orthonormal."""
        left, core, right = self.factors
        assert isinstance(core, Tensor)
        return replace(self, factors=(left, core * 2.0**exponent, right))

    @staticmethod
    def weight_from(factors: Sequence[Factor], shape: tuple[int, ...]) -> Tensor:
        left, core, right = factors
        return torch.einsum("oa,abyx,ib->oiyx", left, core, right)

    @staticmethod
    def linear(factors: Sequence[Factor], x: Tensor) -> Tensor:
        raise AssertionError("Tucker-2 factors belong to a convolution")

    @staticmethod
    def conv2d(
        factors: Sequence[Factor], x: Tensor, shape: tuple[int, ...], geometry: ConvGeometry
    ) -> Tensor:
        left, core, right = factors
        assert isinstance(core, Tensor)
        assert isinstance(right, Tensor)
        return mix_channels(left, geometry.convolve(mix_channels(right.T, x), core))
