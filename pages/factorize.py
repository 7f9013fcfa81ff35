"""Factorize: chosen layers by chosen methods at one budget, live, and the errors that result."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from pages._ui import forms, jobs, memory, resources, text
from pages._ui.shell import go, page
from psm_core import plots
from psm_core.errors import BudgetError
from psm_core.experiments.jobs import JobStatus
from psm_core.experiments.record import METRICS, NETWORK
from psm_core.experiments.study import Point
from psm_core.methods import METHODS
from psm_core.methods.base import Method, shape_text

CARDS = 5
CURVES = 12


def choose(network: resources.Network) -> tuple[list[str], list[str]]:
    """The layers and methods to run."""
    shapes = network.shapes
    left, right = st.columns(2)
    memory.project("layers_choice", memory.recall_list("layers", list(shapes), [next(iter(shapes))]))
    left.multiselect(
        "Layers",
        list(shapes),
        key="layers_choice",
        format_func=lambda name: f"{name} ({shape_text(shapes[name])})",
        on_change=lambda: memory.remember("layers", st.session_state["layers_choice"]),
        help="Layers that can be compressed, the largest first. The Model page lists them all.",
        placeholder="Choose one or several layers",
    )
    memory.project("methods_choice", memory.recall_list("methods", list(METHODS), list(METHODS)))
    right.pills(
        "Methods",
        list(METHODS),
        selection_mode="multi",
        key="methods_choice",
        format_func=plots.title,
        on_change=lambda: memory.remember("methods", st.session_state["methods_choice"]),
    )
    return st.session_state["layers_choice"], st.session_state["methods_choice"]


def settings(
    network: resources.Network, layers: list[str], methods: list[str], fraction: float
) -> list[tuple[str, Method]]:
    """The size sliders of each method; returns what they ask for, layer by layer."""
    shapes = network.shapes
    lead_layer = max(layers, key=network.floats)
    if len(layers) > 1:
        st.caption(
            f"The sliders show **{text.plain(lead_layer)}**, the largest of the {len(layers)} layers; the "
            "others get the sizes that meet the same budget."
        )
    wanted: list[tuple[str, Method]] = []
    missed: list[str] = []
    for start in range(0, len(methods), CARDS):
        row = methods[start : start + CARDS]
        for cell, name in zip(st.columns(len(row), gap="small"), row, strict=True):
            with cell.container(border=True, height="stretch"):
                st.markdown(f"**{plots.title(name)}**")
                method = forms.method_form(name, shapes[lead_layer], fraction)
            if method is not None:
                wanted.append((lead_layer, method))
            for layer in layers:
                if layer != lead_layer:
                    try:
                        wanted.append((layer, forms.setting(name, shapes[layer], fraction)))
                    except BudgetError as error:
                        missed.append(f"{layer}: {error}")
    if missed:
        with st.expander(f"{text.count(len(missed), 'combination')} cannot meet this budget"):
            st.markdown("\n".join(f"- {text.plain(reason)}" for reason in missed))
    with_advanced = [name for name in methods if forms.has_advanced(name)]
    if with_advanced:
        with st.expander("Advanced parameters"):
            for cell, name in zip(st.columns(len(with_advanced)), with_advanced, strict=True):
                with cell:
                    st.markdown(f"**{plots.title(name)}**")
                    forms.advanced_form(name)
    return wanted


def results(network: resources.Network, status: JobStatus, metric: str) -> None:
    """What the job has given so far: errors, sizes, convergence. `metric` is the error to judge by."""
    kept = network.study.records()
    frame = kept[kept["key"].isin(status.keys) & (kept["layer"] != NETWORK)]
    if frame.empty:
        return
    began = pd.Timestamp(status.submitted, unit="s", tz="UTC").floor("s")
    is_new = pd.to_datetime(frame["created"], utc=True) >= began
    frame = frame.assign(answer=is_new.map({True: "computed now", False: "from cache"}))
    st.subheader("Results", anchor=False)
    of_layers = kept[kept["layer"].isin(frame["layer"])]
    if of_layers["output_error"].isna().all():
        metric = "relative_error"
    errors = [name for name in ("relative_error", "output_error") if frame[name].notna().any()]
    errors.sort(key=lambda name: name != metric)
    columns = ["method", "setting", *errors, "parameters", "fraction", "nbytes", "seconds", "answer"]
    if frame["layer"].nunique() > 1:
        columns.insert(0, "layer")
    shown, config = text.table(frame.sort_values(["layer", metric, "relative_error"]), columns)
    st.dataframe(shown, column_config=config, hide_index=True)
    for note in frame["note"].unique():
        if note:
            st.caption(note)
    layer = frame["layer"].iloc[0]
    if frame["layer"].nunique() > 1:
        layer = st.selectbox("Layer of the charts", list(frame["layer"].unique()), width=300)
    left, right = st.columns(2)
    with left:
        st.markdown(f"**{METRICS[metric].label} against size, all kept results of {text.plain(layer)}**")
        measured = kept[(kept["layer"] == layer) & kept[metric].notna()]
        st.plotly_chart(
            plots.trade_off(measured, y=metric), key="layer_trade_off", config={"displaylogo": False}
        )
        if missing := int((kept["layer"] == layer).sum()) - len(measured):
            st.caption(f"{text.count(missing, 'result')} without a measured output error left out.")
    with right:
        st.markdown("**Convergence**")
        histories = {}
        for row in frame[frame["layer"] == layer].head(CURVES).to_dict("records"):
            fitted = resources.store().factors(row["key"])
            if fitted is not None and len(fitted.history) > 1:
                histories[str(fitted.method)] = (row["method"], fitted.history)
        if histories:
            st.plotly_chart(
                plots.convergence(histories, jobs.error_metric(status)), key="convergence",
                config={"displayModeBar": False},
            )  # fmt: skip
        else:
            st.caption("These methods compute their answer in one step.")
    if st.button("See all results on the Compare page", icon=":material/scatter_plot:"):
        memory.remember("layer", layer)
        go("compare")


with page(
    "Factorize",
    "One budget for all methods; each method's own sliders move with it, and it with them.",
) as network:
    if not network.shapes:
        st.info("No layer of this network can be compressed; the Model page says why.")
        st.stop()
    layers, methods = choose(network)
    if not layers or not methods:
        st.info(
            f"Choose at least one {'method' if layers else 'layer'} above.",
            icon=":material/arrow_upward:",
        )
    else:
        widths = [3, 1.3, 1] if network.calibration else [4, 1]
        budget, *goal, run = st.columns(widths, vertical_alignment="bottom")
        live = st.container()
        with budget:
            fraction = forms.budget_slider()
        with goal[0] if goal else budget:
            calibration = forms.fit_to(network)
        wanted = settings(network, layers, methods, fraction)
        if run.button(
            f"Factorize: {text.count(len(wanted), 'fit')}",
            type="primary",
            icon=":material/play_arrow:",
            disabled=not wanted,
            key="run",
            width="stretch",
        ):
            points = [Point(layer, method=method) for layer, method in wanted]
            jobs.submit(network, points, "fit", calibration)
            st.rerun()
        with live:
            status = jobs.panel("fit")
        if status is not None:
            results(network, status, "output_error" if calibration else "relative_error")
