"""The joint fit against the methods it contains, recomputed in float64 by NumPy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import psm_core as psm
from psm_core.methods._joint import JointFit, joint
from psm_core.methods._palm4msa import palm4msa
from psm_core.methods.prune import pruned
from psm_core.progress import JobCancelled


def quiet(iteration: int, total: int, error: float) -> None:
    assert 0 <= iteration <= total
    assert math.isfinite(error)


def fit(target: Tensor, nonzeros: int, iterations: int = 40, tolerance: float = 0.0) -> JointFit:
    return joint(
        target.clone(), nonzeros=nonzeros, iterations=iterations, tolerance=tolerance, seed=0, report=quiet
    )


def relative_error(target: Tensor, found: JointFit | list[Tensor]) -> float:
    exact = target.double().numpy()
    factors = found if isinstance(found, list) else found.factors
    matrices = [factor.double().numpy().copy() for factor in factors]
    scale = np.abs(exact).max() or 1.0
    if isinstance(found, JointFit) and found.ones:
        side = 0 if exact.shape[0] <= exact.shape[1] else 1
        count = min(exact.shape)
        padded = matrices[side] if side == 0 else matrices[side].T
        padded[:, -count:] += np.eye(count)  # [0 I], or [0; I] transposed
    product = np.eye(len(exact)) / scale
    for matrix in matrices:
        product = product @ matrix
    return float(np.linalg.norm(product - exact / scale) / (np.linalg.norm(exact / scale) or 1.0))


def stored(found: JointFit | list[Tensor]) -> int:
    factors = found if isinstance(found, list) else found.factors
    return sum(int(np.count_nonzero(factor.numpy())) for factor in factors)


def pruning_error(matrix: np.ndarray, nonzeros: int) -> float:
    return float(np.linalg.norm(np.sort(np.abs(matrix), axis=None)[: max(matrix.size - nonzeros, 0)]))


def rival_error(target: Tensor, nonzeros: int) -> float:
    """The best of truncated SVD, pruning and low-rank + sparse (as a sum), over all ranks."""
    exact = target.double().numpy()
    floats = sum(exact.shape)
    U, s, V = np.linalg.svd(exact, full_matrices=False)
    rests = (exact - (U[:, :r] * s[:r]) @ V[:r] for r in range(min(nonzeros // floats, len(s)) + 1))
    errors = [pruning_error(rest, nonzeros - rank * floats) for rank, rest in enumerate(rests)]
    return min(errors) / float(np.linalg.norm(exact))


def matrices() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    smooth = torch.nn.functional.interpolate(normal(64, 24, 2, 2), size=3, mode="bilinear").reshape(64, 216)
    decay = (
        torch.linalg.qr(normal(96, 96)).Q * torch.logspace(0, -2, 96) @ torch.linalg.qr(normal(160, 96)).Q.T
    )
    return {
        "heavy-tailed entries": (normal(80, 12) @ normal(12, 120) / 3).sinh(),
        "decaying spectrum": decay,
        "flat spectrum": torch.linalg.qr(normal(96, 96)).Q,
        "random": normal(120, 80),
        "convolution": smooth + 0.05 * normal(64, 216),
        "low-rank + spikes": normal(90, 3) @ normal(3, 110)
        + 8 * normal(90, 110) * (torch.rand(90, 110, generator=random) < 0.02),
        "wide": (normal(24, 8) @ normal(8, 500) / 2).sinh(),
    }


@pytest.mark.parametrize("fraction", [0.02, 0.05, 0.1, 0.2, 0.3])
def test_beats_what_it_contains(fraction: float) -> None:
    for name, target in matrices().items():
        nonzeros = int(fraction * target.numel())
        factors = fit(target, nonzeros)
        assert stored(factors) <= nonzeros, name
        assert relative_error(target, factors) < rival_error(target, nonzeros), name


def test_never_loses_at_tiny_budgets() -> None:
    no_structure = torch.randn(80, 120, generator=torch.Generator().manual_seed(4)).sinh()
    for name, target in {**matrices(), "no structure": no_structure}.items():
        exact = target.double().numpy()
        s = np.linalg.svd(exact, compute_uv=False)
        for nonzeros in (1, 7, sum(target.shape), int(0.05 * target.numel())):
            factors = fit(target, nonzeros, iterations=15)
            lost = min(
                pruning_error(exact, nonzeros), float(np.linalg.norm(s[nonzeros // sum(exact.shape) :]))
            )
            assert stored(factors) <= nonzeros, name
            assert relative_error(target, factors) <= lost / np.linalg.norm(exact) * (1 + 1e-6), name


def test_far_below_palm4msa_at_equal_nonzeros() -> None:
    ratios = []
    for target in matrices().values():
        rival = palm4msa(target, K=4, Q=2, iterations=40, tolerance=0.0, seed=0, report=quiet)
        ratios.append(relative_error(target, fit(target, stored(rival))) / relative_error(target, rival))
    assert math.prod(ratios) ** (1 / len(ratios)) < 0.85
    assert max(ratios) < 1


def test_spends_its_budget_and_drops_empty_units() -> None:
    target = matrices()["convolution"]
    found = fit(target, 1500)
    left, right = found.factors
    free = left.shape[1] - min(target.shape)  # the units without a one
    assert found.ones
    assert stored(found) == 1500
    assert bool((left[:, :free] != 0).any(0).all())
    assert bool((right[:free] != 0).any(1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finds_a_planted_product(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(1)
    left = torch.randn(120, 30, generator=random, dtype=dtype)
    right = torch.randn(30, 150, generator=random, dtype=dtype)
    left *= torch.rand(120, 30, generator=random) < 0.1
    right *= torch.rand(30, 150, generator=random) < 0.1
    nonzeros = stored([left, right])
    factors = fit(left @ right, 2 * nonzeros, iterations=150)
    assert relative_error(left @ right, factors) < 0.2 * rival_error(left @ right, 2 * nonzeros)


def test_low_rank_target_is_met() -> None:
    random = torch.Generator().manual_seed(2)
    target = torch.randn(60, 3, generator=random) @ torch.randn(3, 80, generator=random)
    assert relative_error(target, fit(target, 3 * 140)) < 1e-5


def test_a_full_budget_returns_the_target() -> None:
    target = matrices()["random"]
    for nonzeros in (target.numel(), 10 * target.numel()):
        (factor,) = fit(target, nonzeros).factors
        assert torch.equal(factor, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edge_cases_stay_finite(dtype: torch.dtype) -> None:
    plain = torch.randn(12, 18, generator=torch.Generator().manual_seed(3), dtype=dtype)
    cases = {
        "zero": torch.zeros(5, 7, dtype=dtype),
        "rank 1": plain[:, :1] @ plain[:1],
        "one row": plain[:1],
        "one column": plain[:, :1],
        "one entry": plain[:1, :1],
        "tiny": plain * 1e-30,
        "huge": plain * 1e30,
        "mixed": plain * 10 ** torch.linspace(-30, 30, plain.numel(), dtype=dtype).view_as(plain),
        "duplicated rows": plain[:1].repeat(10, 1),
    }
    for name, target in cases.items():
        for nonzeros, iterations in ((1, 5), (40, 1), (40, 25), (100, 2)):
            factors = fit(target, nonzeros, iterations=iterations)
            assert all(factor.isfinite().all() and factor.dtype == dtype for factor in factors.factors), name
            assert stored(factors) <= nonzeros, name
            assert relative_error(target, factors) <= 1 + 1e-6, name


def test_same_bits_again() -> None:
    target = matrices()["heavy-tailed entries"]
    first, second = fit(target, 900), fit(target, 900)
    assert all(torch.equal(a, b) for a, b in zip(first.factors, second.factors, strict=True))


def test_tolerance_ends_the_fit_early() -> None:
    seen: list[int] = []
    target = matrices()["random"]
    joint(
        target,
        nonzeros=900,
        iterations=100,
        tolerance=0.5,
        seed=0,
        report=lambda i, n, e: seen.append(i),
    )
    assert seen[-1] < 100


def test_raising_from_the_report_cancels() -> None:
    def cancel(iteration: int, total: int, error: float) -> None:
        raise JobCancelled

    with pytest.raises(JobCancelled):
        joint(torch.randn(30, 40), nonzeros=200, iterations=10, tolerance=0.0, seed=0, report=cancel)


def activations(n: int) -> Tensor:
    """Correlated, positive and of different scales, as after a ReLU."""
    random = torch.Generator().manual_seed(7)
    mixed = torch.randn(500, 12, generator=random) @ torch.randn(12, n, generator=random)
    inputs = (mixed + 0.5 * torch.randn(500, n, generator=random)).relu() * torch.logspace(0, -1, n)
    return inputs.T @ inputs / 500


def output_error(target: Tensor, found: JointFit | list[Tensor], metric: Tensor) -> float:
    """In float64, from the product of the factors with their ones."""
    eye = torch.eye(min(target.shape))
    factors = list(found) if isinstance(found, list) else [factor.clone() for factor in found.factors]
    if isinstance(found, JointFit) and found.ones:
        side = 0 if target.shape[0] <= target.shape[1] else 1
        factors[side].narrow(1 - side, factors[side].shape[1 - side] - len(eye), len(eye)).add_(eye)
    product = factors[0].double() if len(factors) == 1 else factors[0].double() @ factors[1].double()
    exact, C = target.double(), metric.double()
    rest = exact - product
    return float((((rest @ C) * rest).sum() / ((exact @ C) * exact).sum()).sqrt())


@pytest.mark.parametrize("iterations", [1, 40])
def test_in_a_metric_it_beats_pruning_svd_and_the_plain_fit(iterations: int) -> None:
    for name, target in matrices().items():
        metric = activations(target.shape[1])
        C = metric.double().numpy()
        exact = target.double().numpy()
        root = np.linalg.cholesky(C + 1e-9 * np.eye(len(C)))
        s = np.linalg.svd(exact @ root, compute_uv=False)
        for fraction in (0.03, 0.2):
            nonzeros = int(fraction * target.numel())
            found = joint(
                target.clone(), nonzeros=nonzeros, iterations=iterations, tolerance=0.0, seed=0,
                report=quiet, metric=metric,
            )  # fmt: skip
            error = output_error(target, found, metric)
            rank = nonzeros // sum(target.shape)
            assert stored(found) <= nonzeros, name
            assert error <= output_error(target, [pruned(target, nonzeros, metric)], metric) * (1 + 1e-4), (
                name
            )
            assert error <= np.linalg.norm(s[rank:]) / np.linalg.norm(s) * (1 + 1e-4), name
            if iterations > 1:
                plain = output_error(target, fit(target, nonzeros, iterations), metric)
                assert error < plain or error < 0.01, name  # nearly exact fits converge more slowly


def test_reported_errors_are_those_in_the_metric() -> None:
    target = matrices()["convolution"]
    metric = activations(target.shape[1])
    seen: list[float] = []
    found = joint(
        target.clone(), nonzeros=1500, iterations=40, tolerance=0.0, seed=0, metric=metric,
        report=lambda i, n, error: seen.append(error),
    )  # fmt: skip
    assert seen[-1] == pytest.approx(output_error(target, found, metric), rel=1e-3)
    assert max(a / b for a, b in zip(seen[-25:], seen[-24:], strict=False)) < 2  # no cliff at the refit


def test_a_diagonal_metric_is_the_plain_fit_of_scaled_columns() -> None:
    target = matrices()["random"]
    plain = fit(target, 900)
    same = joint(
        target.clone(), nonzeros=900, iterations=40, tolerance=0.0, seed=0, report=quiet,
        metric=3 * torch.eye(target.shape[1]),
    )  # fmt: skip
    assert relative_error(target, same) == pytest.approx(relative_error(target, plain), rel=1e-5)


@pytest.mark.parametrize("in_metric", [False, True])
def test_long_fits_stay_in_range_and_are_no_worse(in_metric: bool) -> None:
    weight = psm.load_model("demo:fashion-cnn").get_submodule("features.conv2").weight.detach().flatten(1)
    errors = {}
    for iterations in (30, 250):
        seen: list[float] = []
        found = joint(
            weight.clone(), nonzeros=int(0.3 * weight.numel()), iterations=iterations, tolerance=0.0, seed=0,
            report=lambda i, n, error, seen=seen: seen.append(error),
            metric=activations(weight.shape[1]) if in_metric else None,
        )  # fmt: skip
        assert all(map(math.isfinite, seen))
        assert max(float(factor.abs().max()) for factor in found.factors) < 1e3
        errors[iterations] = seen[-1]
    assert errors[250] < errors[30]
