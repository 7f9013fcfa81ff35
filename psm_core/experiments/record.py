"""One result: a factorized layer, or a whole network (layer `*`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

NETWORK = "*"


@dataclass(frozen=True)
class Metric:
    """How a figure of a record is shown: its label, format, and which direction is better."""

    label: str
    format: str
    better: str
    help: str


METRICS = {
    "fraction": Metric(
        "Budget", ".2%", "lower", "Stored floats ÷ dense floats (of the layer, or of the network)."
    ),
    "parameters": Metric(
        "Parameters", ",", "lower", "Floats stored: non-zeros of sparse factors, all of dense ones."
    ),
    "nbytes": Metric("Bytes", ",", "lower", "Bytes of the stored tensors, sparse indices included."),
    "relative_error": Metric(
        "Relative error", ".4f", "lower", "‖W − Ŵ‖ / ‖W‖, over all compressed layers of a network."
    ),
    "output_error": Metric(
        "Output error",
        ".4f",
        "lower",
        "‖(W − Ŵ)X‖ / ‖WX‖ over the inputs X that the layer receives from the data the network is "
        "evaluated on. Known once something was fitted to activations there.",
    ),
    "accuracy": Metric("Accuracy", ".2%", "higher", "Share of labelled inputs classified correctly (top-1)."),
    "seconds": Metric("Seconds", ".2f", "lower", "Time the fit took on the named device."),
}


@dataclass(frozen=True)
class Record:
    """Everything known of one result. Figures are described in `METRICS`.

    For a layer, `params` holds the method's parameters. For a network it holds `budget` (the
    fraction asked for) and `plan` (layer → method and parameters). `cached` says that this answer
    came from the store. `data` names what accuracy and output error were measured on.

    `calibration` names the data whose inputs the fit minimizes the output error on, "" for a fit to the
    weights alone. `relative_error` is that of the weights in either case.
    """

    key: str
    model: str
    model_hash: str
    layer: str
    method: str
    params: dict[str, Any]
    fraction: float
    relative_error: float
    parameters: int
    dense_parameters: int
    nbytes: int
    dense_nbytes: int
    seconds: float
    device: str
    accuracy: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int | None = None
    data: str = ""
    note: str = ""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: dict[str, str] = field(default_factory=lambda: library_versions())
    calibration: str = ""
    output_error: float | None = None
    cached: bool = False

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


COLUMNS = [f.name for f in fields(Record) if f.name != "cached"]
JSON_COLUMNS = ("params", "versions")


def to_row(record: Record) -> dict[str, Any]:
    """The record as flat values, nested ones as JSON text: a row of SQL or CSV."""
    row = record.to_json()
    for name in JSON_COLUMNS:
        row[name] = json.dumps(row[name], sort_keys=True)
    return row


def from_row(row: dict[str, Any]) -> Record:
    """The record of a row that `to_row` gave."""
    nested = {name: json.loads(row[name]) for name in JSON_COLUMNS}
    return Record(**{**row, **nested})


def size_change(before: int, after: int) -> str:
    """The change of a size in words.

    >>> size_change(100, 40), size_change(100, 120)
    ('2.5× smaller', '1.2× larger')
    """
    return f"{before / after:.1f}× smaller" if after <= before else f"{after / before:.1f}× larger"


def library_versions() -> dict[str, str]:
    """Versions of what computes the figures."""
    return {name: metadata.version(name) for name in ("torch", "numpy", "tensorly")}
