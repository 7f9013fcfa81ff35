"""What a page remembers: kept for the session, and in the URL so that refreshing and sharing work."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import streamlit as st


def recall(name: str, default: str = "") -> str:
    """The value of this name: the session's, else the URL's, else the default."""
    if _slot(name) not in st.session_state:
        st.session_state[_slot(name)] = st.query_params.get(name, default)
    value: str = st.session_state[_slot(name)]
    show_in_url(name, value if value != default else "")
    return value


def recall_choice(name: str, known: Collection[str], default: str) -> str:
    """The remembered value, or the default where it is none of the known ones."""
    return value if (value := recall(name, default)) in known else default


def recall_list(name: str, known: Sequence[str], default: Sequence[str] = ()) -> list[str]:
    """The known ones among the remembered names, in the order in which they are known.

    The default where names are remembered and none is known; none remembered is a choice, too.
    """
    text = recall(name, ",".join(default))
    return [value for value in known if value in text.split(",")] or list(default if text else ())


def recall_number(name: str, default: float, low: float, high: float) -> float:
    """The remembered number, or the default where it is no number from `low` to `high`."""
    try:
        value = float(recall(name, f"{default:g}"))
    except ValueError:
        return default
    return value if low <= value <= high else default


def remember(name: str, value: str | Sequence[str]) -> None:
    """Keep a value, or several, under this name; the URL follows on the next run."""
    st.session_state[_slot(name)] = value if isinstance(value, str) else ",".join(value)


def forget(*names: str) -> None:
    """Drop values, so that their defaults hold again."""
    for name in names:
        st.session_state.pop(_slot(name), None)
        st.query_params.pop(name, None)


def show_in_url(name: str, value: str) -> None:
    """Put a value in the URL, or take it out when it is empty."""
    if value and st.query_params.get(name) != value:
        st.query_params[name] = value
    elif not value and name in st.query_params:
        del st.query_params[name]


def project(key: str, value: object) -> None:
    """Let the widget of this key show a value on this run."""
    if key not in st.session_state or st.session_state[key] != value:
        st.session_state[key] = value


def _slot(name: str) -> str:
    return f"remembered.{name}"
