"""The errors of a fit as it goes, reported a few times a second."""

import math
import time

import torch
from torch import Tensor

from psm_core.progress import Report

_REPORT_EVERY = 0.1  # seconds


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
