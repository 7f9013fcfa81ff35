"""Calibration statistics of a network on one data set, computed once for each layer and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from psm_core.errors import ParameterError, StoreError
from psm_core.experiments.keys import canonical_key
from psm_core.files import write_atomically
from psm_core.network.calibration import Calibration, calibrate
from psm_core.network.data import Dataset
from psm_core.network.layers import get_layer
from psm_core.network.models import card_of

VERSION = 1
"""Raised when the statistics of the same inputs change."""

PASS_NBYTES = 2**30
"""Bytes of the statistics that one pass over the data gathers, if several layers are asked for."""


def calibration_source(model: nn.Module) -> str:
    """The data a network is calibrated on unless other data is named: "" where none is known.

    A demonstration network's test images are kept for measuring, so it gets its training images.
    """
    data = card_of(model).data
    return "demo:train" if data == "demo:test" else data


class Calibrations:
    """The second moments of layers' inputs on one data set, in files named by their content's origin."""

    def __init__(self, root: Path, model: nn.Module, model_hash: str, data: Dataset, device: str) -> None:
        self.folder = root / "calibration"
        self.model, self.model_hash, self.data, self.device = model, model_hash, data, device
        self._hashes: dict[str, str] = {}

    def hash(self, layer: str) -> str | None:
        """The hash of a layer's statistics, or None where they are not computed yet."""
        if layer not in self._hashes:
            self._read(layer)
        return self._hashes.get(layer)

    def get(self, layer: str, on_batch: Callable[[int, int], None] | None = None) -> Calibration:
        """The statistics of a layer, read where they are kept, else computed.

        Raises:
            CalibrationError, DataError, LayerError: they cannot be computed.
            StoreError: they cannot be kept.
        """
        return self._read(layer) or self._compute([layer], on_batch)[layer]

    def prepare(self, layers: Iterable[str], on_batch: Callable[[int, int], None] | None = None) -> None:
        """Compute what is not kept yet, for as many layers in a pass as memory allows."""
        group: list[str] = []
        room = PASS_NBYTES
        for layer in [layer for layer in layers if self.hash(layer) is None]:
            nbytes = 8 * get_layer(self.model, layer).weight[0].numel() ** 2
            if group and nbytes > room:
                self._compute(group, on_batch)
                group, room = [], PASS_NBYTES
            group, room = [*group, layer], room - nbytes
        if group:
            self._compute(group, on_batch)

    def _compute(
        self, layers: list[str], on_batch: Callable[[int, int], None] | None
    ) -> dict[str, Calibration]:
        found = calibrate(self.model, self.data, layers, self.device, on_batch)
        for layer, calibration in found.items():
            seal = {"sha256": calibration.hash, "samples": str(calibration.samples)}
            tensors = {"second_moment": calibration.second_moment}
            try:
                write_atomically(self._file(layer), save(tensors, metadata=seal))
            except OSError as error:
                raise StoreError(
                    f"calibration statistics cannot be kept in '{self.folder}' ({error}); make room, or "
                    "name another folder that can be written"
                ) from error
            self._hashes[layer] = calibration.hash
        return found

    def _read(self, layer: str) -> Calibration | None:
        """The kept statistics of a layer; None where there are none, or their file is damaged."""
        try:
            with safe_open(self._file(layer), framework="pt") as file:
                seal = file.metadata() or {}
                calibration = Calibration(file.get_tensor("second_moment"), int(seal["samples"]))
            if calibration.hash != seal["sha256"]:
                return None  # they are computed again, and the file replaced
        except (OSError, SafetensorError, ParameterError, KeyError, ValueError):
            return None
        self._hashes[layer] = calibration.hash
        return calibration

    def _file(self, layer: str) -> Path:
        key = canonical_key(
            {"version": VERSION, "model": self.model_hash, "layer": layer, "data": self.data.fingerprint}
        )
        return self.folder / f"{key}.safetensors"
