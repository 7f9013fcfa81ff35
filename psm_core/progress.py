"""Progress and cancellation are one callback: it receives steps and stops the work by raising."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class JobCancelled(Exception):
    """Raised from a step callback to stop the work; nothing half-done is kept."""


@dataclass(frozen=True)
class Step:
    """One iteration of a fit: `iteration` of `total`, and ‖W − Ŵ‖_F / ‖W‖_F after it.

    In the metric of its inputs, ‖(W − Ŵ)M^½‖_F / ‖WM^½‖_F, where the fit has a calibration.
    """

    iteration: int
    total: int
    relative_error: float


OnStep = Callable[[Step], None]
OnLayerStep = Callable[[str, Step], None]
Report = Callable[[int, int, float], None]


def of_layer(on_step: OnLayerStep | None, name: str) -> OnStep | None:
    """The callback for the fit of one layer of a network."""
    return None if on_step is None else lambda step: on_step(name, step)
