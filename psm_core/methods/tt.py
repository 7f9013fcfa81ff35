"""Tensor train: TT-matrix for Linear layers, a train of convolutions for Conv2d layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import tensorly
import torch
import torch.nn.functional as F
from tensorly.decomposition import tensor_train
from torch import Tensor

from psm_core.factorization import Factor, Factorization
from psm_core.methods._multilinear import refine
from psm_core.methods.base import Method, Shape, floats_in_budget, parameter
from psm_core.network.modules import ConvGeometry
from psm_core.progress import Report

ORDERS = (3, 2, 4, 5, 6)
"""In the order in which a budget tries them."""

_SWEEPS, _TOLERANCE = 20, 5e-3


@dataclass(frozen=True)
class TensorTrain(Method):
    """A train of `order` small cores, each joined to the next by a rank of at most `rank`.

    Linear (and 1×1 convolutions): TT-matrix (Novikov et al. 2015). With out = Πo_k and in = Πi_k,
    balanced, core k has shape (r_k, o_k, i_k, r_{k+1}).

    k×k convolutions: modes from output to input, so that the layer is a chain of convolutions:
    order 2: out | in·kh·kw; 3: out | kh·kw | in; 4: out | kh | kw | in; 5 and 6 also split out and
    in in two.

    The cores come from successive truncated SVDs (TT-SVD, Oseledets 2011) by TensorLy, whose error
    is within √(order − 1) of the best for these ranks. In the metric of a calibration, sweeps of
    alternating least squares over the cores follow.
    """

    name = "tt"
    title = "Tensor train"
    version = 1
    size_parameter = "rank"

    rank: int = parameter("largest rank between two cores", int, minimum=1)
    order: int = parameter("number of cores", int, default=3, minimum=2, maximum=6)

    def storage(self, shape: Shape) -> int:
        modes = [math.prod(mode) for mode in train_modes(shape, self.order)]
        ranks = train_ranks(modes, self.rank)
        return sum(a * mode * b for a, mode, b in zip(ranks[:-1], modes, ranks[1:], strict=True))

    @classmethod
    def largest(cls, shape: Shape, name: str, **fixed: Any) -> float:
        if name != "rank":
            return super().largest(shape, name)
        order = fixed.get("order", 3)
        modes = [math.prod(mode) for mode in train_modes(shape, order)]
        return max(train_ranks(modes, math.prod(modes)))

    @classmethod
    def smallest(cls, shape: Shape, **fixed: Any) -> Self:
        orders = [fixed["order"]] if "order" in fixed else ORDERS
        return min((cls(rank=1, order=k) for k in orders), key=lambda setting: setting.storage(shape))

    @classmethod
    def at_budget(cls, shape: Shape, fraction: float, **fixed: Any) -> Self:
        """Of order 3, or where that stores too much at rank 1, of the first other order that fits."""
        for order in ORDERS if "order" not in fixed else ():
            if cls(rank=1, order=order).storage(shape) <= floats_in_budget(shape, fraction):
                return super().at_budget(shape, fraction, order=order)
        return super().at_budget(shape, fraction, **fixed)

    def _factorize(self, weight: Tensor, report: Report, metric: Tensor | None) -> Factorization:
        shape = tuple(weight.shape)
        modes = train_modes(shape, self.order)
        sizes = [math.prod(mode) for mode in modes]
        with tensorly.backend_context("pytorch", local_threadsafe=True):
            train = tensor_train(to_train(weight, modes).reshape(sizes), train_ranks(sizes, self.rank))
        cores = tuple(
            core.reshape(core.shape[0], *mode, core.shape[-1])
            for core, mode in zip(train.factors, modes, strict=True)
        )
        if metric is not None:
            matrix = weight.flatten(1)
            cores = tuple(
                refine(
                    cores, lambda train: TrainProduct.weight_from(train, shape).flatten(1), matrix, metric,
                    sweeps=_SWEEPS, tolerance=_TOLERANCE, report=report,
                )
            )  # fmt: skip
        return TrainProduct(self, shape, cores)


def train_modes(shape: Shape, order: int) -> list[tuple[int, ...]]:
    """The modes of each core: pairs (o_k, i_k) for a matrix, single sizes for a k×k kernel."""
    out, channels, *kernel = shape
    if math.prod(kernel) == 1:
        # The largest row factors meet the smallest column factors, so that cores are of equal size.
        return list(zip(balanced_factors(out, order), balanced_factors(channels, order)[::-1], strict=True))
    area = math.prod(kernel)
    if order == 2:
        return [(out,), (channels * area,)]
    split = 2 if order >= 5 else 1
    middle = [(area,)] if order % 2 else [(side,) for side in kernel]
    outs, ins = balanced_factors(out, split), balanced_factors(channels, split)
    return [*((n,) for n in outs), *middle, *((n,) for n in ins)]


def balanced_factors(number: int, count: int) -> list[int]:
    """`count` whole factors of a number, ascending, as equal as its primes allow."""
    factors = [1] * count
    for prime in reversed(prime_factors(number)):
        factors[factors.index(min(factors))] *= prime
    return sorted(factors)


def prime_factors(number: int) -> list[int]:
    """The primes of a number, ascending: 12 → [2, 2, 3]."""
    primes, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            primes.append(divisor)
            number //= divisor
        divisor += 1
    return [*primes, number] if number > 1 else primes


def train_ranks(modes: Sequence[int], cap: int) -> list[int]:
    """Ranks 1, r_1 … 1: each the cap, or less where the unfolding has fewer rows or columns."""
    ranks = [1]
    for k in range(1, len(modes)):
        ranks.append(min(cap, ranks[-1] * modes[k - 1], math.prod(modes[k:])))
    return [*ranks, 1]


def to_train(weight: Tensor, modes: Sequence[tuple[int, ...]]) -> Tensor:
    """The weight with its entries in the order of the train's modes."""
    order = len(modes)
    if len(modes[0]) == 2:
        outs, ins = zip(*modes, strict=True)
        interleaved = [axis for k in range(order) for axis in (k, order + k)]
        return weight.reshape(*outs, *ins).permute(interleaved)
    return weight if order == 2 else weight.permute(0, 2, 3, 1)


class TrainProduct(Factorization):
    """Cores of shape (r, o, i, r′) for a matrix, (r, n, r′) for the modes of a kernel."""

    kind = "tensor-train"

    @staticmethod
    def weight_from(factors: Sequence[Factor], shape: tuple[int, ...]) -> Tensor:
        cores = _dense(factors)
        if cores[0].dim() == 4:
            matrix = cores[0].new_ones(1, 1, 1)
            for core in cores:
                matrix = torch.einsum("oia,abcd->obicd", matrix, core).reshape(
                    matrix.shape[0] * core.shape[1], matrix.shape[1] * core.shape[2], -1
                )
            return matrix.reshape(shape)
        train = _contract(cores)
        if len(cores) == 2:
            return train.reshape(shape)
        out, channels, *kernel = shape
        return train.reshape(out, *kernel, channels).permute(0, 3, 1, 2).contiguous()

    @staticmethod
    def linear(factors: Sequence[Factor], x: Tensor) -> Tensor:
        cores, batch = _dense(factors), x.shape[0]
        state = x.unsqueeze(1)
        for core in cores:
            # (batch·outs so far, rank, ins left) → the next input mode becomes an output mode.
            state = torch.unflatten(state, 2, (core.shape[2], -1))
            state = torch.einsum("paic,aoib->pobc", state, core).flatten(0, 1)
        return state.reshape(batch, math.prod(core.shape[1] for core in cores))

    @staticmethod
    def conv2d(
        factors: Sequence[Factor], x: Tensor, shape: tuple[int, ...], geometry: ConvGeometry
    ) -> Tensor:
        cores = _dense(factors)
        out, channels, *kernel = shape
        if cores[0].dim() == 4:
            x = geometry.subsample(geometry.pad(x))
            rows = TrainProduct.linear(cores, x.permute(0, 2, 3, 1).flatten(0, 2))
            return rows.reshape(x.shape[0], *x.shape[2:], out).permute(0, 3, 1, 2)
        if len(cores) == 2:
            y = geometry.convolve(x, cores[1].reshape(-1, channels, *kernel))
            return F.conv2d(y, cores[0].reshape(out, -1, 1, 1))
        split = 2 if len(cores) >= 5 else 1
        left, right = _contract(cores[:split]), _contract(cores[-split:])
        y = F.conv2d(x, right.reshape(-1, channels, 1, 1))
        middle = _contract(cores[split:-split])
        core = middle.reshape(middle.shape[0], *kernel, middle.shape[-1])
        y = geometry.convolve(y, core.permute(0, 3, 1, 2))
        return F.conv2d(y, left.reshape(out, -1, 1, 1))


def _dense(factors: Sequence[Factor]) -> list[Tensor]:
    """Cores of a train are dense."""
    return [core for core in factors if isinstance(core, Tensor)]


def _contract(cores: Sequence[Tensor]) -> Tensor:
    """Join neighbouring cores: shape (first rank, product of the modes, last rank)."""
    train = cores[0]
    for core in cores[1:]:
        train = torch.einsum("amb,bnc->amnc", train, core).flatten(1, 2)
    return train
