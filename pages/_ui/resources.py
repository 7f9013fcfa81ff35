"""What sessions share: the store, the worker, loaded networks and their layer tables."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import streamlit as st
import torch
from torch import nn

from psm_core.checkpoint import load_model
from psm_core.device import choose_device
from psm_core.experiments.calibrations import calibration_source
from psm_core.experiments.jobs import JobRunner
from psm_core.experiments.record import NETWORK, Record
from psm_core.experiments.store import ResultStore
from psm_core.experiments.study import Study
from psm_core.methods.base import Shape
from psm_core.network.layers import LayerRow, layers
from psm_core.network.models import card_of

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Network:
    """The network at hand: its source string, its study, and its layers."""

    source: str
    study: Study
    rows: tuple[LayerRow, ...]
    fitted: dict[str, Study] = field(default_factory=dict)
    """The same study with fits to other data, by its name."""

    def study_of(self, calibration: str) -> Study:
        """The study whose fits are to this data, or ("") to the weights alone."""
        if not calibration:
            return self.study
        if calibration not in self.fitted:
            self.fitted[calibration] = self.study.fitted_to(calibration)
        return self.fitted[calibration]

    @property
    def calibration(self) -> str:
        """The data that its layers can be fitted to, "" where none is known."""
        return calibration_source(self.model)

    @property
    def model(self) -> nn.Module:
        """The dense network; shared by all sessions, never to be changed."""
        return self.study.model

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the layers that can be compressed, the largest first."""
        rows = sorted((row for row in self.rows if row.compressible), key=lambda r: -r.parameters)
        return {row.name: row.shape for row in rows}

    def floats(self, layer: str) -> int:
        """The dense weights of a layer that can be compressed, its bias left out."""
        return math.prod(self.shapes[layer])

    @property
    def notice(self) -> str:
        """What a user should know of how it was loaded."""
        return card_of(self.model).notice

    @property
    def short_name(self) -> str:
        """The source as part of a file name."""
        name = Path(self.source).stem if os.sep in self.source else self.source.split(":")[-1]
        return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)

    def dense(self) -> Record:
        """The dense network's record; its accuracy is measured once and then kept."""
        return self.study.network({})

    def has_results(self) -> bool:
        """Whether anything was compressed yet."""
        frame = self.study.records()
        return bool(((frame["layer"] != NETWORK) | (frame["method"] != "dense")).any())


def cache_root() -> Path:
    """Where results are kept: `cache/` of the repository, or the folder PSM_CACHE names."""
    return Path(os.environ.get("PSM_CACHE") or ROOT / "cache")


def store() -> ResultStore:
    """The result store."""
    return runner().store


def runner() -> JobRunner:
    """The one worker of this server."""
    return _runner(str(cache_root()))


@st.cache_resource(show_spinner=False)
def _runner(root: str) -> JobRunner:
    started = JobRunner(ResultStore(root))
    started.warm_up()
    return started


def close_all() -> None:
    """Let the workers end, and forget what sessions share."""
    runner().close()
    st.cache_resource.clear()


def network(source: str) -> Network:
    """The network of a source string, loaded once for all sessions.

    Raises:
        PsmError: it cannot be loaded; the message says why.
    """
    try:
        stamp = os.stat(source).st_mtime_ns
    except (OSError, ValueError):  # no file, or no file's name at all
        stamp = 0
    return _network(source, stamp, str(cache_root()))


@st.cache_resource(max_entries=4, show_spinner="Loading the network …")
def _network(source: str, stamp: int, root: str) -> Network:
    model = load_model(source)
    return Network(source, Study(model, _runner(root).store), tuple(layers(model)))


@st.cache_data(show_spinner=False)
def device_text() -> str:
    """The device that computes, in words."""
    device = choose_device("auto", torch.empty(0))
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = {"cpu": f"CPU, {os.cpu_count()} cores", "mps": "Apple GPU"}
    return names.get(device.type, device.type)
