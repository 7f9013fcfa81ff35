"""PSM against its rivals in one run: `python -m tests.benchmarks.psm [--quick] [--threads N]`.

Prints one table of fits, on the CPU with all cores, then the ratios that the project is measured by, each
with its bar. Rivals of the same layer and budget run in turn; what is short runs several times, and the
median counts. `--quick` takes fewer layers, budgets and repetitions.

Run it on a quiet machine. Where other programs hold a core, threads wait for each other: pyfaust, which joins
them often, then takes up to ten times as long. `--threads 1` compares fairly on a machine in use: it counts
the seconds of the processor, not those of the clock.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch

import psm_core as psm
from tests.benchmarks import activations, rivals
from tests.benchmarks.layers import HINT, Layer, collect

# A mistaken processor type or cache size would slow pyfaust, and NumPy, down.
UNWANTED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
JOINT, SVD, PRUNE, SUM = "PSM joint", "SVD", "pruning", "low-rank + sparse"
PALM, PYFAUST, EQUAL = "PSM palm4msa", "pyfaust palm4msa", "PSM joint, as many floats as pyfaust"


@dataclass(frozen=True)
class Scale:
    """How much is run."""

    budgets: tuple[float, ...]
    iterations: dict[int, int]  # of PALM4MSA, by Q
    largest: int  # entries of a layer; one with more is fitted at 10 % only, without PALM4MSA
    repeats: int
    short: float  # seconds up to which a run is repeated
    shares: int  # of the low-rank part in low-rank + sparse, and its sweeps
    sweeps: int


FULL = Scale((0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3), {2: 50, 3: 50, 4: 50}, 10**9, 3, 2.0, 8, 20)
QUICK = Scale((0.02, 0.05, 0.1, 0.2, 0.3), {2: 50, 3: 10, 4: 10}, 300_000, 2, 0.3, 4, 5)


@dataclass(frozen=True)
class Row:
    """One line of the table; `budget` is the share of the weights asked for, or stored by PALM4MSA."""

    layer: Layer
    budget: float
    method: str
    error: float
    seconds: float
    floats: int
    nbytes: int


@dataclass(frozen=True)
class Job:
    """What is timed, and how its result is measured: (error, floats, bytes)."""

    run: Callable[[], Any]
    measure: Callable[[Any], tuple[float, int, int]]


def fit_job(layer: Layer, method: Callable[[], Any]) -> Job:
    """The fit of a method of psm_core."""
    return Job(
        lambda: method().fit(layer.weight, device="cpu"),
        lambda f: (f.relative_error(layer.weight), f.parameters, f.nbytes),
    )


def timed(jobs: dict[str, Job], scale: Scale) -> Iterator[tuple[str, float, tuple[float, int, int]]]:
    """All jobs once, then the short ones again and again, in turn: name, median of the seconds, measures."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    measures = {}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for turn in range(scale.repeats):
        for name, job in jobs.items():
            if turn and seconds[name][0] > scale.short:
                continue
            start = clock()
            result = job.run()
            seconds[name].append(clock() - start)
            if not turn:
                measures[name] = job.measure(result)
    for name in jobs:
        yield name, statistics.median(seconds[name]), measures[name]


def at_budgets(layer: Layer, scale: Scale) -> Iterator[Row]:
    """The joint fit and its special cases at each budget."""
    weight, matrix = layer.weight, layer.matrix
    for budget in scale.budgets if weight.numel() <= scale.largest else (0.1,):
        floats = int(budget * weight.numel() + 1e-6)
        setting = {name: psm.at_budget(name, weight.shape, budget) for name in ("psm", "prune")}
        jobs = {
            JOINT: fit_job(layer, lambda s=setting: s["psm"]),
            PRUNE: fit_job(layer, lambda s=setting: s["prune"]),
            SUM: Job(
                lambda floats=floats: rivals.low_rank_plus_sparse(matrix, floats, scale.shares, scale.sweeps),
                lambda found: (found.error(matrix), found.floats, found.nbytes),
            ),
        }
        if floats >= sum(matrix.shape):
            jobs[SVD] = fit_job(layer, lambda b=budget: psm.at_budget("svd", weight.shape, b))
        for method, seconds, measures in timed(jobs, scale):
            yield Row(layer, budget, method, measures[0], seconds, *measures[1:])


def palm4msa(layer: Layer, scale: Scale) -> Iterator[Row]:
    """PALM4MSA in the same sets, and the joint fit with as many non-zeros as pyfaust's two factors."""
    for Q, iterations in scale.iterations.items():
        yield from with_factors(layer, Q, iterations, scale)


def with_factors(layer: Layer, Q: int, iterations: int, scale: Scale) -> Iterator[Row]:
    """The same for one Q, with the K whose sets hold about 10 % of the weights."""
    weight, matrix = layer.weight, layer.matrix
    # The sets allow more non-zeros than they mostly hold.
    method = psm.at_budget("psm", weight.shape, 0.11, Q=Q, algorithm="palm4msa", iterations=iterations)
    stored: list[int] = []

    def reference() -> Any:
        faust = rivals.pyfaust_palm4msa(matrix, int(method.K), Q, iterations)
        stored.append(faust.nnz_sum())
        return faust

    def measure(faust: Any) -> tuple[float, int, int]:
        found = rivals.of_faust(faust, matrix)
        return found.error(matrix), found.floats, found.nbytes

    jobs = {f"{PYFAUST} Q={Q}": Job(reference, measure), f"{PALM} Q={Q}": fit_job(layer, lambda: method)}
    if Q == 2:
        jobs[EQUAL] = fit_job(layer, lambda: psm.at_budget("psm", weight.shape, stored[0] / weight.numel()))
    for name, seconds, measures in timed(jobs, scale):
        yield Row(layer, measures[1] / weight.numel(), name, measures[0], seconds, *measures[1:])


def table(layers: Iterable[Layer], scale: Scale) -> list[Row]:
    """Run everything, and print each row as it comes."""
    print(f"\n{'layer':28}{'shape':>10}{'budget':>8}  {'method':38}", end="")
    print(f"{'error':>8}{'seconds':>10}{'floats':>9}{'bytes':>10}")
    rows = []
    for layer in layers:
        for source in (at_budgets, palm4msa):
            if source is palm4msa and not (rivals.has_pyfaust() and layer.weight.numel() <= scale.largest):
                continue
            for row in source(layer, scale):
                rows.append(row)
                print(f"{layer.name:28}{layer.shape:>10}{row.budget:8.2%}  {row.method:38}", end="")
                print(f"{row.error:8.4f}{row.seconds:10.3f}{row.floats:9,}{row.nbytes:10,}", flush=True)
    return rows


def mean(values: Iterable[float]) -> float:
    """Geometric mean; not a number where there are none."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def verdict(title: str, value: float, bar: float, strict: bool = False) -> str:
    """A ratio beside its bar."""
    met = value < bar if strict else value <= bar
    return f"{title:88}{value:8.3f}   bar {'<' if strict else '≤'} {bar:.3f}   {'met' if met else 'MISSED'}"


def ratios(rows: list[Row]) -> None:
    """Print the ratios (a) to (d)."""
    groups: dict[tuple[str, float], dict[str, Row]] = {}
    fausts: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.method in (JOINT, SVD, PRUNE, SUM):
            groups.setdefault((row.layer.name, row.budget), {})[row.method] = row
        else:
            fausts.setdefault(row.layer.name, {})[row.method] = row

    print("\nErrors of the joint fit, equal floats")
    shares: dict[bool, list[float]] = {True: [], False: []}
    worst: dict[bool, tuple[float, str]] = {True: (0.0, ""), False: (0.0, "")}
    for (name, budget), group in groups.items():
        joint = group.pop(JOINT)
        trained, rival = joint.layer.trained, min(group.values(), key=lambda row: row.error)
        place = f"{name}, {budget:.0%}, {rival.method}"
        worst[trained] = max(worst[trained], (joint.error / rival.error, place))
        if budget in (0.05, 0.1, 0.2):
            special = min(row.error for row in group.values() if row.method != SUM)
            shares[trained].append(joint.error / special)
    title = "÷ better of SVD and pruning, geometric mean at 5, 10, 20 %"
    print(verdict(f"(a) {title}: {len(shares[True])} of trained layers", mean(shares[True]), 0.86))
    print(f"{f'    the same: {len(shares[False])} of synthetic matrices':88}{mean(shares[False]):8.3f}")
    for trained, (largest, place) in worst.items():
        kind = "trained" if trained else "synthetic"
        title = f"(b) ÷ best of SVD, pruning, low-rank + sparse, largest, {kind}"
        print(verdict(title, largest, 1.0, strict=True) + f"   ({place})")
    if not fausts:
        print(f"(c), (d) skipped: pyfaust is not installed; run: {HINT}")
        return

    print("\nJoint ÷ pyfaust's PALM4MSA (Q = 2), as many non-zeros: error, time")
    pairs = {name: (found[EQUAL], found[f"{PYFAUST} Q=2"]) for name, found in fausts.items()}
    for name, (ours, theirs) in pairs.items():
        print(f"    {name:84}{ours.error / theirs.error:8.3f}{ours.seconds / theirs.seconds:8.3f}")
    trained_pairs = [pair for pair in pairs.values() if pair[0].layer.trained]
    title = f"geometric mean over {len(trained_pairs)} trained layers"
    print(verdict(f"(c) error, {title}", mean(a.error / b.error for a, b in trained_pairs), 0.8))
    print(verdict(f"(c) time, {title}", mean(a.seconds / b.seconds for a, b in trained_pairs), 0.5))

    print("\nPALM4MSA ÷ pyfaust's, same sets and iterations: error, time")
    same = []
    for name, found in fausts.items():
        for method, theirs in found.items():
            if method.startswith(PYFAUST):
                ours = found[method.replace(PYFAUST, PALM)]
                pair = ours.error / theirs.error, ours.seconds / theirs.seconds
                same.append((*pair, f"{name}, {method[-3:]}", ours.layer.trained))
                print(f"    {same[-1][2]:84}{same[-1][0]:8.3f}{same[-1][1]:8.3f}")
    print(verdict("(d) error, largest", max(same)[0], 1.01) + f"   ({max(same)[2]})")
    times = [pair[1] for pair in same if pair[3]]
    print(verdict(f"(d) time, geometric mean of {len(times)} of trained layers", mean(times), 1 / 6))


def main(arguments: list[str]) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.psm", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer layers, budgets and repetitions")
    parser.add_argument("--threads", type=int, choices=range(1, 1025), metavar="N", help="default: all cores")
    options = parser.parse_args(arguments)
    environment = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    if options.threads:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    if environment != dict(os.environ):  # too late for libraries that are loaded: start again
        os.execve(sys.executable, [sys.executable, "-m", "tests.benchmarks.psm", *arguments], environment)
    quick = options.quick
    scale = QUICK if quick else FULL
    start = time.monotonic()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads of {os.cpu_count()} cores")
    if (busy := psutil.cpu_percent(2.0)) > 10 and torch.get_num_threads() > 1:
        print(f"{busy:.0f} % of the machine is in use: times are not to be trusted; try --threads 1")
    layers = collect(quick)
    # First calls load libraries and start threads.
    warm = Layer("", torch.randn(64, 128))
    psm.PSM(K=3).fit(warm.weight, device="cpu")
    if rivals.has_pyfaust():
        rivals.pyfaust_palm4msa(warm.matrix, 3, 2, 2)
    rows = table(layers, scale)
    ratios(rows)
    activations.report(quick)
    print(f"\n{time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
