"""Compare: error and accuracy against size, for a layer or the whole network."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from pages._ui import forms, jobs, memory, quick, resources, text
from pages._ui.shell import go, page
from psm_core import plots
from psm_core.experiments.record import METRICS, NETWORK
from psm_core.experiments.study import sweep_points
from psm_core.methods import METHODS
from psm_core.methods.base import Shape, shape_text

SIZES = ("parameters", "nbytes", "fraction")
SWEEP = (0.5, 1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 70)
TABLE = "compare_table"


def choose_view(network: resources.Network, frame: pd.DataFrame) -> pd.DataFrame:
    """The records to draw: of one layer or the whole network, of the chosen methods."""
    places = [name for name in (NETWORK, *network.shapes) if name in set(frame["layer"])] or [NETWORK]
    layer = memory.recall("layer", NETWORK)
    memory.project("layer_choice", layer if layer in places else places[0])
    left, right = st.columns([2, 3])
    left.selectbox(
        "Show",
        places,
        key="layer_choice",
        format_func=lambda name: "Whole network" if name == NETWORK else f"Layer {name}",
        on_change=lambda: memory.remember("layer", st.session_state["layer_choice"]),
    )
    frame = frame[frame["layer"] == st.session_state["layer_choice"]]
    present = [name for name in (*METHODS, "recipe", "dense") if name in set(frame["method"])]
    key = f"shown_choice.{'.'.join(present)}"  # new methods make a new widget, with them chosen
    memory.project(key, memory.recall_list("shown", present) or present)
    right.pills(
        "Methods",
        present,
        selection_mode="multi",
        key=key,
        format_func=plots.title,
        on_change=_methods_chosen,
        args=(key, present),
    )
    return frame[frame["method"].isin(st.session_state[key])].reset_index(drop=True)


def _methods_chosen(key: str, present: list[str]) -> None:
    """Keep the choice of methods; all of them is no choice, so that later ones appear too."""
    chosen = st.session_state[key]
    memory.remember("shown", [] if len(chosen) == len(present) else chosen)


def choose_axes(frame: pd.DataFrame) -> tuple[str, str, bool]:
    """The metrics on the axes, and whether sizes are on a logarithmic scale."""
    is_network = (frame["layer"] == NETWORK).any()
    goals = ["relative_error"]
    if is_network and frame["accuracy"].notna().any():
        goals = ["accuracy", "relative_error"]
    if frame["output_error"].notna().any():
        goals.append("output_error")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        y = goals[0]
        if len(goals) > 1:
            y = st.segmented_control(
                "Quality",
                goals,
                default=y,
                format_func=_label,
                required=True,
                key=f"y_choice.{'.'.join(goals)}",  # a choice of its own for a network and for a layer
            )
        x = st.segmented_control(
            "Size", SIZES, default=SIZES[0], format_func=_label, key="x_choice", required=True,
            help="  \n".join(f"{METRICS[name].label}: {METRICS[name].help}" for name in SIZES),
        )  # fmt: skip
        log_x = st.toggle("Log size", value=True, key="log_x")
    return x, y, log_x


def _label(name: str) -> str:
    return METRICS[name].label


def draw(frame: pd.DataFrame) -> None:
    """The chart and, beside it, the table; selecting in one selects in the other."""
    x, y, log_x = choose_axes(frame)
    front = plots.pareto_front(frame[x].to_list(), frame[y].to_list(), (METRICS[x].better, METRICS[y].better))
    frame = frame.assign(front=front).sort_values(["front", x], ascending=[False, True], ignore_index=True)
    keys = list(frame["key"])
    selected = [key for key in st.session_state.get("selection", []) if key in keys]
    chart, table = st.columns(2)
    with chart:
        st.plotly_chart(
            plots.trade_off(frame, x, y, log_x, selected),
            key="trade_off",
            on_select=_chart_selected,
            config={"displaylogo": False},
            alt=f"{_label(y)} against {_label(x)}, by method",
        )
    with table:
        others = [name for name in ("fraction", "relative_error") if name not in (x, y)]
        interval = ["interval"] if y == "accuracy" else []
        shown, config = text.table(frame, ["method", y, x, *others, *interval, "setting"])
        shown.insert(0, "front", ["★" if on else "" for on in frame["front"]])
        config["front"] = st.column_config.TextColumn(
            "★", help="On the Pareto front: no other result here is as small and as good.", width=40
        )
        st.session_state["table_keys"] = keys
        memory.project(TABLE, {"selection": {"rows": [keys.index(key) for key in selected]}})
        st.dataframe(
            shown, column_config=config, hide_index=True, height=430, key=TABLE,
            on_select=_table_selected, selection_mode="multi-row",
        )  # fmt: skip
    if selected:
        details(frame[frame["key"].isin(selected)])
    else:
        st.caption(
            "Select points in the chart (click, box or lasso) or rows in the table to see them in full."
        )


def details(chosen: pd.DataFrame) -> None:
    """The selected results in full."""
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(text.count(len(chosen), "selected result"), anchor=False)
        one = chosen.iloc[0]
        exportable = len(chosen) == 1 and one["layer"] == NETWORK and one["method"] != "dense"
        if exportable and st.button("Export this result", icon=":material/download:"):
            memory.remember("selected", one["key"])
            memory.remember("from", "result")
            go("export")
        st.button("Clear selection", on_click=lambda: st.session_state.update(selection=[]))
    measured = ["accuracy", "interval"] if chosen["accuracy"].notna().any() else []
    if chosen["output_error"].notna().any():
        measured.append("output_error")
    columns = ["method", "setting", "relative_error", *measured]
    shown, config = text.table(chosen, [*columns, "parameters", "fraction", "nbytes", "seconds"])
    st.dataframe(shown, column_config=config, hide_index=True, placeholder="–")


def _chart_selected() -> None:
    points = st.session_state["trade_off"]["selection"]["points"]
    keys = [_first(point["customdata"]) for point in points if point.get("customdata")]
    st.session_state["selection"] = list(dict.fromkeys(keys))


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) else value


def _table_selected() -> None:
    rows = st.session_state[TABLE]["selection"]["rows"]
    keys = st.session_state["table_keys"]
    st.session_state["selection"] = [keys[i] for i in rows if i < len(keys)]


def sweep_form(network: resources.Network) -> None:
    """Methods and budgets to run over layers and the whole network."""
    shapes = network.shapes
    with st.expander("Run a sweep", icon=":material/tune:"):
        calibration = forms.fit_to(network)  # outside the form: it takes effect at once on every page
        _sweep_form(network, shapes, calibration)


def _sweep_form(network: resources.Network, shapes: dict[str, Shape], calibration: str) -> None:
    """What to run, sent all together by the form's button; the fits are to the data `calibration`."""
    with st.form("sweep"):
        methods = st.pills(
            "Methods", list(METHODS), selection_mode="multi", default=list(METHODS),
            format_func=plots.title,
        )  # fmt: skip
        budgets = st.pills(
            "Budgets, % of the weights", SWEEP, selection_mode="multi", default=[2, 5, 10, 20],
            format_func=lambda value: f"{value:g} %",
            help="Stored floats ÷ dense floats, of each layer, and of all parameters of the network.",
        )  # fmt: skip
        layers = st.multiselect(
            "Layers, one by one", list(shapes), default=list(shapes)[:1],
            format_func=lambda name: f"{name} ({shape_text(shapes[name])})",
            help="Each is fitted alone at every budget, the rest of the network untouched.",
        )  # fmt: skip
        whole = st.toggle("The whole network, with its accuracy", value=True)
        if st.form_submit_button("Run the sweep", icon=":material/play_arrow:", type="primary"):
            if not methods or not budgets or not (layers or whole):
                st.error("Choose at least one method, one budget, and layers or the network.")
                return
            points, skipped = sweep_points(network.model, methods, [b / 100 for b in budgets], layers, whole)
            st.session_state["skipped"] = (jobs.submit(network, points, calibration=calibration), skipped)
            st.rerun()


def empty(network: resources.Network) -> None:
    """What to do when there is nothing to compare yet."""
    with st.container(border=True):
        st.markdown("**No results of this network yet.** Start with the standard comparison:")
        quick.comparison_button(network, "first_comparison")
        st.caption("Or choose methods and budgets under *Run a sweep*, or layers on *Factorize*.")


with page(
    "Compare",
    "Which method keeps most at which size? Every point is a stored result.",
) as network:
    status = jobs.panel()
    job_id, skipped = st.session_state.get("skipped", ("", []))
    if status is not None and status.id == job_id and skipped:
        with st.expander(f"{text.count(len(skipped), 'combination')} cannot meet its budget"):
            st.markdown("\n".join(f"- {text.plain(reason)}" for reason in skipped))
    if network.has_results():
        view = choose_view(network, network.study.records())
        if view.empty:
            st.info("Choose at least one method above.", icon=":material/arrow_upward:")
        else:
            draw(view)
    elif status is None:
        empty(network)
    else:
        st.info("The first results are on their way.", icon=":material/hourglass_top:")
    sweep_form(network)
