"""Fits in the metric of a layer's inputs: statistics and errors against plain NumPy, and their keeping."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psm_core as psm
from psm_core import Calibration, calibrate
from psm_core.errors import CalibrationError, DataError, LayerError, ParameterError, UnknownNameError
from psm_core.methods.base import Method
from psm_core.network import calibration as module
from psm_core.network.data import Dataset

MLP = "demo:fashion-mlp"
SETTINGS = [
    psm.SVD(rank=2),
    psm.Prune(fraction=0.15),
    psm.TensorTrain(rank=3),
    psm.Tucker(rank_out=3, rank_in=2),
    psm.PSM(K=2, iterations=30),
    psm.PSM(K=2, iterations=30, algorithm="palm4msa"),
    psm.PSM(K=2, iterations=30, algorithm="hierarchical"),
]
settings = pytest.mark.parametrize("method", SETTINGS, ids=str)


def dataset(inputs: torch.Tensor) -> Dataset:
    """Inputs without labels that mean anything."""
    return Dataset("inputs", inputs, torch.zeros(len(inputs), dtype=torch.long))


def second_moment(rows: torch.Tensor) -> np.ndarray:
    """C of inputs as rows, by NumPy in float64."""
    x = rows.detach().double().numpy()
    return x.T @ x / len(x)


def correlated(size: int, seed: int = 0, samples: int = 300) -> Calibration:
    """Statistics of inputs with a decaying spectrum and uneven scales."""
    generator = np.random.default_rng(seed)
    mix = generator.standard_normal((size, size)) * np.logspace(0, -2, size)
    x = generator.standard_normal((samples, size)) @ mix.T
    return Calibration(torch.from_numpy(x.T @ x / samples), samples)


def weight_of(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class TestStatistics:
    @pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
    def test_of_linear_layers(self, leading: tuple[int, ...]) -> None:
        model, x = nn.Sequential(nn.Linear(7, 4)).train(), torch.randn(600, *leading, 7)
        found = calibrate(model, dataset(x))["0"]
        expected = second_moment(x.reshape(-1, 7))
        np.testing.assert_allclose(found.second_moment, expected, rtol=1e-5, atol=1e-6)
        assert found.samples == 600 * math.prod(leading)
        assert model.training
        assert model[0].training

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"stride": 2, "padding": 1},
            {"stride": (1, 3), "padding": (2, 0), "dilation": (2, 1)},
            {"padding": "same", "dilation": 2},
            {"padding": (1, 2), "padding_mode": "reflect", "stride": 2},
            {"padding": 1, "padding_mode": "circular"},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("block", [2**22, 400])
    def test_of_convolutions(
        self, options: dict[str, object], block: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_BLOCK", block)  # the small one takes single lines of an image
        layer, x = nn.Conv2d(3, 5, (3, 2), **options), torch.randn(30, 3, 11, 8)
        found = calibrate(nn.Sequential(layer), dataset(x))["0"]
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padded = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        patches = F.unfold(padded, (3, 2), layer.dilation, 0, layer.stride).transpose(1, 2).flatten(0, 1)
        np.testing.assert_allclose(found.second_moment, second_moment(patches), rtol=1e-5, atol=1e-5)
        assert found.samples == len(patches)
        weight = layer.weight.detach().flatten(1)  # the patches are in the order of the weight
        y = layer(x).detach() - layer.bias.detach()[:, None, None]
        norm = math.sqrt(float(y.double().square().sum()) / len(patches))
        assert found.norm(weight) == pytest.approx(norm, rel=1e-5)

    def test_calls_add_up_and_the_network_is_left_as_it_was(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(input=torch.relu(self.layer(self.drop(x))))

        model, x = Twice(), torch.randn(50, 4)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        found = calibrate(model, dataset(x))["layer"]
        seen = torch.cat([x, torch.relu(model.layer(x))])
        np.testing.assert_allclose(found.second_moment, second_moment(seen), rtol=1e-5, atol=1e-6)
        assert found.samples == 100
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert not model.layer._forward_pre_hooks
        assert model.drop.training

    def test_what_cannot_be_had_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Idle(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.used(x)

        model, x = Idle(), torch.randn(10, 4)
        assert list(calibrate(model, dataset(x))) == ["used"]
        with pytest.raises(CalibrationError, match=r"'idle' is never called on 'inputs'.*leave it out"):
            calibrate(model, dataset(x), ["used", "idle"])
        for bad, words in [(math.nan, "NaN"), (math.inf, "infinite"), (1e30, "too large")]:
            broken = x.clone()
            broken[3, 1] = bad
            with pytest.raises(CalibrationError, match=f"'used' receives .*{words}"):
                calibrate(model, dataset(broken))
        with pytest.raises(UnknownNameError, match="unknown layer 'none'"):
            calibrate(model, dataset(x), ["none"])
        with pytest.raises(LayerError, match="neither Linear nor"):
            calibrate(nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), dataset(x), ["0"])
        with pytest.raises(DataError, match=r"shape \(5,\)"):
            calibrate(model, dataset(torch.randn(10, 5)))
        with pytest.raises(UnknownNameError, match="demonstration data"):
            calibrate(model, "demo:nothing")
        monkeypatch.setattr(module, "LARGEST", 3)
        with pytest.raises(CalibrationError, match=r"4 inputs.*without calibration"):
            calibrate(model, dataset(x))

    def test_a_callback_stops_it_and_no_hook_stays(self) -> None:
        def cancel(done: int, total: int) -> None:
            raise psm.JobCancelled

        model = nn.Sequential(nn.Linear(4, 4))
        with pytest.raises(psm.JobCancelled):
            calibrate(model, dataset(torch.randn(10, 4)), on_batch=cancel)
        assert not model[0]._forward_pre_hooks

    @pytest.mark.parametrize(
        "moment",
        [None, torch.eye(3), torch.eye(3, 4).double(), torch.full((2, 2), math.nan).double(), torch.zeros(3)],
    )
    def test_no_second_moment_is_named(self, moment: torch.Tensor) -> None:
        with pytest.raises(ParameterError, match=r"expected finite second moments \(n, n\)"):
            Calibration(moment, 5)

    def test_regularised_is_positive_definite_with_a_diagonal_of_mean_one(self) -> None:
        x = torch.zeros(3, 8, dtype=torch.float64)
        x[:, :5] = torch.randn(3, 5)  # dead inputs, and fewer samples than inputs
        for moment in (x.T @ x / 3, torch.zeros(8, 8, dtype=torch.float64)):
            regular = Calibration(moment, 3).regularised().second_moment
            assert float(regular.diagonal().mean()) == pytest.approx(1)
            assert float(torch.linalg.eigvalsh(regular)[0]) > 0.009


class TestFits:
    def test_output_error_is_that_of_the_layer_on_the_data(self) -> None:
        for layer, x in [
            (nn.Linear(12, 9), torch.randn(40, 3, 12) * torch.linspace(0.1, 2, 12)),
            (nn.Conv2d(4, 9, 3, stride=2, padding=1), torch.randn(20, 4, 9, 9).cumsum(3)),
        ]:
            found = calibrate(nn.Sequential(layer), dataset(x))["0"]
            f = psm.SVD(rank=3).fit(layer.weight)
            with torch.no_grad():
                bias = layer.bias if layer.weight.dim() == 2 else layer.bias[:, None, None]
                y, z = layer(x) - bias, f.to_module(layer)(x) - bias
            expected = float((y - z).double().norm() / y.double().norm())
            assert f.output_error(layer.weight, found) == pytest.approx(expected, rel=1e-4)

    def test_svd_is_the_generalized_optimum(self) -> None:
        weight, calibration = weight_of(20, 12), correlated(12)
        values, vectors = np.linalg.eigh(calibration.regularised().second_moment.numpy())
        seen = weight.numpy() @ (vectors * np.sqrt(values)) @ vectors.T
        singular = np.linalg.svd(seen, compute_uv=False)
        for rank in (1, 4, 12):
            f = psm.SVD(rank=rank).fit(weight, calibration=calibration)
            expected = math.sqrt((singular[rank:] ** 2).sum() / (singular**2).sum())
            assert f.history == (pytest.approx(expected, rel=1e-9, abs=1e-12),)
            assert [tuple(factor.shape) for factor in f.factors] == [(20, rank), (rank, 12)]

    @settings
    @pytest.mark.parametrize("shape", [(24, 36), (18, 4, 3, 3), (30, 20)], ids=str)
    def test_in_the_metric_no_fit_is_worse_than_the_plain_one(
        self, method: Method, shape: tuple[int, ...]
    ) -> None:
        weight, calibration = weight_of(*shape), correlated(math.prod(shape[1:]))
        plain, fitted = method.fit(weight), method.fit(weight, calibration=calibration)
        regular = calibration.regularised()
        assert fitted.output_error(weight, regular) <= plain.output_error(weight, regular) * (1 + 1e-9)
        assert fitted.history[-1] == pytest.approx(fitted.output_error(weight, regular), rel=1e-9)
        assert fitted.parameters <= method.storage(shape)
        assert fitted.relative_error(weight) >= plain.relative_error(weight) * (1 - 0.02)

    @settings
    def test_the_identity_changes_nothing_that_matters(self, method: Method) -> None:
        weight, white = weight_of(16, 24), Calibration(3 * torch.eye(24, dtype=torch.float64), 100)
        fitted = method.fit(weight, calibration=white)
        assert fitted.output_error(weight, white) == pytest.approx(fitted.relative_error(weight), rel=1e-9)
        assert fitted.relative_error(weight) <= method.fit(weight).relative_error(weight) * 1.02

    @settings
    def test_zero_and_extreme_weights(self, method: Method) -> None:
        calibration = correlated(24)
        zeros = torch.zeros(16, 24)
        assert torch.equal(method.fit(zeros, calibration=calibration).reconstruct(), zeros)
        weight = weight_of(16, 24).float()
        expected = method.fit(weight, calibration=calibration).history[-1]
        for exponent in (-100, 100):
            scaled = method.fit(weight * 2.0**exponent, calibration=calibration)
            assert scaled.history[-1] == pytest.approx(expected, rel=1e-4)

    @settings
    def test_dead_inputs_and_few_samples(self, method: Method) -> None:
        x = torch.randn(6, 24, dtype=torch.float64) * (torch.arange(24) % 3 > 0)
        calibration, weight = Calibration(x.T @ x / 6, 6), weight_of(16, 24).float()
        fitted = method.fit(weight, calibration=calibration)
        assert bool(fitted.reconstruct().isfinite().all())
        assert fitted.output_error(weight, calibration) < 1

    @settings
    def test_another_size_or_type_is_named(self, method: Method) -> None:
        with pytest.raises(ParameterError, match=r"23 inputs do not fit a weight of shape 16×24.* 24"):
            method.fit(weight_of(16, 24), calibration=correlated(23))
        with pytest.raises(ParameterError, match="got ndarray"):
            method.fit(weight_of(16, 24), calibration=np.eye(24))
        with pytest.raises(ParameterError, match="23 inputs"):
            method.fit(weight_of(16, 24)).output_error(weight_of(16, 24), correlated(23))

    @settings
    def test_steps_are_errors_in_the_metric_and_cancel(self, method: Method) -> None:
        weight, calibration, steps = weight_of(18, 6, 3, 3).float(), correlated(54), []
        fitted = method.fit(weight, steps.append, calibration)
        assert len(fitted.history) == max(1, len({step.iteration for step in steps} - {0}))
        if len(steps) > 1:
            assert fitted.history[-1] <= steps[0].relative_error * (1 + 1e-6)

            def cancel(step: psm.Step) -> None:
                raise psm.JobCancelled

            with pytest.raises(psm.JobCancelled):
                method.fit(weight, cancel, calibration)

    def test_pruned_weights_are_unchanged_and_chosen_by_effect(self) -> None:
        weight = weight_of(10, 20)
        scales = torch.linspace(0.1, 3, 20, dtype=torch.float64)
        f = psm.Prune(fraction=0.2).fit(weight, calibration=Calibration(torch.diag(scales**2), 10))
        rebuilt = f.reconstruct()
        assert torch.equal(rebuilt[rebuilt != 0], weight[rebuilt != 0])
        moment = torch.diag(scales**2) / (scales**2).mean() + module.DAMPING * torch.eye(20)
        # without correlations the effect of each is all there is
        scores = (weight.abs() * moment.diagonal().sqrt()).flatten()
        assert set((rebuilt != 0).flatten().nonzero()[:, 0].tolist()) == set(scores.topk(40).indices.tolist())

    def test_compress_takes_statistics_by_layer(self) -> None:
        model, x = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6)), torch.randn(40, 8)
        found = calibrate(model, dataset(x))
        plan = {"0": psm.SVD(rank=2), "1": psm.SVD(rank=2)}
        small = psm.compress(model, plan, calibration=found)
        for name in plan:
            weight = model.get_submodule(name).weight
            expected = plan[name].fit(weight, calibration=found[name]).reconstruct()
            assert torch.allclose(small.get_submodule(name).weight, expected)
        with pytest.raises(ParameterError, match="no statistics of layer '1'"):
            psm.compress(model, plan, calibration={"0": found["0"]})


@pytest.fixture(scope="module")
def demo_layers() -> list[tuple[torch.Tensor, Calibration, Calibration]]:
    """Weights of the demonstration networks with statistics of training and of held-out images."""
    found = []
    for source, names in [(MLP, ["fc2"]), ("demo:fashion-cnn", ["features.conv5"])]:
        model = psm.load_model(source)
        seen, held_out = (
            calibrate(model, dataset(psm.load_data(data).inputs[::5]), names)
            for data in ("demo:train", "demo:test")
        )
        weights = [model.get_submodule(name).weight.detach() for name in names]
        found += list(zip(weights, seen.values(), held_out.values(), strict=True))
    return found


@pytest.mark.parametrize("name", psm.METHODS)
def test_held_out_outputs_of_demonstration_layers_are_closer(
    name: str, demo_layers: list[tuple[torch.Tensor, Calibration, Calibration]]
) -> None:
    for weight, seen, held_out in demo_layers:
        few = {"iterations": 15} if name == "psm" else {}
        method = psm.at_budget(name, tuple(weight.shape), 0.1, **few)
        errors = [method.fit(weight, calibration=c).output_error(weight, held_out) for c in (None, seen)]
        assert errors[1] < errors[0]


@pytest.mark.parametrize("moment", [-torch.eye(3), torch.ones(3, 3).triu()], ids=["negative", "asymmetric"])
def test_a_matrix_that_is_no_second_moment_is_refused(moment: torch.Tensor) -> None:
    with pytest.raises(ParameterError, match="XᵀX / N"):
        psm.Calibration(moment.double(), 10)
