"""A sparse matrix as values and indices (CSR), its product with a dense one, and its file form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from psm_core.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class SparseMatrix:
    """Compressed sparse rows: row i holds `values[row_starts[i]:row_starts[i+1]]` at `columns[…]`.

    Shapes: values (nnz,), columns (nnz,) int32, row_starts (rows + 1,) int32.
    """

    values: Tensor
    columns: Tensor
    row_starts: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_dense(cls, matrix: Tensor) -> SparseMatrix:
        """Keep the non-zero entries of a (rows, cols) matrix."""
        support = matrix != 0
        row_starts = torch.zeros(matrix.shape[0] + 1, dtype=torch.int32, device=matrix.device)
        row_starts[1:] = support.sum(1).cumsum(0)
        columns = support.nonzero()[:, 1].to(torch.int32)
        return cls(matrix[support], columns, row_starts, (matrix.shape[0], matrix.shape[1]))

    @property
    def rows_of_entries(self) -> Tensor:
        """Row index of each stored value, shape (nnz,)."""
        rows = torch.arange(self.shape[0], device=self.values.device)
        return rows.repeat_interleave(self.row_starts.diff().long(), output_size=len(self.values))

    def to_dense(self) -> Tensor:
        """The (rows, cols) matrix; differentiable in the values."""
        dense = self.values.new_zeros(self.shape)
        return dense.index_put((self.rows_of_entries, self.columns.long()), self.values)

    def matmul(self, x: Tensor) -> Tensor:
        """S @ x for x of shape (cols, batch), differentiable in the values and in x.

        A weighted bag of rows of x for each row of S, which reads only what is stored: on a CPU
        several times faster than a masked dense product for large batches, slower for a single input.

        Raises:
            RuntimeError: x has not as many rows as this matrix has columns.
        """
        if x.shape[0] != self.shape[1]:
            raise RuntimeError(
                f"a {self.shape[0]}×{self.shape[1]} sparse matrix cannot multiply {tuple(x.shape)}"
            )
        autocast = torch.is_autocast_enabled(x.device.type)  # which leaves a bag of rows alone
        if self.values.numel() == 0:
            return self.to_dense() @ x  # zeros, still part of the autograd graph
        return F.embedding_bag(
            self.columns,
            x,
            self.row_starts,
            mode="sum",
            per_sample_weights=self.values.to(x.dtype) if autocast else self.values,
            include_last_offset=True,
        )

    def pack(self) -> dict[str, Tensor]:
        """The tensors written to a file: values, and the smaller of a bitmap and column indices.

        The bitmap takes rows·cols/8 bytes; indices take 1, 2 or 4 bytes an entry plus the counts of
        the rows.
        """
        counts = _narrow(self.row_starts.diff())
        columns = _narrow(self.columns)
        size = self.shape[0] * self.shape[1]
        values = self.values.detach().cpu().contiguous()
        if (size + 7) // 8 <= _nbytes(counts) + _nbytes(columns):
            bits = np.zeros(size, dtype=bool)
            positions = self.rows_of_entries * self.shape[1] + self.columns
            bits[positions.cpu().numpy()] = True
            return {"values": values, "bitmap": torch.from_numpy(np.packbits(bits))}
        return {"values": values, "columns": columns, "row_counts": counts}

    @classmethod
    def unpack(cls, tensors: dict[str, Tensor], shape: tuple[int, int]) -> SparseMatrix:
        """Read what `pack` wrote.

        Raises:
            CheckpointError: the indices do not describe a sparse matrix of this shape.
        """
        rows, cols = shape
        values = tensors["values"]
        if "bitmap" in tensors:
            if len(tensors["bitmap"]) != (rows * cols + 7) // 8:
                raise CheckpointError(f"the bitmap of a {rows}×{cols} sparse factor has a wrong size")
            flat = np.unpackbits(tensors["bitmap"].cpu().numpy(), count=rows * cols)
            bits = flat.reshape(rows, cols)
            counts = torch.from_numpy(bits.sum(1, dtype=np.int64))
            columns = torch.from_numpy(bits.nonzero()[1])
        else:
            counts = tensors["row_counts"].long()
            columns = tensors["columns"].long()
        fits = values.dim() == 1 and counts.shape == (rows,) and columns.shape == values.shape
        if not fits or int(counts.sum()) != len(values):
            raise CheckpointError(f"the indices of a {rows}×{cols} sparse factor do not fit its values")
        if not bool(((columns >= 0) & (columns < cols)).all() and (counts >= 0).all()):
            raise CheckpointError(f"an index of a {rows}×{cols} sparse factor is out of range")
        row_starts = torch.zeros(rows + 1, dtype=torch.int64)
        row_starts[1:] = counts.cumsum(0)
        matrix = cls(values, columns.to(torch.int32), row_starts.to(torch.int32), shape)
        if not bool(((matrix.rows_of_entries * cols + columns).diff() > 0).all()):
            raise CheckpointError(f"the indices of a {rows}×{cols} sparse factor are not in order")
        return matrix


def _narrow(indices: Tensor) -> Tensor:
    """The same non-negative integers in the narrowest type that holds them, on the CPU."""
    array = indices.cpu().numpy()
    largest = int(array.max(initial=0))
    dtype = np.uint8 if largest < 2**8 else np.uint16 if largest < 2**16 else np.int32
    return torch.from_numpy(array.astype(dtype))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
