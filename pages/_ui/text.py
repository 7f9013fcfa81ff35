"""Figures in words: accuracies with their samples and interval, sizes with their unit."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd
import streamlit as st

from psm_core import plots
from psm_core.experiments.record import METRICS, Record


def plain(words: object) -> str:
    """Text of unknown origin, such as a name or an error, so that Markdown shows it as it is."""
    return re.sub(r"([\\`*_\[\]$<~|]|:(?=\w))", r"\\\1", str(words))


def accuracy(record: Record) -> str:
    """An accuracy with its sample size and 95 % interval."""
    if record.accuracy is None:
        return "no labelled data"
    return f"{record.accuracy:.2%} ({interval(record)})"


def interval(record: Record) -> str:
    """The 95 % interval and the sample size behind an accuracy."""
    return f"95 % interval {record.low:.1%} to {record.high:.1%}, n = {record.samples:,}"


def data(record: Record) -> str:
    """The data behind an accuracy, and that it is held out where that is known."""
    held_out = record.data == "demo:test" and record.model.startswith("demo:")
    return f"`{record.data}`{', never used for training' if held_out else ''}"


def size(nbytes: float) -> str:
    """Bytes in a unit that reads well.

    >>> size(4_728_296)
    '4.73 MB'
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def duration(seconds: float) -> str:
    """Seconds in a unit that reads well."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def count(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "layer"), count(3, "layer")
    ('1 layer', '3 layers')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def table(frame: pd.DataFrame, columns: list[str]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Records as a table for people, with each column's unit, direction and definition."""
    shown = pd.DataFrame(index=frame.index)
    config: dict[str, Any] = {}
    for name in columns:
        if name in METRICS:
            metric = METRICS[name]
            share = name in ("fraction", "accuracy")
            shown[name] = frame[name] * 100 if share else frame[name]
            config[name] = st.column_config.NumberColumn(
                f"{metric.label}{', %' if share else ''} {_arrow(name)}",
                help=f"{metric.help} {metric.better.capitalize()} is better.",
                format="%.2f" if share or name == "seconds" else _FORMATS.get(name),
                width=_WIDTHS.get(name, 90),
            )
        else:
            shown[name] = _WORDS[name](frame)
            label, help, width = _LABELS[name]
            if name == "method" and (frame["calibration"] != "").any():
                width = 168
            config[name] = st.column_config.TextColumn(label, help=help, width=width)
    return shown, config


def _arrow(name: str) -> str:
    return "↓" if METRICS[name].better == "lower" else "↑"


_FORMATS = {
    "parameters": "localized", "nbytes": "localized", "relative_error": "%.4f", "output_error": "%.4f",
}  # fmt: skip
_WIDTHS = {"relative_error": 112, "output_error": 105, "accuracy": 100, "seconds": 80}
_LABELS = {
    "layer": ("Layer", None, None),
    "method": ("Method", None, 95),
    "setting": ("Setting", "The method's parameters, or the layers compressed.", 170),
    "interval": ("95 % interval", "Wilson interval of the accuracy, and the inputs behind it.", None),
    "answer": ("Answer", "Computed now, or answered from the results kept in the cache.", 100),
}
_WORDS = {
    "layer": lambda frame: frame["layer"].replace("*", "whole network"),
    "method": lambda frame: [plots.label(row) for row in frame.to_dict("records")],
    "setting": lambda frame: [plots.setting_text(row) for row in frame.to_dict("records")],
    "interval": lambda frame: [
        "" if pd.isna(row.accuracy) else f"{row.low:.1%} – {row.high:.1%}, n = {row.samples:,.0f}"
        for row in frame.itertuples()
    ],
    "answer": lambda frame: frame["answer"],
}
