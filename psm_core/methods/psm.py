"""Products of sparse matrices: the method this project exists for."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from psm_core.errors import ParameterError
from psm_core.factorization import Factor, Factorization, MatrixProduct, ShortcutProduct
from psm_core.methods._joint import joint
from psm_core.methods._palm4msa import ORDERS, hierarchical, palm4msa
from psm_core.methods._sparsity_sets import CONSTRAINTS, set_size
from psm_core.methods.base import (
    Method,
    Shape,
    floats_in_budget,
    matrix_shape,
    parameter,
)
from psm_core.methods.prune import pruned
from psm_core.progress import Report
from psm_core.sparse import SparseMatrix


@dataclass(frozen=True)
class PSM(Method):
    """W ≈ S₁S₂…S_Q with sparse factors, of about K non-zeros a row and a column each.

    The nominal factors are one of W's own shape and Q − 1 square ones of its smaller side, where W
    is the matrix out × (in·kh·kw) with sides (min, max).

    `joint` (the default) has a budget of K·((Q − 1)·min + max) floats and spends it freely: the
    non-zeros go where they lower the error most, over rows, factors and a free inner dimension. Q
    is the most factors it may use, and it uses one or two: in trials a third gained nothing. The
    factor with W's smaller side ends in an identity, whose ones need not be stored: W ≈ (A + [0 I])·B
    (`ShortcutProduct`), so that SVD, pruning and low-rank + sparse are special cases. It returns the
    first two, and says so, where they are best.

    `palm4msa` and `hierarchical` are the published algorithms (Le Magoarou & Gribonval, IEEE JSTSP
    2016), with the constraint sets of PSM-nets (Giffon et al., IJCNN 2021): `splincol` keeps the K
    largest of each row and of each column, between K·max(rows, cols) and K·(rows + cols) non-zeros
    a factor; `row` and `column` keep K each; `global` keeps the K·max(rows, cols) largest, and `block`
    whole blocks of 4 × 4 (or 2 × 2, where K < 4) of the largest energy, within the same number.
    `update_order` is that within an iteration, with the factor of W's longer side on the right: the
    first one to be updated starts at zero, the others as the identity.
    """

    name = "psm"
    title = "PSM"
    version = 2
    size_parameter = "K"

    K: float = parameter("non-zeros per row and per column of a factor", float, above=0.0)
    Q: int = parameter("number of factors (joint: at the most)", int, default=2, minimum=1, maximum=8)
    algorithm: str = parameter(
        "how the factors are found",
        str,
        default="joint",
        choices=("joint", "palm4msa", "hierarchical"),
    )
    constraint: str = parameter(
        "sparsity set of a factor (palm4msa and hierarchical)",
        str,
        default="splincol",
        choices=CONSTRAINTS,
    )
    iterations: int = parameter(
        "most iterations of one search or stage, of which a fit may take several",
        int,
        default=60,
        minimum=1,
        maximum=100_000,
    )
    tolerance: float = parameter(
        "stop when an iteration lowers the relative error by less than this share of it",
        float,
        default=0.0,
        minimum=0.0,
    )
    seed: int = parameter("seed of the random numbers", int, default=0, minimum=0, maximum=2**63 - 1)
    update_order: str = parameter(
        "order in which an iteration updates the factors (palm4msa and hierarchical)",
        str,
        default=ORDERS[0],
        choices=ORDERS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in ("constraint", "update_order") if self.algorithm == "joint" else ():
            if (value := getattr(self, name)) != defaults[name]:
                raise ParameterError(
                    f"psm: {name} = {value} is for algorithm=palm4msa or hierarchical; joint spreads its "
                    f"non-zeros freely. Leave {name} out, or choose one of these"
                )
        if self.algorithm != "joint" and int(self.K) != self.K:
            raise ParameterError(
                f"psm: K = {self.K:g} is not whole, as algorithm={self.algorithm} needs it; give a "
                "whole K, or use algorithm=joint"
            )

    def storage(self, shape: Shape) -> int:
        """Floats stored at the most: the budget of `joint`, the bound of the sparsity set otherwise."""
        sides = sorted(matrix_shape(shape))
        if self.algorithm == "joint":
            return max(1, min(math.floor(self.K * nominal_rows(shape, self.Q) + 1e-6), math.prod(sides)))
        return sum(
            set_size(self.constraint, int(self.K), rows, cols) for rows, cols in nominal_shapes(shape, self.Q)
        )

    @classmethod
    def largest(cls, shape: Shape, name: str, **fixed: Any) -> float:
        return max(matrix_shape(shape)) if name == "K" else super().largest(shape, name)

    @classmethod
    def smallest(cls, shape: Shape, **fixed: Any) -> Self:
        if fixed.get("algorithm", "joint") != "joint":
            return super().smallest(shape, **fixed)
        return cls(K=1 / nominal_rows(shape, fixed.get("Q", 2)), **fixed)

    @classmethod
    def at_budget(cls, shape: Shape, fraction: float, **fixed: Any) -> Self:
        """Meets any budget exactly with `joint`, whose K may be fractional; else the largest K."""
        if fixed.get("algorithm", "joint") != "joint":
            return super().at_budget(shape, fraction, **fixed)
        if (budget := floats_in_budget(shape, fraction)) < 1:
            raise cls.too_small(shape, fraction, **fixed)
        return cls(K=budget / nominal_rows(shape, fixed.get("Q", 2)), **fixed)

    def _factorize(self, weight: Tensor, report: Report, metric: Tensor | None) -> Factorization:
        shape = tuple(weight.shape)
        matrix = weight.reshape(matrix_shape(shape))
        common: dict[str, Any] = {
            "iterations": self.iterations,
            "tolerance": self.tolerance,
            "seed": self.seed,
            "report": report,
            "metric": metric,
        }
        family: type[MatrixProduct] = MatrixProduct
        if self.algorithm != "joint":
            run = palm4msa if self.algorithm == "palm4msa" else hierarchical
            factors = run(
                matrix, K=int(self.K), Q=self.Q, constraint=self.constraint, order=self.update_order, **common
            )
        elif self.Q == 1:
            factors = [pruned(matrix, self.storage(shape), metric)]
        else:
            fit = joint(matrix, nonzeros=self.storage(shape), **common)
            factors, family = fit.factors, ShortcutProduct if fit.ones else MatrixProduct
        # A factor without zeros needs no indices.
        stored: list[Factor] = [f if bool((f != 0).all()) else SparseMatrix.from_dense(f) for f in factors]
        return family(self, shape, tuple(stored), note=self._note(stored))

    def _note(self, factors: list[Factor]) -> str:
        """Which special case the joint fit came to, if it did."""
        if self.algorithm == "joint" and self.Q > 1 and len(factors) == 1:
            return "At this budget pruning is the best product of sparse matrices found."
        if self.algorithm == "joint" and not any(isinstance(f, SparseMatrix) for f in factors):
            return "At this budget the SVD is the best product of sparse matrices found."
        return ""


def nominal_shapes(shape: Shape, Q: int) -> list[tuple[int, int]]:
    """One factor of the matrix's own shape, and Q − 1 square ones of its smaller side."""
    rows, cols = matrix_shape(shape)
    return [(rows, cols)] + [(min(rows, cols),) * 2] * (Q - 1)


def nominal_rows(shape: Shape, Q: int) -> int:
    """Σ max(rows, cols) over the nominal factors: non-zeros for K = 1."""
    return sum(max(sides) for sides in nominal_shapes(shape, Q))
