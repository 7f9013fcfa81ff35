"""Model: what the network is made of, and which of its layers can be compressed."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from pages._ui import memory, quick, resources, text
from pages._ui.shell import go, page
from psm_core import plots
from psm_core.experiments.record import Record
from psm_core.methods.base import shape_text


def summary(network: resources.Network, dense: Record | None) -> None:
    """Size and accuracy of the dense network; the accuracy may still be on its way."""
    able = sum(row.share for row in network.rows if row.compressible)
    total = sum(row.parameters for row in network.rows)
    cells = st.columns(4)
    cells[0].metric(
        "Parameters (↓ smaller)",
        f"{total:,}",
        border=True,
        help="Floats stored by the dense network: weights, biases and normalisations.",
    )
    cells[1].metric(
        "Dense size (↓ smaller)",
        text.size(dense.nbytes) if dense else "…",
        border=True,
        help="Bytes of all its tensors, each stored once.",
    )
    cells[2].metric(
        "Dense accuracy (↑ better)",
        "measuring …" if not dense else "–" if dense.accuracy is None else f"{dense.accuracy:.2%}",
        border=True,
        help=f"Top-1, on {text.data(dense)}." if dense and dense.data else "Top-1.",
    )
    cells[3].metric(
        "Can be compressed",
        f"{able:.1%}",
        border=True,
        help="Share of the parameters that sit in Linear and Conv2d layers open to compression.",
    )
    if dense is None:
        st.caption("Measuring the dense network's accuracy, once …")
    elif dense.accuracy is None:
        st.caption("This network has no labelled data; errors of its weights can still be compared.")
    else:
        st.caption(f"Accuracy on {text.data(dense)}: {text.interval(dense)}.")


def first_step(network: resources.Network) -> None:
    """The way to a first result."""
    words, button = st.columns([3, 2], vertical_alignment="center")
    words.markdown(
        "Results of this network are kept; the **Compare** page shows them."
        if network.has_results()
        else "**Start here.** One click runs every method at three budgets, and shows error and "
        "accuracy against size."
    )
    with button, st.container(horizontal=True, horizontal_alignment="right"):
        quick.comparison_button(network, "first_step")


def layer_table(network: resources.Network) -> list[str]:
    """The layers as a table; returns the names of the selected ones."""
    rows = network.rows
    frame = pd.DataFrame(
        {
            "Layer": [row.name or "(the model itself)" for row in rows],
            "Kind": [row.kind for row in rows],
            "Shape": [shape_text(row.shape) for row in rows],
            "Parameters": [row.parameters for row in rows],
            "Share": [100 * row.share for row in rows],
            "MACs": pd.array([row.macs for row in rows], dtype="Int64"),
            "Compressible, or why not": [row.reason or "yes" for row in rows],
        }
    )
    state = st.dataframe(
        frame,
        hide_index=True,
        key=f"layers.{network.source}",
        on_select="rerun",
        selection_mode="multi-row",
        column_config={
            "Layer": st.column_config.TextColumn(width=130),
            "Kind": st.column_config.TextColumn(width=100),
            "Shape": st.column_config.TextColumn(width=95),
            "Parameters": st.column_config.NumberColumn(format="localized", width=85),
            "Share": st.column_config.NumberColumn(
                "Share, %", format="%.1f", width=70, help="Part of the network's parameters."
            ),
            "MACs": st.column_config.NumberColumn(
                format="localized", width=90, help="Multiply-accumulates for one input (↓ cheaper)."
            ),
            "Compressible, or why not": st.column_config.TextColumn(width=285),
        },
        placeholder="–",
    )  # fmt: skip
    return [rows[i].name for i in state["selection"]["rows"]]


def next_step(network: resources.Network, selected: list[str]) -> None:
    """From the selected layers to their factorization."""
    able = [name for name in selected if name in network.shapes]
    left_out = len(selected) - len(able)
    label = f"Factorize {text.count(len(able), 'layer')}" if able else "Factorize"
    words, button = st.columns([3, 2], vertical_alignment="center")
    if not able:
        words.caption("Select layers in the table to factorize them.")
    elif left_out:
        words.caption(f"{text.count(left_out, 'selected layer')} must stay dense and is left out.")
    with button, st.container(horizontal=True, horizontal_alignment="right"):
        if st.button(label, icon=":material/compress:", disabled=not able):
            memory.remember("layers", able)
            go("factorize")


with page(
    "Model",
    "How small can this network get, with which factorization, at what cost?",
) as network:
    top = st.empty()
    known = network.study.known({})
    with top.container():
        summary(network, known)
    first_step(network)
    st.subheader("Layers", anchor=False)
    st.plotly_chart(
        plots.layer_bars(network.rows), key="layer_bars", config={"displayModeBar": False},
        alt="Parameters by layer",
    )  # fmt: skip
    above = st.container()
    selected = layer_table(network)
    with above:
        next_step(network, selected)
    if known is None:
        dense = network.dense()
        with top.container():
            summary(network, dense)
