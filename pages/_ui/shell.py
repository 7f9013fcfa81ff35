"""The frame of a page: its title, the network chosen in the sidebar, and errors as one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import streamlit as st
from streamlit import runtime

from pages._ui import memory, resources, text
from psm_core import demo
from psm_core.errors import PsmError

DEFAULT = "demo:fashion-cnn"
SUGGESTIONS = (
    *(f"demo:{name}" for name in demo.NETWORKS),
    "torchvision:resnet18",
    "torchvision:mobilenet_v3_small",
    "torchvision:vgg11_bn",
    "torchvision:vit_b_16",
)
STYLE = "<style>[data-testid=stMainBlockContainer] { padding-inline: 2.5rem }</style>"
OF_ONE_NETWORK = ("layers", "layer", "job", "fit", "build", "selected")


@contextmanager
def page(title: str, lead: str) -> Iterator[resources.Network]:
    """Title and sidebar of a page; yields the chosen network, and shows any named error inside."""
    _enter_through_app()
    st.html(STYLE)
    st.title(title, anchor=False)
    st.caption(lead)
    source = _choose_source()
    try:
        network = resources.network(source)
        _describe(network)
    except PsmError as error:
        st.error(text.plain(error), icon=":material/error:")
        st.info("Choose another network in the sidebar to go on.", icon=":material/arrow_back:")
        if source != DEFAULT:
            st.button("Use the default network", on_click=_change_source, args=(DEFAULT,))
        st.stop()
    with errors_as_messages():
        yield network


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Show a named error as its one line."""
    try:
        yield
    except PsmError as error:
        st.error(text.plain(error), icon=":material/error:")


def _enter_through_app() -> None:
    """Run `app.py` first when a page's own address is the first that a fresh server is asked for.

    Until `st.navigation` has run once, Streamlit takes `pages/` for the whole app. The flag is
    Streamlit's own and may be gone in another version.
    """
    manager = getattr(getattr(runtime, "pages_manager", None), "PagesManager", None)
    if getattr(manager, "uses_pages_directory", False):
        manager.uses_pages_directory = False
        st.rerun()


def _choose_source() -> str:
    """The sidebar's choice of a network, kept in the URL."""
    source = memory.recall("network", DEFAULT)
    memory.project("network_choice", source)
    st.sidebar.selectbox(
        "Network",
        SUGGESTIONS if source in SUGGESTIONS else (*SUGGESTIONS, source),
        key="network_choice",
        accept_new_options=True,
        on_change=_network_chosen,
        help="Choose one, or type a name: `torchvision:NAME`, `timm:NAME`, `hf:NAME`, "
        "`package.module:callable`, or the path of a checkpoint.",
    )
    return source


def _network_chosen() -> None:
    # A page change can drop the widget's state before its callback runs.
    if "network_choice" in st.session_state:
        _change_source(st.session_state["network_choice"])


def _change_source(source: str | None) -> None:
    """Another network: what was chosen of the old one no longer holds."""
    memory.remember("network", (source or DEFAULT).strip())
    memory.forget(*OF_ONE_NETWORK)
    st.session_state.pop("lead", None)


def _describe(network: resources.Network) -> None:
    """What the sidebar says of the network and the machine."""
    total = sum(row.parameters for row in network.rows)
    data = network.study.data
    with st.sidebar:
        st.caption(
            f"{total:,} parameters  \n{text.count(len(network.rows), 'layer')}  \n"
            + (f"{len(data):,} labelled inputs" if data else "No labelled data, no accuracy")
            + f"  \nComputes on {resources.device_text()}"
        )
        if network.notice:
            st.warning(network.notice, icon=":material/casino:")
        for job in resources.runner().jobs():
            if job.active:
                st.caption(f"Job {job.state}: {job.done} of {job.total} done")
                st.button("Cancel this job", key=f"stop.{job.id}", on_click=_cancel, args=(job.id,))


def _cancel(job_id: str) -> None:
    resources.runner().cancel(job_id)


def go(page: str) -> None:
    """Open another page of the app; the network stays."""
    source = memory.recall("network", DEFAULT)
    st.switch_page(f"pages/{page}.py", query_params={"network": source} if source != DEFAULT else None)
