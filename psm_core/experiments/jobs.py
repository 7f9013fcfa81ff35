"""Jobs: lists of points computed by a worker process, with their state and progress on disk.

A job is a folder `jobs/ID/` of the store: `request.json` (what to compute), `status.json` (replaced
atomically as it goes) and, once asked for, `cancel`. The page that submitted it may be closed; the
worker goes on, and each finished point is in the store at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from psm_core.errors import StoreError, UnknownNameError
from psm_core.experiments.store import ResultStore
from psm_core.experiments.study import Point
from psm_core.files import process_alive, process_started, write_atomically
from psm_core.methods import method_from_json

ACTIVE = ("queued", "running")
INTERRUPTED = "Its process ended before it did. What was finished is kept; run it again to compute the rest."


@dataclass(frozen=True)
class JobStatus:
    """Where a job stands.

    `state` is queued, running, done, failed, cancelled or interrupted (its process ended before it
    did). `done` of `total` points are computed; `current` names the one at work and `method` its
    method; `part` is the share of it that is done. The fit at hand is at iteration `step` of
    `steps`, its errors so far are `history`: of the outputs on the data `calibration`, or ("") of the
    weights. `keys` are the records computed or found so far, `cached` how many of them were answered
    from the store. `worker` is the number of the process at work, which began at `worker_started`.
    """

    id: str
    state: str
    total: int
    submitted: float
    done: int = 0
    cached: int = 0
    current: str = ""
    method: str = ""
    part: float = 0.0
    step: int = 0
    steps: int = 0
    history: tuple[float, ...] = ()
    keys: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    message: str = ""
    started: float | None = None
    finished: float | None = None
    worker: int | None = None
    worker_started: float | None = None
    calibration: str = ""

    @property
    def active(self) -> bool:
        """Whether it still runs or waits."""
        return self.state in ACTIVE

    @property
    def progress(self) -> float:
        """The share done, from 0 to 1."""
        return min(1.0, (self.done + self.part) / self.total) if self.total else 1.0

    def eta_seconds(self, now: float | None = None) -> float | None:
        """Seconds left at the pace so far, or None before there is a pace."""
        if self.state != "running" or self.started is None or self.progress < 0.01:
            return None
        elapsed = (time.time() if now is None else now) - self.started
        return elapsed * (1 - self.progress) / self.progress


@dataclass(frozen=True)
class JobRequest:
    """What to compute: points of one model, with its data, on a device.

    `calibration` names the data whose inputs the layers are fitted to, "" for the weights alone.
    """

    model: str
    points: tuple[Point, ...]
    data: str = ""
    device: str = "auto"
    calibration: str = ""

    def to_json(self) -> dict[str, Any]:
        """The request as JSON."""
        return {
            "model": self.model,
            "data": self.data,
            "device": self.device,
            "calibration": self.calibration,
            "points": [_point_to_json(point) for point in self.points],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> JobRequest:
        """The request that `to_json` gave."""
        points = tuple(_point_from_json(point) for point in document["points"])
        calibration = document.get("calibration", "")  # requests of older versions have none
        return cls(document["model"], points, document["data"], document["device"], calibration)


def _point_to_json(point: Point) -> dict[str, Any]:
    plan = point.plan
    return {
        "layer": point.layer,
        "method": None if point.method is None else point.method.to_json(),
        "plan": None if plan is None else {name: m.to_json() for name, m in plan.items()},
        "budget": point.budget,
    }


def _point_from_json(document: dict[str, Any]) -> Point:
    method, plan = document["method"], document["plan"]
    return Point(
        document["layer"],
        None if method is None else method_from_json(method),
        None if plan is None else {name: method_from_json(m) for name, m in plan.items()},
        document["budget"],
    )


class JobFolder:
    """The files of one job."""

    def __init__(self, root: Path, job_id: str) -> None:
        self.id = job_id
        self.path = root / "jobs" / job_id

    def write_request(self, request: JobRequest) -> None:
        """Keep what is to be computed."""
        write_atomically(self.path / "request.json", json.dumps(request.to_json()).encode())

    def read_request(self) -> JobRequest:
        """What is to be computed.

        Raises:
            UnknownNameError: there is no such job.
        """
        return JobRequest.from_json(self._document("request.json"))

    def write(self, status: JobStatus) -> None:
        """Replace the status."""
        write_atomically(self.path / "status.json", json.dumps(asdict(status)).encode())

    def read(self) -> JobStatus:
        """The status.

        Raises:
            UnknownNameError: there is no such job.
        """
        document = self._document("status.json")
        for name in ("history", "keys", "problems"):
            document[name] = tuple(document[name])
        return JobStatus(**document)

    def _document(self, name: str) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads((self.path / name).read_text())
        except (OSError, ValueError):
            known = [folder.name for folder in self.path.parent.glob("*")]
            raise UnknownNameError("job", self.id, known) from None
        return document

    def request_cancel(self) -> None:
        """Ask the worker to stop."""
        (self.path / "cancel").touch()

    @property
    def cancel_requested(self) -> bool:
        """Whether the worker was asked to stop."""
        return (self.path / "cancel").exists()


@dataclass
class JobRunner:
    """One worker process and its queue; jobs run one after another, in the order submitted."""

    store: ResultStore
    _worker: subprocess.Popen[bytes] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def submit(
        self,
        model: str,
        points: Sequence[Point],
        data: str = "",
        device: str = "auto",
        calibration: str = "",
    ) -> str:
        """Queue points of a model (named by its source string) and return the job's id.

        Raises:
            StoreError: the request cannot be written or no worker can be started.
        """
        job_id = time.strftime("%Y%m%d-%H%M%S-") + uuid.uuid4().hex[:6]
        folder = JobFolder(self.store.root, job_id)
        with self._lock:
            try:
                folder.write_request(JobRequest(model, tuple(points), data, device, calibration))
                worker = self._running_worker()
                folder.write(
                    JobStatus(
                        job_id,
                        "queued",
                        len(points),
                        time.time(),
                        worker=worker.pid,
                        worker_started=process_started(worker.pid),
                        calibration=calibration,
                    )
                )
                assert worker.stdin is not None
                worker.stdin.write(f"{job_id}\n".encode())
                worker.stdin.flush()
            except OSError as error:
                raise StoreError(f"the job cannot be queued: {error}") from error
        return job_id

    def warm_up(self) -> None:
        """Start the worker now, so that the first job need not wait for it."""
        with self._lock:
            self._running_worker()

    def status(self, job_id: str) -> JobStatus:
        """Where a job stands; one whose worker is gone is recorded as interrupted.

        Raises:
            UnknownNameError: there is no such job.
        """
        folder = JobFolder(self.store.root, job_id)
        status = folder.read()
        if status.active and not (status.worker and process_alive(status.worker, status.worker_started)):
            status = folder.read()  # it may have ended properly in between
            if status.active:
                status = replace(
                    status,
                    state="interrupted",
                    finished=time.time(),
                    message=INTERRUPTED,
                )
                folder.write(status)
        return status

    def position(self, job_id: str) -> int:
        """How many active jobs were submitted before this one."""
        own = self.status(job_id)
        return sum(other.active and other.submitted < own.submitted for other in self.jobs())

    def jobs(self) -> list[JobStatus]:
        """All jobs of this store, newest first."""
        folders = (self.store.root / "jobs").glob("*/status.json")
        found = [self.status(path.parent.name) for path in folders]
        return sorted(found, key=lambda status: status.submitted, reverse=True)

    def cancel(self, job_id: str) -> None:
        """Stop a job: at once when it is queued, at its next iteration when it runs.

        Raises:
            UnknownNameError: there is no such job.
        """
        folder = JobFolder(self.store.root, job_id)
        if not folder.read().active:
            return
        folder.request_cancel()
        status = folder.read()
        if status.state == "queued":
            folder.write(replace(status, state="cancelled", finished=time.time()))

    def resubmit(self, job_id: str) -> str:
        """Queue the same points again; finished ones are answered from the store."""
        request = JobFolder(self.store.root, job_id).read_request()
        return self.submit(request.model, request.points, request.data, request.device, request.calibration)

    def close(self) -> None:
        """Let the worker end after the job at hand."""
        if self._worker is not None and self._worker.stdin is not None:
            self._worker.stdin.close()
            self._worker = None

    def _running_worker(self) -> subprocess.Popen[bytes]:
        if self._worker is None or self._worker.poll() is not None:
            # Started by command: a child spawned by multiprocessing would run the page's script.
            self._worker = subprocess.Popen(
                [sys.executable, "-m", "psm_core.experiments.worker", str(self.store.root), str(os.getpid())],
                stdin=subprocess.PIPE,
                # Threads that wait asleep leave the processor to the app and to other programs.
                env={
                    "OMP_WAIT_POLICY": "passive",
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                },
            )
        return self._worker
