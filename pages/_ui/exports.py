"""What the Export page writes: a checkpoint, its recipe, and the proof that it reloads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pages._ui import resources
from psm_core.checkpoint import FILE_NAME, save_verified
from psm_core.experiments.plan import write_recipe
from psm_core.experiments.record import NETWORK, Record, from_row
from psm_core.experiments.study import plan_method
from psm_core.files import write_atomically
from psm_core.methods import method_from_json
from psm_core.methods.base import Method

PROOF = "verified.json"


@dataclass(frozen=True)
class Choice:
    """A recipe, the budget asked for, if any, and the data its layers are fitted to, if any."""

    plan: dict[str, Method]
    budget: float | None = None
    calibration: str = ""


def network_records(network: resources.Network) -> list[Record]:
    """The whole-network results of a network, the most accurate first, then the smallest."""
    frame = network.study.records()
    frame = frame[frame["layer"] == NETWORK]
    frame = frame.astype(object).where(frame.notna(), None)
    records = [from_row(row) for row in frame.to_dict("records")]
    return sorted(records, key=lambda r: (-(r.accuracy or 0.0), r.relative_error, r.parameters))


def plan_of(record: Record) -> dict[str, Method]:
    """The recipe of a whole-network result."""
    return {name: method_from_json(setting) for name, setting in record.params["plan"].items()}


def method_of(row: Mapping[str, Any]) -> Method:
    """The method of a layer's row in the store."""
    return method_from_json({"method": row["method"], "params": json.loads(row["params"])})


def stored_floats(network: resources.Network, plan: Mapping[str, Method]) -> int:
    """The floats a network stores at the most once it is compressed by a recipe."""
    saved = sum(network.floats(name) - method.storage(network.shapes[name]) for name, method in plan.items())
    return network.dense().parameters - saved


def file_stem(network: resources.Network, choice: Choice) -> str:
    """A file name that says network, method and budget: `fashion-cnn-svd-10pct-activations`."""
    budget = "" if choice.budget is None else f"-{100 * choice.budget:.4g}pct"
    goal = "-activations" if choice.calibration else ""
    return f"{network.short_name}-{plan_method(choice.plan)}{budget}{goal}"


def folder(network: resources.Network, choice: Choice) -> Path:
    """Where an export is written; the same recipe of the same network has the same place."""
    recipe = {name: method.to_json() for name, method in sorted(choice.plan.items())}
    origin = [network.study.hash, recipe, *([choice.calibration] if choice.calibration else [])]
    text = json.dumps(origin, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return resources.cache_root() / "exports" / f"{file_stem(network, choice)}-{digest}"


def build(network: resources.Network, choice: Choice, target: Path) -> dict[str, Any]:
    """Write the checkpoint and its recipe, and verify it in a fresh process.

    Raises:
        CheckpointError: it cannot be written, or does not reload to the same outputs.
    """
    result = save_verified(network.study_of(choice.calibration).compressed(choice.plan), target)
    write_recipe(target / "recipe.json", choice.plan, network.source, choice.calibration)
    file = target / FILE_NAME
    proof = {**asdict(result), "sha256": _sha256(file), "mtime_ns": file.stat().st_mtime_ns}
    write_atomically(target / PROOF, json.dumps(proof).encode())
    return proof


def read_verified(target: Path) -> dict[str, Any] | None:
    """What the verification of an export showed, if it is there and its file unchanged since.

    The file is read only where its time is another than when it was verified.
    """
    file = target / FILE_NAME
    try:
        proof: dict[str, Any] = json.loads((target / PROOF).read_text())
        now = file.stat()
        same = now.st_size == proof["nbytes"]
        same = same and (now.st_mtime_ns == proof["mtime_ns"] or _sha256(file) == proof["sha256"])
    except (OSError, ValueError, KeyError):
        return None
    return proof if same else None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
