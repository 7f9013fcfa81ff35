"""Sliders of methods, built from their declared parameters and tied to one budget.

The budget determines each method's sizes, and moving a size slider moves the budget, and with it
the other methods. What is kept is the budget, the parameters set by hand, and the method whose
slider moved last (the lead); all else follows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import streamlit as st

from pages._ui import memory, resources, text
from psm_core.errors import BudgetError, ParameterError
from psm_core.methods import METHODS, method_from_json
from psm_core.methods.base import Method, Parameter, Shape

STEPS = (
    0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 25, 30, 35, 40, 50, 60, 70, 80, 90, 100,
)  # fmt: skip
SMALLEST_PERCENT = 1e-4
FEW_VALUES = 16
FIT_TO = ("weights", "activations")


def budget_slider(default: float = 10.0) -> float:
    """The budget as a share of the weights, on a scale of log-like steps."""
    percent = memory.recall_number("budget", default, SMALLEST_PERCENT, 100)
    memory.project("budget_choice", percent)
    st.select_slider(
        "Budget, % of the weights (↓ smaller)",
        sorted({*map(float, STEPS), percent}),
        key="budget_choice",
        format_func=lambda value: f"{value:.4g} %",
        on_change=_budget_moved,
        help="Stored floats ÷ the dense weights of each layer. All methods get the same budget.",
    )
    return percent / 100


def _budget_moved() -> None:
    memory.remember("budget", f"{st.session_state['budget_choice']:g}")
    st.session_state.pop("lead", None)


def fit_to(network: resources.Network) -> str:
    """What fits are to be fitted to: the name of the calibration data, or "" for the weights.

    Without data there is no choice, and nothing is shown.
    """
    if not (source := network.calibration):
        return ""
    memory.project("fit_to_choice", memory.recall_choice("fit_to", FIT_TO, "weights"))
    st.segmented_control(
        "Fit to",
        FIT_TO,
        key="fit_to_choice",
        format_func=str.capitalize,
        required=True,
        on_change=lambda: memory.remember("fit_to", st.session_state["fit_to_choice"]),
        help="Weights: the closest weights. Activations: the closest outputs of the layer on what it "
        f"receives from `{source}`; first used, a layer's statistics take some seconds.",
    )
    return source if st.session_state["fit_to_choice"] == "activations" else ""


def setting(name: str, shape: Shape, fraction: float) -> Method:
    """The setting of a method at a budget, with what was set by hand; the lead keeps its own.

    Raises:
        BudgetError: the method cannot store so little.
        ParameterError: what was set by hand does not go together.
    """
    lead = st.session_state.get("lead")
    if lead and lead["method"] == name and tuple(lead["shape"]) == shape:
        return method_from_json(lead)
    return METHODS[name].at_budget(shape, fraction, **in_use(name))


def pinned(name: str) -> dict[str, Any]:
    """The parameters of a method that were set by hand, sizes aside."""
    values: dict[str, Any] = st.session_state.setdefault(f"pinned.{name}", {})
    return values


def in_use(name: str) -> dict[str, Any]:
    """What was set by hand and means something beside the rest: a choice made earlier goes first.

    What is left out is kept, for when it means something again.
    """
    kind, values = METHODS[name], pinned(name)
    used: dict[str, Any] = {}
    for parameter, declared in kind.parameters().items():
        if parameter in values and not (
            declared.choices and _clashes(kind, parameter, values[parameter], used)
        ):
            used[parameter] = values[parameter]
    return used


def _clashes(kind: type[Method], parameter: str, value: Any, others: dict[str, Any]) -> bool:
    """Whether the method refuses this value beside the others."""
    sizes = {size: 1 for size in kind.parameters() if _is_size(kind, size)}
    try:
        kind.from_params({**sizes, **others, parameter: value})
    except ParameterError:
        return True
    return False


def _is_idle(kind: type[Method], parameter: str, declared: Parameter) -> bool:
    """Whether this is a choice of which the method refuses all but the default, as things are set."""
    others = {other: value for other, value in in_use(kind.name).items() if other != parameter}
    choices = [choice for choice in declared.choices if choice != _defaults(kind)[parameter]]
    return bool(choices) and all(_clashes(kind, parameter, choice, others) for choice in choices)


def method_form(name: str, shape: Shape, fraction: float) -> Method | None:
    """The sliders of one method for a weight of this shape; None where it cannot meet the budget."""
    kind = METHODS[name]
    try:
        method = setting(name, shape, fraction)
    except BudgetError as error:
        st.warning(text.plain(error), icon=":material/straighten:")
        lowest = math.ceil(error.smallest_fraction * 1e4) / 100
        st.button(
            f"Raise the budget to {lowest:g} %",
            key=f"raise.{name}",
            on_click=_raise_budget,
            args=(lowest,),
            disabled=lowest > 100,
        )
        return None
    except ParameterError as error:
        st.error(text.plain(error), icon=":material/error:")
        st.button("Back to the defaults", key=f"reset.{name}", on_click=pinned(name).clear)
        return None
    stored, dense = method.storage(shape), math.prod(shape)
    for parameter, declared in kind.parameters().items():
        if _is_size(kind, parameter) or _has_few_values(declared):
            _slider(method, parameter, declared, shape)
    st.caption(f"{stored:,} floats, {stored / dense:.2%}{_exact_sizes(method)}")
    if stored >= dense:
        st.warning("Above break-even: this stores no less than the dense layer.")
    return method


def advanced_form(name: str) -> None:
    """The parameters of a method that do not set its size."""
    kind = METHODS[name]
    for parameter, declared in kind.parameters().items():
        if _is_size(kind, parameter) or _has_few_values(declared) or _is_idle(kind, parameter, declared):
            continue
        key = f"form.{name}.{parameter}"
        memory.project(key, pinned(name).get(parameter, _defaults(kind)[parameter]))
        common: dict[str, Any] = {
            "label": _label(parameter),
            "key": key,
            "help": _help(declared),
            "on_change": _pin,
            "args": (name, parameter),
        }
        if declared.choices:
            st.selectbox(options=declared.choices, **common)
        elif declared.kind is int:
            st.number_input(
                min_value=_whole(declared.minimum), max_value=_whole(declared.maximum), step=1,
                **common,
            )  # fmt: skip
        else:
            st.number_input(
                min_value=declared.minimum, max_value=declared.maximum, format="%g", step=1e-5,
                **common,
            )  # fmt: skip


def has_advanced(name: str) -> bool:
    """Whether a method has parameters that do not set its size."""
    kind = METHODS[name]
    return any(
        not _is_size(kind, parameter) and not _has_few_values(declared)
        for parameter, declared in kind.parameters().items()
    )


def _slider(method: Method, parameter: str, declared: Parameter, shape: Shape) -> None:
    """One slider: whole numbers up to a little beyond break-even, shares in percent."""
    key = f"form.{method.name}.{parameter}"
    value = getattr(method, parameter)
    common: dict[str, Any] = {
        "label": _label(parameter),
        "key": key,
        "help": _help(declared),
        "on_change": _pin if not _is_size(type(method), parameter) else _size_moved,
        "args": (method.name, parameter) + ((method, shape) * _is_size(type(method), parameter)),
    }
    if _has_few_values(declared):
        memory.project(key, value)
        st.slider(min_value=_whole(declared.minimum), max_value=_whole(declared.maximum), **common)
    elif declared.maximum == 1:
        memory.project(key, shown := _shown(declared, value))
        low = min(0.001, 10.0 ** math.floor(math.log10(shown)))  # large layers go below 0.1 %
        st.slider(min_value=low, max_value=1.0, step=low, format="percent", **common)
    else:
        top, even = _top(method, parameter, shape)
        low = _whole(declared.minimum) or 1
        memory.project(key, min(max(low, _shown(declared, value)), top))
        common["help"] += f" Break-even, where as much is stored as dense: {even:,}."
        if top > low:
            st.slider(min_value=low, max_value=top, step=1, **common)
        else:
            st.caption(f"{common['label']}: {low} is the only value for this layer")


def _shown(declared: Parameter, value: float) -> float:
    """A size as its slider shows it: a share to four digits, all else as a whole number."""
    return float(f"{value:.4g}") if declared.maximum == 1 else round(value)


def _exact_sizes(method: Method) -> str:
    """The sizes that a slider of whole numbers shows rounded."""
    exact = [
        f"  \n{_label(name)} = {value:.4g} exactly"
        for name, value in method.params.items()
        if _is_size(type(method), name) and value > 1 and value != round(value)
    ]
    return "".join(exact)


def _top(method: Method, parameter: str, shape: Shape) -> tuple[int, int]:
    """The end of a size slider, a little beyond break-even; and break-even."""
    dense = math.prod(shape)
    others = {k: v for k, v in method.params.items() if k != parameter}
    largest = int(method.largest(shape, parameter, **others))
    low, high = 1, largest
    while low < high:
        middle = (low + high) // 2
        if dataclasses.replace(method, **{parameter: middle}).storage(shape) < dense:
            low = middle + 1
        else:
            high = middle
    return min(largest, max(low + 1, math.ceil(1.25 * low), round(getattr(method, parameter)))), low


def _size_moved(name: str, parameter: str, method: Method, shape: Shape) -> None:
    """The method leads with this size, and the budget becomes what it stores."""
    value = st.session_state[f"form.{name}.{parameter}"]
    if value == _shown(method.parameters()[parameter], getattr(method, parameter)):
        return  # Streamlit also calls this for a slider that has just left the page, unmoved
    moved = dataclasses.replace(method, **{parameter: value})
    st.session_state["lead"] = {**moved.to_json(), "shape": list(shape)}
    # Rounded up, so that the same floats still fit.
    percent = math.ceil(1e6 * moved.storage(shape) / math.prod(shape)) / 1e4
    memory.remember("budget", f"{min(percent, 100):g}")


def _pin(name: str, parameter: str) -> None:
    """Keep a parameter set by hand; the budget holds, and the sizes follow."""
    if (key := f"form.{name}.{parameter}") in st.session_state:  # else the control has just left the page
        pinned(name)[parameter] = st.session_state[key]
        st.session_state.pop("lead", None)


def _raise_budget(percent: float) -> None:
    memory.remember("budget", f"{percent:g}")
    st.session_state.pop("lead", None)


def _defaults(kind: type[Method]) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(kind)}


def _is_size(kind: type[Method], parameter: str) -> bool:
    """A parameter without a default is a size, which the budget determines."""
    return _defaults(kind)[parameter] is dataclasses.MISSING


def _has_few_values(declared: Parameter) -> bool:
    """Whether a slider of whole numbers shows every value, such as Q or the order."""
    return declared.kind is int and declared.maximum is not None and declared.maximum <= FEW_VALUES


def _label(parameter: str) -> str:
    """A parameter's name for people: `rank_out` → Rank out; single letters stay."""
    return parameter if len(parameter) == 1 else parameter.replace("_", " ").capitalize()


def _help(declared: Parameter) -> str:
    return f"{declared.help[0].upper()}{declared.help[1:]}."


def _whole(limit: float | None) -> int | None:
    """A limit as a whole number that a browser can hold."""
    return None if limit is None else min(int(limit), 2**53 - 1)
