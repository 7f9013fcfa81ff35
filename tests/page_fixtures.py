"""What the tests of the pages share: caches in several states, and a way to open a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from psm_core import SVD, Prune, ResultStore, Study, load_model, uniform_plan

ROOT = Path(__file__).resolve().parents[1]
MLP = "demo:fashion-mlp"
PAGES = ("model", "factorize", "compare", "export")

Open = Callable[..., AppTest]


@pytest.fixture(scope="module")
def largest() -> str:
    """The largest layer of the network under test."""
    rows = sorted(load_model(MLP).named_parameters(), key=lambda item: -item[1].numel())
    return rows[0][0].removesuffix(".weight")


@pytest.fixture(scope="module")
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache without results."""
    return tmp_path_factory.mktemp("empty")


@pytest.fixture(scope="module")
def full_cache(tmp_path_factory: pytest.TempPathFactory, largest: str) -> Path:
    """A cache with results of layers and of the whole network."""
    root = tmp_path_factory.mktemp("full")
    model = load_model(MLP)
    study = Study(model, ResultStore(root))
    study.network({})
    for rank in (4, 16):
        study.fit(largest, SVD(rank=rank))
        study.fit(largest, Prune(fraction=rank / 100))
    for method in ("svd", "prune"):
        study.network(uniform_plan(model, method, 0.2).layers, 0.2)
    return root


@pytest.fixture(scope="module")
def jobs_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for jobs; one worker serves them all."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture
def open_page(monkeypatch: pytest.MonkeyPatch, empty_cache: Path, workers_end: None) -> Open:
    """Open a page alone, with a cache and URL parameters of choice."""
    monkeypatch.syspath_prepend(str(ROOT))

    def run(page: str, cache: Path = empty_cache, **query: str) -> AppTest:
        monkeypatch.setenv("PSM_CACHE", str(cache))
        at = AppTest.from_file(str(ROOT / "pages" / f"{page}.py"), default_timeout=60)
        at.query_params.update({"network": MLP, **query})
        return at.run()

    return run


@pytest.fixture(scope="module")
def workers_end() -> Iterator[None]:
    """End the workers that the pages started."""
    yield
    from pages._ui import resources

    resources.close_all()


def sound(at: AppTest) -> AppTest:
    """The page, which must show neither an exception nor an error."""
    assert [e.value for e in at.exception] == []
    assert [e.value for e in at.error] == []
    return at


def texts(at: AppTest) -> str:
    """The words a page shows."""
    shown = [*at.markdown, *at.caption, *at.info, *at.warning, *at.success, *at.error, *at.subheader]
    return "\n".join(str(element.value) for element in shown)
