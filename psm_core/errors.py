"""Named errors: each message says what was given, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PsmError(Exception):
    """Base of every error a user can cause; its message is one line fit to be shown as it is."""


class ParameterError(PsmError, ValueError):
    """A parameter of a method is out of range or of the wrong type."""


class BudgetError(ParameterError):
    """A method cannot store a layer in so few floats; `smallest_fraction` is what it can reach."""

    def __init__(self, message: str, smallest_fraction: float) -> None:
        super().__init__(message)
        self.smallest_fraction = smallest_fraction


class WeightError(PsmError, ValueError):
    """A weight is empty, not finite, or of a shape or type that cannot be factorized."""


class LayerError(PsmError, ValueError):
    """A layer cannot be compressed (grouped convolution, normalisation, shared weight ...)."""


class UnknownNameError(PsmError, LookupError):
    """No model, layer, method or data source has this name."""

    def __init__(self, what: str, name: object, known: Iterable[str]) -> None:
        names = sorted(known)
        close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
        shown = close or names[:12]
        lead = "did you mean" if close else "expected one of"
        more = "" if close or len(names) <= 12 else f" … ({len(names)} in all)"
        listing = ", ".join(shown) or "none there are"
        super().__init__(f"unknown {what} '{name}'; {lead}: {listing}{more}")


class FitError(PsmError):
    """A factorization could not be computed (no convergence, out of memory)."""


class ModelError(PsmError):
    """A model could not be loaded or run."""


class DataError(PsmError):
    """A data source could not be read, or does not fit the model."""


class CalibrationError(PsmError):
    """Statistics of a layer's inputs cannot be computed (never called, not finite, too many)."""


class CheckpointError(PsmError):
    """A checkpoint is missing, damaged, of a newer schema, or does not fit its architecture."""


class StoreError(PsmError):
    """The result store cannot be read or written."""


def first_line(error: BaseException) -> str:
    """What an error of another library says, as one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
