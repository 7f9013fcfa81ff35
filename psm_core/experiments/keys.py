"""Cache keys: SHA-256 over canonical JSON of everything that determines a result, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from psm_core.experiments.evaluation import METRIC_VERSION
from psm_core.methods.base import Method
from psm_core.network.models import tensor_bytes

SCHEMA = 1


def canonical_key(document: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON document, independent of the order of its members."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def fit_key(method: Method, weight: Tensor, calibration_hash: str | None = None) -> str:
    """The key of one factorization: method, its version and parameters, and the weight's bytes.

    And the hash of the calibration statistics it is fitted to (None: to the weight alone).
    """
    return canonical_key(
        {
            "schema": SCHEMA,
            **method.to_json(),
            "weight": hashlib.sha256(tensor_bytes(weight)).hexdigest(),
            "dtype": str(weight.dtype),
            "shape": list(weight.shape),
            "calibration": calibration_hash,
        }
    )


def eval_key(fit_keys: Mapping[str, str], base_hash: str, data_fingerprint: str | None) -> str:
    """The key of one network: fit keys by layer, the dense model, the data and the metric."""
    return canonical_key(
        {
            "schema": SCHEMA,
            "fits": dict(fit_keys),
            "base": base_hash,
            "data": data_fingerprint,
            "metric": METRIC_VERSION,
        }
    )
