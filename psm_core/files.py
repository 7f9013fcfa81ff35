"""Files that a crash cannot leave half-written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers and crashes see the old content or the new, nothing between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{os.getpid()}-", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def remove_abandoned(parts: Iterable[Path]) -> None:
    """Delete those half-written files (`.PID-….part`) whose processes are no more."""
    for part in parts:
        owner = part.name[1:].split("-")[0]
        if owner.isdigit() and not process_alive(int(owner)):
            part.unlink(missing_ok=True)


def process_alive(pid: int, started: float | None = None) -> bool:
    """Whether a process of this number runs; the one that began at `started`, where that is known."""
    try:
        process = psutil.Process(pid)
        is_same = started is None or abs(process.create_time() - started) < 1
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def process_started(pid: int) -> float:
    """When a process began, in seconds since 1970: numbers are given again, moments are not."""
    return float(psutil.Process(pid).create_time())
