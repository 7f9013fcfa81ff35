"""The compressed layer against the dense layer rebuilt from `reconstruct()`, for every geometry."""

from __future__ import annotations

import copy
import functools
import io
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import psm_core as psm
from psm_core.errors import LayerError, ModelError
from psm_core.factorization import Factorization
from psm_core.network.modules import CompressedLayer, check_layer
from psm_core.sparse import SparseMatrix

SETTINGS = {
    "psm": psm.PSM(K=1.5, Q=2, iterations=5),
    "psm-three": psm.PSM(K=2, Q=3, algorithm="palm4msa", iterations=5),
    "svd": psm.SVD(rank=2),
    "tucker": psm.Tucker(rank_out=3, rank_in=2),
    "tt-2": psm.TensorTrain(rank=2, order=2),
    "tt-3": psm.TensorTrain(rank=2, order=3),
    "tt-4": psm.TensorTrain(rank=2, order=4),
    "tt-5": psm.TensorTrain(rank=2, order=5),
    "tt-6": psm.TensorTrain(rank=2, order=6),
    "prune": psm.Prune(fraction=0.3),
}
settings = pytest.mark.parametrize("setting", SETTINGS)
KERNELS = [(1, 1), (3, 3), (3, 2), (1, 4)]


@functools.cache
def fitted(setting: str, shape: tuple[int, ...]) -> Factorization:
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    return SETTINGS[setting].fit(weight, device="cpu")


def dense_twin(layer: nn.Module, factorization: Factorization) -> nn.Module:
    """The layer with the rebuilt weight."""
    twin = copy.deepcopy(layer)
    twin.weight.data = factorization.reconstruct().to(layer.weight.dtype)
    return twin


def assert_same(found: torch.Tensor, expected: torch.Tensor, what: object = "", limit: float = 1e-9) -> None:
    assert found.shape == expected.shape, what
    assert found.dtype == expected.dtype, what
    found, expected = found.detach(), expected.detach()
    assert float((found - expected).abs().max()) <= limit * (1 + float(expected.abs().max())), what


@settings
@pytest.mark.parametrize("shape", [(6, 8), (5, 3), (3, 5), (12, 4)])
def test_linear_takes_inputs_of_every_rank(setting: str, shape: tuple[int, int]) -> None:
    factorization = fitted(setting, shape)
    layer = nn.Linear(shape[1], shape[0], dtype=torch.float64)
    small, twin = factorization.to_module(layer), dense_twin(layer, factorization)
    for leading in [(), (3,), (2, 5), (2, 3, 4), (0,), (2, 0, 3)]:
        x = torch.randn(*leading, shape[1], dtype=torch.float64)
        assert small(x).shape == twin(x).shape
        if x.numel():
            assert_same(small(x), twin(x), leading)
    x = torch.randn(shape[1], 7, dtype=torch.float64).T  # strides of a transposed tensor
    assert_same(small(x), twin(x))


@settings
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_convolution_in_every_geometry(setting: str, mode: str) -> None:
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    tried = 0
    for kernel, stride, padding, dilation in itertools.product(
        KERNELS, [1, (2, 3)], [0, (1, 3), "same", "valid"], [1, (2, 1)]
    ):
        if padding == "same" and stride != 1:
            continue
        layer = nn.Conv2d(
            4, 6, kernel, stride=stride, padding=padding, dilation=dilation, padding_mode=mode,
            bias=stride == 1, dtype=torch.float64,
        )  # fmt: skip
        factorization = fitted(setting, tuple(layer.weight.shape))
        small, twin = factorization.to_module(layer), dense_twin(layer, factorization)
        case = (kernel, stride, padding, dilation)
        with torch.no_grad():
            assert_same(small(x), twin(x), case)
            assert_same(small(x[0]), twin(x[0]), case)  # unbatched
        tried += 1
    assert tried == 4 * 2 * (2 * 3 + 1)


@settings
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolution_of_no_images(setting: str, kernel: int) -> None:
    layer = nn.Conv2d(4, 6, kernel, stride=2, dtype=torch.float64)
    small = fitted(setting, tuple(layer.weight.shape)).to_module(layer)
    x = torch.zeros(0, 4, 9, 8, dtype=torch.float64)
    assert small(x).shape == layer(x).shape


@settings
def test_convolution_takes_no_wrong_input(setting: str) -> None:
    for kernel, channels in itertools.product([1, 3], [2, 4]):
        layer = nn.Conv2d(channels, 6, kernel, dtype=torch.float64)
        small = fitted(setting, tuple(layer.weight.shape)).to_module(layer)
        for shape in [(2, channels + 1, 8, 8), (2, 2 * channels, 8, 8), (8, 8), (1, 2, channels, 8, 8)]:
            x = torch.randn(shape, dtype=torch.float64)
            with pytest.raises(RuntimeError):
                layer(x)
            with pytest.raises((RuntimeError, ValueError)):
                small(x)


@settings
def test_linear_takes_no_wrong_input(setting: str) -> None:
    small = fitted(setting, (6, 8)).to_module(nn.Linear(8, 6, dtype=torch.float64))
    for shape in [(3, 7), (3, 16), (4, 4), (2, 4), (16,)]:
        with pytest.raises((RuntimeError, ValueError)):
            small(torch.randn(shape, dtype=torch.float64))


@settings
@pytest.mark.parametrize("shape", [(6, 8), (6, 4, 3, 3)])
def test_gradients_reach_exactly_what_is_stored(setting: str, shape: tuple[int, ...]) -> None:
    layer: nn.Module = nn.Linear(8, 6) if len(shape) == 2 else nn.Conv2d(4, 6, 3, padding=1)
    layer = layer.double()
    factorization = fitted(setting, shape)
    small = factorization.to_module(layer)
    x = torch.randn(3, 8) if len(shape) == 2 else torch.randn(2, 4, 5, 5)
    x = x.double().requires_grad_()
    small(x).square().sum().backward()
    stored = {name: p for name, p in small.named_parameters() if name != "bias"}
    assert sum(p.numel() for p in stored.values()) == factorization.parameters
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in small.parameters())

    # The chain rule through the rebuilt weight, by the dense layer and a Jacobian of Ŵ.
    twin, other = dense_twin(layer, factorization), x.detach().clone().requires_grad_()
    twin(other).square().sum().backward()
    assert_same(x.grad, other.grad)
    assert_same(small.bias.grad, twin.bias.grad)
    again = factorization.to_module(layer)
    leaves = {name: p for name, p in again.named_parameters() if name != "bias"}
    again.weight.backward(twin.weight.grad)
    for name, p in leaves.items():
        assert_same(stored[name].grad, p.grad, name)


@settings
def test_training_steps_lower_the_loss_and_keep_the_support(setting: str) -> None:
    layer = nn.Conv2d(4, 6, 3, padding=1)
    small = fitted(setting, (6, 4, 3, 3)).to_module(layer)
    support = [f.to_dense() != 0 for f in small.factorization().factors if isinstance(f, SparseMatrix)]
    optimizer = torch.optim.SGD(small.parameters(), lr=1e-3)
    x = torch.randn(2, 4, 6, 6)
    losses = []
    for _ in range(4):
        loss = (small(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    after = [f.to_dense() != 0 for f in small.factorization().factors if isinstance(f, SparseMatrix)]
    assert all(torch.equal(a, b) for a, b in zip(support, after, strict=True))
    with torch.no_grad():
        assert_same(small(x), dense_twin(small_dense(small, layer), small.factorization())(x), limit=1e-5)


def small_dense(small: CompressedLayer, layer: nn.Conv2d) -> nn.Conv2d:
    """The dense layer with the trained bias of its compressed form."""
    twin = copy.deepcopy(layer)
    twin.bias.data = small.bias.detach().clone()
    return twin


@settings
@pytest.mark.parametrize("shape", [(6, 8), (6, 4, 3, 3)])
def test_state_deepcopy_and_pickle_keep_the_outputs(setting: str, shape: tuple[int, ...]) -> None:
    layer: nn.Module = nn.Linear(8, 6) if len(shape) == 2 else nn.Conv2d(4, 6, 3, stride=2)
    small = fitted(setting, shape).to_module(layer).eval()
    x = torch.randn(3, 8) if len(shape) == 2 else torch.randn(2, 4, 5, 5)
    expected = small(x)

    twin = copy.deepcopy(small)
    for p in small.parameters():
        assert all(p.data_ptr() != q.data_ptr() for q in twin.parameters())
    assert torch.equal(twin(x), expected)

    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not torch.equal(twin(x), expected)
    assert twin.load_state_dict(small.state_dict()) == ([], [])
    assert torch.equal(twin(x), expected)

    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)


@settings
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(6, 8), (6, 4, 1, 1), (6, 4, 3, 3)])
def test_low_precision_layers(setting: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    padding = shape[-1] // 2
    layer: nn.Module = nn.Linear(8, 6) if len(shape) == 2 else nn.Conv2d(4, 6, shape[2], padding=padding)
    layer = layer.to(dtype)
    factorization = fitted(setting, shape)
    for small in (factorization.to_module(layer), factorization.to_module(layer.float()).to(dtype)):
        assert {p.dtype for p in small.parameters()} == {dtype}
        x = torch.randn(3, 8) if len(shape) == 2 else torch.randn(2, 4, 5, 5)
        found = small(x.to(dtype))
        expected = dense_twin(layer.float(), factorization)(x)
        assert found.dtype == dtype
        limit = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
        assert_same(found.float(), expected, limit=limit)


@settings
def test_mixed_precision_runs_where_the_dense_layer_does(setting: str) -> None:
    net = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 8), nn.Linear(8, 6))
    x = torch.randn(2, 4, 4, 4)
    plan = {"0": fitted(setting, (6, 4, 1, 1)), "4": fitted(setting, (6, 8))}
    small = psm.compress(net, plan)
    expected = small(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(small(x).float(), expected, limit=5e-2)


REFUSED = {
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), "depthwise"),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2), "groups=2"),
    "parametrized": (lambda: parametrizations.weight_norm(nn.Linear(8, 6)), "parametrized"),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(8, 6)), "parametrized"),
    "masked": (lambda: prune.l1_unstructured(nn.Linear(8, 6), "weight", 0.5), "weight_orig"),
    "lazy linear": (lambda: nn.LazyLinear(6), "first forward pass"),
    "lazy convolution": (lambda: nn.LazyConv2d(6, 3), "first forward pass"),
    "no outputs": (lambda: nn.Linear(8, 0), "empty"),
    "no inputs": (lambda: nn.Linear(0, 8), "empty"),
    "embedding": (lambda: nn.Embedding(6, 8), "neither Linear nor Conv2d"),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3), "neither Linear nor Conv2d"),
    "one-dimensional": (lambda: nn.Conv1d(4, 6, 3), "neither Linear nor Conv2d"),
    "compressed": (lambda: fitted("svd", (6, 8)).to_module(nn.Linear(8, 6)), "already"),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_compressed_are_refused_with_the_reason(name: str) -> None:
    build, reason = REFUSED[name]
    layer = build()
    for attempt in (check_layer, fitted("svd", (6, 8)).to_module):
        with pytest.raises(LayerError, match=reason):
            attempt(layer)
    net = nn.Sequential(nn.Linear(2, 2), layer)
    if name.startswith("lazy"):
        with pytest.raises(ModelError, match="run it once"):
            psm.layers(net)
    else:
        reasons = {row.name: row.reason for row in psm.layers(net) if not row.compressible}
        assert any(reason in text for text in reasons.values())
    with pytest.raises(LayerError, match=reason):
        psm.compress(net, {"1": psm.SVD(rank=1)})


def test_factors_of_another_shape_are_refused() -> None:
    with pytest.raises(LayerError, match=r"\(6, 8\).*\(8, 6\)"):
        fitted("svd", (6, 8)).to_module(nn.Linear(6, 8))


def test_transformer_layer_computes_the_same_in_its_fast_path() -> None:
    """In evaluation PyTorch's encoder layer reads the weights of its Linear layers directly."""
    block = nn.TransformerEncoderLayer(8, 2, dim_feedforward=6, batch_first=True, dropout=0.0).eval()
    small = psm.compress(block, {"linear1": psm.SVD(rank=2), "linear2": psm.Prune(fraction=0.3)})
    twin = copy.deepcopy(block)
    for name in ("linear1", "linear2"):
        getattr(twin, name).weight.data = getattr(small, name).factorization().reconstruct()
    x = torch.randn(2, 5, 8)
    assert_same(small(x), twin(x), limit=1e-5)
    with torch.no_grad():
        assert_same(small(x), twin(x), limit=1e-5)
