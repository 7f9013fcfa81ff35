"""Jobs end to end: real worker processes, cancelled, killed and asked again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import psm_core as psm
from psm_core.errors import UnknownNameError
from psm_core.experiments.jobs import JobFolder, JobRequest, JobRunner, JobStatus
from psm_core.experiments.record import NETWORK
from psm_core.experiments.study import Point
from psm_core.experiments.worker import Progress
from psm_core.files import process_started, write_atomically
from psm_core.progress import Step

LONG = psm.PSM(K=3, Q=3, algorithm="palm4msa", iterations=100_000, tolerance=0.0)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobRunner]:
    """One runner, whose worker is started once for all tests that do not kill it."""
    runner = JobRunner(psm.ResultStore(tmp_path_factory.mktemp("jobs") / "cache"))
    runner.warm_up()
    yield runner
    worker = runner._worker
    runner.close()
    assert worker is not None
    assert worker.wait(30) is not None


@pytest.fixture(scope="module")
def model(networks_module: str) -> str:
    return f"{networks_module}:broad"


def wait(runner: JobRunner, job: str, until: Callable[[JobStatus], bool], limit: float = 90) -> JobStatus:
    """The first status that meets a condition."""
    deadline = time.monotonic() + limit
    while not until(status := runner.status(job)):
        assert time.monotonic() < deadline, status
        time.sleep(0.02)
    return status


def ended(status: JobStatus) -> bool:
    return not status.active


def is_at_work(status: JobStatus) -> bool:
    """In the middle of a fit, with its curve visible."""
    return status.state == "running" and len(status.history) > 1


def test_a_job_is_computed_and_found_again(runner: JobRunner, model: str, data_file: Path) -> None:
    points = [
        Point("1", method=psm.SVD(rank=3)),
        Point("1", method=psm.PSM(K=1, iterations=30)),
        Point(NETWORK, plan={}),
        Point(NETWORK, plan={"1": psm.SVD(rank=5)}, budget=0.3),
        Point(NETWORK, plan={"1": psm.SVD(rank=3)}),
    ]
    job = runner.submit(model, points, str(data_file))
    status = wait(runner, job, ended)
    assert (status.state, status.done, status.total, status.cached) == ("done", 5, 5, 0)
    assert status.problems == ()
    assert status.progress == 1.0
    assert len(status.keys) == 5
    records = [runner.store.get(key) for key in status.keys]
    assert [record.layer for record in records if record] == ["1", "1", NETWORK, NETWORK, NETWORK]
    assert all(record.accuracy is not None for record in records[2:] if record)
    again = wait(runner, runner.resubmit(job), ended)
    assert (again.state, again.done, again.cached) == ("done", 5, 5)
    assert again.keys == status.keys

    # The same figures as without a job.
    study = psm.Study(psm.load_model(model), runner.store, str(data_file))
    record = study.network({"1": psm.SVD(rank=3)})
    assert record.cached
    weight = study.model.get_submodule("1").weight
    assert records[0] is not None
    assert records[0].relative_error == pytest.approx(psm.SVD(rank=3).fit(weight).relative_error(weight))


def test_a_running_and_a_queued_job_are_cancelled(runner: JobRunner, model: str) -> None:
    running = runner.submit(model, [Point("1", method=LONG)])
    queued = runner.submit(model, [Point("1", method=psm.SVD(rank=2))])
    last = runner.submit(model, [Point("3", method=psm.SVD(rank=2))])
    status = wait(runner, running, is_at_work)
    assert 0 < status.step < status.steps == 100_000
    assert status.current == f"1 · {LONG}"
    assert [runner.position(job) for job in (running, queued, last)] == [0, 1, 2]
    assert [job.id for job in runner.jobs()][:3] == [last, queued, running]
    runner.cancel(queued)
    assert runner.status(queued).state == "cancelled"
    assert runner.position(last) == 1
    start = time.monotonic()
    runner.cancel(running)
    assert wait(runner, running, ended).state == "cancelled"
    assert time.monotonic() - start <= 2.0
    assert wait(runner, last, ended).state == "done"
    assert runner.status(queued) == runner.status(queued)
    assert runner.status(queued).done == 0
    first, second = runner.status(running), runner.status(last)
    assert first.finished is not None
    assert second.started is not None
    assert first.finished <= second.started  # one after another
    assert runner.store.query(method="psm").query("layer == '1' and seconds > 1000").empty
    runner.cancel(last)  # it has ended: nothing changes
    assert runner.status(last) == second
    assert wait(runner, runner.resubmit(queued), ended).state == "done"


def test_what_fails_for_one_point_is_noted_and_the_rest_goes_on(runner: JobRunner, model: str) -> None:
    points = [
        Point("absent", method=psm.SVD(rank=2)),
        Point("1", method=psm.SVD(rank=10_000)),
        Point("3", method=psm.SVD(rank=1)),
        Point(NETWORK, plan={"1": psm.SVD(rank=10_000)}),
    ]
    status = wait(runner, runner.submit(model, points), ended)
    assert (status.state, status.done, len(status.keys), len(status.problems)) == ("done", 4, 1, 3)
    for problem, expected in zip(status.problems, ("absent", "rank = 10000", "rank = 10000"), strict=True):
        assert expected in problem
    status = wait(runner, runner.submit(model, points[:2]), ended)
    assert status.state == "failed"
    assert "absent" in status.message
    for source, data in [("nowhere:nothing", ""), (model, "missing.npz"), ("small_networks:broken", "")]:
        status = wait(runner, runner.submit(source, points, data), ended)
        assert (status.state, status.done) == ("failed", 0)
        assert source in status.message or data in status.message
        assert len(status.message.splitlines()) == 1
    assert wait(runner, runner.submit(model, []), ended).progress == 1.0


def test_the_status_is_whole_at_every_moment(runner: JobRunner, model: str) -> None:
    job = runner.submit(model, [Point("1", method=LONG)])
    file = runner.store.root / "jobs" / job / "status.json"
    wait(runner, job, is_at_work)
    texts = set()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        texts.add(file.read_text())
    runner.cancel(job)
    wait(runner, job, ended)
    documents = [json.loads(text) for text in texts]
    assert len(documents) >= 3
    assert {document["id"] for document in documents} == {job}
    assert len({document["step"] for document in documents}) >= 3


def test_an_iteration_has_one_place_in_the_curve(tmp_path: Path) -> None:
    """However often it reports; signs of life outside an iteration have none."""
    folder = JobFolder(tmp_path, "j")
    folder.write(JobStatus("j", "queued", 1, 0.0))
    progress = Progress(folder, os.getppid())
    point = Point(NETWORK, plan={"a": psm.SVD(rank=1), "b": psm.SVD(rank=1)})
    progress.begin(point)

    def curve(layer: str, *reports: tuple[int, float]) -> tuple[float, ...]:
        for iteration, error in reports:
            progress.on_step(layer, Step(iteration, 9, error))
        progress._written = 0.0
        progress.tick()
        return folder.read().history

    assert curve("a", (0, 1.0), (0, 0.9)) == ()
    assert curve("a", (1, 0.8), (1, 0.7), (1, 0.6)) == (0.6,)
    assert curve("a", (0, 1.0), (2, 0.5), (2, 0.4), (3, 0.3), (0, 1.0)) == (0.6, 0.4, 0.3)
    assert folder.read().part == pytest.approx(3 / 9 / 2)
    assert curve("b", (0, 1.0), (1, 0.2)) == (0.2,)


def test_writers_and_readers_of_one_status(tmp_path: Path) -> None:
    """As fast as it goes, with two writers."""
    target, stop, sizes = tmp_path / "status.json", threading.Event(), set()
    write_atomically(target, json.dumps(["x"]).encode())

    def write(letter: str) -> None:
        for size in range(1, 150):
            write_atomically(target, json.dumps([letter] * size * 50).encode())
        stop.set()

    writers = [threading.Thread(target=write, args=(letter,)) for letter in "ab"]
    for writer in writers:
        writer.start()
    while not stop.is_set():
        content = json.loads(target.read_text())
        assert len(set(content)) == 1
        sizes.add(len(content))
    for writer in writers:
        writer.join()
    assert len(sizes) > 5
    assert list(tmp_path.iterdir()) == [target]


def test_a_killed_worker_leaves_an_interrupted_job_that_can_be_completed(tmp_path: Path, model: str) -> None:
    runner = JobRunner(psm.ResultStore(tmp_path / "cache"))
    long = psm.PSM(K=3, Q=3, algorithm="palm4msa", iterations=3000, tolerance=0.0)
    points = [Point("1", method=psm.SVD(rank=4)), Point("1", method=long)]
    job = runner.submit(model, points)
    waiting = runner.submit(model, points[:1])
    status = wait(runner, job, lambda s: s.done == 1 and is_at_work(s))
    assert status.worker is not None
    os.kill(status.worker, signal.SIGKILL)
    assert runner._worker is not None
    runner._worker.wait(10)
    for other in (runner, JobRunner(psm.ResultStore(tmp_path / "cache"))):  # after a restart, too
        status = other.status(job)
        assert (status.state, status.done, status.finished is not None) == ("interrupted", 1, True)
        assert "run it again" in status.message
        assert other.status(waiting).state == "interrupted"
        assert list((tmp_path / "cache").rglob("*.part")) == []
    frame = runner.store.query()
    assert frame["method"].tolist() == ["svd"]
    assert len(list((tmp_path / "cache" / "factors").rglob("*.*"))) == 1
    status = wait(runner, runner.resubmit(job), ended)
    assert (status.state, status.done, status.cached) == ("done", 2, 1)
    assert runner.status(job).state == "interrupted"
    factorization = runner.store.factors(status.keys[1])
    assert factorization is not None
    worker = runner._worker
    runner.close()
    assert worker is not None
    assert worker.wait(30) == 0


APP = """
import sys, time
import psm_core as psm
from psm_core.experiments.jobs import JobRunner
from psm_core.experiments.study import Point

runner = JobRunner(psm.ResultStore(sys.argv[1]))
long = psm.PSM(K=3, Q=3, algorithm="palm4msa", iterations=100_000, tolerance=0.0)
print(runner.submit(sys.argv[2], [Point("1", method=long)]), flush=True)
print(runner.submit(sys.argv[2], [Point("1", method=psm.SVD(rank=2))]), flush=True)
time.sleep(600)
"""


def test_work_stops_when_the_app_is_killed(tmp_path: Path, model: str) -> None:
    root = tmp_path / "cache"
    command = [sys.executable, "-c", APP, str(root), model]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as app:
        assert app.stdout is not None
        running, waiting = app.stdout.readline().strip(), app.stdout.readline().strip()
        runner = JobRunner(psm.ResultStore(root))
        status = wait(runner, running, is_at_work)
        app.kill()
    assert status.worker is not None
    psutil.Process(status.worker).wait(10)
    assert runner.status(running).state == "interrupted"
    assert runner.status(waiting).state == "interrupted"
    assert runner.store.query().empty


def test_another_process_with_the_same_number_is_not_the_worker(tmp_path: Path) -> None:
    runner = JobRunner(psm.ResultStore(tmp_path))
    own = process_started(os.getpid())
    for started, state in ((own, "running"), (own - 100, "interrupted")):
        folder = JobFolder(tmp_path, f"j{state}")
        folder.write(JobStatus(folder.id, "running", 1, 0.0, worker=os.getpid(), worker_started=started))
        assert runner.status(folder.id).state == state


def test_jobs_that_do_not_exist(runner: JobRunner) -> None:
    for act in (runner.status, runner.cancel, runner.resubmit, runner.position):
        with pytest.raises(UnknownNameError, match="unknown job 'nothing'"):
            act("nothing")
    assert not (runner.store.root / "jobs" / "nothing").exists()


def test_requests_and_figures_of_a_status(tmp_path: Path) -> None:
    points = (
        Point("a", method=LONG),
        Point(NETWORK, plan={"a": psm.Prune(fraction=0.5)}),
        Point(NETWORK, plan={"a": psm.TensorTrain(rank=2)}, budget=0.3),
    )
    folder = JobFolder(tmp_path, "j")
    request = JobRequest("small:net", points, "d.npz", "cpu")
    folder.write_request(request)
    assert folder.read_request() == request
    status = JobStatus(
        "j", "running", 4, 0.0, done=1, part=0.5, step=5, steps=10, started=100.0, history=(0.5, 0.25)
    )
    folder.write(status)
    assert folder.read() == status
    assert status.progress == pytest.approx(1.5 / 4)
    assert status.eta_seconds(now=130.0) == pytest.approx(30 / 1.5 * 2.5)
    assert JobStatus("j", "queued", 4, 0.0).eta_seconds() is None
