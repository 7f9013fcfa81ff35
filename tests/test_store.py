"""The result store: round trips, keys, damage, several writers, processes killed in the middle."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import psm_core as psm
from psm_core.errors import StoreError
from psm_core.experiments.keys import canonical_key, eval_key, fit_key
from psm_core.experiments.record import COLUMNS, NETWORK, Record
from psm_core.factorization import Factorization
from psm_core.files import write_atomically

FORK = multiprocessing.get_context("fork")  # a fresh interpreter would import for seconds

METHODS = [
    psm.PSM(K=2, iterations=3),
    psm.SVD(rank=2),
    psm.Tucker(rank_out=2, rank_in=2),
    psm.TensorTrain(rank=2),
    psm.Prune(fraction=0.2),
]


@functools.cache
def fitted(index: int = 1, seed: int = 0) -> Factorization:
    generator = torch.Generator().manual_seed(seed)
    return METHODS[index].fit(torch.randn(8, 6, 3, 3, generator=generator), device="cpu")


def record_of(factorization: Factorization, **changes: Any) -> Record:
    record = Record(
        key=canonical_key({"method": factorization.method.to_json()}),
        model="small:net",
        model_hash="f" * 64,
        layer="conv",
        method=factorization.method.name,
        params=factorization.method.params,
        fraction=0.1,
        relative_error=1 / 3,
        parameters=factorization.parameters,
        dense_parameters=432,
        nbytes=factorization.nbytes,
        dense_nbytes=1728,
        seconds=0.25,
        device="cpu",
        note="“quoted”, with, commas\nand lines",
    )
    return dataclasses.replace(record, **changes)


@pytest.mark.parametrize("index", range(len(METHODS)))
def test_records_and_factors_come_back(index: int, store: psm.ResultStore) -> None:
    factorization = fitted(index)
    record = record_of(factorization)
    assert store.get(record.key) is None
    assert store.factors(record.key) is None
    store.put(record, factorization)
    for again in (store, psm.ResultStore(store.root)):
        found = again.get(record.key)
        assert found == dataclasses.replace(record, cached=True)
        assert type(found.parameters) is int
        back = again.factors(record.key)
        assert back is not None
        assert back.method == factorization.method
        assert back.history == factorization.history
        assert torch.equal(back.reconstruct(), factorization.reconstruct())
    size = sum(f.stat().st_size for f in (store.root / "factors").rglob("*.safetensors"))
    assert factorization.nbytes < size < factorization.nbytes + 3000


def test_network_records_keep_their_figures(store: psm.ResultStore) -> None:
    plan = {"conv": {"method": "svd", "params": {"rank": 2}}}
    figures = {"accuracy": 0.9251, "low": 0.91, "high": 0.93, "samples": 2000, "data": "demo:test"}
    record = record_of(fitted(), layer=NETWORK, params={"budget": 0.1, "plan": plan}, **figures)
    store.put(record)
    assert store.get(record.key, record.model_hash, NETWORK) == dataclasses.replace(record, cached=True)
    frame = store.query(model_hash=record.model_hash, layer=NETWORK)
    assert list(frame.columns) == COLUMNS
    assert frame["accuracy"].tolist() == [0.9251]
    assert store.query(model_hash="0" * 64).empty


def test_queries_select_and_the_last_record_of_a_key_counts(store: psm.ResultStore) -> None:
    records = [
        record_of(fitted(), key=str(i), layer=f"l{i % 2}", method="svd" if i < 3 else "psm") for i in range(5)
    ]
    for record in records:
        store.put(record)
    store.put(dataclasses.replace(records[0], seconds=9.0))
    assert len(store.query()) == 5
    assert sorted(store.query(layer="l0")["key"]) == ["0", "2", "4"]
    assert sorted(store.query(layer="l0", method="svd")["key"]) == ["0", "2"]
    assert store.query(model_hash="other").empty
    found = store.get("0")
    assert found is not None
    assert found.seconds == 9.0
    assert store.query(layer="x' OR 1=1 --").empty


def test_a_fit_is_computed_once_and_again_when_its_factors_are_damaged(
    networks_module: str, store: psm.ResultStore
) -> None:
    study = psm.Study(psm.load_model(f"{networks_module}:mlp"), store)
    method = psm.PSM(K=2, iterations=20)
    steps: list[psm.Step] = []
    first, factorization = study.fit("1", method, steps.append)
    assert not first.cached
    assert steps
    steps.clear()
    second, same = study.fit("1", method, steps.append)
    assert second == dataclasses.replace(first, cached=True)
    assert not steps
    assert torch.equal(same.reconstruct(), factorization.reconstruct())
    (file,) = (store.root / "factors").rglob("*.safetensors")
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[-3] ^= 1  # in the last value
    renamed = content.replace(b'\\"K\\"', b'\\"Z\\"')
    assert renamed != content
    for damaged in [b"", content[:-1], content[: len(content) // 2], b"\xff" * 50, renamed, flipped]:
        file.write_bytes(damaged)
        third, again = study.fit("1", method)
        assert not third.cached
        assert torch.equal(again.reconstruct(), factorization.reconstruct())
        assert len(file.read_bytes()) == len(content)
    file.unlink()
    assert not study.fit("1", method)[0].cached


def test_the_same_weight_in_another_model_is_not_fitted_again(store: psm.ResultStore) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    model[1].weight.data.copy_(model[0].weight.data)
    study = psm.Study(model, store)
    first, _ = study.fit("0", psm.SVD(rank=2))
    second, _ = study.fit("1", psm.SVD(rank=2))
    assert (first.cached, second.cached) == (False, True)
    assert (second.layer, second.key) == ("1", first.key)
    assert sorted(store.query()["layer"]) == ["0", "1"]
    model[0].bias.data += 1  # another model, the same weight
    third, _ = psm.Study(model, store).fit("0", psm.SVD(rank=2))
    assert third.cached
    assert third.model_hash != first.model_hash


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder that belongs to somebody else, for a process that is not root."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    was_root = os.geteuid() == 0
    yield folder
    if was_root:
        os.seteuid(0)
    folder.chmod(0o755)
    shutil.rmtree(folder)


def become_nobody() -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)


def test_a_folder_that_cannot_be_written_is_named(unprivileged: Path) -> None:
    store = psm.ResultStore(unprivileged / "cache")
    record = record_of(fitted())
    for path in [store.root, *store.root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    unprivileged.chmod(0o555)
    become_nobody()
    for place in (unprivileged / "new", unprivileged / "cache"):
        with pytest.raises(StoreError, match="cannot be used"):
            psm.ResultStore(place)
    with pytest.raises(StoreError, match="cannot be used"):
        store.put(record, fitted())


def test_a_path_that_is_no_folder_and_a_foreign_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for place in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(StoreError):
            psm.ResultStore(place)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "results.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(StoreError):
        psm.ResultStore(tmp_path / "cache")


def test_a_newer_schema_is_refused_and_left_alone(store: psm.ResultStore) -> None:
    store.put(record_of(fitted()), fitted())
    with sqlite3.connect(store.root / "results.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match=r"99.*update"):
        psm.ResultStore(store.root)
    with sqlite3.connect(store.root / "results.sqlite") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (99,)
    db.close()


def test_a_database_damaged_while_open_is_named(store: psm.ResultStore) -> None:
    store.put(record_of(fitted()), fitted())
    for file in store.root.glob("results.sqlite*"):
        file.unlink()
    (store.root / "results.sqlite").write_bytes(b"no database" * 1000)
    for act in (lambda: store.get("k"), store.query, lambda: store.put(record_of(fitted()))):
        with pytest.raises(StoreError):
            act()


def written(root: Path) -> int:
    return len(list((root / "factors").rglob("*.safetensors")))


def write_for_ever(root: Path) -> None:
    store = psm.ResultStore(root)
    for i in range(10**9):
        store.put(record_of(fitted(), key=canonical_key({"i": i, "pid": os.getpid()})), fitted())


def test_processes_killed_while_writing_leave_only_whole_results(tmp_path: Path) -> None:
    fitted()
    root, delays = tmp_path / "cache", random.Random(1)
    psm.ResultStore(root)
    kept = 0
    for _ in range(10):
        writer = FORK.Process(target=write_for_ever, args=(root,))
        writer.start()
        deadline, wanted = time.monotonic() + 30, written(root) + 3
        while written(root) < wanted and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(delays.uniform(0, 0.02))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        store = psm.ResultStore(root)
        assert list(root.rglob("*.part")) == []
        frame = store.query()
        assert len(frame) >= kept
        kept = len(frame)
    assert kept >= 10
    files = {path.stem for path in (root / "factors").rglob("*.safetensors")}
    assert set(frame["key"]) <= files
    expected = fitted().reconstruct()
    for key in frame["key"]:
        factorization = store.factors(key)
        assert factorization is not None
        assert torch.equal(factorization.reconstruct(), expected)


def test_abandoned_files_are_removed_and_those_being_written_are_not(tmp_path: Path) -> None:
    ended = FORK.Process(target=int)
    ended.start()
    ended.join()
    folder = tmp_path / "factors" / "ab"
    folder.mkdir(parents=True)
    abandoned, current = folder / f".{ended.pid}-x.part", folder / f".{os.getpid()}-y.part"
    foreign = folder / ".notes.part"
    for path in (abandoned, current, foreign):
        path.touch()
    psm.ResultStore(tmp_path)
    assert not abandoned.exists()
    assert current.exists()
    assert foreign.exists()


def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")

    def full_disk(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomically(target, b"new content")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
    store = psm.ResultStore(tmp_path / "cache")
    with pytest.raises(StoreError, match="No space"):
        store.put(record_of(fitted()), fitted())
    assert store.query().empty


def write_some(root: Path, number: int) -> None:
    store = psm.ResultStore(root)
    for i in range(12):
        common = canonical_key({"i": i})
        own = canonical_key({"i": i, "writer": number})
        for key in (common, own):
            store.put(record_of(fitted(), key=key), fitted())


def test_four_writers_at_once(tmp_path: Path) -> None:
    fitted()
    writers = [FORK.Process(target=write_some, args=(tmp_path, n)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0, 0]
    store = psm.ResultStore(tmp_path)
    frame = store.query()
    assert len(frame) == 12 * 5
    assert all(store.factors(key) is not None for key in frame["key"])
    assert list(tmp_path.rglob("*.part")) == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e300, 1e300) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def reversed_order(value: Any) -> Any:
    """The same document with the members of every object the other way round."""
    if isinstance(value, dict):
        return {name: reversed_order(value[name]) for name in reversed(value)}
    return [reversed_order(item) for item in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=5), st.text(max_size=4), VALUES)
def test_keys_depend_on_content_and_not_on_order(document: dict[str, Any], name: str, value: Any) -> None:
    key = canonical_key(document)
    assert canonical_key(reversed_order(document)) == key
    assert len(key) == 64
    if name not in document:
        assert canonical_key(document | {name: value}) != key


PARAMS = st.fixed_dictionaries(
    {"K": st.integers(1, 20)},
    optional={
        "Q": st.integers(1, 4),
        "iterations": st.integers(1, 500),
        "tolerance": st.floats(0, 1),
        "seed": st.integers(0, 99),
        "algorithm": st.sampled_from(["joint", "palm4msa", "hierarchical"]),
        "constraint": st.sampled_from(["splincol", "row", "column", "global"]),
    },
).filter(lambda params: "constraint" not in params or params.get("algorithm", "joint") != "joint")
WEIGHT = torch.linspace(-1, 1, 24).reshape(4, 6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PARAMS, PARAMS, st.randoms())
def test_fit_keys_depend_on_every_parameter(one: dict[str, Any], other: dict[str, Any], random: Any) -> None:
    first, second = psm.PSM(**one), psm.PSM(**other)
    assert (fit_key(first, WEIGHT) == fit_key(second, WEIGHT)) == (first == second)
    shuffled = list(one.items())
    random.shuffle(shuffled)
    as_floats = {n: float(v) if type(v) is int else v for n, v in shuffled}
    assert fit_key(psm.METHODS["psm"].from_params(as_floats), WEIGHT) == fit_key(first, WEIGHT)
    assert fit_key(psm.method_from_json(first.to_json()), WEIGHT) == fit_key(first, WEIGHT)


@given(st.integers(0, 24 * 4 - 1), st.integers(0, 7))
def test_fit_keys_depend_on_every_bit_of_the_weight(place: int, bit: int) -> None:
    other = WEIGHT.clone()
    other.view(torch.uint8).flatten()[place] ^= 1 << bit
    assert fit_key(psm.SVD(rank=1), other) != fit_key(psm.SVD(rank=1), WEIGHT)


def test_fit_keys_depend_on_type_shape_method_and_nothing_else() -> None:
    method, key = psm.SVD(rank=1), fit_key(psm.SVD(rank=1), WEIGHT)
    assert fit_key(method, WEIGHT.T.contiguous().T) == key  # strides
    assert fit_key(method, torch.nn.Parameter(WEIGHT)) == key
    zeros = torch.zeros(4, 6)
    variants = [
        fit_key(method, zeros),
        fit_key(method, zeros.reshape(6, 4)),
        fit_key(method, zeros.reshape(4, 6, 1, 1)),
        fit_key(method, zeros.to(torch.int32)),  # the same bytes
        fit_key(method, zeros.bfloat16()),
        fit_key(method, zeros.half()),
        fit_key(psm.SVD(rank=2), zeros),
        fit_key(psm.Tucker(rank_out=1, rank_in=1), zeros),
    ]
    assert len({key, *variants}) == len(variants) + 1
    keys = {"a": "1", "b": "2"}
    assert eval_key(keys, "h", "d") == eval_key({"b": "2", "a": "1"}, "h", "d")
    others = [eval_key({"a": "2", "b": "1"}, "h", "d"), eval_key(keys, "i", "d"), eval_key(keys, "h", None)]
    assert len({eval_key(keys, "h", "d"), *others}) == 4


def test_a_new_version_of_a_method_has_new_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fit_key(psm.SVD(rank=1), WEIGHT)
    monkeypatch.setattr(psm.SVD, "version", psm.SVD.version + 1)
    assert fit_key(psm.SVD(rank=1), WEIGHT) != before


def test_a_folder_deleted_meanwhile_is_made_again(tmp_path: Path) -> None:
    store = psm.ResultStore(tmp_path / "cache")
    record = record_of(fitted())
    store.put(record, fitted())
    shutil.rmtree(tmp_path / "cache")
    assert store.query().empty
    assert store.get(record.key) is None
    store.put(record, fitted())
    assert store.get(record.key) == dataclasses.replace(record, cached=True)
    assert store.factors(record.key) is not None
