"""Accuracy by an independent count, its interval against SciPy, and data that cannot be used."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

import psm_core as psm
from psm_core.errors import DataError, ModelError, ParameterError, UnknownNameError, WeightError
from psm_core.experiments.evaluation import wilson
from psm_core.network.data import Dataset, load_data


@pytest.mark.parametrize("samples", [1, 2, 7, 100, 2000])
def test_interval_is_that_of_scipy(samples: int) -> None:
    for correct in {0, 1, samples // 3, samples // 2, samples - 1, samples}:
        found = wilson(correct, samples)
        expected = scipy.stats.binomtest(correct, samples).proportion_ci(0.95, method="wilson")
        assert found == pytest.approx((expected.low, expected.high), abs=1e-6)
        assert 0.0 <= found[0] <= correct / samples + 1e-12
        assert correct / samples - 1e-12 <= found[1] <= 1.0


def test_accuracy_is_an_independent_count(networks_module: str, data_file: Path) -> None:
    model = psm.load_model(f"{networks_module}:mlp").train()
    arrays = np.load(data_file)
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    hidden = arrays["x"].reshape(300, 64).astype(np.float64)
    for i in (1, 3, 5):
        hidden = hidden @ weights[f"{i}.weight"].T + weights[f"{i}.bias"]
        hidden = np.maximum(hidden, 0) if i < 5 else hidden
    correct = int((hidden.argmax(1) == arrays["y"]).sum())
    assert 150 < correct < 290
    seen: list[tuple[int, int]] = []
    result = psm.evaluate(model, str(data_file), lambda done, total: seen.append((done, total)))
    assert (result.correct, result.samples) == (correct, 300)
    assert result.accuracy == correct / 300
    assert (result.low, result.high) == wilson(correct, 300)
    assert seen[-1] == (300, 300)
    assert result.data == str(data_file)
    assert model.training  # as it was
    again = psm.evaluate(psm.load_model(f"{networks_module}:bfloat"), load_data(str(data_file)))
    assert abs(again.correct - correct) <= 6


def test_bytes_are_images_between_zero_and_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (600, 3), dtype=np.uint8)
    np.savez(tmp_path / "bytes.npz", x=x, y=(x.astype(float) / 255 > 0.5).sum(1) > 1)
    with pytest.raises(DataError, match="bool"):
        load_data(str(tmp_path / "bytes.npz"))
    np.savez(tmp_path / "bytes.npz", x=x, y=x.argmax(1))

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(1))
            self.highest = 0.0

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.highest = max(self.highest, float(images.max()))
            return images * self.one

    model = Scale()
    ties = (np.sort(x, axis=1)[:, -1] == np.sort(x, axis=1)[:, -2]).sum()
    assert psm.evaluate(model, str(tmp_path / "bytes.npz")).correct >= 600 - ties
    assert model.highest == x.max() / 255


def test_whole_numbers_are_tokens(networks_module: str, tmp_path: Path, store: psm.ResultStore) -> None:
    model = psm.load_model(f"{networks_module}:tied")
    tokens = torch.arange(60).reshape(15, 4) % 20
    y = model(tokens).argmax(1)
    np.savez(tmp_path / "tokens.npz", x=tokens.numpy().astype(">u2"), y=y.numpy())
    study = psm.Study(model, store, str(tmp_path / "tokens.npz"))
    record = study.network({"body": psm.SVD(rank=8)}, "svd")
    assert (record.accuracy, record.samples) == (1.0, 15)
    assert "body" in {row.name for row in psm.layers(model)}


def test_networks_with_equal_weights_have_figures_of_their_own(
    store: psm.ResultStore, tmp_path: Path
) -> None:
    first = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    second = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    second.load_state_dict(first.state_dict())
    x = torch.randn(200, 4)
    np.savez(tmp_path / "d.npz", x=x.numpy(), y=first(x).argmax(1).numpy())
    for network in (first, second):
        record = psm.Study(network, store, str(tmp_path / "d.npz")).network({}, "dense")
        assert record.accuracy == psm.evaluate(network, str(tmp_path / "d.npz")).accuracy


def test_labels_beyond_the_classes_and_inputs_that_do_not_fit(networks_module: str, tmp_path: Path) -> None:
    model = psm.load_model(f"{networks_module}:mlp")
    x, y = np.zeros((4, 1, 8, 8), np.float32), np.array([0, 1, 2, 5])
    np.savez(tmp_path / "d.npz", x=x, y=y)
    with pytest.raises(DataError, match=r"label 5.*5 classes.*0 to 4"):
        psm.evaluate(model, str(tmp_path / "d.npz"))
    np.savez(tmp_path / "d.npz", x=x[:, :, :7], y=y.clip(0, 4))
    with pytest.raises(DataError, match=r"\(1, 7, 8\)"):
        psm.evaluate(model, str(tmp_path / "d.npz"))
    with pytest.raises(DataError, match="no class scores"):
        psm.evaluate(nn.Conv2d(1, 3, 3), Dataset("d", torch.zeros(2, 1, 8, 8), torch.zeros(2).long()))
    with pytest.raises(DataError, match="no data of its own"):
        psm.evaluate(model)


GOOD = {"x": np.zeros((3, 4), np.float32), "y": np.array([0, 1, 0])}
BAD: dict[str, dict[str, Any]] = {
    "no labels": {"x": GOOD["x"]},
    "no inputs": {"y": GOOD["y"]},
    "fewer labels": GOOD | {"y": np.array([0, 1])},
    "one column of labels": GOOD | {"y": GOOD["y"][:, None]},
    "no samples": {"x": np.zeros((0, 4), np.float32), "y": np.zeros(0, int)},
    "a scalar": GOOD | {"x": np.float32(3)},
    "flat inputs": GOOD | {"x": np.zeros(3, np.float32)},
    "fractional labels": GOOD | {"y": np.array([0.0, 1.0, 0.0])},
    "negative labels": GOOD | {"y": np.array([0, -1, 0])},
    "labels of text": GOOD | {"y": np.array(["a", "b", "c"])},
    "inputs of text": GOOD | {"x": np.array([["a"], ["b"], ["c"]])},
    "complex inputs": GOOD | {"x": np.zeros((3, 4), complex)},
    "inputs that are not finite": GOOD | {"x": np.full((3, 4), np.nan, np.float32)},
    "infinite inputs": GOOD | {"x": np.full((3, 4), np.inf)},
    "images of whole numbers": GOOD | {"x": np.zeros((3, 1, 4, 4), np.int64)},
    "inputs beyond single precision": GOOD | {"x": np.full((3, 4), 1e300)},
    "objects": GOOD | {"x": np.array([[{}], [{}], [{}]], dtype=object)},
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", BAD)
def test_arrays_that_are_no_data_are_named(case: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "good.npz", **GOOD)
    assert len(load_data(str(tmp_path / "good.npz"))) == 3
    path = tmp_path / "bad.npz"
    np.savez(path, **BAD[case])
    with pytest.raises(DataError, match=r"bad\.npz"):
        load_data(str(path))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_files_are_refused_or_hold_the_same(save: Any, tmp_path: Path) -> None:
    """Whatever byte is changed or cut off: a named error, or data that is intact."""
    path, rng, places = tmp_path / "d.npz", np.random.default_rng(0), random.Random(3)
    x = rng.standard_normal((6, 20)).astype(np.float32)
    save(path, x=x, y=np.arange(6))
    content = path.read_bytes()
    refused = 0
    for _ in range(250):
        damaged = bytearray(content)
        damaged[places.randrange(len(content))] ^= 1 << places.randrange(8)
        if places.random() < 0.2:
            damaged = damaged[: places.randrange(len(damaged))]
        path.write_bytes(damaged)
        try:
            found = load_data(str(path))
        except DataError:
            refused += 1
        else:
            np.testing.assert_array_equal(found.inputs.numpy(), x)
            np.testing.assert_array_equal(found.labels.numpy(), np.arange(6))
    assert refused > 100


def test_sources_that_are_no_data(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", GOOD["x"])
    (tmp_path / "text.npz").write_text("x,y\n1,2\n")
    (tmp_path / "empty.npz").touch()
    places = [tmp_path, *tmp_path.iterdir(), tmp_path / "missing.npz", "", "a" * 300, "a\0b", "other:test"]
    for place in places:
        with pytest.raises(DataError):
            load_data(str(place))
    for source in ("demo:", "demo:all", "demo:Test"):
        with pytest.raises(UnknownNameError, match="test"):
            load_data(source)


def test_fingerprints_depend_on_every_value_and_type() -> None:
    x, y = torch.zeros(3, 4), torch.tensor([0, 1, 0])
    first = Dataset("a", x, y)
    assert Dataset("b", x.clone(), y.clone()).fingerprint == first.fingerprint
    changed = x.clone()
    changed[2, 3] = 1e-30
    others = [
        Dataset("a", changed, y),
        Dataset("a", x, torch.tensor([0, 1, 1])),
        Dataset("a", x.double(), y),
        Dataset("a", x.reshape(3, 2, 2), y),
        Dataset("a", x.int(), y),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_a_study_answers_for_its_own_data_and_plan(store: psm.ResultStore, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(200, 4)
    right = network(x).argmax(1)
    np.savez(tmp_path / "right.npz", x=x.numpy(), y=right.numpy())
    np.savez(tmp_path / "wrong.npz", x=x.numpy(), y=((right + 1) % 3).numpy())
    studies = [psm.Study(network, store, str(tmp_path / name)) for name in ("right.npz", "wrong.npz")]
    plan = {"0": psm.SVD(rank=4), "2": psm.SVD(rank=3)}
    for study, accuracy in zip(studies, (1.0, 0.0), strict=True):
        assert study.known(plan) is None
        assert study.network({}).accuracy == accuracy
        assert study.network(plan).accuracy == accuracy
        records = study.records()
        assert records[records["layer"] == "*"]["accuracy"].tolist() == [accuracy, accuracy]
        assert len(records[records["layer"] != "*"]) == 2
    first = studies[0].network(plan)
    again = studies[0].network(plan, budget=0.75)
    assert (first.method, again.method, again.cached) == ("svd", "svd", True)
    assert again.params["budget"] == 0.75
    assert studies[0].network({"0": psm.SVD(rank=1), "2": psm.Prune(fraction=0.5)}).method == "recipe"
    assert studies[0].network({}).method == "dense"


def test_modes_of_modules_are_left_as_they_were() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))
    network.train()
    network[1].eval()
    data = Dataset("d", torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64))
    psm.evaluate(network, data)
    psm.layers(network, torch.zeros(1, 1, 8, 8))
    assert [module.training for module in network.modules()] == [True, True, False, True, True]


def test_whatever_a_forward_raises_is_named() -> None:
    class Strict(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("only on Sundays")

    data = Dataset("d", torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(DataError, match="only on Sundays"):
        psm.evaluate(Strict(5, 3), data)
    with pytest.raises(ModelError, match="only on Sundays"):
        psm.layers(Strict(5, 3), torch.zeros(1, 5))


def test_bytes_of_a_half_precision_network(store: psm.ResultStore) -> None:
    network = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 5)).half()
    record = psm.Study(network, store).network({"0": psm.SVD(rank=3)})
    assert record.nbytes == 2 * (3 * (64 + 48) + 48 + 48 * 5 + 5)
    assert record.dense_nbytes == 2 * (64 * 48 + 48 + 48 * 5 + 5)


def test_batches_of_large_inputs_are_small() -> None:
    sizes: list[int] = []
    data = Dataset("d", torch.zeros(3, 3, 1200, 1200), torch.zeros(3, dtype=torch.int64))
    head = nn.Sequential(nn.AvgPool2d(600), nn.Flatten(), nn.Linear(12, 2))
    psm.evaluate(head, data, lambda done, total: sizes.append(done))
    assert sizes == [1, 2, 3]


def test_outputs_that_are_not_numbers_are_named() -> None:
    network = nn.Linear(4, 3)
    network.weight.data[0, 0] = float("nan")
    data = Dataset("d", torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(DataError, match="not numbers"):
        psm.evaluate(network, data)


def test_a_bad_weight_is_named_with_its_layer(store: psm.ResultStore) -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    network[1].weight.data[0, 0] = float("inf")
    with pytest.raises(WeightError, match=r"layer '1': .*1 NaN or infinite among 9"):
        psm.Study(network, store).network({"0": psm.SVD(rank=1), "1": psm.SVD(rank=1)})
    with pytest.raises(ParameterError, match="device 'zz'"):
        psm.Study(network, store, device="zz")
