"""The command line as a user types it: results, exit codes, one line for every bad input."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import psm_core as psm
from psm_core.cli import main
from psm_core.experiments.record import COLUMNS

MLP = "small_networks:mlp"
SHORT = {"MLP": "mlp", "CNN": "cnn", "NAN": "nan_weight", "INF": "infinite_weight"}
TOTAL = 64 * 48 + 48 + 48 * 32 + 32 + 32 * 5 + 5


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, networks_module: str) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must succeed, and return what it prints."""

    def call(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return call


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Run a command that must be refused in one line, leaving no file, and return that line."""

    def call(*arguments: object) -> str:
        before = results()
        assert main([str(argument) for argument in arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert re.fullmatch(r"error: [^\n]+\n", printed.err), printed.err
        assert len(printed.err) < 900
        assert "Traceback" not in printed.err
        assert results() == before
        return printed.err

    return call


def read(path: str) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def results() -> set[str]:
    """Everything below the working folder but whole results in the store."""
    files = {str(path) for path in Path().rglob("*") if path.is_file()}
    whole = re.compile(r"cache/(results\.sqlite.*|factors/.*/[0-9a-f]{64}\.safetensors)")
    return {name for name in files if not whole.fullmatch(name)}


def test_layers(run: Callable[..., str]) -> None:
    rows = json.loads(run("layers", MLP, "--json"))
    assert [row["name"] for row in rows] == ["1", "3", "5"]
    assert [row["parameters"] for row in rows] == [64 * 48 + 48, 48 * 32 + 32, 32 * 5 + 5]
    assert rows[0] | {"share": 0, "macs": 0} == {
        "name": "1", "kind": "Linear", "shape": [48, 64], "parameters": 3120, "share": 0, "macs": 0,
        "compressible": True, "reason": "",
    }  # fmt: skip
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    table = run("layers", MLP).splitlines()
    assert table[0].split() == ["LAYER", "KIND", "SHAPE", "PARAMETERS", "SHARE", "MACS", "COMPRESSIBLE"]
    assert "48×64" in table[1]
    assert "3,120" in table[1]
    assert "BatchNorm2d" in run("layers", "small_networks:cnn")


def test_fit(run: Callable[..., str]) -> None:
    command = [
        "fit",
        MLP,
        "--layer",
        "1",
        "--method",
        "psm",
        "--set",
        "K=2",
        "--set",
        "Q=2",
        "--set",
        "iterations=20",
    ]
    record = json.loads(run(*command, "--json"))
    assert {
        "layer",
        "method",
        "params",
        "relative_error",
        "parameters",
        "nbytes",
        "seconds",
        "cached",
    } <= set(record)
    assert (record["layer"], record["method"], record["cached"]) == ("1", "psm", False)
    assert (record["params"]["K"], record["params"]["Q"]) == (2, 2)
    weight = psm.load_model(MLP).get_submodule("1").weight
    factorization = psm.PSM(K=2, Q=2, iterations=20).fit(weight)
    rebuilt = factorization.reconstruct().double().numpy()
    dense = weight.detach().double().numpy()
    expected = np.linalg.norm(dense - rebuilt) / np.linalg.norm(dense)
    assert record["relative_error"] == pytest.approx(expected, rel=1e-6)
    assert (record["parameters"], record["nbytes"]) == (factorization.parameters, factorization.nbytes)
    again = json.loads(run(*command, "--json"))
    assert again == record | {"cached": True}
    assert "answered from the cache" in run(*command)

    values = np.linalg.svd(dense, compute_uv=False)
    record = json.loads(run("fit", MLP, "--layer", "1", "--method", "svd", "--fraction", "0.15", "--json"))
    rank = int(0.15 * 48 * 64 / (48 + 64))
    assert record["params"] == {"rank": rank}
    assert record["relative_error"] == pytest.approx(
        np.sqrt((values[rank:] ** 2).sum() / (values**2).sum()), rel=1e-4
    )
    assert record["parameters"] == rank * (48 + 64)


def test_sweep(run: Callable[..., str], data_file: Path) -> None:
    command = [
        "sweep", MLP, "--methods", "psm,svd,tucker,tt,prune", "--fractions", "0.02,0.05,0.1,0.2",
        "--out", "results.csv", "--data", data_file,
    ]  # fmt: skip
    assert "from the cache" in run(*command)
    rows = read("results.csv")
    assert list(rows[0]) == [*COLUMNS, "cached"]
    networks = [row for row in rows if row["layer"] == "*"]
    assert networks[0]["method"] == "dense"
    assert {row["layer"] for row in rows} == {"*", "1", "3", "5"}
    assert {row["method"] for row in rows} == {"dense", *psm.METHODS}
    for row in rows:
        assert int(row["parameters"]) / int(row["dense_parameters"]) == pytest.approx(float(row["fraction"]))
        assert (row["accuracy"] != "") == (row["layer"] == "*")
        json.loads(row["params"])
    for row in networks[1:]:
        asked = json.loads(row["params"])["budget"]
        assert asked in (0.02, 0.05, 0.1, 0.2)
        assert int(row["parameters"]) <= asked * TOTAL
    dense = json.loads(run("evaluate", MLP, "--data", data_file, "--json"))
    assert float(networks[0]["accuracy"]) == dense["accuracy"]
    run(*command)
    again = read("results.csv")
    assert {row["cached"] for row in again} == {"True"}
    for before, after in zip(rows, again, strict=True):
        assert {n: (before[n], after[n]) for n in before if before[n] != after[n]}.keys() <= {"cached"}


def test_compress_evaluate_and_verify(run: Callable[..., str], data_file: Path) -> None:
    document = json.loads(
        run(
            "compress",
            MLP,
            "--method",
            "svd",
            "--fraction",
            "0.3",
            "--out",
            "small",
            "--data",
            data_file,
            "--json",
        )
    )
    assert sorted(path.name for path in Path("small").iterdir()) == ["model.safetensors", "recipe.json"]
    assert document["file_nbytes"] == Path("small/model.safetensors").stat().st_size
    assert document["parameters"] <= 0.3 * TOTAL
    assert document["difference"] < 1e-4
    found = json.loads(run("evaluate", "small", "--data", data_file, "--json"))
    assert {"accuracy", "low", "high", "samples"} <= set(found)
    assert (found["accuracy"], found["samples"]) == (document["accuracy"], 300)
    arrays = np.load(data_file)
    model = psm.load_checkpoint("small")
    with torch.no_grad():
        right = (model(torch.from_numpy(arrays["x"])).argmax(1).numpy() == arrays["y"]).sum()
    assert found["accuracy"] == right / 300
    assert sum(p.numel() for p in model.parameters()) == document["parameters"]

    # Its own recipe, and one written by hand.
    recipe = json.loads(Path("small/recipe.json").read_text())
    assert recipe["model"] == MLP
    recipe["layers"] = {"1": {"method": "prune", "params": {"fraction": 0.1}}}
    Path("mine.json").write_text(json.dumps(recipe))
    text = run("compress", MLP, "--recipe", "mine.json", "--out", "other/folder")
    assert "1 compressed" in text
    assert json.loads(Path("other/folder/recipe.json").read_text()) == recipe
    pruned = psm.load_checkpoint("other/folder")
    assert sum(p.numel() for p in pruned.parameters()) == TOTAL - 64 * 48 + 307
    rows = json.loads(run("layers", "other/folder", "--json"))
    assert json.loads(run("verify", "other/folder", "--json"))["ok"]
    assert rows[0]["kind"] == "CompressedLayer"
    assert "compressed already" in rows[0]["reason"]


WRONG: dict[str, list[str]] = {
    "no command": [""],
    "unknown command": ["squeeze " + MLP, "invalid choice"],
    "no model": ["layers", "MODEL"],
    "unknown option": ["layers " + MLP + " --jsn", "--jsn"],
    "unknown model": ["layers demo:fashion-cmm", "did you mean", "fashion-cnn"],
    "unknown torchvision model": ["layers torchvision:resnet17", "did you mean"],
    "unknown source": ["layers nowhere", "neither an existing file nor"],
    "unknown module": ["layers nowhere:nothing", "cannot be imported"],
    "standard library": ["layers os:system", "standard library"],
    "failing callable": ["layers small_networks:broken", "no network today"],
    "no network": ["layers small_networks:no_network", "returned int"],
    "no parameters": ["evaluate torch.nn:ReLU", "no parameters"],
    "long name": ["layers " + "a" * 300, "neither"],
    "a folder without a checkpoint": ["layers .", "no checkpoint"],
    "no layer": ["fit MLP --method svd --set rank=1", "--layer"],
    "unknown layer": ["fit MLP --layer fc --method svd --set rank=1", "expected one of: 1, 3, 5"],
    "uncompressible layer": ["fit MLP --layer 2 --method svd --set rank=1", "neither Linear nor Conv2d"],
    "empty layer": ["fit small_networks:empty_layer --layer 3 --method svd --set rank=1", "empty"],
    "unknown method": ["fit MLP --layer 1 --method svg --set rank=1", "did you mean: svd"],
    "unknown parameter": ["fit MLP --layer 1 --method svd --set rnk=1", "did you mean: rank"],
    "unknown parameter at a budget": ["fit MLP --layer 1 --method svd --set rnk=1 --fraction 0.1", "rank"],
    "size and budget": ["fit MLP --layer 1 --method psm --set K=3 --fraction 0.1", "budget determines K"],
    "share and budget": ["fit MLP --layer 1 --method prune --set fraction=0.3 --fraction 0.1", "determines"],
    "no size": ["fit MLP --layer 1 --method psm", "needs K"],
    "no value": ["fit MLP --layer 1 --method psm --set K", "NAME=VALUE"],
    "K is text": ["fit MLP --layer 1 --method psm --set K=many", "not a number"],
    "K is nothing": ["fit MLP --layer 1 --method psm --set K=", "not a number"],
    "K is zero": ["fit MLP --layer 1 --method psm --set K=0", "above 0"],
    "K is negative": ["fit MLP --layer 1 --method psm --set K=-3", "above 0"],
    "K is too large": ["fit MLP --layer 1 --method psm --set K=65", "at most 64"],
    "K is NaN": ["fit MLP --layer 1 --method psm --set K=nan", "finite"],
    "K is infinite": ["fit MLP --layer 1 --method psm --set K=inf", "finite"],
    "K is beyond floats": ["fit MLP --layer 1 --method psm --set K=1" + "0" * 400, "finite"],
    "K is endless": ["fit MLP --layer 1 --method psm --set K=" + "9" * 5000, "finite"],
    "K is fractional": ["fit MLP --layer 1 --method psm --set K=1.5 --set algorithm=palm4msa", "not whole"],
    "Q is zero": ["fit MLP --layer 1 --method psm --set K=2 --set Q=0", "at least 1"],
    "Q is too large": ["fit MLP --layer 1 --method psm --set K=2 --set Q=9", "at most 8"],
    "Q is fractional": ["fit MLP --layer 1 --method psm --set K=2 --set Q=1.5", "not whole"],
    "Q at a budget": ["fit MLP --layer 1 --method psm --fraction 0.1 --set Q=1.5", "not whole"],
    "order at a budget": ["fit MLP --layer 1 --method tt --fraction 0.1 --set order=0", "at least 2"],
    "seed": ["fit MLP --layer 1 --method psm --set K=2 --set seed=" + str(2**70), "at most"],
    "algorithm": ["fit MLP --layer 1 --method psm --set K=2 --set algorithm=best", "joint, palm4msa"],
    "rank is zero": ["fit MLP --layer 1 --method svd --set rank=0", "at least 1"],
    "rank is too large": ["fit MLP --layer 1 --method svd --set rank=49", "at most 48"],
    "Tucker ranks": ["fit MLP --layer 1 --method tucker --set rank_out=2 --set rank_in=65", "at most 64"],
    "train rank": ["fit MLP --layer 1 --method tt --set rank=100000", "at most"],
    "nothing kept": ["fit MLP --layer 1 --method prune --set fraction=0", "above 0"],
    "more than all kept": ["fit MLP --layer 1 --method prune --set fraction=1.1", "at most 1"],
    "budget zero": ["fit MLP --layer 1 --method svd --fraction 0", "above 0"],
    "budget NaN": ["fit MLP --layer 1 --method svd --fraction nan", "out of range"],
    "budget too small": ["fit MLP --layer 1 --method svd --fraction 0.001", "raise the budget"],
    "budget as text": ["fit MLP --layer 1 --method svd --fraction some", "invalid float"],
    "NaN weights": ["fit NAN --layer 3 --method svd --set rank=1", "1 NaN or infinite"],
    "infinite weights": ["fit INF --layer 1 --method prune --set fraction=0.1", "infinite"],
    "device": ["fit MLP --layer 1 --method svd --set rank=1 --device gpu9", "auto, cpu, cuda or mps"],
    "cache is a file": ["fit MLP --layer 1 --method svd --set rank=1 --cache a.txt", "result store"],
    "cache below a file": ["fit MLP --layer 1 --method svd --set rank=1 --cache a.txt/b", "result store"],
    "sweep without methods": ["sweep MLP --methods , --fractions 0.1 --out o.csv", "--methods"],
    "sweep of unknown methods": ["sweep MLP --methods svd,smv --fractions 0.1 --out o.csv", "did you mean"],
    "sweep without budgets": ["sweep MLP --methods svd --fractions , --out o.csv", "--fractions"],
    "sweep of text": ["sweep MLP --methods svd --fractions 0.1,b --out o.csv", "expected numbers"],
    "sweep out of range": ["sweep MLP --methods svd --fractions 0.1,2 --out o.csv", "out of range"],
    "sweep of unknown layers": ["sweep MLP --layers 1,9 --fractions 0.1 --out o.csv", "unknown layer '9'"],
    "sweep into nowhere": ["sweep MLP --fractions 0.1 --out none/o.csv", "make it first"],
    "sweep into a folder": ["sweep MLP --fractions 0.1 --out folder", "is a folder"],
    "sweep with NaN": ["sweep NAN --methods prune --fractions 0.2 --layers 3 --out o.csv", "NaN"],
    "no way to compress": ["compress MLP --out o", "--method --recipe"],
    "two ways to compress": ["compress MLP --method svd --recipe r.json --out o", "not allowed with"],
    "no budget": ["compress MLP --method svd --out o", "--fraction"],
    "budget and recipe": ["compress MLP --recipe a.txt --fraction 0.1 --out o", "--fraction goes with"],
    "infeasible budget": ["compress MLP --method svd --fraction 0.01 --out o", "raise the budget"],
    "no recipe": ["compress MLP --recipe none.json --out o", "none.json"],
    "recipe is text": ["compress MLP --recipe a.txt --out o", "not JSON"],
    "recipe is a folder": ["compress MLP --recipe folder --out o", "folder"],
    "recipe of another model": ["compress CNN --recipe good.json --out o", "unknown layer '1'"],
    "out is a file": ["compress MLP --recipe good.json --out a.txt", "is a file"],
    "out below a file": ["compress MLP --recipe good.json --out a.txt/o", "a.txt"],
    "NaN in compress": ["compress NAN --method prune --fraction 0.3 --out o", "NaN"],
    "no data": ["evaluate MLP", "no data of its own"],
    "missing data": ["evaluate MLP --data none.npz", "none.npz"],
    "unknown data": ["evaluate MLP --data demo:all", "demonstration data"],
    "broken data": ["evaluate MLP --data broken.npz", "broken.npz"],
    "labels out of range": ["evaluate MLP --data labels.npz", "label 7"],
    "inputs that do not fit": ["evaluate MLP --data wide.npz", "(1, 9, 9)"],
    "missing checkpoint": ["verify none", "no checkpoint"],
    "checkpoint is text": ["verify a.txt", "not a sound safetensors file"],
    "evaluate a text file": ["evaluate a.txt", "not a sound safetensors file"],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_refused_in_one_line(case: str, refuse: Callable[..., str], data_file: Path) -> None:
    command, *expected = WRONG[case]
    Path("a.txt").write_text("a text, no more")
    Path("folder").mkdir()
    Path("good.json").write_text(json.dumps({"layers": {"1": {"method": "svd", "params": {"rank": 2}}}}))
    content = data_file.read_bytes()
    Path("broken.npz").write_bytes(content[: len(content) // 2])
    zeros = np.zeros((2, 1, 8, 8), np.float32)
    np.savez("labels.npz", x=zeros, y=np.array([0, 7]))
    np.savez("wide.npz", x=np.zeros((2, 1, 9, 9), np.float32), y=np.array([0, 1]))
    message = refuse(
        *(f"small_networks:{SHORT[word]}" if word in SHORT else word for word in command.split())
    )
    assert all(part in message for part in expected), message


def test_a_file_system_that_refuses_is_named(
    run: Callable[..., str], refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("fit", MLP, "--layer", "1", "--method", "svd", "--set", "rank=2")

    def full_disk(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    assert "No space" in refuse("fit", MLP, "--layer", "1", "--method", "svd", "--set", "rank=3")
    assert "No space" in refuse("sweep", MLP, "--methods", "svd", "--fractions", "0.3", "--out", "o.csv")
    Path("r.json").write_text(json.dumps({"layers": {"1": {"method": "svd", "params": {"rank": 2}}}}))
    assert "No space" in refuse("compress", MLP, "--recipe", "r.json", "--out", "o")


def test_a_checkpoint_that_does_not_reload_is_not_left_behind(
    refuse: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's module is known to this process only."""
    module: Any = type(sys)("only_here")
    exec("import small_networks\ndef network():\n    return small_networks.mlp()", module.__dict__)
    module.network.__module__ = "only_here"
    monkeypatch.setitem(sys.modules, "only_here", module)
    Path("r.json").write_text(json.dumps({"layers": {"1": {"method": "svd", "params": {"rank": 2}}}}))
    assert main(["compress", "only_here:network", "--recipe", "r.json", "--out", "o"]) == 2
    assert not list(Path("o").glob("*.safetensors"))


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("layers", "fit", "sweep", "compress", "evaluate", "verify"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert command in capsys.readouterr().out


def psm_core(*arguments: object) -> subprocess.Popen[str]:
    """A real command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "psm_core", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_real_process_prints_one_document_or_one_line() -> None:
    good, bad = psm_core("layers", MLP, "--json"), psm_core("layers", "nowhere")
    out, err = good.communicate(timeout=120)
    assert (good.returncode, err) == (0, "")
    assert len(json.loads(out)) == 3
    out, err = bad.communicate(timeout=120)
    assert (bad.returncode, out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", err)


def test_an_interrupted_sweep_keeps_what_is_finished(run: Callable[..., str]) -> None:
    sweep = ["sweep", "small_networks:broad", "--methods", "psm", "--layers", "1", "--out", "o.csv"]
    process = psm_core(*sweep, "--fractions", ",".join(f"{n / 100}" for n in range(5, 60)))
    try:
        deadline = time.monotonic() + 120
        while finished() < 2 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert (out, err) == ("", "cancelled; finished results are kept\n")
    assert not Path("o.csv").exists()
    assert list(Path().rglob("*.part")) == []
    kept = finished()
    assert 2 <= kept < 80
    run(*sweep, "--fractions", "0.05")
    rows = read("o.csv")
    assert [row["cached"] for row in rows if row["layer"] == "1"] == ["True"]
    assert rows[0]["layer"] == "*"
    assert rows[0]["cached"] == "True"


def finished() -> int:
    """Records in the store, read without the library."""
    if not Path("cache/results.sqlite").exists():
        return 0
    db = sqlite3.connect("file:cache/results.sqlite?mode=ro", uri=True, timeout=5)
    try:
        return int(db.execute("SELECT count(*) FROM records").fetchone()[0])
    except sqlite3.Error:
        return 0
    finally:
        db.close()
