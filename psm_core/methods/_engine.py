"""What the sparse fits share: a trace of their errors, and products with sparse matrices."""

import math
import time
import warnings

import torch
from torch import Tensor

from psm_core.progress import Report

_REPORT_EVERY = 0.1  # seconds
_SPARSE = 1 / 8  # density below which a CPU multiplies faster by compressed rows

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.zeros(1, 1).to_sparse_csr()  # torch says once a process that this layout is in beta


class Trace:
    """Relative errors of a fit, reported together every tenth of a second: the device is not waited for."""

    def __init__(self, report: Report, total: int) -> None:
        self.report, self.total, self.done, self.error = report, total, 0, 1.0
        self.pending: list[Tensor] = []
        self.reported = -math.inf

    def add(self, error: Tensor) -> None:
        """The error after one more iteration, still on its device."""
        self.pending.append(error)
        self.pulse()

    def pulse(self, error: float | None = None) -> None:
        """A chance to report inside a long iteration; ``error`` if it is known without an iteration."""
        self.error = self.error if error is None else error
        if time.monotonic() - self.reported > _REPORT_EVERY:
            if not self.pending:
                self.report(self.done, self.total, self.error)
            self.flush()

    def flush(self) -> None:
        for error in torch.stack(self.pending).tolist() if self.pending else ():
            self.done, self.error = self.done + 1, error
            self.report(self.done, self.total, self.error)
        self.pending, self.reported = [], time.monotonic()


class Rows:
    """Support of a matrix, for products of it, or of its transpose, with dense matrices.

    By compressed rows where they pay: on a CPU, and if the support is sparse enough.
    """

    def __init__(self, mask: Tensor, transposed: bool = False) -> None:
        self.transposed, self.compressed = transposed, False
        rows, cols = self.shape = mask.shape[::-1] if transposed else mask.shape
        if mask.is_cpu:
            places = (mask.mT if transposed else mask).reshape(-1).nonzero().squeeze(1)
            self.compressed = len(places) < _SPARSE * mask.numel()
        if self.compressed:
            columns = places % cols
            self.places = columns * rows + places // cols if transposed else places
            self.columns = columns.int()
            self.starts = torch.searchsorted(places, torch.arange(rows + 1) * cols).int()

    def times(self, matrix: Tensor, other: Tensor) -> Tensor:
        """``matrix`` (or its transpose) @ ``other``; entries of ``matrix`` outside the support are zero."""
        if not self.compressed:
            return (matrix.mT if self.transposed else matrix) @ other
        values = matrix.reshape(-1)[self.places]
        rows = torch.sparse_csr_tensor(self.starts, self.columns, values, self.shape, check_invariants=False)
        return rows @ other.contiguous()  # other strides would more than double the time
