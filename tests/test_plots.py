"""Figures: the Pareto front against brute force, and what each figure holds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from psm_core import SVD, Prune, ResultStore, Study, layers, plots
from psm_core.experiments.record import METRICS
from psm_core.methods import METHODS


def dominated(i: int, x: list[float], y: list[float], signs: tuple[int, int]) -> bool:
    """Whether another point is as good in both coordinates and better in one."""
    a, b = signs[0] * x[i], signs[1] * y[i]
    others = [(signs[0] * p, signs[1] * q) for p, q in zip(x, y, strict=True)]
    return any(p <= a and q <= b and (p < a or q < b) for p, q in others)


@pytest.mark.parametrize("better", [("lower", "lower"), ("lower", "higher"), ("higher", "higher")])
@pytest.mark.parametrize("seed", range(8))
def test_pareto_front_is_that_of_brute_force(better: tuple[str, str], seed: int) -> None:
    random = np.random.default_rng(seed)
    x, y = random.integers(0, 9, 40).tolist(), random.integers(0, 9, 40).tolist()
    signs = tuple(1 if direction == "lower" else -1 for direction in better)
    expected = [not dominated(i, x, y, signs) for i in range(len(x))]
    assert plots.pareto_front(x, y, better) == expected


def test_points_without_a_value_are_not_on_the_front() -> None:
    assert plots.pareto_front([1, 0, 2], [1, math.nan, 2]) == [True, False, False]
    assert plots.pareto_front([], []) == []


def test_each_method_has_its_own_colour_and_marker() -> None:
    names = [*METHODS, "recipe", "dense"]
    assert len({plots.colour(name) for name in names}) == len(names)
    assert len({plots.symbol(name) for name in names}) == len(names)


def test_an_unknown_method_gets_the_same_spare_colour_each_time() -> None:
    assert plots.colour("made up") == plots.colour("made up")
    assert plots.colour("made up") not in {plots.colour(name) for name in METHODS}


@pytest.fixture
def records(tmp_path: Path) -> pd.DataFrame:
    """Two methods at three sizes on one layer."""
    torch.manual_seed(0)
    study = Study(nn.Sequential(nn.Linear(24, 16)), ResultStore(tmp_path))
    for size in (1, 3, 6):
        study.fit("0", SVD(rank=size))
        study.fit("0", Prune(fraction=size / 10))
    return study.store.query()


def drawn_keys(figure: plots.go.Figure) -> set[str]:
    """The keys of the records that a figure shows."""
    return {key for trace in figure.data if trace.customdata is not None for key in trace.customdata}


@pytest.mark.parametrize("log_x", [True, False])
def test_trade_off_shows_every_record_once(records: pd.DataFrame, log_x: bool) -> None:
    figure = plots.trade_off(records, log_x=log_x)
    points = [trace for trace in figure.data if trace.customdata is not None]
    assert sum(len(trace.x) for trace in points) == len(records)
    assert drawn_keys(figure) == set(records["key"])
    assert {trace.marker.color for trace in points} == {plots.colour("svd"), plots.colour("prune")}
    assert figure.layout.xaxis.type == ("log" if log_x else None)


def test_trade_off_draws_the_front_and_rings_the_selection(records: pd.DataFrame) -> None:
    chosen = records["key"].iloc[2]
    figure = plots.trade_off(records, selected=[chosen])
    front = next(trace for trace in figure.data if trace.name == "Pareto front")
    on_front = plots.pareto_front(records["parameters"], records["relative_error"])
    assert sorted(front.x) == sorted(records["parameters"][on_front])
    assert list(figure.data[-1].x) == [records["parameters"].iloc[2]]


def test_hover_says_everything(records: pd.DataFrame) -> None:
    text = next(trace for trace in plots.trade_off(records).data if trace.name == "SVD").text[0]
    row = records[records["method"] == "svd"].sort_values("parameters").iloc[0]
    for expected in ("SVD", "rank=1", f"{row['parameters']:,}", f"{row['relative_error']:.4f}", "bytes"):
        assert expected in text


def test_accuracies_carry_their_interval_and_the_dense_line(records: pd.DataFrame) -> None:
    networks = records.assign(accuracy=0.8, low=0.75, high=0.84, samples=100)
    dense = networks.iloc[[0]].assign(method="dense", key="dense", params='{"budget": 1, "plan": {}}')
    figure = plots.trade_off(pd.concat([networks, dense]), y="accuracy")
    svd = next(trace for trace in figure.data if trace.name == "SVD")
    np.testing.assert_allclose(svd.error_y.array, 0.04)
    np.testing.assert_allclose(svd.error_y.arrayminus, 0.05)
    assert len(figure.layout.shapes) == 2
    assert "n = 100" in svd.text[0]


@pytest.mark.parametrize(("low", "high"), [(2.1, 2.6), (1.0, 3.0), (0.5, 7.0)])
def test_log_ticks_are_few_and_in_range(low: float, high: float) -> None:
    ticks = plots._log_ticks(low - 0.06, high + 0.06)
    assert 2 <= len(ticks) <= 10
    assert all(low - 0.06 <= math.log10(tick) <= high + 0.06 for tick in ticks)


def test_log_ticks_leave_a_narrow_range_to_the_figure() -> None:
    assert plots._log_ticks(4.31, 4.43) is None


def test_layer_bars_show_all_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
    figure = plots.layer_bars(layers(model))
    assert sum(sum(trace.y) for trace in figure.data) == sum(p.numel() for p in model.parameters())


def test_convergence_draws_one_line_a_history() -> None:
    figure = plots.convergence({"a": ("psm", [0.5, 0.4]), "b": ("tucker", [0.3])})
    assert [list(trace.y) for trace in figure.data] == [[0.5, 0.4], [0.3]]


@pytest.mark.parametrize("metric", ["relative_error", "output_error"])
def test_error_curves_name_their_metric(metric: str) -> None:
    label = METRICS[metric].label
    curves = (
        plots.convergence({"a": ("psm", [0.5, 0.4])}, metric),
        plots.live_error([0.5, 0.4], "psm", metric),
    )
    for figure in curves:
        assert figure.layout.yaxis.title.text == f"{label} (↓ better)"
        assert f"{label.lower()} %{{y" in figure.data[0].hovertemplate
