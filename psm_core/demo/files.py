"""The shipped files of the demonstration: folder, names, and safe reading and writing.

``demo.json`` describes the others (SHA-256, size, origin, measured accuracy), and every read is
checked against it, so a damaged or exchanged file is an error and never a wrong number.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from psm_core.errors import PsmError
from psm_core.files import write_atomically

FILES = Path(__file__).parent / "files"
"""Folder of the shipped files."""

METADATA_NAME = "demo.json"
SLICE_NAME = "fashion-mnist-slice.npz"
METADATA_SCHEMA = 1


class DemoError(PsmError, ValueError):
    """A name, a shipped file or the training data of the demonstration cannot be used."""


def weights_name(network: str) -> str:
    """File name of a network's weights."""
    return f"{network}.safetensors"


def sha256(content: bytes) -> str:
    """SHA-256 of ``content``, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def read_metadata(folder: Path = FILES) -> dict[str, Any]:
    """The content of ``demo.json`` in ``folder``.

    Raises:
        DemoError: the file is missing, damaged or of another schema.
    """
    path = folder / METADATA_NAME
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DemoError(f"cannot read {path} ({error}); write it with: python -m psm_core.demo") from error
    if not isinstance(metadata, dict) or metadata.get("schema") != METADATA_SCHEMA:
        raise DemoError(
            f"{path} must have schema {METADATA_SCHEMA}; write it again with: python -m psm_core.demo"
        )
    return metadata


def network_entry(name: str) -> dict[str, Any]:
    """What ``demo.json`` says about one network: file, SHA-256, accuracies, training, versions.

    Raises:
        DemoError: there is no such entry, or no readable file.
    """
    networks = read_metadata()["networks"]
    if name not in networks:
        raise DemoError(
            f"{METADATA_NAME} has no entry {name}; write it with: python -m psm_core.demo --network {name}"
        )
    entry: dict[str, Any] = networks[name]
    return entry


def read_checked(name: str, expected_sha256: str, folder: Path = FILES) -> bytes:
    """The content of the file ``name``, which must have the given SHA-256.

    Raises:
        DemoError: the file is missing, or its content is not what ``demo.json`` describes.
    """
    path = folder / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DemoError(f"cannot read {path} ({error}); write it with: python -m psm_core.demo") from error
    if sha256(content) != expected_sha256:
        raise DemoError(
            f"{path} is damaged: its SHA-256 is not the one in {METADATA_NAME}; install the package again"
        )
    return content


def write_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    """Write ``demo.json``, with its schema, into ``folder``."""
    text = json.dumps({"schema": METADATA_SCHEMA, **metadata}, indent=2) + "\n"
    write_atomically(folder / METADATA_NAME, text.encode())
