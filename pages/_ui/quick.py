"""The first comparison: every method at a few budgets, on the largest layer and the whole network."""

from __future__ import annotations

from itertools import islice

import streamlit as st

from pages._ui import jobs, memory, resources
from pages._ui.shell import go
from psm_core.experiments.record import NETWORK
from psm_core.experiments.study import sweep_points
from psm_core.methods import METHODS

FRACTIONS = (0.1, 0.2, 0.4)


def comparison_button(network: resources.Network, key: str) -> None:
    """Start the first comparison, and watch it on the Compare page."""
    if st.button(
        "Compare the methods on this network",
        type="primary",
        icon=":material/play_arrow:",
        key=key,
        disabled=not network.shapes,
        help=f"{len(METHODS)} methods at {', '.join(f'{f:.0%}' for f in FRACTIONS)} of the "
        "parameters, on the whole network and its largest layer. Results appear as they arrive.",
    ):
        largest = list(islice(network.shapes, 1))
        points, skipped = sweep_points(network.model, METHODS, FRACTIONS, largest)
        st.session_state["skipped"] = (jobs.submit(network, points), skipped)
        memory.remember("layer", NETWORK)
        go("compare")
