"""What a fit to activations gains on the demonstration networks, on images it has not seen."""

from __future__ import annotations

from torch import nn

import psm_core as psm
from psm_core.experiments.evaluation import Evaluation

NETWORKS = ("demo:fashion-mlp", "demo:fashion-cnn")
SMALLEST = 1000  # weights of a layer


def report(quick: bool) -> None:
    """Print section (e): layer by layer, and whole networks."""
    budgets = (0.02,) if quick else (0.02, 0.05, 0.1)
    models = {name: psm.load_model(name) for name in NETWORKS}
    print("\n(e) PSM fitted to the weights → to the activations of demo:train")
    print(f"    {'layer':36}{'shape':>12}{'budget':>8}   error of the outputs on demo:test")
    for name, model in models.items():
        _layers(name, model, budgets, quick)
    print(f"\n    {'network':36}{'budget':>8}   accuracy on demo:test, 95 % interval")
    for name in NETWORKS[:1] if quick else NETWORKS:  # the second takes minutes
        model = models[name]
        full = psm.evaluate(model, "demo:test")
        print(f"    {name:36}{1:8.0%}   {_percent(full)}, n = {full.samples:,}")
        statistics = psm.calibrate(model, "demo:train", device="cpu")
        for budget in budgets:
            plan = psm.uniform_plan(model, "psm", budget).layers
            plain, fitted = (
                psm.evaluate(psm.compress(model, plan, device="cpu", calibration=used), "demo:test")
                for used in (None, statistics)
            )
            print(f"    {name:36}{budget:8.0%}   {_percent(plain)} → {_percent(fitted)}", flush=True)


def _layers(network: str, model: nn.Module, budgets: tuple[float, ...], quick: bool) -> None:
    seen, unseen = (psm.calibrate(model, data, device="cpu") for data in ("demo:train", "demo:test"))
    for name, statistics in seen.items():
        weight = model.get_parameter(f"{name}.weight").detach()
        if weight.numel() < SMALLEST or (quick and weight.numel() > 100_000):
            continue
        for budget in budgets:
            method = psm.at_budget("psm", weight.shape, budget)
            plain, fitted = (
                method.fit(weight, device="cpu", calibration=used).output_error(weight, unseen[name])
                for used in (None, statistics)
            )
            title, shape = f"{network} {name}", "×".join(map(str, weight.shape))
            print(f"    {title:36}{shape:>12}{budget:8.0%}   {plain:.4f} → {fitted:.4f}", end="")
            print(f"   ratio {fitted / plain:.3f}", flush=True)


def _percent(found: Evaluation) -> str:
    return f"{found.accuracy:.2%} ({found.low:.2%} to {found.high:.2%})"
