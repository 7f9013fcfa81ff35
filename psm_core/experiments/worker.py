"""The worker process: reads job ids from standard input, one a line, and computes their points."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from dataclasses import replace

from psm_core.checkpoint import load_model
from psm_core.errors import PsmError, first_line
from psm_core.experiments.jobs import INTERRUPTED, JobFolder, JobStatus
from psm_core.experiments.store import ResultStore
from psm_core.experiments.study import Point, Study
from psm_core.progress import JobCancelled, Step

WRITE_INTERVAL = 0.25
HISTORY_POINTS = 400


class Abandoned(JobCancelled):
    """The app that asked for the work has gone; nobody could stop or see it."""


class Progress:
    """Writes the status of a job as it goes, and stops it when that is asked for."""

    def __init__(self, folder: JobFolder, app: int) -> None:
        self.folder = folder
        self.status = replace(folder.read(), state="running", started=time.time())
        self._history: list[float] = []
        self._iteration = 0
        self._layers: list[str] = []
        self._fits = 1
        self._app = app
        self._written = 0.0
        self.write()

    def write(self, **changes: object) -> None:
        """Replace the status at once."""
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]
        self.folder.write(self.status)
        self._written = time.monotonic()

    def tick(self) -> None:
        """Honour a request to cancel, and write the status if it is due."""
        if time.monotonic() - self._written < WRITE_INTERVAL:
            return
        self.check_cancel()
        stride = max(1, len(self._history) // HISTORY_POINTS)
        self.write(history=tuple(self._history[::stride]))

    def check_cancel(self) -> None:
        """Raise JobCancelled when the user asked to stop, Abandoned when the app has gone."""
        if self.folder.cancel_requested:
            raise JobCancelled
        if os.getppid() != self._app:
            raise Abandoned

    def begin(self, point: Point) -> None:
        """Go on to the next point."""
        self._layers, self._fits = [], max(1, len(point.plan or {}))
        self.write(current=point.label, method=point.method_name, part=0.0, step=0, steps=0, history=())

    def on_step(self, layer: str, step: Step) -> None:
        """Receive an iteration of the fit at hand."""
        if layer not in self._layers:
            self._layers.append(layer)
            self._history, self._iteration = [], 0
        if step.iteration > self._iteration:
            self._history.append(step.relative_error)
            self._iteration = step.iteration
        elif step.iteration:  # again, within a long iteration
            self._history[-1] = step.relative_error
        if step.iteration or not self._iteration:  # 0 is a sign of life, and no way back
            part = (len(self._layers) - 1 + step.iteration / step.total) / self._fits
            self.status = replace(self.status, part=part, step=step.iteration, steps=step.total)
        self.tick()

    def on_batch(self, done: int, total: int) -> None:
        """Receive an evaluated batch of the network at hand."""
        self.tick()


def run_job(store: ResultStore, job_id: str, app: int) -> JobStatus:
    """Compute the points of a job; what fails for one point is noted, and the rest goes on.

    `app` is the process that asked for it: when that is gone, the job is interrupted.
    """
    folder = JobFolder(store.root, job_id)
    if folder.cancel_requested:
        return folder.read()
    progress = Progress(folder, app)
    try:
        request = folder.read_request()
        model = load_model(request.model)
        study = Study(model, store, request.data, request.device, request.calibration)
        for point in request.points:
            progress.check_cancel()
            progress.begin(point)
            status = progress.status
            try:
                record = study.compute(point, progress.on_step, progress.on_batch)
                progress.write(keys=(*status.keys, record.key), cached=status.cached + record.cached)
            except JobCancelled:
                raise
            except Exception as error:  # one point's failure is not the sweep's
                if not isinstance(error, PsmError):
                    traceback.print_exc()
                progress.write(problems=(*status.problems, f"{point.label}: {first_line(error)}"))
            progress.write(done=status.done + 1, part=0.0, step=0, steps=0)
        status = progress.status
        failed = len(status.problems) == status.total > 0
        progress.write(
            state="failed" if failed else "done",
            message=status.problems[0] if failed else "",
            current="",
            method="",
            finished=time.time(),
        )
    except Abandoned:
        progress.write(state="interrupted", message=INTERRUPTED, finished=time.time())
    except JobCancelled:
        progress.write(state="cancelled", current="", finished=time.time())
    except Exception as error:
        # The worker serves the next job whatever this one met; the log keeps the trace.
        traceback.print_exc()
        progress.write(state="failed", message=first_line(error), finished=time.time())
    return progress.status


def main() -> None:
    """Serve jobs until standard input is closed or the app, whose number is given, is gone."""
    root, app = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the app's terminal is for the app
    store = ResultStore(root)
    for line in sys.stdin:
        if os.getppid() != app:
            return
        with contextlib.suppress(FileNotFoundError):  # its folder was deleted meanwhile
            run_job(store, line.strip(), app)


if __name__ == "__main__":
    main()
