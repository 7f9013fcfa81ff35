"""The pages' choice between fits to weights and to activations, and how the results are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from psm_core import SVD, ResultStore, Study, load_model, uniform_plan
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
    shown = at.dataframe[0].value
    assert list(shown["method"]) == ["SVD · activations"]
    assert 0 < shown["output_error"].iloc[0] < 1
    record = ResultStore(jobs_cache).query(layer="fc3").iloc[-1]
    assert (record["calibration"], record["data"]) == ("demo:train", "demo:test")


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
        assert "SVD" in sound(at).dataframe[0].value.set_index("Layer").loc["fc3", "Method"]
    assert "Choose a stored result" in texts(at)
