"""Records as Plotly figures: one colour and one marker a method, the Pareto front marked."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from psm_core.experiments.record import METRICS, Metric
from psm_core.methods import METHODS, method_from_json
from psm_core.network.layers import LayerRow

# Okabe & Ito's palette, told apart with every common colour vision.
_COLOURS = {
    "psm": "#D55E00",
    "svd": "#0072B2",
    "tucker": "#009E73",
    "tt": "#CC79A7",
    "prune": "#E69F00",
    "recipe": "#56B4E9",
    "dense": "#7A7A7A",
}
_SYMBOLS = {
    "psm": "circle",
    "svd": "square",
    "tucker": "diamond",
    "tt": "triangle-up",
    "prune": "x",
    "recipe": "star",
    "dense": "cross",
}
_SPARE_COLOURS = ("#332288", "#117733", "#882255", "#44AA99", "#999933", "#AA4499")
_SPARE_SYMBOLS = ("pentagon", "hexagon", "triangle-down", "hourglass", "bowtie", "hexagram")
_TITLES = {"recipe": "Recipe", "dense": "Dense"}
FRONT_COLOUR = "#8A8A8A"
MUTED_COLOUR = "#A9B1BA"
ACCENT_COLOUR = "#0B6BCB"


def colour(method: str) -> str:
    """The colour of a method, the same on every figure; unknown ones get a fixed spare one."""
    return _COLOURS.get(method) or _SPARE_COLOURS[_spare(method)]


def symbol(method: str) -> str:
    """The marker of a method, so that it is known without its colour."""
    return _SYMBOLS.get(method) or _SPARE_SYMBOLS[_spare(method)]


def title(method: str) -> str:
    """The name of a method for people.

    >>> title("svd"), title("dense")
    ('SVD', 'Dense')
    """
    if method in METHODS:
        return METHODS[method].title
    return _TITLES.get(method, method)


def label(row: Mapping[Any, Any]) -> str:
    """The method of a record, and that it was fitted to activations if it was.

    >>> label({"method": "svd", "calibration": "demo:train"})
    'SVD · activations'
    """
    return title(row["method"]) + (" · activations" if row["calibration"] else "")


def _spare(method: str) -> int:
    return hashlib.sha256(method.encode()).digest()[0] % len(_SPARE_COLOURS)


def pareto_front(
    x: Sequence[float], y: Sequence[float], better: tuple[str, str] = ("lower", "lower")
) -> list[bool]:
    """Whether each point is on the front: no other is as good in both and better in one.

    Points with a missing coordinate are not.

    >>> pareto_front([1, 2, 3], [5, 6, 1])
    [True, False, True]
    """
    signs = [1.0 if direction == "lower" else -1.0 for direction in better]
    points = [(signs[0] * float(a), signs[1] * float(b)) for a, b in zip(x, y, strict=True)]
    known = [i for i, point in enumerate(points) if not any(map(math.isnan, point))]
    front = [False] * len(points)
    best = math.inf
    previous: tuple[float, float] | None = None
    for i in sorted(known, key=lambda i: points[i]):
        if points[i][1] < best or points[i] == previous:
            front[i], best, previous = True, points[i][1], points[i]
    return front


def axis_title(name: str, metric: Metric | None = None) -> str:
    """A metric with its direction: "Relative error (↓ better)"."""
    metric = metric or METRICS[name]
    return f"{metric.label} ({'↓' if metric.better == 'lower' else '↑'} better)"


def setting_text(row: Mapping[Any, Any]) -> str:
    """The setting of a record in a few words: the budget of a network, a method's parameters."""
    params = row["params"]
    return _setting_text(row["method"], params if isinstance(params, str) else json.dumps(params))


@lru_cache(maxsize=50_000)
def _setting_text(method: str, params_json: str) -> str:
    params = json.loads(params_json)
    if "plan" in params:
        return f"{len(params['plan'])} layers compressed" if params["plan"] else "as trained"
    return method_from_json({"method": method, "params": params}).setting


def trade_off(
    frame: pd.DataFrame,
    x: str = "parameters",
    y: str = "relative_error",
    log_x: bool = True,
    selected: Collection[str] = (),
) -> go.Figure:
    """One metric against another, a colour a method; the front as a line, the selection ringed.

    `frame` holds records as `ResultStore.query` gives them. Accuracies carry their 95 % intervals,
    and the dense network is drawn as a line across. Each point's custom data is its record's key.
    """
    figure = go.Figure()
    front = pareto_front(frame[x].to_list(), frame[y].to_list(), (METRICS[x].better, METRICS[y].better))
    edge = frame[front].sort_values(x)
    figure.add_scatter(
        x=edge[x], y=edge[y], mode="lines", name="Pareto front", hoverinfo="skip",
        line={"color": FRONT_COLOUR, "width": 1.5, "dash": "dot", "shape": "hv"},
    )  # fmt: skip
    if y == "accuracy":
        _add_dense_line(figure, frame[frame["method"] == "dense"])
    kinds = [(method, fitted) for method in _in_order(frame["method"].unique()) for fitted in (False, True)]
    for method, fitted in kinds:  # to the weights, or to activations
        chosen = (frame["method"] == method) & ((frame["calibration"] != "") == fitted)
        group = frame[chosen & frame[y].notna()].sort_values(x)
        if group.empty:
            continue
        figure.add_scatter(
            x=group[x],
            y=group[y],
            mode="markers" if method in ("dense", "recipe") else "lines+markers",
            name=label(group.iloc[0]),
            line={"color": colour(method), "width": 1, "dash": "dash" if fitted else "solid"},
            marker={
                "color": colour(method), "symbol": symbol(method) + "-open" * fitted, "size": 10,
                "line": {"width": 2 if fitted else 1, "color": colour(method) if fitted else "white"},
            },
            error_y=_interval(group) if y == "accuracy" else None,
            customdata=group["key"],
            text=[_hover(row) for row in group.to_dict("records")],
            hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
    ringed = frame[frame["key"].isin(selected)]
    if len(ringed):
        figure.add_scatter(
            x=ringed[x], y=ringed[y], mode="markers", hoverinfo="skip", showlegend=False,
            marker={"size": 20, "color": "rgba(0,0,0,0)",
                    "line": {"width": 2.5, "color": ACCENT_COLOUR}},
        )  # fmt: skip
    _axis(figure.update_xaxes, x, frame[x] if log_x else None)
    _axis(figure.update_yaxes, y)
    figure = _styled(figure, 430)
    # Below the data, where the buttons of the figure do not cover it.
    return figure.update_layout(legend={"yanchor": "top", "y": -0.21}, margin={"t": 32})


def _add_dense_line(figure: go.Figure, dense: pd.DataFrame) -> None:
    """The dense network's accuracy across the figure, its interval as a band."""
    if dense.empty or pd.isna(dense["accuracy"].iloc[-1]):
        return
    row = dense.iloc[-1]
    figure.add_hline(y=row["accuracy"], line={"color": colour("dense"), "width": 1, "dash": "dash"})
    figure.add_hrect(y0=row["low"], y1=row["high"], fillcolor=colour("dense"), opacity=0.12, line_width=0)


def _interval(group: pd.DataFrame) -> dict[str, Any]:
    """Error bars from the accuracy to the ends of its interval."""
    return {
        "type": "data",
        "array": group["high"] - group["accuracy"],
        "arrayminus": group["accuracy"] - group["low"],
        "thickness": 1,
        "width": 3,
    }


def _hover(row: Mapping[Any, Any]) -> str:
    """All that is known of a record, in lines."""
    lines = [f"<b>{label(row)}</b> {setting_text(row)}"]
    lines.append(f"{row['parameters']:,} of {row['dense_parameters']:,} parameters")
    lines.append(f"budget {row['fraction']:.2%}, {row['nbytes']:,} of {row['dense_nbytes']:,} bytes")
    lines.append(f"relative error {row['relative_error']:.4f}")
    if pd.notna(row["output_error"]):
        lines.append(f"output error {row['output_error']:.4f} on {row['data']}")
    if row["calibration"]:
        lines.append(f"fitted to what its layers receive from {row['calibration']}")
    if pd.notna(row["accuracy"]):
        lines.append(
            f"accuracy {row['accuracy']:.2%} (95 % interval {row['low']:.2%} to "
            f"{row['high']:.2%}, n = {row['samples']:,.0f} of {row['data']})"
        )
    lines.append(f"fitted in {row['seconds']:.2f} s on {row['device']}")
    return "<br>".join(lines)


def convergence(
    histories: Mapping[str, tuple[str, Sequence[float]]], metric: str = "relative_error"
) -> go.Figure:
    """The error after each iteration; `histories` gives a method and its errors by label.

    Fits with a calibration minimize, and report, the metric "output_error".
    """
    error = METRICS[metric].label.lower()
    figure = go.Figure()
    for label, (method, history) in histories.items():
        figure.add_scatter(
            x=list(range(1, len(history) + 1)), y=list(history), name=label,
            mode="lines" if len(history) > 1 else "markers",
            line={"color": colour(method)}, marker={"symbol": symbol(method), "size": 7},
            hovertemplate=f"iteration %{{x}}: {error} %{{y:.4f}}<extra>%{{fullData.name}}</extra>",
        )  # fmt: skip
    figure.update_layout(showlegend=True)
    figure.update_xaxes(title="Iteration", rangemode="tozero")
    _axis(figure.update_yaxes, metric)
    return _styled(figure, 320)


def live_error(history: Sequence[float], method: str = "", metric: str = "relative_error") -> go.Figure:
    """The error curve of the fit at work."""
    figure = convergence({title(method): (method, history)}, metric)
    figure.update_yaxes(rangemode="normal")
    return figure.update_layout(height=190, showlegend=False)


def layer_bars(rows: Sequence[LayerRow]) -> go.Figure:
    """Parameters by layer, in the network's order; layers that must stay dense in grey."""
    figure = go.Figure()
    for compressible, name, tint in (
        (True, "Can be compressed", ACCENT_COLOUR),
        (False, "Stays dense", MUTED_COLOUR),
    ):
        group = [row for row in rows if row.compressible is compressible]
        if not group:
            continue
        figure.add_bar(
            x=[row.name for row in group],
            y=[row.parameters for row in group],
            name=name,
            marker={"color": tint},
            customdata=[(row.kind, f"{row.share:.2%}", row.reason) for row in group],
            hovertemplate="<b>%{x}</b> (%{customdata[0]})<br>%{y:,} parameters, %{customdata[1]} of "
            "the network<br>%{customdata[2]}<extra></extra>",
        )
    figure.update_xaxes(
        type="category", categoryorder="array", categoryarray=[row.name for row in rows],
        showticklabels=len(rows) <= 30, tickangle=-35,
    )  # fmt: skip
    figure.update_yaxes(title="Parameters", rangemode="tozero")
    return _styled(figure, 300)


def _in_order(methods: Iterable[str]) -> list[str]:
    """Registered methods in their order, then the others by name."""
    order = {name: i for i, name in enumerate(METHODS)}
    return sorted(methods, key=lambda name: (order.get(name, len(order)), name))


def _axis(update: Any, name: str, values: pd.Series | None = None) -> None:
    """Title, number format and, where the values are to be on a log scale, its range and ticks."""
    formats = {"parameters": "~s", "nbytes": "~s", "accuracy": ".1%", "fraction": ".2~%"}
    update(title=axis_title(name), tickformat=formats.get(name))
    if values is not None and len(values):
        low, high = math.log10(values.min()) - 0.06, math.log10(values.max()) + 0.06
        update(type="log", range=[low, high], tickvals=_log_ticks(low, high))


def _log_ticks(low: float, high: float) -> list[float] | None:
    """Round numbers between 10^low and 10^high: fewer a decade, the more decades there are.

    None where there would be fewer than two; the figure then finds its own.
    """
    steps = (1, 1.5, 2, 3, 5, 7) if high - low < 1.3 else (1, 2, 5) if high - low < 2.5 else (1,)
    decades = range(math.floor(low), math.ceil(high) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
    return ticks if len(ticks) > 1 else None


def _styled(figure: go.Figure, height: int) -> go.Figure:
    """The common layout: the legend above the data, narrow margins."""
    return figure.update_layout(
        height=height,
        margin={"l": 10, "r": 10, "t": 40, "b": 10},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.01, "x": 0, "title": None},
        hoverlabel={"align": "left"},
    )
