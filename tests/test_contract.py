"""One suite that every registered method passes: shapes, counts, module, budget, JSON, errors."""

from __future__ import annotations

import copy
import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import psm_core as psm
from psm_core.errors import (
    BudgetError,
    FitError,
    LayerError,
    ParameterError,
    UnknownNameError,
    WeightError,
)
from psm_core.methods.base import Method
from psm_core.sparse import SparseMatrix

SHAPES = [
    (1, 1),
    (1, 9),
    (9, 1),
    (40, 6),
    (6, 40),
    (13, 17),
    (32, 48),
    (12, 8, 3, 3),
    (16, 1, 5, 5),
    (7, 5, 1, 7),
    (24, 10, 1, 1),
]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")),
    pytest.param("mps", marks=pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no MPS")),
]
methods = pytest.mark.parametrize("name", list(psm.METHODS))


def weight_of(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def settings(name: str, shape: tuple[int, ...]) -> list[Method]:
    """What the method offers at a few budgets, and its smallest setting."""
    found: list[Method] = [psm.METHODS[name].smallest(shape)]
    for fraction in (0.1, 0.3, 0.8):
        try:
            found.append(psm.at_budget(name, shape, fraction))
        except BudgetError:
            continue
    return found


def dense_layer(weight: torch.Tensor) -> nn.Module:
    """A Linear or strided, padded Conv2d with this weight and a random bias."""
    if weight.dim() == 2:
        layer: nn.Module = nn.Linear(weight.shape[1], weight.shape[0])
    else:
        kernel = tuple(weight.shape[2:])
        layer = nn.Conv2d(weight.shape[1], weight.shape[0], kernel, stride=2, padding=1)
    layer = layer.to(weight.dtype)
    layer.weight.data = weight.clone()
    return layer


def sample_input(weight: torch.Tensor) -> torch.Tensor:
    if weight.dim() == 2:
        return torch.randn(4, 3, weight.shape[1], dtype=weight.dtype)
    return torch.randn(2, weight.shape[1], 11, 10, dtype=weight.dtype)


@methods
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_factors_counts_and_module(name: str, shape: tuple[int, ...], seed: int, device: str) -> None:
    dtype = torch.float32 if device == "mps" else torch.float64
    weight = weight_of(shape, seed, dtype)
    for method in settings(name, shape):
        f = method.fit(weight, device=device)
        rebuilt = f.reconstruct()
        assert rebuilt.shape == weight.shape
        assert rebuilt.dtype == dtype
        assert bool(torch.isfinite(rebuilt).all())

        expected = np.linalg.norm(weight.numpy() - rebuilt.numpy()) / np.linalg.norm(weight.numpy())
        assert f.relative_error(weight) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert f.history[-1] == pytest.approx(f.relative_error(weight), rel=1e-12, abs=1e-15)
        assert expected <= 1 + 1e-9

        stored = f.tensors()
        floats = [t for t in stored.values() if t.is_floating_point()]
        assert f.parameters == sum(t.numel() for t in floats) <= method.storage(shape)
        assert f.nbytes == sum(t.numel() * t.element_size() for t in stored.values())
        for factor in f.factors:
            if isinstance(factor, SparseMatrix):
                assert int((factor.to_dense() != 0).sum()) == factor.values.numel()

        layer = dense_layer(weight)
        module = f.to_module(layer)
        x = sample_input(weight)
        reference = copy.deepcopy(layer)
        reference.weight.data = rebuilt.clone()
        y, y_dense = module(x).detach(), reference(x).detach()
        assert y.shape == y_dense.shape
        tolerance = 1e-4 if device == "mps" else 1e-9
        assert float((y - y_dense).norm()) <= tolerance * float(y_dense.norm())


@methods
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_budget_is_met(name: str, shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    weight = weight_of(shape)
    smallest = psm.METHODS[name].smallest(shape).storage(shape)
    for fraction in (0.02, 0.1, 0.29, 0.5, 1.0):
        if smallest > fraction * size:
            with pytest.raises(BudgetError) as caught:
                psm.at_budget(name, shape, fraction)
            assert caught.value.smallest_fraction == pytest.approx(smallest / size)
            continue
        method = psm.at_budget(name, shape, fraction)
        assert method.storage(shape) <= fraction * size + 1e-6
        assert method.fit(weight).parameters <= fraction * size + 1e-6


@methods
def test_budget_is_met_closely_on_a_usual_layer(name: str) -> None:
    for shape in [(512, 784), (128, 64, 3, 3)]:
        for fraction in (0.05, 0.1, 0.2):
            stored = psm.at_budget(name, shape, fraction).storage(shape) / math.prod(shape)
            assert 0.9 * fraction < stored <= fraction


@methods
@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, float("nan"), float("inf"), "0.1", None])
def test_budget_out_of_range_is_named(name: str, fraction: object) -> None:
    with pytest.raises(ParameterError, match="budget fraction"):
        psm.at_budget(name, (8, 8), fraction)  # type: ignore[arg-type]


@methods
def test_error_falls_with_budget(name: str) -> None:
    for shape in [(48, 64), (32, 16, 3, 3)]:
        weight = weight_of(shape)
        errors = [
            psm.at_budget(name, shape, fraction).fit(weight).history[-1] for fraction in (0.1, 0.2, 0.4, 0.8)
        ]
        assert errors == sorted(errors, reverse=True)


@methods
def test_json_round_trip(name: str) -> None:
    for method in settings(name, (32, 48)):
        assert psm.method_from_json(json.loads(json.dumps(method.to_json()))) == method
        assert hash(psm.method_from_json(method.to_json())) == hash(method)


@methods
def test_tensors_round_trip(name: str) -> None:
    for shape in [(13, 17), (12, 8, 3, 3)]:
        f = psm.at_budget(name, shape, 0.4).fit(weight_of(shape))
        again = psm.Factorization.from_tensors(f.method, json.loads(json.dumps(f.layout())), f.tensors())
        assert torch.equal(again.reconstruct(), f.reconstruct())
        assert (again.parameters, again.nbytes, again.history) == (f.parameters, f.nbytes, f.history)


@methods
def test_same_seed_same_bits(name: str) -> None:
    weight = weight_of((24, 16, 3, 3), dtype=torch.float32)
    method = psm.at_budget(name, tuple(weight.shape), 0.2)
    assert torch.equal(method.fit(weight).reconstruct(), method.fit(weight).reconstruct())


@methods
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_weights_are_fitted_in_float32(name: str, dtype: torch.dtype) -> None:
    weight = weight_of((24, 20), dtype=dtype)
    f = psm.at_budget(name, (24, 20), 0.4).fit(weight)
    assert f.reconstruct().dtype == torch.float32
    layer = dense_layer(weight)
    module = f.to_module(layer)
    assert {p.dtype for p in module.parameters()} == {dtype}


@methods
@pytest.mark.parametrize("exponent", [-100, 0, 100])
def test_scale_does_not_matter(name: str, exponent: int) -> None:
    """Entries of about 1e-30 and 1e30; by a power of two, so that not even the rounding differs."""
    weight = weight_of((20, 30), dtype=torch.float32)
    method = psm.at_budget(name, (20, 30), 0.3)
    expected = method.fit(weight).relative_error(weight)
    scaled = weight * 2.0**exponent
    assert method.fit(scaled).relative_error(scaled) == pytest.approx(expected, rel=1e-5)


@methods
@pytest.mark.parametrize("shape", [(9, 12), (6, 5, 3, 3)])
def test_zero_weight(name: str, shape: tuple[int, ...]) -> None:
    f = psm.at_budget(name, shape, 0.6).fit(torch.zeros(shape))
    assert torch.equal(f.reconstruct(), torch.zeros(shape))
    assert f.relative_error(torch.zeros(shape)) == 0.0


@methods
def test_bad_weights_are_named(name: str) -> None:
    method = psm.METHODS[name].smallest((8, 8))
    broken = weight_of((8, 8))
    broken[2, 3] = float("nan")
    with pytest.raises(WeightError, match="1 NaN or infinite among 64"):
        method.fit(broken)
    for bad, message in [
        (torch.zeros(0, 4), "empty"),
        (torch.zeros(4), "shape"),
        (torch.zeros(2, 3, 4), "shape"),
        (torch.zeros(4, 4, dtype=torch.int64), "floating"),
        (torch.zeros(4, 4, device="meta"), "meta"),
        (torch.eye(4).to_sparse(), "layout"),
        (torch.eye(4).to(torch.float8_e4m3fn), "float8"),
        (np.zeros((4, 4)), "torch tensor"),
    ]:
        with pytest.raises(WeightError, match=message):
            method.fit(bad)  # type: ignore[arg-type]


@methods
def test_unusable_device_and_calibration_are_named(name: str) -> None:
    method = psm.METHODS[name].smallest((8, 8))
    with pytest.raises(ParameterError, match="device 'quantum'"):
        method.fit(weight_of((8, 8)), device="quantum")
    with pytest.raises(ParameterError, match="calibration"):
        method.fit(weight_of((8, 8)), calibration=torch.eye(8))  # type: ignore[arg-type]


@methods
def test_step_callback_reports_and_cancels(name: str) -> None:
    weight = weight_of((40, 30, 3, 3), dtype=torch.float32)
    method = psm.at_budget(name, tuple(weight.shape), 0.2)
    steps: list[psm.Step] = []
    f = method.fit(weight, on_step=steps.append)
    errors = {step.iteration: step.relative_error for step in steps if step.iteration}
    assert len(f.history) == max(1, len(errors))
    assert f.history[:-1] == tuple(errors.values())[:-1]
    for before, after in itertools.pairwise(steps):
        assert before.iteration <= after.iteration <= after.total
    if steps:

        def cancel(step: psm.Step) -> None:
            raise psm.JobCancelled

        with pytest.raises(psm.JobCancelled):
            method.fit(weight, on_step=cancel)


@methods
@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_convolutions_are_refused_with_the_reason(name: str, groups: int) -> None:
    layer = nn.Conv2d(4, 8, 3, groups=groups)
    f = psm.METHODS[name].smallest(tuple(layer.weight.shape)).fit(layer.weight)
    with pytest.raises(LayerError, match=r"grouped|depthwise"):
        f.to_module(layer)
    with pytest.raises(LayerError, match=r"grouped|depthwise"):
        psm.compress(nn.Sequential(layer), {"0": f.method})


def test_parameters_out_of_range_are_named() -> None:
    for make, message in [
        (lambda: psm.PSM(K=0), "K = 0"),
        (lambda: psm.PSM(K=-1), "K = -1"),
        (lambda: psm.PSM(K=2, Q=0), "Q = 0"),
        (lambda: psm.PSM(K=2, Q=1.5), "Q = 1.5 is not whole"),
        (lambda: psm.PSM(K=float("nan")), "not a finite number"),
        (lambda: psm.PSM(K="ten"), "not a finite number"),
        (lambda: psm.PSM(K=True), "not a finite number"),
        (lambda: psm.PSM(K=2, algorithm="magic"), "algorithm = 'magic'"),
        (lambda: psm.PSM(K=2.5, algorithm="palm4msa"), "not whole"),
        (lambda: psm.SVD(rank=0), "rank = 0"),
        (lambda: psm.Tucker(rank_out=3, rank_in=0), "rank_in = 0"),
        (lambda: psm.TensorTrain(rank=2, order=1), "order = 1"),
        (lambda: psm.Prune(fraction=0), "fraction = 0"),
        (lambda: psm.Prune(fraction=1.01), "fraction = 1.01"),
    ]:
        with pytest.raises(ParameterError, match=message):
            make()
    for method, shape, message in [
        (psm.PSM(K=41), (8, 40), "K = 41 .* at most 40"),
        (psm.SVD(rank=9), (8, 40), "rank = 9 .* at most 8"),
        (psm.Tucker(rank_out=9, rank_in=2), (8, 4, 3, 3), "rank_out = 9 .* at most 8"),
        (psm.TensorTrain(rank=10_000), (8, 40), "rank = 10000"),
    ]:
        with pytest.raises(ParameterError, match=message):
            method.fit(weight_of(shape))


def test_unknown_names_are_named() -> None:
    with pytest.raises(UnknownNameError, match="unknown method 'sdv'; did you mean: svd"):
        psm.at_budget("sdv", (8, 8), 0.1)
    with pytest.raises(UnknownNameError, match="unknown parameter of psm 'k'"):
        psm.method_from_json({"method": "psm", "params": {"k": 3}})
    with pytest.raises(ParameterError, match="svd needs rank"):
        psm.method_from_json({"method": "svd", "params": {}})


@methods
@pytest.mark.parametrize("shape", [(), (5,), (3, 3, 3), (0, 5), (4, 4, 0, 3)])
def test_budget_of_a_shape_that_is_no_weight(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightError, match="expected a weight"):
        psm.at_budget(name, shape, 0.5)


def test_smallest_settings_are_the_smallest_of_all() -> None:
    for shape in [(127, 61, 3, 3), (10, 512), (97, 89), (16, 1, 5, 5)]:
        rank_one = [psm.TensorTrain(rank=1, order=order).storage(shape) for order in range(2, 7)]
        assert psm.TensorTrain.smallest(shape).storage(shape) == min(rank_one)
        size = math.prod(shape)
        least = psm.at_budget("tt", shape, min(rank_one) / size)
        assert least.storage(shape) == min(rank_one)
        with pytest.raises(BudgetError):
            psm.at_budget("tt", shape, (min(rank_one) - 1) / size)
    assert psm.SVD.smallest((10, 512)).storage((10, 512)) == 522
    assert psm.Tucker.smallest((8, 4, 3, 3)).storage((8, 4, 3, 3)) == 8 + 4 + 9
    assert psm.Prune.smallest((8, 4)).storage((8, 4)) == 1


def test_a_computation_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "svd", broken)
    with pytest.raises(FitError, match=r"SVD \(rank=2\) failed .* 8×8 .* failed to converge"):
        psm.SVD(rank=2).fit(weight_of((8, 8)))


def test_factors_share_the_scale() -> None:
    for exponent in (-40, 0, 40):
        weight = weight_of((20, 30)) * 2.0**exponent
        left, right = psm.SVD(rank=5).fit(weight).factors
        assert 0.25 < float(left.norm()) / float(right.norm()) < 4
    kernel = weight_of((8, 6, 3, 3)) * 1e6
    u, _, v = psm.Tucker(rank_out=3, rank_in=2).fit(kernel).factors
    assert torch.allclose(u.T @ u, torch.eye(3, dtype=torch.float64))
    assert torch.allclose(v.T @ v, torch.eye(2, dtype=torch.float64))


@methods
def test_an_error_of_the_callback_is_its_own(name: str) -> None:
    def broken(step: psm.Step) -> None:
        raise RuntimeError("the plot is gone")

    weight = weight_of((40, 30, 3, 3), dtype=torch.float32)
    method = psm.at_budget(name, tuple(weight.shape), 0.2)
    if len(method.fit(weight).history) > 1:
        with pytest.raises(RuntimeError, match=r"^the plot is gone$"):
            method.fit(weight, on_step=broken)


def test_frozen_layers_stay_frozen() -> None:
    layer = nn.Linear(12, 9).requires_grad_(False)
    for method in (psm.SVD(rank=2), psm.Prune(fraction=0.2)):
        module = method.fit(layer.weight).to_module(layer)
        assert not any(p.requires_grad for p in module.parameters())
