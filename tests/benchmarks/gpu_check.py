"""Fits on an accelerator against those on the CPU, then the joint fit of large layers in seconds and memory.

`python -m tests.benchmarks.gpu_check [--device cuda|mps|cpu]` ends within 4 minutes, with exit code 0 if the
two agree. Without an accelerator it says so; `--device cpu` runs the same checks on small layers.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import psm_core as psm

SECONDS = 235.0  # for the whole
AGREE = 0.01  # the most by which an error may differ
SAME = 1e-3  # the most by which outputs may differ, relative to their size: convolutions may use TF32
SIDES = (1024, 2048, 4096, 8192)
SHAPES: tuple[tuple[int, ...], ...] = ((192, 384), (384, 192), (64, 64, 3, 3), (256, 1152))
SMALL_SIDES, SMALL_SHAPES = (128, 256, 512), ((48, 80), (80, 48), (32, 16, 3, 3))
METHODS: dict[str, dict[str, Any]] = {
    "psm joint": {"name": "psm"},
    "psm palm4msa Q=2": {"name": "psm", "algorithm": "palm4msa", "iterations": 30},
    "psm palm4msa Q=3": {"name": "psm", "algorithm": "palm4msa", "iterations": 30, "Q": 3},
    "svd": {"name": "svd"},
    "prune": {"name": "prune"},
}


class OutOfTimeError(Exception):
    """Raised inside a fit to stop it."""


def weight_like_trained(shape: tuple[int, ...], device: str = "cpu") -> Tensor:
    """A decaying spectrum and a few large entries; made without a decomposition, so at once in any size."""
    random = torch.Generator(device).manual_seed(0)
    m, n = shape[0], torch.Size(shape[1:]).numel()
    rank = max(min(m, n) // 4, 1)
    left, right = (torch.randn(*side, generator=random, device=device) for side in ((m, rank), (rank, n)))
    decay = torch.logspace(0, -1.5, rank, device=device)
    matrix = (left * decay) @ right / decay.norm() + torch.randn(m, n, generator=random, device=device) / 2
    spikes = torch.rand(m, n, generator=random, device=device) < 0.02
    return (matrix + 3 * spikes * torch.randn(m, n, generator=random, device=device)).reshape(shape)


def statistics_of_inputs(n: int) -> psm.Calibration:
    """The second moment of inputs that are strongly correlated."""
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * n, n, generator=random, dtype=torch.float64)
    inputs = inputs * torch.logspace(0, -1.5, n, dtype=torch.float64) + inputs.mean(1, keepdim=True)
    return psm.Calibration(inputs.T @ inputs / len(inputs), len(inputs))


def agreement(device: str, shapes: tuple[tuple[int, ...], ...]) -> Iterator[bool]:
    """Each method on each shape and on either metric, here and there."""
    print(f"{'shape':>14}  {'method':18}{'metric':12}{'cpu':>9}{device:>9}{'outputs':>10}")
    for shape in shapes:
        weight = weight_like_trained(shape)
        statistics = statistics_of_inputs(weight[0].numel())
        for title in METHODS:
            for metric, used in {"weights": None, "activations": statistics}.items():
                print(f"{'×'.join(map(str, shape)):>14}  {title:18}{metric:12}", end="")
                yield succeeds(compare, title, weight, device, used)


def succeeds(check: Callable[..., tuple[str, bool]], *arguments: Any) -> bool:
    """Run a check and print what it says; an error is a failure, not the end."""
    try:
        text, good = check(*arguments)
    except (psm.errors.PsmError, RuntimeError) as error:
        text, good = f"{type(error).__name__}: {error}".splitlines()[0], False
    print(text + ("" if good else "   FAILED"), flush=True)
    return good


def compare(title: str, weight: Tensor, device: str, statistics: psm.Calibration | None) -> tuple[str, bool]:
    """The errors of a fit on the CPU and on the device, and how far the outputs there are off."""
    method = psm.at_budget(shape=weight.shape, fraction=0.1, **METHODS[title])
    moved = weight.to(device)
    here = method.fit(weight, device="cpu", calibration=statistics).history[-1]
    fitted = method.fit(moved, device=device, calibration=statistics)
    there, differs = fitted.history[-1], outputs_differ(fitted, moved)
    good = abs(there - here) <= AGREE * here + 1e-6 and differs <= SAME
    return f"{here:9.4f}{there:9.4f}{differs:10.1e}", good


def outputs_differ(fitted: psm.Factorization, weight: Tensor) -> float:
    """Outputs of the module, where the weight is and in its type, against its dense form on the CPU."""
    random = torch.Generator().manual_seed(2)
    layer: nn.Module
    if weight.dim() == 2:
        layer, x = nn.Linear(weight.shape[1], len(weight)), torch.randn(32, weight.shape[1], generator=random)
    else:
        layer = nn.Conv2d(weight.shape[1], len(weight), tuple(weight.shape[2:]), padding=1)
        x = torch.randn(4, weight.shape[1], 9, 9, generator=random)
    module = fitted.to_module(layer.to(weight))
    with torch.no_grad():
        found = module(x.to(weight)).to("cpu", torch.float32)
        layer.to("cpu", torch.float32).get_parameter("weight").copy_(fitted.reconstruct().cpu())
        expected = layer(x)
    return float((found - expected).norm() / expected.norm())


def types(device: str, shape: tuple[int, ...]) -> Iterator[bool]:
    """Every method takes weights of each type, its factors come back where the weight is, its module runs."""
    print(f"\n{'weight':>14}  {'method':18}{'error':>9}{'outputs':>10}")
    for kind in [torch.float32, torch.bfloat16, torch.float16] + [torch.float64] * (device != "mps"):
        weight = weight_like_trained(shape).to(device, kind)
        for title in METHODS:
            print(f"{str(kind).removeprefix('torch.'):>14}  {title:18}", end="")
            yield succeeds(take, title, weight)


def take(title: str, weight: Tensor) -> tuple[str, bool]:
    """A fit where the weight is, in its type."""
    fitted = psm.at_budget(shape=weight.shape, fraction=0.1, **METHODS[title]).fit(weight)
    found, error, differs = fitted.reconstruct(), fitted.history[-1], outputs_differ(fitted, weight)
    wanted = torch.float64 if weight.dtype == torch.float64 else torch.float32
    good = found.dtype == wanted and found.device == weight.device and 0 < error < 1
    return f"{error:9.4f}{differs:10.1e}", good and differs <= max(SAME, 4 * torch.finfo(weight.dtype).eps)


def timings(device: str, sides: tuple[int, ...], end: float) -> None:
    """The joint fit at 10 % of square layers, the largest last; each may take what is left, no longer."""
    print(f"\n{'layer':>12}{'seconds':>10}{'peak memory':>14}{'error':>9}   joint fit at 10 %")
    for side in sides:
        sizes = f"{side}×{side}"
        weight = weight_like_trained((side, side), device)
        method = psm.at_budget("psm", weight.shape, 0.1)
        seen = [psm.Step(0, 1, 1.0)]

        def guard(step: psm.Step, seen: list[psm.Step] = seen) -> None:
            seen[0] = step
            if time.monotonic() > end:
                raise OutOfTimeError

        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        try:
            result = f"{method.fit(weight, guard, device=device).history[-1]:9.4f}"
        except OutOfTimeError:
            step = seen[0]
            result = f"{step.relative_error:9.4f}   stopped at iteration {step.iteration} of {step.total}"
        except psm.errors.FitError as error:
            result = f"   {error}"
        memory = f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB" if device == "cuda" else "not known"
        print(f"{sizes:>12}{time.monotonic() - start:10.2f}{memory:>14}{result}", flush=True)


def main(arguments: list[str]) -> int:
    """Run the checks and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu_check", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--device", choices=("cuda", "mps", "cpu"), help="default: the accelerator there is")
    begun = time.monotonic()
    device = parser.parse_args(arguments).device or accelerator()
    if not device:
        print("no GPU: torch finds neither CUDA nor MPS here, so there is nothing to check; see --device cpu")
        return 0
    small = device == "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else device
    print(f"torch {torch.__version__}, {name}")
    results: list[bool] = []

    def stop() -> None:
        """The last resort: a call that takes longer than what is left cannot be interrupted."""
        print("\nstopped: the time is up", flush=True)
        os._exit(0 if finished.is_set() and all(results) else 1)

    finished = threading.Event()
    timer = threading.Timer(SECONDS, stop)
    timer.daemon = True
    timer.start()
    psm.PSM(K=3).fit(weight_like_trained((64, 128)).to(device), device=device)  # loads libraries
    results += agreement(device, SMALL_SHAPES if small else SHAPES)
    results += types(device, SMALL_SHAPES[0] if small else SHAPES[0])
    finished.set()
    print(f"\nagreement: {sum(results)} of {len(results)} checks, after {time.monotonic() - begun:.0f} s")
    timings(device, SMALL_SIDES if small else SIDES, begun + SECONDS - 10)
    timer.cancel()
    return 0 if all(results) else 1


def accelerator() -> str:
    """The name of the accelerator that torch finds; empty if there is none."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
