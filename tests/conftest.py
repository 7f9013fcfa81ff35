"""Shared fixtures: a package of small networks that any process can import, data for them, a store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

import psm_core as psm

NETWORKS = '''
"""Small networks with weights like trained ones: a decaying spectrum and a few large entries."""

import torch
from torch import nn


def _trained_like(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.data.normal_(0, 0.1, generator=generator)
            continue
        matrix = torch.randn(parameter.shape[0], parameter[0].numel(), generator=generator)
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        matrix = u * torch.logspace(0, -1.5, len(s)) @ v
        spikes = torch.rand(matrix.shape, generator=generator) < 0.02
        matrix = matrix + spikes * torch.randn(matrix.shape, generator=generator) * 0.3
        parameter.data.copy_(matrix.reshape(parameter.shape))
    return model.eval()


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 12, 3, stride=2, padding=1, bias=False)
        self.fc1 = nn.Linear(12 * 16, 24)
        self.fc2 = nn.Linear(24, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv1(x)))
        x = torch.relu(self.conv2(x))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def cnn():
    return _trained_like(CNN())


def mlp():
    layers = nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 5)
    return _trained_like(nn.Sequential(nn.Flatten(), *layers))


def bfloat():
    return mlp().bfloat16()


def broad():
    """A layer large enough that an iterative fit takes a while."""
    return _trained_like(nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 5)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.body(self.embed(tokens).mean(1))))


def tied():
    return _trained_like(Tied())


def nan_weight():
    model = mlp()
    model[3].weight.data[2, 5] = float("nan")
    return model


def infinite_weight():
    model = mlp()
    model[1].weight.data[0, 0] = float("-inf")
    return model


def empty_layer():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 0))


def parameterless():
    return nn.ReLU()


def broken():
    raise ZeroDivisionError("no network today")


def no_network():
    return 7


not_callable = mlp()
'''


# The same examples every time, however slow the machine.
settings.register_profile("tests", deadline=None, max_examples=50, derandomize=True, database=None)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def networks_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of an importable module whose functions build small networks."""
    folder = tmp_path_factory.mktemp("importable")
    (folder / "small_networks.py").write_text(NETWORKS)
    sys.path.insert(0, str(folder))
    yield "small_networks"
    sys.path.remove(str(folder))
    sys.modules.pop("small_networks", None)


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory, networks_module: str) -> Path:
    """300 labelled 8×8 images of which the network `mlp` classifies about four in five correctly."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((300, 1, 8, 8)).astype(np.float32)
    with torch.no_grad():
        y = psm.load_model(f"{networks_module}:mlp")(torch.from_numpy(x)).argmax(1).numpy()
    noisy = rng.random(300) < 0.25
    path = tmp_path_factory.mktemp("data") / "images.npz"
    np.savez(path, x=x, y=np.where(noisy, rng.integers(0, 5, 300), y))
    return path


@pytest.fixture
def store(tmp_path: Path) -> psm.ResultStore:
    """An empty result store."""
    return psm.ResultStore(tmp_path / "cache")
