"""Plans for a budget, counted on the network that is really compressed, and recipe files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import psm_core as psm
from psm_core.errors import BudgetError, ModelError, ParameterError, UnknownNameError
from psm_core.experiments.plan import read_recipe, write_recipe
from psm_core.methods.base import Method

methods = pytest.mark.parametrize("method", list(psm.METHODS))


def stored(model: nn.Module) -> int:
    """Floats of a state, without the indices: counted from what a file would hold."""
    floats = [t for t in model.state_dict().values() if t.is_floating_point()]
    return sum({t.data_ptr(): t.numel() for t in floats}.values())


def quick(plan: Mapping[str, Method]) -> dict[str, Method]:
    """The same sizes with few iterations."""
    return {
        name: type(m)(**(m.params | {"iterations": 2})) if "iterations" in m.params else m
        for name, m in plan.items()
    }


@methods
@pytest.mark.parametrize("fraction", [0.08, 0.15, 0.4, 1.0])
def test_the_network_really_stores_at_most_the_budget(
    method: str, fraction: float, networks_module: str
) -> None:
    model = psm.load_model(f"{networks_module}:mlp")
    total = 64 * 48 + 48 + 48 * 32 + 32 + 32 * 5 + 5
    plan = psm.uniform_plan(model, method, fraction)
    assert plan.total == total
    small = psm.compress(model, quick(plan.layers))
    assert stored(small) <= plan.stored <= fraction * total + 1e-6
    assert plan.stored > 0.8 * fraction * total  # and uses it
    assert set(plan.layers) | set(plan.kept) == {"1", "3", "5"}
    assert not set(plan.layers) & set(plan.kept)
    for name in plan.kept:
        assert torch.equal(small.get_submodule(name).weight, model.get_submodule(name).weight)


def test_small_layers_stay_dense_up_to_half_of_what_is_left() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10), nn.Linear(10, 40), nn.Linear(40, 200))
    # 270 of 8,770 floats are fixed: 200 are left at 470 / 8,770 = 0.0536, 1,000 at 0.1448.
    for fraction, kept in [
        (0.053, set()),
        (0.054, {"0"}),
        (0.144, {"0"}),
        (0.145, {"0", "2"}),
        (0.9, {"0", "2"}),
    ]:
        plan = psm.uniform_plan(model, "prune", fraction)
        assert set(plan.kept) == kept, fraction
        assert all("dense" in reason for reason in plan.kept.values())


@methods
def test_an_infeasible_budget_names_one_that_is_reached(method: str, networks_module: str) -> None:
    for name in ("mlp", "cnn", "tied"):
        model = psm.load_model(f"{networks_module}:{name}")
        with pytest.raises(BudgetError, match=method) as error:
            psm.uniform_plan(model, method, 1e-4)
        reachable = error.value.smallest_fraction
        assert 1e-4 < reachable <= 1
        plan = psm.uniform_plan(model, method, reachable)
        small = psm.compress(model, quick(plan.layers))
        assert stored(small) <= reachable * plan.total + _buffers(small) + 1e-6
        shown = float(str(error.value).split("at least ")[1].split(",")[0])
        assert shown >= reachable
        assert psm.uniform_plan(model, method, shown).stored <= shown * plan.total + 1e-6


def _buffers(model: nn.Module) -> int:
    """Statistics of normalisations, which are no parameters."""
    return sum(b.numel() for b in model.buffers() if b.is_floating_point())


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=6),
    st.sampled_from(list(psm.METHODS)),
    st.floats(0.001, 1.0),
    st.booleans(),
)
def test_any_network_at_any_budget(widths: list[int], method: str, fraction: float, bias: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(a, b, bias=bias) for a, b in pairwise(widths)))
    total = sum(a * b + bias * b for a, b in pairwise(widths))
    try:
        plan = psm.uniform_plan(model, method, fraction)
    except BudgetError as error:
        reachable = error.smallest_fraction
        plan = psm.uniform_plan(model, method, reachable)
        assert fraction < reachable <= 1
        fraction = reachable
    counted = total
    for name, setting in plan.layers.items():
        shape = tuple(model.get_submodule(name).weight.shape)
        assert setting.storage(shape) <= shape[0] * shape[1]
        counted += setting.storage(shape) - shape[0] * shape[1]
    assert counted == plan.stored <= fraction * total + 1e-6


@methods
@pytest.mark.parametrize("fraction", [0, -0.1, 1.0001, float("nan"), float("inf"), "0.1", None])
def test_fractions_out_of_range(method: str, fraction: object, networks_module: str) -> None:
    with pytest.raises(ParameterError, match="fraction"):
        psm.uniform_plan(psm.load_model(f"{networks_module}:mlp"), method, fraction)  # type: ignore[arg-type]


def test_bad_requests_are_named(networks_module: str) -> None:
    model = psm.load_model(f"{networks_module}:mlp")
    with pytest.raises(UnknownNameError, match=r"smv.*did you mean: svd"):
        psm.uniform_plan(model, "smv", 0.1)
    with pytest.raises(UnknownNameError, match="parameter of psm"):
        psm.uniform_plan(model, "psm", 0.1, k=3)
    for method, fixed in [
        ("psm", {"K": 3}),
        ("svd", {"rank": 2}),
        ("tt", {"rank": 2}),
        ("tucker", {"rank_out": 2, "rank_in": 2}),
    ]:
        with pytest.raises(ParameterError, match="a budget determines"):
            psm.uniform_plan(model, method, 0.3, **fixed)
        with pytest.raises(ParameterError, match="a budget determines"):
            psm.at_budget(method, (40, 60), 0.3, **fixed)
    for method, fixed in [
        ("psm", {"Q": 0}),
        ("psm", {"Q": 1.5}),
        ("psm", {"Q": "2"}),
        ("psm", {"algorithm": "magic"}),
        ("psm", {"seed": 2**70}),
        ("tt", {"order": 1}),
        ("tt", {"order": 2.5}),
        ("tt", {"order": 10**9}),
        ("tucker", {"rank_out": 0}),
        ("tucker", {"iterations": None}),
    ]:
        (name,) = fixed
        with pytest.raises(ParameterError, match=name):
            psm.at_budget(method, (40, 60, 3, 3), 0.3, **fixed)
        with pytest.raises(ParameterError, match=name):
            psm.uniform_plan(model, method, 0.3, **fixed)
    with pytest.raises(ModelError, match="no layer"):
        psm.uniform_plan(nn.Sequential(nn.Conv1d(2, 2, 3)), "svd", 0.5)


def test_parameters_set_by_hand_are_in_every_layer(networks_module: str) -> None:
    model = psm.load_model(f"{networks_module}:mlp")
    plan = psm.uniform_plan(model, "psm", 0.2, Q=3, algorithm="palm4msa")
    assert plan.layers
    assert {(m.Q, m.algorithm) for m in plan.layers.values()} == {(3, "palm4msa")}


SETTINGS = {
    "a": psm.PSM(K=2.5, Q=3, seed=7),
    "b.c": psm.SVD(rank=2),
    "": psm.Tucker(rank_out=1, rank_in=2),
    "Ω": psm.TensorTrain(rank=3, order=4),
    "d": psm.Prune(fraction=0.1),
}


def test_recipes_come_back(tmp_path: Path) -> None:
    write_recipe(tmp_path / "r.json", SETTINGS, "small:net")
    assert read_recipe(tmp_path / "r.json") == SETTINGS
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["model"] == "small:net"
    assert document["layers"]["b.c"] == {"method": "svd", "params": {"rank": 2}}
    (tmp_path / "r.json").write_text(json.dumps({"layers": {"x": {"method": "svd", "params": {"rank": 4}}}}))
    assert read_recipe(str(tmp_path / "r.json")) == {"x": psm.SVD(rank=4)}


def one(setting: object) -> str:
    return json.dumps({"recipe": 1, "layers": {"fc": setting}})


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "7", '"text"', "{}", '{"layers": {}}', '{"layers": []}', '{"layers": "fc"}',
        '{"recipe": 2, "layers": {"fc": {"method": "svd", "params": {"rank": 1}}}}', "[" * 100_000,
        one(None), one([]), one("svd"), one({}), one({"method": None}), one({"method": []}),
        one({"method": {}}), one({"method": "svd"}), one({"method": "svd", "params": []}),
        one({"method": "smv", "params": {"rank": 1}}), one({"method": "svd", "params": {"rnk": 1}}),
        one({"method": "svd", "params": {"rank": 0}}), one({"method": "svd", "params": {"rank": 1.5}}),
        one({"method": "svd", "params": {"rank": "1"}}), one({"method": "svd", "params": {"rank": None}}),
        one({"method": "svd", "params": {"rank": True}}), one({"method": "svd", "params": {"rank": [1]}}),
        one({"method": "psm", "params": {"K": float("nan")}}),
        one({"method": "psm", "params": {"K": 10**400}}),
        one({"method": "psm", "params": {"K": 1, "algorithm": ["joint"]}}),
        one({"method": "psm", "params": {"K": 1.5, "algorithm": "palm4msa"}}),
    ],
)  # fmt: skip
def test_bad_recipes_are_named_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ParameterError, match=r"r\.json") as error:
        read_recipe(path)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 600
    if '"fc"' in text and "recipe" in text and '"recipe": 2' not in text:
        assert "'fc'" in message


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    for place in (tmp_path, tmp_path / "none.json", tmp_path / "binary", tmp_path / ("x" * 300)):
        with pytest.raises(ParameterError, match="recipe"):
            read_recipe(place)
