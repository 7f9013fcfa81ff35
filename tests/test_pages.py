"""The pages, each alone and through `app.py`: first render in every state, and what widgets change."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from psm_core import SVD, ResultStore, Study, load_model, uniform_plan
from psm_core.experiments.jobs import JobFolder, JobRequest, JobStatus
from psm_core.experiments.study import Point
from tests.page_fixtures import MLP, PAGES, ROOT, Open, sound, texts

pytest_plugins = ["tests.page_fixtures"]


@pytest.mark.parametrize("page", PAGES)
def test_first_render_with_an_empty_store(open_page: Open, page: str) -> None:
    assert sound(open_page(page)).title[0].value == page.capitalize()


@pytest.mark.parametrize("page", PAGES)
def test_first_render_with_results(open_page: Open, full_cache: Path, page: str) -> None:
    sound(open_page(page, full_cache))


@pytest.mark.parametrize("page", PAGES)
def test_an_unknown_network_is_one_line_and_a_way_out(open_page: Open, page: str) -> None:
    at = open_page(page, network="demo:fashion-nothing")
    assert not at.exception
    assert len(at.error) == 1
    assert "fashion-nothing" in at.error[0].value
    at.button[0].click().run()
    assert not at.error
    assert "network" not in at.query_params  # the default network needs none


@pytest.mark.parametrize(
    "source", ["nonsense", "torchvision:resnet999", "no_such_package:thing", "x" * 300, "demo:" + "x" * 300]
)
def test_bad_network_names_never_give_a_traceback(open_page: Open, source: str) -> None:
    at = open_page("model", network=source)
    assert not at.exception
    assert source.split(":")[-1] in at.error[0].value


@pytest.mark.parametrize(
    ("page", "query"),
    [
        *(("factorize", {"budget": text}) for text in ("abc", "nan", "inf", "500", "0", "-3", "0.05")),
        *(("factorize", {name: "nosuch"}) for name in ("methods", "layers", "fit")),
        *(("compare", {name: "nosuch"}) for name in ("layer", "shown", "job")),
        *(("compare", {"job": job}) for job in ("x" * 300, "../jobs", "/")),
        *(("export", {name: "nosuch"}) for name in ("from", "selected", "build")),
    ],
)
def test_nonsense_in_the_address_is_as_if_it_were_not_there(
    open_page: Open, full_cache: Path, page: str, query: dict[str, str]
) -> None:
    usual, at = sound(open_page(page, full_cache)), sound(open_page(page, full_cache, **query))
    if query != {"budget": "0.05"}:  # little, but a budget
        assert [frame.value.to_dict() for frame in at.dataframe] == [
            frame.value.to_dict() for frame in usual.dataframe
        ]
        assert size_sliders(at) == size_sliders(usual)


def test_the_app_keeps_the_network_from_page_to_page(
    open_page: Open, full_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSM_CACHE", str(full_cache))
    at = AppTest.from_file(str(ROOT / "app.py"), default_timeout=60)
    at.query_params["network"] = MLP
    sound(at.run())
    for page in (*PAGES[1:], PAGES[0]):
        sound(at.switch_page(f"pages/{page}.py").run())
        assert at.title[0].value == page.capitalize()
        assert at.query_params["network"] == MLP


def test_model_shows_sizes_and_accuracy_with_their_sample(open_page: Open, full_cache: Path) -> None:
    at = open_page("model", full_cache)
    model = load_model(MLP)
    total = sum(p.numel() for p in model.parameters())
    dense = Study(model, ResultStore(full_cache)).network({})
    values = [metric.value for metric in at.metric]
    assert values[0] == f"{total:,}"
    assert values[2] == f"{dense.accuracy:.2%}"
    assert f"n = {dense.samples:,}" in texts(at)
    assert at.dataframe[0].value["Parameters"].sum() == total


def test_selected_layers_open_in_factorize(open_page: Open, largest: str) -> None:
    at = open_page("factorize", layers=largest)
    assert at.multiselect(key="layers_choice").value == [largest]


def size_sliders(at: AppTest) -> dict[str, float]:
    """The values of the methods' sliders by key."""
    return {s.key: s.value for s in at.slider if str(s.key).startswith("form.")}


def test_the_budget_moves_the_sizes(open_page: Open) -> None:
    at = open_page("factorize")
    before = size_sliders(at)
    at.select_slider(key="budget_choice").set_value(30.0).run()
    after = size_sliders(sound(at))
    for key in ("form.psm.K", "form.svd.rank", "form.tt.rank", "form.prune.fraction"):
        assert after[key] > before[key]
    assert after["form.psm.Q"] == before["form.psm.Q"]
    assert at.query_params["budget"] == "30"


def test_a_size_moves_the_budget_and_the_other_methods(open_page: Open, largest: str) -> None:
    at = open_page("factorize")
    shape = tuple(load_model(MLP).get_submodule(largest).weight.shape)
    at.slider(key="form.svd.rank").set_value(60).run()
    share = 100 * SVD(rank=60).storage(shape) / math.prod(shape)
    after = size_sliders(sound(at))
    assert at.select_slider(key="budget_choice").value == pytest.approx(share, abs=1e-3)
    assert after["form.svd.rank"] == 60
    assert after["form.tucker.rank_out"] == 60  # on a Linear layer Tucker is the SVD
    assert after["form.prune.fraction"] == pytest.approx(share / 100, abs=1e-3)
    at.select_slider(key="budget_choice").set_value(10.0).run()
    assert size_sliders(sound(at))["form.svd.rank"] == int(0.1 * math.prod(shape) / sum(shape))


def test_the_number_of_factors_moves_k_and_not_the_budget(open_page: Open) -> None:
    at = open_page("factorize")
    before = size_sliders(at)["form.psm.K"]
    at.slider(key="form.psm.Q").set_value(4).run()
    assert size_sliders(sound(at))["form.psm.K"] < before
    assert at.select_slider(key="budget_choice").value == 10.0


def test_above_break_even_it_warns(open_page: Open) -> None:
    at = open_page("factorize", methods="svd,psm")
    ranks, sparsities = (at.slider(key=key) for key in ("form.svd.rank", "form.psm.K"))
    assert sparsities.max == pytest.approx(ranks.max, rel=0.05)  # as many floats for each step
    ranks.set_value(ranks.max).run()
    assert any("break-even" in warning.value for warning in sound(at).warning)


def test_a_budget_out_of_reach_says_so_and_offers_the_smallest(open_page: Open) -> None:
    at = open_page("factorize", methods="svd", budget="0.1")
    assert "svd cannot store" in sound(at).warning[0].value
    assert at.button(key="run").disabled
    at.button(key="raise.svd").click().run()
    assert size_sliders(sound(at)) == {"form.svd.rank": 1}


def test_a_tiny_budget_has_its_place_on_the_slider(open_page: Open) -> None:
    at = open_page("factorize", methods="prune", budget="0.05")
    assert size_sliders(sound(at)) == {"form.prune.fraction": 0.0005}
    at.slider(key="form.prune.fraction").set_value(0.0002).run()
    assert at.select_slider(key="budget_choice").value == pytest.approx(0.02, abs=1e-3)
    at.slider(key="form.prune.fraction").set_value(0.6).run()
    at.slider(key="form.prune.fraction").set_value(1.0).run()
    assert at.select_slider(key="budget_choice").value == 100


def test_advanced_parameters_reach_the_method(open_page: Open) -> None:
    at = open_page("factorize", methods="psm")
    at.selectbox(key="form.psm.algorithm").set_value("palm4msa").run()
    at.number_input(key="form.psm.iterations").set_value(7).run()
    sound(at)
    assert at.selectbox(key="form.psm.algorithm").value == "palm4msa"
    assert at.number_input(key="form.psm.iterations").value == 7


def test_what_means_nothing_to_an_algorithm_is_neither_shown_nor_passed(open_page: Open) -> None:
    at = open_page("factorize", methods="psm")
    idle = {"form.psm.constraint", "form.psm.update_order"}

    def boxes() -> set[str]:
        return {str(box.key) for box in sound(at).selectbox} & idle

    def choose(parameter: str, value: str) -> None:
        at.selectbox(key=f"form.psm.{parameter}").set_value(value).run()

    assert boxes() == set()
    before = size_sliders(at)
    choose("algorithm", "palm4msa")
    assert boxes() == idle
    choose("update_order", at.selectbox(key="form.psm.update_order").options[1])
    choose("constraint", "row")
    by_row = size_sliders(sound(at))
    for _ in range(2):
        choose("algorithm", "joint")
        assert boxes() == set()
        assert size_sliders(at) == before
        assert not at.button(key="run").disabled
        choose("algorithm", "hierarchical")
        assert boxes() == idle
        assert at.selectbox(key="form.psm.constraint").value == "row"
        assert size_sliders(at) == by_row


def test_nothing_chosen_is_an_instruction(open_page: Open) -> None:
    at = open_page("factorize")
    at.multiselect(key="layers_choice").set_value([]).run()
    assert "Choose at least one layer" in sound(at).info[0].value


def test_another_network_resets_the_layers(open_page: Open, largest: str) -> None:
    at = open_page("factorize", layers=largest)
    at.sidebar.selectbox(key="network_choice").set_value("demo:fashion-cnn").run()
    assert at.multiselect(key="layers_choice").value == ["classifier.fc1"]
    assert "network" not in sound(at).query_params  # the default network needs none
    assert "layers" not in at.query_params or at.query_params["layers"] != largest


def test_a_job_runs_to_its_results_and_then_answers_from_the_cache(
    open_page: Open, jobs_cache: Path, networks_module: str
) -> None:
    at = open_page("factorize", jobs_cache, network=f"{networks_module}:cnn", methods="svd,prune")
    for expected in ("2 results computed, 0 answered", "0 results computed, 2 answered"):
        at.button(key="run").click().run()
        job = at.query_params["fit"]
        wait_for(jobs_cache, job)
        at.run()
        assert expected in sound(at).success[0].value
        assert len(at.dataframe[0].value) == 2
    fresh = open_page("factorize", jobs_cache, network=f"{networks_module}:cnn", fit=job)
    assert "0 results computed, 2 answered" in sound(fresh).success[0].value


def wait_for(root: Path, job: str, seconds: float = 60) -> None:
    """Wait until a job has ended."""
    end = time.monotonic() + seconds
    while JobFolder(root, job).read().active:
        assert time.monotonic() < end, "the job does not end"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("failed", "Failed. no memory is left"),
        ("interrupted", "Interrupted. no memory is left"),
        ("cancelled", "Cancelled after 1 of 3"),
        ("running", "Interrupted."),
    ],
)
def test_ended_jobs_say_why_and_can_run_again(
    open_page: Open, jobs_cache: Path, networks_module: str, state: str, words: str
) -> None:
    source = f"{networks_module}:cnn"
    folder = JobFolder(jobs_cache, f"job-{state}")
    folder.write_request(JobRequest(source, (Point("fc1", method=SVD(rank=1)),)))
    nobody = 2**22 + 1
    folder.write(
        JobStatus(folder.id, state, 3, time.time(), done=1, message="no memory is left", worker=nobody)
    )
    at = open_page("factorize", jobs_cache, network=source, fit=folder.id)
    assert not at.exception
    assert words in texts(at)
    at.button(key="again.fit").click().run()
    assert at.query_params["fit"] != folder.id
    wait_for(jobs_cache, at.query_params["fit"])
    assert "Done" in sound(at.run()).success[0].value


def test_a_running_job_shows_progress_and_can_be_cancelled(
    open_page: Open, jobs_cache: Path, networks_module: str
) -> None:
    source = f"{networks_module}:broad"
    at = open_page("factorize", jobs_cache, network=source, methods="psm", budget="30")
    at.selectbox(key="form.psm.algorithm").set_value("palm4msa").run()
    at.number_input(key="form.psm.iterations").set_value(50_000).run()
    at.button(key="run").click().run()
    job = at.query_params["fit"]
    sound(at).button(key="cancel.fit").click().run()
    wait_for(jobs_cache, job, 30)
    assert JobFolder(jobs_cache, job).read().state == "cancelled"
    assert "Cancelled" in texts(sound(at.run()))


def test_a_forgotten_job_is_no_error(open_page: Open) -> None:
    at = open_page("compare", job="20200101-000000-abcdef")
    assert "no longer kept" in texts(sound(at))


def test_compare_starts_with_what_to_do(open_page: Open) -> None:
    at = open_page("compare")
    assert "No results of this network yet" in texts(sound(at))
    assert any("Compare the methods" in button.label for button in at.button)


def test_compare_shows_the_network_and_each_layer(open_page: Open, full_cache: Path, largest: str) -> None:
    at = open_page("compare", full_cache)
    assert set(at.dataframe[0].value["method"]) == {"SVD", "Pruning", "Dense"}
    at.selectbox(key="layer_choice").set_value(largest).run()
    kept = ResultStore(full_cache).query(layer=largest)
    assert len(sound(at).dataframe[0].value) == len(kept)
    at.pills[0].set_value(["svd"]).run()
    assert set(sound(at).dataframe[0].value["method"]) == {"SVD"}
    at.toggle(key="log_x").set_value(False).run()
    sound(at)
    again = open_page("compare", full_cache, layer=largest, shown="svd")
    assert set(sound(again).dataframe[0].value["method"]) == {"SVD"}


def test_results_on_other_data_are_not_shown(open_page: Open, tmp_path: Path) -> None:
    model = load_model(MLP)
    other, study = (Study(model, ResultStore(tmp_path), data) for data in ("demo:train", "demo:test"))
    plan = uniform_plan(model, "prune", 0.2).layers
    foreign = [other.network({}), other.network(plan, 0.2)]
    at = open_page("compare", tmp_path)  # the layers' own results hold on any data
    assert sound(at).selectbox(key="layer_choice").options == [f"Layer {name}" for name in plan]
    at = open_page("export", tmp_path)
    assert "No whole-network result is kept yet" in texts(sound(at))
    dense = study.network({})
    at = open_page("model", tmp_path)
    assert sound(at).metric[2].value == f"{dense.accuracy:.2%}" != f"{foreign[0].accuracy:.2%}"
    assert "`demo:test`, never used for training" in texts(at)
    study.network(plan, 0.2)
    assert len(sound(open_page("compare", tmp_path)).dataframe[0].value) == 2


def test_selected_results_are_shown_in_full(open_page: Open, full_cache: Path) -> None:
    at = open_page("compare", full_cache)
    keys = at.session_state["table_keys"]
    at.session_state["selection"] = keys[:2]
    at.run()
    assert not any(button.label == "Export this result" for button in at.button)
    assert len(sound(at).dataframe[1].value) == 2
    assert at.session_state["compare_table"]["selection"]["rows"] == [0, 1]
    next(b for b in at.button if b.label == "Clear selection").click().run()
    assert len(sound(at).dataframe) == 1


def test_export_builds_verifies_and_offers(open_page: Open, full_cache: Path) -> None:
    at = open_page("export", full_cache)
    assert not at.download_button
    assert "after building" not in [metric.value for metric in sound(at).metric]
    at.button(key="build_button").click().run()
    labels = [button.label for button in sound(at).download_button]
    assert any(label.endswith(".safetensors") for label in labels)
    assert "Largest output difference" in at.success[0].value
    again = open_page("export", full_cache)
    assert len(again.download_button) == 2  # the verified file is still there


def test_a_file_changed_after_its_verification_is_not_offered(open_page: Open, full_cache: Path) -> None:
    at = open_page("export", full_cache, **{"from": "result"})
    if at.button and at.button[0].key == "build_button":
        at.button(key="build_button").click().run()
    assert len(sound(at).download_button) == 2
    file = next((full_cache / "exports").glob("*/*.safetensors"))
    content = file.read_bytes()
    os.utime(file, ns=(1, 1))  # as a copy or a backup does
    assert len(open_page("export", full_cache).download_button) == 2
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert not open_page("export", full_cache).download_button


def test_another_streamlit_without_the_flag_breaks_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamlit import runtime

    from pages._ui import shell

    monkeypatch.delattr(runtime, "pages_manager")
    shell._enter_through_app()


def test_export_of_layer_results_makes_a_recipe(open_page: Open, full_cache: Path, largest: str) -> None:
    at = open_page("export", full_cache, **{"from": "layers"})
    box = at.selectbox(key=f"recipe.{largest}")
    box.select_index(0).run()
    frame = sound(at).dataframe[0].value.set_index("Layer")
    assert frame.loc[largest, "Method"] == "SVD"
    assert "Compute, build and verify" in [button.label for button in at.button]


def test_export_of_a_uniform_budget_says_what_is_out_of_reach(open_page: Open, full_cache: Path) -> None:
    at = open_page("export", full_cache, **{"from": "uniform"})
    at.selectbox(key="uniform_method").set_value("svd").run()
    at.select_slider(key="uniform_budget").set_value(0.5).run()
    assert not at.exception
    assert len(at.error) == 1
    at.select_slider(key="uniform_budget").set_value(20.0).run()
    sound(at)
