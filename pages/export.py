"""Export: a recipe, its sizes and accuracy, and a checkpoint that is verified before download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from pages._ui import exports, forms, jobs, memory, resources, text
from pages._ui.shell import page
from psm_core import plots
from psm_core.checkpoint import FILE_NAME
from psm_core.experiments.plan import uniform_plan
from psm_core.experiments.record import METRICS, NETWORK, Record, size_change
from psm_core.experiments.study import Point
from psm_core.methods import METHODS
from psm_core.methods.base import Method

SOURCES = {
    "result": "A stored result",
    "uniform": "One method and budget",
    "layers": "Results layer by layer",
}


def choose(network: resources.Network) -> exports.Choice | None:
    """The recipe to export."""
    memory.project("source_choice", memory.recall_choice("from", SOURCES, "result"))
    source = st.segmented_control(
        "What to export", list(SOURCES), format_func=SOURCES.__getitem__, key="source_choice",
        required=True,
        on_change=lambda: memory.remember("from", st.session_state["source_choice"]),
    )  # fmt: skip
    return {"result": from_result, "uniform": from_uniform, "layers": from_layers}[source](network)


def from_result(network: resources.Network) -> exports.Choice | None:
    """A whole-network result from the store."""
    records = [record for record in exports.network_records(network) if record.params["plan"]]
    if not records:
        st.info(
            "No whole-network result is kept yet. Run a sweep on the Compare page, or export "
            "*One method and budget*.",
            icon=":material/inbox:",
        )
        return None
    keys = {record.key: record for record in records}
    memory.project("result_choice", memory.recall_choice("selected", keys, records[0].key))
    st.selectbox(
        "Result, the most accurate first",
        list(keys),
        key="result_choice",
        format_func=lambda key: _result_text(keys[key]),
        on_change=lambda: memory.remember("selected", st.session_state["result_choice"]),
    )
    record = keys[st.session_state["result_choice"]]
    return exports.Choice(exports.plan_of(record), record.params["budget"], record.calibration)


def _result_text(record: Record) -> str:
    parts = [
        f"{plots.label(vars(record))}, {record.fraction:.2%} of the parameters",
        text.size(record.nbytes),
    ]
    if record.accuracy is not None:
        parts.append(f"accuracy {record.accuracy:.2%}")
    return " · ".join(parts)


def from_uniform(network: resources.Network) -> exports.Choice:
    """One method on the whole network at a budget."""
    left, right = st.columns(2)
    method = left.selectbox("Method", list(METHODS), format_func=plots.title, key="uniform_method")
    calibration = forms.fit_to(network)
    percent = right.select_slider(
        "Budget, % of the network's parameters (↓ smaller)",
        [float(step) for step in forms.STEPS if step < 100],
        value=10.0,
        key="uniform_budget",
        format_func=lambda value: f"{value:g} %",
    )
    plan = uniform_plan(network.model, method, percent / 100)
    return exports.Choice(plan.layers, percent / 100, calibration)


def from_layers(network: resources.Network) -> exports.Choice | None:
    """A stored result for each layer, or the layer left dense."""
    frame = network.study.records()
    calibration = forms.fit_to(network)
    frame = frame[(frame["layer"] != NETWORK) & (frame["calibration"] == calibration)]
    if frame.empty:
        goal = "activations" if calibration else "weights"
        st.info(
            f"No result of a layer is fitted to {goal} yet; the Factorize page makes them.",
            icon=":material/inbox:",
        )
        return None
    st.caption("Choose a stored result for each layer; the others stay dense.")
    plan: dict[str, Method] = {}
    known = [name for name in network.shapes if name in set(frame["layer"])]
    columns = st.columns(2)
    for i, name in enumerate(known):
        of_layer = frame[frame["layer"] == name].sort_values("parameters")
        rows = {row["key"]: row for row in of_layer.to_dict("records")}
        key = columns[i % 2].selectbox(
            name,
            list(rows),
            index=None,
            key=f"recipe.{name}{'.activations' if calibration else ''}",
            placeholder="stays dense",
            format_func=lambda key, rows=rows: _row_text(rows[key]),
        )
        if key:
            plan[name] = exports.method_of(rows[key])
    return exports.Choice(plan, calibration=calibration) if plan else None


def _row_text(row: dict[str, Any]) -> str:
    metric = "output_error" if row["calibration"] and pd.notna(row["output_error"]) else "relative_error"
    return (
        f"{plots.title(row['method'])} ({plots.setting_text(row)}) · {row['fraction']:.2%} · "
        f"{METRICS[metric].label.lower()} {row[metric]:.4f}"
    )


def show_recipe(network: resources.Network, choice: exports.Choice) -> None:
    """The settings layer by layer, and the totals before and after."""
    record = network.study_of(choice.calibration).known(choice.plan)
    dense = network.dense()
    stored = exports.stored_floats(network, choice.plan) if record is None else record.parameters
    cells = st.columns(3)
    cells[0].metric(
        "Parameters (↓ smaller)", f"{stored:,}", border=True,
        delta=f"{stored / dense.parameters - 1:.1%} of {dense.parameters:,}",
        delta_color="inverse",
        help="Floats the network stores; biases and normalisations are counted on both sides."
        + ("" if record else " An upper bound until it is computed."),
    )  # fmt: skip
    cells[1].metric(
        "Stored tensors (↓ smaller)",
        "after building" if record is None else text.size(record.nbytes),
        delta=None if record is None
        else f"{record.nbytes / dense.nbytes - 1:.1%} of {text.size(dense.nbytes)}",
        delta_color="inverse", border=True,
        help="Bytes of all tensors, sparse indices included. The file's own size is measured "
        "when it is built.",
    )  # fmt: skip
    cells[2].metric(
        "Accuracy (↑ better)",
        "after computing" if record is None
        else "–" if record.accuracy is None else f"{record.accuracy:.2%}",
        delta=None if record is None or record.accuracy is None
        else f"{100 * (record.accuracy - dense.accuracy):+.2f} points",
        border=True,
        help="Top-1. " + (text.accuracy(record).capitalize() if record else "Not measured yet."),
    )  # fmt: skip
    if record is not None and record.accuracy is not None:
        st.caption(f"Accuracy on {text.data(record)}: {text.interval(record)}. "
                   f"Dense: {text.accuracy(dense)}.")  # fmt: skip
    rows = []
    for row in network.rows:
        if not row.compressible:
            continue
        method = choice.plan.get(row.name)
        dense_floats = network.floats(row.name)
        after = dense_floats if method is None else method.storage(row.shape)
        rows.append(
            {
                "Layer": row.name,
                "Method": "stays dense" if method is None else plots.title(method.name),
                "Setting": "" if method is None else method.setting,
                "Floats before": dense_floats,
                "Floats after (↓)": after,
                "Kept, % (↓)": 100 * after / dense_floats,
            }
        )
    numbers = ("Floats before", "Floats after (↓)")
    st.dataframe(
        pd.DataFrame(rows),
        hide_index=True,
        column_config={
            "Method": st.column_config.TextColumn(width=95),
            "Setting": st.column_config.TextColumn(width=190),
            **{name: st.column_config.NumberColumn(format="localized", width=110) for name in numbers},
            "Kept, % (↓)": st.column_config.NumberColumn(format="%.2f", width=90),
        },
    )


def build(network: resources.Network, choice: exports.Choice) -> None:
    """Compute what is missing, write the checkpoint, verify it, and offer it."""
    folder = exports.folder(network, choice)
    done = exports.read_verified(folder)
    known = network.study_of(choice.calibration).known(choice.plan)
    if done is None:
        label = "Build and verify" if known else "Compute, build and verify"
        if st.button(label, type="primary", icon=":material/verified:", key="build_button"):
            st.session_state["build_wanted"] = folder.name
            if known is None:
                point = Point(NETWORK, plan=choice.plan, budget=choice.budget)
                jobs.submit(network, [point], "build", choice.calibration)
                st.rerun()
    status = jobs.panel("build")
    if done is None and known and st.session_state.get("build_wanted") == folder.name:
        with st.spinner("Writing the checkpoint and reloading it in a fresh process …", show_time=True):
            exports.build(network, choice, folder)
        st.session_state.pop("build_wanted")
        st.rerun()
    elif done is None and status is None:
        st.caption(
            "The download appears when the file has been reloaded in a fresh Python process and "
            "computes the same outputs."
        )
    if done is not None:
        offer(network, choice, folder, done)


def offer(network: resources.Network, choice: exports.Choice, folder: Path, done: dict[str, Any]) -> None:
    """The verified file: its size, its downloads, and how to load it."""
    name = exports.file_stem(network, choice)
    dense = network.dense().nbytes
    st.success(
        f"Verified in a fresh process: {text.size(done['nbytes'])} on disk, "
        f"{size_change(dense, done['nbytes'])} than the {text.size(dense)} of the dense tensors. "
        f"{_difference_text(done)}",
        icon=":material/verified:",
    )
    with st.container(horizontal=True):
        st.download_button(
            f"Download {name}.safetensors",
            lambda: (folder / FILE_NAME).read_bytes(),
            file_name=f"{name}.safetensors",
            mime="application/octet-stream",
            on_click="ignore",
            type="primary",
            icon=":material/download:",
            key="download_checkpoint",
        )
        st.download_button(
            "Download recipe.json",
            lambda: (folder / "recipe.json").read_bytes(),
            file_name=f"{name}.recipe.json",
            mime="application/json",
            on_click="ignore",
            icon=":material/receipt_long:",
            key="download_recipe",
        )
    st.markdown("Load it in Python, or measure it from the command line:")
    st.code(
        f'import psm_core as psm\nmodel = psm.load_checkpoint("{name}.safetensors")',
        language="python",
    )
    st.code(f"python -m psm_core evaluate {name}.safetensors", language="bash")


def _difference_text(done: dict[str, Any]) -> str:
    """What the verification found of the outputs."""
    if done["difference"] is None:
        return "Its tensors reload; no inputs are known to compare outputs."
    size = f"{done['difference']:.1e} of the output's size" if done["difference"] else "none"
    return f"Largest output difference: {size}, on {done['inputs']}."


with page(
    "Export",
    "A compressed checkpoint that is smaller on disk and is verified before you get it.",
) as network:
    choice = choose(network)
    if choice is not None:
        show_recipe(network, choice)
        build(network, choice)
