"""The pages' choice between fits to weights and to activations, and how the results are told apart."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from psm_core import PSM, SVD, ResultStore, Study, load_model, uniform_plan
from psm_core.experiments.jobs import JobFolder, JobStatus
from psm_core.experiments.record import METRICS
from psm_core.files import process_started
from tests.page_fixtures import MLP, Open, sound, texts
from tests.test_pages import wait_for

pytest_plugins = ["tests.page_fixtures"]


@pytest.fixture(scope="module")
def fitted_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the same fits to weights and to activations."""
    root = tmp_path_factory.mktemp("fitted")
    study = Study(load_model(MLP), ResultStore(root))
    plan = uniform_plan(study.model, "svd", 0.1).layers
    for one in (study, study.fitted_to("demo:train")):
        one.network(plan, 0.1)
        one.fit("fc3", SVD(rank=3))
    return root


def test_the_choice_is_kept_in_the_address(open_page: Open) -> None:
    at = open_page("factorize", methods="svd")
    control = at.button_group(key="fit_to_choice")
    assert control.value == "weights"
    assert "`demo:train`" in control.proto.help
    control.set_value("activations").run()
    assert sound(at).query_params["fit_to"] == "activations"
    again = open_page("compare", fit_to="activations")
    assert sound(again).button_group(key="fit_to_choice").value == "activations"
    nonsense = open_page("factorize", fit_to="nonsense")
    assert sound(nonsense).button_group(key="fit_to_choice").value == "weights"


@pytest.mark.parametrize("page", ["factorize", "compare", "export"])
def test_without_data_there_is_no_choice(open_page: Open, networks_module: str, page: str) -> None:
    at = open_page(page, network=f"{networks_module}:cnn", fit_to="activations")
    assert "fit_to_choice" not in at.session_state
    sound(at)


def test_a_job_fits_to_activations(open_page: Open, jobs_cache: Path) -> None:
    at = open_page("factorize", jobs_cache, methods="svd", layers="fc3", budget="60", fit_to="activations")
    at.button(key="run").click().run()
    wait_for(jobs_cache, at.query_params["fit"])
    at.run()
    assert "1 result computed" in sound(at).success[0].value
    assert "fitted to activations" in at.success[0].value
    shown = at.dataframe[0].value
    assert list(shown["method"]) == ["SVD · activations"]
    assert 0 < shown["output_error"].iloc[0] < 1
    record = ResultStore(jobs_cache).query(layer="fc3").iloc[-1]
    assert (record["calibration"], record["data"]) == ("demo:train", "demo:test")


def test_fits_to_activations_are_judged_by_their_output_error(open_page: Open, tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    study = Study(load_model(MLP), store)
    study.fitted_to("demo:train").fit("fc3", SVD(rank=4))
    records = []
    for calibration in ("", "demo:train"):  # both are measured, as the statistics are kept by now
        fitted = study.fitted_to(calibration)
        records += [fitted.fit("fc3", method)[0] for method in (SVD(rank=4), PSM(K=2, iterations=4))]
    status = JobStatus("both", "done", 4, time.time(), done=4, keys=tuple(r.key for r in records))
    for choice, metric in (("weights", "relative_error"), ("activations", "output_error")):
        JobFolder(store.root, "both").write(replace(status, calibration=records[2].calibration))
        at = open_page("factorize", tmp_path, layers="fc3", fit="both", fit_to=choice)
        shown = sound(at).dataframe[0].value
        assert list(shown.columns[2:4]) == sorted(
            ["output_error", "relative_error"], key=lambda n: n != metric
        )
        assert list(shown[metric]) == sorted(getattr(record, metric) for record in records)
        label = METRICS[metric].label
        assert f"{label} against size" in texts(at)
        size, curve = (json.loads(chart.proto.spec)["layout"] for chart in at.get("plotly_chart"))
        assert size["yaxis"]["title"]["text"] == f"{label} (↓ better)"
        assert curve["yaxis"]["title"]["text"] == "Output error (↓ better)"


def test_the_panel_says_which_error_it_draws(open_page: Open, jobs_cache: Path) -> None:
    for calibration, words in (
        ("", "relative error 0.5000 ("),
        ("demo:train", "output error 0.5000 on `demo:"),
    ):
        own = {"worker": os.getpid(), "worker_started": process_started(os.getpid())}
        folder = JobFolder(jobs_cache, f"of-{calibration or 'weights'}")
        status = JobStatus(
            folder.id, "running", 1, time.time(), current="fc3 · PSM", method="psm", history=(0.9, 0.5),
            calibration=calibration, **own,
        )  # fmt: skip
        folder.write(status)
        at = open_page("factorize", jobs_cache, fit=folder.id)
        assert words in texts(sound(at))
        spec = json.loads(at.get("plotly_chart")[0].proto.spec)
        assert words.split(" 0.5")[0] in spec["data"][0]["hovertemplate"]
        folder.write(replace(status, state="cancelled"))


def test_compare_tells_them_apart(open_page: Open, fitted_cache: Path) -> None:
    at = open_page("compare", fitted_cache)
    assert sorted(sound(at).dataframe[0].value["method"]) == ["SVD", "SVD · activations"]
    at = open_page("compare", fitted_cache, layer="fc3")
    shown = sound(at).dataframe[0].value
    assert sorted(shown["method"]) == ["SVD", "SVD · activations"]
    quality = next(group for group in at.button_group if str(group.key).startswith("y_choice"))
    quality.set_value("output_error").run()
    assert "output_error" in sound(at).dataframe[0].value.columns


def test_export_builds_what_was_fitted(open_page: Open, fitted_cache: Path) -> None:
    kept = ResultStore(fitted_cache).query(layer="*").set_index("calibration")
    assert kept["accuracy"].nunique() == 2
    for calibration in ("", "demo:train"):
        at = open_page("export", fitted_cache, selected=kept["key"][calibration])
        assert f"{kept['accuracy'][calibration]:.2%}" in [metric.value for metric in sound(at).metric]
    at.button(key="build_button").click().run()
    labels = [button.label for button in sound(at).download_button]
    assert "Download fashion-mlp-svd-10pct-activations.safetensors" in labels


def test_export_offers_results_of_one_kind_for_the_layers(open_page: Open, fitted_cache: Path) -> None:
    for choice in ("weights", "activations"):
        at = open_page("export", fitted_cache, **{"from": "layers", "fit_to": choice})
        box = at.selectbox(key="recipe.fc3" if choice == "weights" else "recipe.fc3.activations")
        assert len(box.options) == 1
        box.select_index(0).run()
        assert ("output error" if choice == "activations" else "relative error") in box.options[0]
        assert "SVD" in sound(at).dataframe[0].value.set_index("Layer").loc["fc3", "Method"]
    assert "Choose a stored result" in texts(at)


def test_export_names_the_kind_of_fit_that_is_missing(open_page: Open) -> None:
    for choice in ("weights", "activations"):
        at = open_page("export", **{"from": "layers", "fit_to": choice})
        assert f"fitted to {choice} yet" in texts(sound(at))
