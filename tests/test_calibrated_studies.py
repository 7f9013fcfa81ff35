"""Studies, jobs and commands that fit to the inputs of layers: what is kept, and what it is told apart by."""

from __future__ import annotations

import csv
import json
import os
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import psm_core as psm
from psm_core import calibrate
from psm_core.cli import main
from psm_core.errors import ParameterError
from psm_core.experiments.calibrations import Calibrations, calibration_source
from psm_core.experiments.jobs import JobFolder, JobRequest, JobStatus
from psm_core.experiments.keys import fit_key
from psm_core.experiments.plan import read_recipe, recipe_calibration, write_recipe
from psm_core.experiments.record import COLUMNS, NETWORK
from psm_core.experiments.study import Point
from psm_core.experiments.worker import run_job
from psm_core.network.data import Dataset
from tests.test_calibration import correlated

MLP = "demo:fashion-mlp"


class TestStudies:
    def test_statistics_are_computed_once_and_damage_is_repaired(
        self, store: psm.ResultStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        study = psm.Study(psm.load_model(MLP), store, calibration="demo:train")
        method = psm.SVD(rank=4)
        record, factorization = study.fit("fc3", method)
        files = list((store.root / "calibration").glob("*.safetensors"))
        assert len(files) == 2  # of the calibration data, and of the study's own
        assert (record.calibration, record.data, record.cached) == ("demo:train", "demo:test", False)
        held_out = calibrate(study.model, "demo:test", ["fc3"])["fc3"]
        weight = study.model.fc3.weight
        assert record.output_error == pytest.approx(factorization.output_error(weight, held_out))
        assert record.relative_error == pytest.approx(factorization.relative_error(weight))

        def refuse(*args: object) -> None:
            raise AssertionError("the statistics are known")

        monkeypatch.setattr("psm_core.experiments.calibrations.calibrate", refuse)
        again = psm.Study(psm.load_model(MLP), store, calibration="demo:train")
        assert again.fit("fc3", method)[0] == psm.Record(**(vars(record) | {"cached": True}))
        again.fit("fc3", psm.SVD(rank=3))
        monkeypatch.undo()
        for file in files:
            content = file.read_bytes()
            for damaged in (b"", content[:-8], content[:-1] + bytes([content[-1] ^ 1])):
                file.write_bytes(damaged)
                fresh = psm.Study(psm.load_model(MLP), store, calibration="demo:train")
                assert fresh.fit("fc3", method)[0].key == record.key
                assert file.stat().st_size == len(content)
                assert fresh.fit("fc3", psm.SVD(rank=2))[0].output_error is not None

    def test_fits_to_weights_and_to_activations_are_told_apart(
        self, store: psm.ResultStore, networks_module: str, data_file: Path
    ) -> None:
        model = psm.load_model(f"{networks_module}:mlp")
        plain = psm.Study(model, store, str(data_file))
        fitted = plain.fitted_to(str(data_file))
        plan = {"1": psm.SVD(rank=3), "3": psm.Prune(fraction=0.1)}
        assert fitted.known(plan) is None
        assert not (store.root / "calibration").exists()  # to look is not to compute
        records = [study.network(plan) for study in (plain, fitted)]
        assert [record.calibration for record in records] == ["", str(data_file)]
        assert records[0].key != records[1].key
        assert [study.known(plan) for study in (plain, fitted)] == [
            psm.Record(**(vars(record) | {"cached": True})) for record in records
        ]
        frame = plain.records()
        assert len(frame) == 6
        assert (frame["calibration"] != "").sum() == 3
        layers = frame[frame["layer"] != NETWORK]
        assert (layers["output_error"].notna() == (layers["calibration"] != "")).all()
        known, factorization = plain.fit("1", plan["1"])  # measured, now that the statistics are kept
        expected = calibrate(model, str(data_file), ["1"])["1"]
        assert known.cached
        assert known.output_error == pytest.approx(factorization.output_error(model[1].weight, expected))
        assert plain.fit("1", plan["1"])[0] == known
        small = fitted.compressed(plan)
        assert psm.evaluate(small, str(data_file)).accuracy == records[1].accuracy
        assert fitted.network({}).key == plain.network({}).key

    def test_output_errors_belong_to_the_data_they_were_measured_on(
        self, store: psm.ResultStore, networks_module: str, data_file: Path, tmp_path: Path
    ) -> None:
        arrays = dict(np.load(data_file))
        np.savez(other := tmp_path / "other.npz", x=3 * arrays["x"][:90] ** 2, y=arrays["y"][:90])
        model, method = psm.load_model(f"{networks_module}:mlp"), psm.SVD(rank=3)
        own, held_out = (
            psm.Study(model, store, str(data), calibration=str(data_file)).fit("1", method)[0]
            for data in (data_file, other)
        )
        assert own.key == held_out.key
        assert held_out.cached
        assert (own.data, held_out.data) == (str(data_file), str(other))
        expected = calibrate(model, str(other), ["1"])["1"]
        f, _ = method.fit(model[1].weight, calibration=calibrate(model, str(data_file), ["1"])["1"]), None
        assert held_out.output_error == pytest.approx(f.output_error(model[1].weight, expected))
        assert held_out.output_error != pytest.approx(own.output_error)
        for data, expected in ((other, [held_out.output_error]), (data_file, []), ("", [])):
            frame = psm.Study(model, store, str(data)).records()
            assert frame["output_error"].dropna().tolist() == expected
            assert len(frame) == 1

    def test_many_layers_share_passes_within_memory(
        self, store: psm.ResultStore, networks_module: str, data_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = psm.load_model(f"{networks_module}:mlp")
        passes: list[list[str]] = []

        def count(network: nn.Module, data: Dataset, layers: list[str], *rest: object) -> object:
            passes.append(layers)
            return calibrate(network, data, layers, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr("psm_core.experiments.calibrations.calibrate", count)
        monkeypatch.setattr("psm_core.experiments.calibrations.PASS_NBYTES", 8 * (64**2 + 48**2))
        kept = Calibrations(store.root, model, "hash", psm.load_data(str(data_file)), "auto")
        kept.prepare(["1", "3", "5"])
        kept.prepare(["1", "3", "5"])
        assert passes == [["1", "3"], ["5"]]
        assert kept.get("5").hash == kept.hash("5")

    def test_keys_depend_on_the_statistics(self) -> None:
        weight, method = torch.randn(4, 6), psm.SVD(rank=1)
        hashes = [None, correlated(6).hash, correlated(6, seed=1).hash]
        assert len({fit_key(method, weight, found) for found in hashes}) == 3
        assert fit_key(method, weight, None) == fit_key(method, weight)
        assert correlated(6).hash == correlated(6).hash

    def test_the_source_of_a_demonstration_network_is_its_training_data(self, networks_module: str) -> None:
        assert calibration_source(psm.load_model(MLP)) == "demo:train"
        assert calibration_source(psm.load_model(f"{networks_module}:mlp")) == ""


def test_recipes_name_their_calibration(tmp_path: Path) -> None:
    path, plan = tmp_path / "r.json", {"fc": psm.SVD(rank=2)}
    for calibration in ("", "demo:train"):
        write_recipe(path, plan, "small:net", calibration)
        assert read_recipe(path) == plan
        assert recipe_calibration(path) == calibration
    path.write_text(path.read_text().replace('"demo:train"', "7"))
    with pytest.raises(ParameterError, match="has calibration 7"):
        recipe_calibration(path)


def test_a_store_of_the_first_schema_is_brought_up_to_date(store: psm.ResultStore) -> None:
    study = psm.Study(nn.Sequential(nn.Linear(6, 5)), store)
    record, _ = study.fit("0", psm.SVD(rank=1))
    with sqlite3.connect(store.root / "results.sqlite") as db:
        for name in ("calibration", "output_error"):
            db.execute(f"ALTER TABLE records DROP COLUMN {name}")
        db.execute("PRAGMA user_version = 1")
    db.close()
    again = psm.ResultStore(store.root)
    assert again.get(record.key) == psm.Record(**(vars(record) | {"cached": True}))
    assert list(again.query().columns) == COLUMNS
    study.store = psm.ResultStore(store.root)
    study.fit("0", psm.SVD(rank=2))
    assert again.query()["calibration"].tolist() == ["", ""]


def test_the_command_line_fits_to_activations(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        assert main([*arguments]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    fit = ("fit", MLP, "--layer", "fc3", "--method", "svd", "--set", "rank=4", "--json")
    plain, fitted = (json.loads(run(*fit, *more)) for more in ((), ("--calibration", "demo:train")))
    assert plain["key"] != fitted["key"]
    assert (plain["calibration"], plain["output_error"]) == ("", None)
    assert 0 < fitted["output_error"] < 1
    assert fitted["relative_error"] > plain["relative_error"]
    assert json.loads(run(*fit, "--calibration", "none"))["key"] == plain["key"]
    assert "on demo:test, fitted to demo:train\n" in run(*fit[:-1], "--calibration", "demo:train")
    own = run(*fit[:-1], "--calibration", "demo:test")
    assert "on demo:test (on the data it was fitted to)\n" in own
    assert main([*fit, "--calibration", "none.npz"]) == 2
    assert "none.npz" in capsys.readouterr().err
    sweep = ("sweep", MLP, "--methods", "svd", "--fractions", "0.05", "--layers", "fc3", "--out")
    rows = []
    for more in ((), ("--calibration", "demo:train")):
        run(*sweep, "results.csv", *more)
        with open("results.csv", newline="") as file:
            rows.append([row for row in csv.DictReader(file) if row["method"] == "svd"])
    assert [row["calibration"] for row in rows[0] + rows[1]] == ["", "demo:train"]
    accuracies = [float(network["accuracy"]) for (network,) in rows]
    assert accuracies[1] > accuracies[0] + 0.1


def test_a_checkpoint_of_a_fit_to_activations(
    tmp_path: Path,
    networks_module: str,
    data_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, data = f"{networks_module}:mlp", str(data_file)
    options = ("--calibration", data, "--data", data, "--cache", str(tmp_path / "cache"))
    command = ("compress", source, "--method", "svd", "--fraction", "0.4", "--out", str(tmp_path / "small"))
    assert main([*command, "--json", *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["calibration"] == data
    recipe = str(tmp_path / "small" / "recipe.json")
    assert recipe_calibration(recipe) == data
    model = psm.load_model(source)
    found = calibrate(model, data, record["params"]["plan"])
    plan = {name: psm.method_from_json(method) for name, method in record["params"]["plan"].items()}
    expected = psm.compress(model, plan, calibration=found)
    x = torch.from_numpy(np.load(data_file)["x"])
    with torch.no_grad():
        assert torch.allclose(psm.load_checkpoint(tmp_path / "small")(x), expected(x), atol=1e-5)
    (tmp_path / "again").mkdir()
    verified = SimpleNamespace(nbytes=1, difference=None, inputs="")
    monkeypatch.setattr("psm_core.cli.save_verified", lambda *args: verified)
    again = ("compress", source, "--recipe", recipe, "--out", str(tmp_path / "again"), *options[2:])
    assert main([*again, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["key"] == record["key"]
    assert main(again) == 0
    assert f"compressed by svd, fitted to {data}; see" in capsys.readouterr().out
    assert main([*again, "--calibration", "none"]) == 0
    assert "compressed by svd; see" in capsys.readouterr().out
    assert recipe_calibration(tmp_path / "again" / "recipe.json") == ""


def test_the_default_calibration_of_a_recipe_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command, default in (
        ("fit", "none"),
        ("sweep", "none"),
        ("compress", "the data that a recipe names"),
    ):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"none: to the weights alone (default: {default}" in " ".join(capsys.readouterr().out.split())


def test_a_job_fits_to_activations(store: psm.ResultStore, networks_module: str, data_file: Path) -> None:
    model = f"{networks_module}:mlp"
    request = JobRequest(model, (Point("1", psm.SVD(rank=2)),), str(data_file), "cpu", str(data_file))
    assert JobRequest.from_json(json.loads(json.dumps(request.to_json()))) == request
    older = request.to_json()
    del older["calibration"]
    assert JobRequest.from_json(older).calibration == ""
    folder = JobFolder(store.root, "j")
    folder.write_request(request)
    folder.write(JobStatus("j", "queued", 1, 0.0))
    status = run_job(store, "j", os.getppid())
    assert status.state == "done", status
    record = store.get(status.keys[0])
    assert record is not None
    assert record.calibration == record.data == str(data_file)
    assert record.output_error is not None
