"""The result store: an SQLite index of records, and one safetensors file for each factorization."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from psm_core.errors import CheckpointError, PsmError, StoreError
from psm_core.experiments.record import COLUMNS, Record, from_row, to_row
from psm_core.factorization import Factorization
from psm_core.files import remove_abandoned, write_atomically
from psm_core.methods import method_from_json
from psm_core.network.models import tensors_hash

SCHEMA_VERSION = 2
INDEX = "results.sqlite"
_COLUMN_TYPES = {
    "fraction": "REAL",
    "relative_error": "REAL",
    "parameters": "INTEGER",
    "dense_parameters": "INTEGER",
    "nbytes": "INTEGER",
    "dense_nbytes": "INTEGER",
    "seconds": "REAL",
    "accuracy": "REAL",
    "low": "REAL",
    "high": "REAL",
    "samples": "INTEGER",
    "output_error": "REAL",
}
_ADDED = {"calibration": "TEXT DEFAULT ''", "output_error": "REAL"}
"""Columns of schema 2; a record of schema 1 is a fit to the weights, without an output error."""


class ResultStore:
    """Results under one folder: `results.sqlite`, `factors/`, `calibration/`, `jobs/`.

    Safe with several processes: SQLite in WAL mode, files replaced atomically. A record is written
    after its factors, so that a process killed at any moment leaves no record without them.
    """

    def __init__(self, root: str | Path = "cache") -> None:
        self.root = Path(root)
        self._create()
        try:
            remove_abandoned(self.root.rglob(".*.part"))
        except OSError as error:
            raise self._unusable(error) from error

    def _create(self) -> None:
        """Make the folder and the index, where they are not there yet."""
        columns = ", ".join(f"{name} {_COLUMN_TYPES.get(name, 'TEXT')}" for name in COLUMNS)
        try:
            (self.root / "factors").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        with self._open() as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise StoreError(
                    f"the store in '{self.root}' has schema {version}, newer than this version "
                    f"reads ({SCHEMA_VERSION}); update psm_core or name another folder"
                )
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN IMMEDIATE")  # of two processes, one brings the schema up to date
            db.execute(
                f"CREATE TABLE IF NOT EXISTS records ({columns}, PRIMARY KEY (key, model_hash, layer))"
            )
            there = {row["name"] for row in db.execute("PRAGMA table_info(records)")}
            for name in _ADDED.keys() - there:
                db.execute(f"ALTER TABLE records ADD COLUMN {name} {_ADDED[name]}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextlib.contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """The index; a new one where the folder was deleted meanwhile."""
        if not (self.root / INDEX).exists():
            self._create()
        with self._open() as db:
            yield db

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(sqlite3.connect(self.root / INDEX, timeout=30)) as db, db:
                db.row_factory = sqlite3.Row
                yield db
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> StoreError:
        return StoreError(
            f"the result store in '{self.root}' cannot be used ({error}); make room, or name another "
            "folder that can be written"
        )

    def put(self, record: Record, factorization: Factorization | None = None) -> None:
        """Keep a record and its factors; the same record again replaces the old one.

        Raises:
            StoreError: the folder cannot be written (full disk, read-only).
        """
        row = to_row(record)
        names, marks = ", ".join(COLUMNS), ", ".join("?" for _ in COLUMNS)
        try:
            if factorization is not None:
                layout, tensors = json.dumps(factorization.layout()), factorization.tensors()
                seal = {"factorization": layout, "sha256": tensors_hash(tensors, layout)}
                write_atomically(self._factor_file(record.key), save(tensors, metadata=seal))
            with self._connect() as db:
                db.execute(
                    f"INSERT OR REPLACE INTO records ({names}) VALUES ({marks})",
                    [row[name] for name in COLUMNS],
                )
        except OSError as error:
            raise self._unusable(error) from error

    def get(self, key: str, model_hash: str | None = None, layer: str | None = None) -> Record | None:
        """The record of a key (of this layer of this model, where they are named), or None.

        Raises:
            StoreError: the database is damaged or cannot be read.
        """
        where, values = _conditions({"key": key, "model_hash": model_hash, "layer": layer})
        with self._connect() as db:
            row = db.execute(f"SELECT * FROM records WHERE {where} LIMIT 1", values).fetchone()
        return None if row is None else replace(from_row(dict(row)), cached=True)

    def factors(self, key: str) -> Factorization | None:
        """The factorization of a key, or None when it is not kept or its file is damaged."""
        path = self._factor_file(key)
        try:
            with safe_open(path, framework="pt") as file:
                seal = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if seal["sha256"] != tensors_hash(tensors, seal["factorization"]):
                raise CheckpointError(f"the checksum of '{path}' does not match")
            layout = json.loads(seal["factorization"])
            return Factorization.from_tensors(method_from_json(layout), layout, tensors)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, PsmError, KeyError, ValueError, TypeError):
            return None  # it is fitted again, and its file replaced

    def query(
        self,
        model_hash: str | None = None,
        layer: str | None = None,
        method: str | None = None,
    ) -> pd.DataFrame:
        """The records as a frame, oldest first, one column a field."""
        where, values = _conditions({"model_hash": model_hash, "layer": layer, "method": method})
        with self._connect() as db:
            rows = db.execute(
                f"SELECT {', '.join(COLUMNS)} FROM records WHERE {where} ORDER BY created, rowid", values
            )
            return pd.DataFrame.from_records(rows.fetchall(), columns=COLUMNS, coerce_float=True)

    def _factor_file(self, key: str) -> Path:
        return self.root / "factors" / key[:2] / f"{key}.safetensors"


def _conditions(wanted: dict[str, str | None]) -> tuple[str, list[str]]:
    """An SQL condition for the values that are given."""
    given = {name: value for name, value in wanted.items() if value is not None}
    return " AND ".join(f"{name} = ?" for name in given) or "1", list(given.values())
