"""The panel of a job: queued, running or ended, with its progress, error curve and what to do next.

The job's id is in the URL, its state on disk: a refresh or another browser shows it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from pages._ui import memory, resources, text
from pages._ui.shell import errors_as_messages
from psm_core import plots
from psm_core.errors import UnknownNameError
from psm_core.experiments.jobs import JobStatus
from psm_core.experiments.record import METRICS
from psm_core.experiments.study import Point

POLL_SECONDS = 0.7


def submit(
    network: resources.Network, points: Sequence[Point], slot: str = "job", calibration: str = ""
) -> str:
    """Queue points and return the job's id; quick methods come first, so that results appear at once.

    `calibration` names the data that layers are fitted to, "" for the weights alone.

    Raises:
        StoreError: the job cannot be queued.
    """
    ordered = sorted(points, key=_iterations)
    job_id = resources.runner().submit(network.source, ordered, calibration=calibration)
    memory.remember(slot, job_id)
    return job_id


def panel(slot: str = "job") -> JobStatus | None:
    """Draw the job of this slot and return its status; None when there is none.

    While it is active the panel refreshes itself, and the page runs again when a point is done.
    """
    if not (job_id := memory.recall(slot)):
        return None
    try:
        status = resources.runner().status(job_id)
    except UnknownNameError:
        memory.forget(slot)
        st.info("The job in this link is no longer kept here.", icon=":material/history:")
        return None
    refresh = POLL_SECONDS if status.active else None
    st.fragment(run_every=refresh, key=f"job.{slot}")(_draw)(slot, job_id, _stage(status))
    return status


def _draw(slot: str, job_id: str, drawn: tuple[str, int]) -> None:
    with errors_as_messages(), st.container(border=True):
        status = resources.runner().status(job_id)
        if _stage(status) != drawn:
            st.rerun()  # the page shows what is new
        if status.active:
            _draw_active(slot, status)
        else:
            _draw_ended(slot, status)


def _stage(status: JobStatus) -> tuple[str, int]:
    return status.state, status.done


def _draw_active(slot: str, status: JobStatus) -> None:
    words, button = st.columns([5, 1], vertical_alignment="center")
    words.progress(status.progress, _progress_text(status))
    if button.button("Cancel", key=f"cancel.{slot}", icon=":material/stop_circle:", width="stretch"):
        resources.runner().cancel(status.id)
    if len(status.history) > 1:
        metric = error_metric(status)
        st.caption(
            f"{text.plain(status.current)}: {METRICS[metric].label.lower()} {status.history[-1]:.4f}"
            f"{_on_data(status)} (↓ better)"
        )
        st.plotly_chart(
            plots.live_error(status.history, status.method, metric), key=f"live.{slot}",
            config={"displayModeBar": False},
        )  # fmt: skip


def error_metric(status: JobStatus) -> str:
    """The metric that the fits of a job minimize and report."""
    return "output_error" if status.calibration else "relative_error"


def _on_data(status: JobStatus) -> str:
    return f" on `{status.calibration}`" if status.calibration else ""


def _progress_text(status: JobStatus) -> str:
    if status.state == "queued":
        ahead = resources.runner().position(status.id)
        return f"Queued: {text.count(ahead, 'job')} before this one" if ahead else "Starting …"
    left = status.eta_seconds()
    parts = [
        f"{status.done} of {status.total} done",
        text.plain(status.current),
        "to activations" if status.calibration else "",
        # The quick points come first, so that the pace so far is the most that can be hoped for.
        "" if left is None else f"at least {text.duration(left)} left",
    ]
    return " · ".join(part for part in parts if part)


def _draw_ended(slot: str, status: JobStatus) -> None:
    words, again, close = st.columns([5, 1.2, 0.8], vertical_alignment="center")
    good = len(status.keys)
    fresh = good - status.cached
    summary = f"{text.count(fresh, 'result')} computed, {status.cached} answered from the cache"
    if status.calibration:
        summary += "; fitted to activations"
    if status.state == "done":
        words.success(f"Done: {summary}.", icon=":material/check_circle:")
    elif status.state == "cancelled":
        words.warning(
            f"Cancelled after {status.done} of {status.total}; what was finished is kept.",
            icon=":material/stop_circle:",
        )
    elif status.state == "interrupted":
        words.warning(f"Interrupted. {text.plain(status.message)}", icon=":material/power_off:")
    else:
        words.error(f"Failed. {text.plain(status.message)}", icon=":material/error:")
    if again.button(
        "Run again",
        key=f"again.{slot}",
        icon=":material/replay:",
        help="Finished results are answered from the cache; only the rest is computed.",
        width="stretch",
    ):
        memory.remember(slot, resources.runner().resubmit(status.id))
        st.rerun()
    if close.button("Close", key=f"close.{slot}", width="stretch"):
        memory.forget(slot)
        st.rerun()
    if status.problems and status.state != "failed":
        with st.expander(f"{text.count(len(status.problems), 'result')} could not be computed"):
            st.markdown("\n".join(f"- {text.plain(problem)}" for problem in status.problems))


def _iterations(point: Point) -> int:
    """A measure of how long a point takes: the iterations of its methods."""
    methods = [point.method] if point.plan is None else point.plan.values()
    return max((getattr(method, "iterations", 0) for method in methods), default=0)
