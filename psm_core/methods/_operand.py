"""A matrix that dense ones are multiplied with, by compressed rows where that is faster."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Pulse = Callable[[], None]

_SPARSE = 1 / 5  # density below which a CPU multiplies faster by compressed rows
_LEAST = 1 << 15  # entries below which the calls take longer than dense products
_COMPRESSED_WORK, _DENSE_WORK = 1 << 28, 1 << 32  # multiplications between two pulses: some 0.2 s
_CACHE = 1 << 18  # entries of X that a core's cache holds


class Operand:
    """A matrix S (rows × cols) for products S·X and Sᵀ·X, X dense.

    On a CPU, if sparse enough, not tiny and of fewer than 2³¹ entries, it holds its non-zeros by rows, and a
    product adds up rows of X; else it is dense. A long product is done in blocks of columns of X, with a
    ``pulse`` after each.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        values: Tensor,
        pulse: Pulse,
        places: Tensor | None = None,
        columns: Tensor | None = None,
        starts: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> None:
        self.shape, self.values, self.pulse, self.keep = shape, values, pulse, keep
        self.places, self.columns, self.starts = places, columns, starts

    @classmethod
    def of(cls, matrix: Tensor, pulse: Pulse, keep: Tensor | None = None) -> Operand:
        """``matrix`` with only the entries to ``keep``: all non-zeros if not given."""
        rows, cols = matrix.shape
        if matrix.is_cpu and matrix.numel() >= _LEAST:
            mask = (matrix != 0 if keep is None else keep).numpy()
            if np.count_nonzero(mask) < _SPARSE * mask.size < 2**31 * _SPARSE:
                flat = np.flatnonzero(mask)
                starts = np.searchsorted(flat, np.arange(rows + 1) * cols)
                columns = flat - np.repeat(np.arange(rows) * cols, np.diff(starts))
                places, *layout = (torch.from_numpy(index).int() for index in (flat, columns, starts))
                return cls((rows, cols), matrix.reshape(-1)[places], pulse, places, *layout)
        return cls((rows, cols), matrix if keep is None else matrix * keep, pulse, keep=keep)

    def with_values(self, values: Tensor) -> Operand:
        """The same support with other values."""
        return Operand(self.shape, values, self.pulse, self.places, self.columns, self.starts, self.keep)

    def dense(self) -> Tensor:
        return self.values if self.places is None else self.add_to(self.values.new_zeros(self.shape))

    def add_to(self, matrix: Tensor) -> Tensor:
        """``matrix`` (contiguous) += S."""
        if self.places is None:
            return matrix.add_(self.values)
        matrix.view(-1).index_add_(0, self.places, self.values)
        return matrix

    def inner(self, matrix: Tensor) -> Tensor:
        """⟨S, ``matrix``⟩."""
        if self.places is None or self.columns is None:
            return (self.values * matrix).sum()
        return (self.values * matrix[self.places // self.shape[1], self.columns]).sum()

    def at_support(self, matrix: Tensor) -> Tensor:
        """The entries of ``matrix`` on the support, laid out as ``values``."""
        if self.places is None:
            return matrix if self.keep is None else matrix * self.keep
        return matrix.reshape(-1)[self.places]

    def put_into(self, matrix: Tensor, values: Tensor) -> Tensor:
        """``matrix`` (contiguous) with ``values`` on the support."""
        if self.places is None:
            return matrix.copy_(values) if self.keep is None else torch.where(self.keep, values, matrix)
        matrix.view(-1)[self.places] = values
        return matrix

    def by_row(self, vector: Tensor) -> Tensor:
        """For each of the ``values`` the entry of ``vector`` (rows,) of its row."""
        return vector[:, None] if self.places is None else vector[self.places // self.shape[1]]

    def by_column(self, vector: Tensor) -> Tensor:
        """For each of the ``values`` the entry of ``vector`` (cols,) of its column."""
        return vector if self.columns is None else vector[self.columns]

    def row_squares(self) -> Tensor:
        """Sum of squares of each row, (rows,)."""
        if self.places is None:
            return self.values.square().sum(1)
        sums = self.values.new_zeros(self.shape[0])
        return sums.index_add_(0, self.places // self.shape[1], self.values.square())

    @cached_property
    def transposed(self) -> Operand:
        """The transpose, for products alone."""
        if self.places is None or self.columns is None:
            return Operand(self.shape[::-1], self.values.mT, self.pulse)
        columns = self.columns.numpy()
        if self.shape[1] <= 1 << 16:
            columns = columns.astype(np.uint16)  # sorted in linear time
        order = torch.from_numpy(np.argsort(columns, kind="stable"))
        starts = torch.zeros(self.shape[1] + 1, dtype=torch.int32)
        torch.cumsum(torch.bincount(self.columns, minlength=self.shape[1]), 0, out=starts[1:])
        rows = (self.places[order] // self.shape[1]).int()
        return Operand(self.shape[::-1], self.values[order], self.pulse, None, rows, starts)

    def times(self, other: Tensor) -> Tensor:
        """S @ ``other``."""
        rows, width = self.shape[0], other.shape[1]
        step = width
        if self.columns is not None:
            work = _COMPRESSED_WORK // max(self.values.numel(), 1)
            step = max(min(work, _CACHE // max(self.shape[1], 1)), 64)
        elif other.is_cpu:
            step = max(_DENSE_WORK // max(self.values.numel(), 1), 16)
        if step >= width:
            product = self._times(other)
            self.pulse()
            return product
        product = other.new_empty(rows, width)
        for start in range(0, width, step):
            product[:, start : start + step] = self._times(other[:, start : start + step])
            self.pulse()
        return product

    def _times(self, other: Tensor) -> Tensor:
        if self.columns is None:
            return self.values @ other
        return F.embedding_bag(
            self.columns,
            other.contiguous(),
            self.starts,
            mode="sum",
            per_sample_weights=self.values,
            include_last_offset=True,
        )
