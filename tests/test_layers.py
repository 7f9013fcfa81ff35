"""The rows of a network against counts by hand and against torchvision's own figures."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torchvision import models

import psm_core as psm
from psm_core.errors import LayerError, ModelError, UnknownNameError
from psm_core.network.compress import stored_parameters
from psm_core.network.layers import LayerRow, compressible_layers, get_layer
from psm_core.network.models import set_card


class HandMade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.conv = nn.Conv2d(3, 8, (3, 5), stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 12, 3, groups=4, bias=False)
        self.depthwise = nn.Conv2d(12, 12, 3, groups=12)
        self.fc = nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x * self.scale[:, None, None]))
        x = self.depthwise(self.grouped(x))
        return self.fc(self.fc_input(x))

    def fc_input(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def rows_by_name(model: nn.Module, example: torch.Tensor | None = None) -> dict[str, LayerRow]:
    rows = psm.layers(model, example)
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


def test_rows_against_a_count_by_hand() -> None:
    # 16×20 → conv (3, 5), stride 2, padding 1: 8×9 → grouped 3: 6×7 → depthwise 3: 4×5.
    expected = {
        "": ((3,), 3, None),
        "conv": ((8, 3, 3, 5), 8 * 3 * 15 + 8, 8 * 9 * 8 * 3 * 15),
        "norm": ((8,), 16, None),
        "grouped": ((12, 2, 3, 3), 12 * 2 * 9, 6 * 7 * 12 * 2 * 9),
        "depthwise": ((12, 1, 3, 3), 12 * 9 + 12, 4 * 5 * 12 * 9),
        "fc": ((7, 12), 7 * 12 + 7, 7 * 12),
    }
    total = sum(parameters for _, parameters, _ in expected.values())
    for batch in (1, 5):
        model = HandMade().train()
        rows = rows_by_name(model, torch.randn(batch, 3, 16, 20))
        assert list(rows) == list(expected)
        for name, (shape, parameters, macs) in expected.items():
            row = rows[name]
            assert (row.shape, row.parameters, row.macs) == (shape, parameters, macs), name
            assert row.share == pytest.approx(parameters / total, rel=1e-12)
        assert model.training
        assert int(model.norm.num_batches_tracked) == 0  # counting leaves the statistics alone
        assert not model.conv._forward_hooks
    assert {name for name, row in rows.items() if row.compressible} == {"conv", "fc"}
    assert "groups=4" in rows["grouped"].reason
    assert "depthwise" in rows["depthwise"].reason
    assert "BatchNorm2d" in rows["norm"].reason
    assert set(compressible_layers(HandMade())) == {"conv", "fc"}
    assert dict(rows["fc"])["parameters"] == rows["fc"]["parameters"] == 91


def test_macs_need_an_input_that_fits() -> None:
    assert {row.macs for row in psm.layers(HandMade())} == {None}
    for shape in [(1, 3), (1, 4, 16, 20), (1, 3, 2, 2)]:
        with pytest.raises(ModelError, match="does not run"):
            psm.layers(HandMade(), torch.zeros(shape))
    model = set_card(HandMade(), input_shape=(3, 16, 20))
    assert rows_by_name(model)["fc"].macs == 84


def test_a_layer_called_twice_counts_twice_and_on_each_position() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.fc(x))

    assert rows_by_name(Twice(), torch.zeros(4, 10, 6))["fc"].macs == 2 * 10 * 36


def test_compressed_rows_show_the_same_shape_and_fewer_parameters() -> None:
    small = psm.compress(HandMade(), {"fc": psm.SVD(rank=2), "conv": psm.Prune(fraction=0.1)})
    rows = rows_by_name(small, torch.zeros(1, 3, 16, 20))
    assert (rows["fc"].shape, rows["fc"].parameters) == ((7, 12), 2 * (7 + 12) + 7)
    assert (rows["conv"].shape, rows["conv"].parameters) == ((8, 3, 3, 5), 36 + 8)
    assert "already" in rows["fc"].reason
    assert sum(row.parameters for row in rows.values()) == stored_parameters(small)


def test_tied_weights_are_listed_and_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.body = nn.Linear(8, 8)
            self.head = nn.Linear(8, 20)
            self.head.weight = self.embed.weight

    model = Tied()
    rows = rows_by_name(model)
    assert "embed" in rows["head"].reason
    assert rows["head"].share == pytest.approx((160 + 20) / (160 + 72 + 20))
    assert set(compressible_layers(model)) == {"body"}
    with pytest.raises(LayerError, match="embed"):
        psm.compress(model, {"head": psm.SVD(rank=1)})

    siblings = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    siblings[1].weight = siblings[2].weight = siblings[0].weight
    assert compressible_layers(siblings) == {}
    assert all("shares its weight" in row.reason for row in psm.layers(siblings))


def test_one_layer_under_two_names_is_refused() -> None:
    """Replacing it at one of its places would untie it from the other."""
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": nn.ReLU(), "c": shared, "d": nn.Linear(8, 8)})
    rows = rows_by_name(model)
    assert set(rows) == {"a", "d"}
    assert "'c'" in rows["a"].reason
    assert set(compressible_layers(model)) == {"d"}
    for name in ("a", "c"):
        with pytest.raises((LayerError, UnknownNameError)):
            psm.compress(model, {name: psm.SVD(rank=1)})


def test_layers_that_are_not_called_are_listed_with_the_reason() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.lstm = nn.LSTM(8, 4)
            self.embed = nn.Embedding(5, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(self.attention(x, x, x)[0])[0]

    rows = rows_by_name(Odd(), torch.zeros(1, 3, 8))
    assert rows["attention"].parameters == 3 * 8 * 8 + 3 * 8
    assert rows["attention"].shape == (24, 8)
    assert rows["attention.out_proj"].parameters == 8 * 8 + 8
    assert "MultiheadAttention" in rows["attention.out_proj"].reason
    assert rows["lstm"].parameters == 4 * (4 * 8 + 4 * 4 + 4 + 4)
    assert "LSTM" in rows["lstm"].reason
    assert "Embedding" in rows["embed"].reason
    assert not any(row.compressible for row in rows.values())
    # Multiplications that are not counted are not shown as none.
    assert {row.macs for row in rows.values()} == {None}


@pytest.mark.parametrize(
    ("name", "parameters", "macs", "compressible"),
    [
        ("resnet18", 11_689_512, 1.814e9, 21),
        ("mobilenet_v2", 3_504_872, 0.301e9, 36),
        ("vit_b_16", 86_567_656, None, 26),
    ],
)
def test_torchvision_networks_list_all_their_parameters(
    name: str, parameters: int, macs: float | None, compressible: int
) -> None:
    """Parameters as torchvision documents them; MACs as its weights' meta data give them, in GMACs."""
    with torch.device("meta"):  # figures do not depend on values
        network = models.get_model(name, weights=None).eval()
    shape = (1, 3, 224, 224)
    rows = psm.layers(network, torch.zeros(shape, device="meta"))
    assert sum(row.parameters for row in rows) == parameters
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    assert sum(row.compressible for row in rows) == compressible
    meta = models.get_model_weights(name).DEFAULT.meta
    assert meta["num_params"] == parameters
    if macs is not None:
        found = sum(row.macs or 0 for row in rows)
        assert found == pytest.approx(macs, rel=2e-3)
        assert found / 1e9 == pytest.approx(meta["_ops"], rel=5e-3)
    else:
        assert {row.macs for row in rows if "attention" in row.name} == {None}
    assert all(row.reason for row in rows if not row.compressible)


def test_names_that_do_not_exist_or_cannot_be_compressed() -> None:
    model = HandMade()
    with pytest.raises(UnknownNameError, match=r"convv.*did you mean: conv"):
        get_layer(model, "convv")
    with pytest.raises(LayerError, match=r"norm.*BatchNorm2d.*choose another"):
        get_layer(model, "norm")
    with pytest.raises(ModelError, match="no parameters"):
        psm.layers(nn.ReLU())
    assert get_layer(nn.Linear(3, 2), "").weight.shape == (2, 3)


def test_a_model_with_a_pruning_mask_is_listed_and_says_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    rows = rows_by_name(model)
    assert rows["0"].parameters == 8 * 6 + 6
    assert "weight_orig" in rows["0"].reason
    with pytest.raises(ModelError, match="permanent"):
        psm.compress(model, {"2": psm.SVD(rank=4)})
    prune.remove(model[0], "weight")
    x = torch.randn(3, 8)
    assert torch.allclose(psm.compress(model, {"2": psm.SVD(rank=4)})(x), model(x), atol=1e-5)
