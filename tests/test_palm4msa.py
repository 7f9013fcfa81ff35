"""PALM4MSA against pyfaust, its projections against brute force, and its behaviour at the edges."""

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from psm_core.methods._palm4msa import hierarchical, palm4msa
from psm_core.methods._sparsity_sets import CONSTRAINTS, project
from psm_core.progress import JobCancelled

ALGORITHMS = (palm4msa, hierarchical)


def quiet(iteration: int, total: int, error: float) -> None:
    assert 0 <= iteration <= total
    assert math.isfinite(error)


def fit(
    algorithm, target: Tensor, K: int, Q: int, constraint="splincol", iterations=20, tolerance=0.0, seed=0
):
    return algorithm(
        target,
        K=K,
        Q=Q,
        constraint=constraint,
        iterations=iterations,
        tolerance=tolerance,
        seed=seed,
        report=quiet,
    )


def relative_error(target: Tensor, factors: list[Tensor]) -> float:
    """Recomputed in float64 by NumPy, on targets of unit size."""
    exact = target.double().numpy()
    scale = np.abs(exact).max() or 1.0
    product = np.eye(len(exact)) / scale
    for factor in factors:
        product = product @ factor.double().numpy()
    return float(np.linalg.norm(product - exact / scale) / (np.linalg.norm(exact / scale) or 1.0))


@functools.cache
def trained_layers() -> dict[str, Tensor]:
    """Real weights: a network of ccexam, and a small one trained here on scikit-learn's digits."""
    ccexam = pytest.importorskip("ccexam")
    datasets = pytest.importorskip("sklearn.datasets")
    state = torch.load(
        Path(ccexam.__file__).parent / "weights/mnist.pth", map_location="cpu", weights_only=True
    )
    conv = state["features.3.weight"].reshape(64, -1)
    dense = state["classifier.0.weight"][:, :512]
    images, labels = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float(), torch.tensor(labels)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in ((64, 160), (160, 96), (96, 10))))
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        hidden = net[1](net[0](x).relu()).relu()
        torch.nn.functional.cross_entropy(net[2](hidden), y).backward()
        optimizer.step()
    return {
        "conv 64×288": conv,
        "dense 128×512": dense,
        "tall 288×64": conv.T.contiguous(),
        "digits 160×64": net[0].weight.detach(),
        "digits 96×160": net[1].weight.detach(),
        "square 96×96": net[1].weight.detach()[:, :96].contiguous(),
    }


def pyfaust_error(target: Tensor, K: int, Q: int, iterations: int) -> float:
    pytest.importorskip("pyfaust")
    from pyfaust.fact import palm4msa as reference
    from pyfaust.factparams import ParamsPalm4MSA, StoppingCriterion
    from pyfaust.proj import splincol

    wide = target.double().numpy()
    wide = np.asfortranarray(wide if wide.shape[0] <= wide.shape[1] else wide.T)
    m, n = wide.shape
    shapes = [(m, m)] * (Q - 1) + [(m, n)]
    parameters = ParamsPalm4MSA(
        [splincol(shape, K).constraint for shape in shapes],
        StoppingCriterion(iterations),
        is_update_way_R2L=True,
        init_facts=[np.eye(m, order="F")] * (Q - 1) + [np.zeros((m, n), order="F")],
        init_lambda=1.0,
    )
    product = reference(wide, parameters).toarray()
    return float(np.linalg.norm(product - wide) / np.linalg.norm(wide))


@pytest.mark.parametrize("Q", [2, 3, 4])
def test_no_worse_than_pyfaust(Q: int) -> None:
    for name, target in trained_layers().items():
        K = max(2, round(0.06 * min(target.shape)))
        ours = relative_error(target, fit(palm4msa, target, K, Q, iterations=20))
        assert ours <= 1.01 * pyfaust_error(target, K, Q, iterations=20), name


def brute_force(matrix: np.ndarray, K: int, constraint: str) -> tuple[float, int]:
    """Energy kept by the best choice of each set, and the most entries it allows."""
    rows, cols = matrix.shape
    order = np.zeros(matrix.shape, dtype=bool)
    if constraint == "global":
        order.flat[np.argsort(-np.abs(matrix), axis=None)[: K * max(rows, cols)]] = True
    if constraint == "block":
        if K * max(rows, cols) >= matrix.size:
            return float((matrix**2).sum()), matrix.size
        b = max(b for b in (1, 2, 4) if b <= min(K, rows, cols))
        corners = [(i, j) for i in range(0, rows, b) for j in range(0, cols, b)]
        corners.sort(key=lambda c: -(matrix[c[0] : c[0] + b, c[1] : c[1] + b] ** 2).sum())
        for i, j in corners[: K * max(rows, cols) // b**2]:
            order[i : i + b, j : j + b] = True
    if constraint in ("row", "splincol"):
        for i in range(rows):
            order[i, np.argsort(-np.abs(matrix[i]))[:K]] = True
    if constraint in ("column", "splincol"):
        for j in range(cols):
            order[np.argsort(-np.abs(matrix[:, j]))[:K], j] = True
    return float((matrix[order] ** 2).sum()), int(order.sum())


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("shape", [(7, 11), (11, 7), (1, 5), (6, 1), (4, 4), (13, 22)])
@pytest.mark.parametrize("K", [1, 3, 5, 50])
def test_projection_is_the_nearest(shape: tuple[int, int], K: int, constraint: str) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(K))
    kept = project(matrix, K, constraint)
    energy, count = brute_force(matrix.numpy(), K, constraint)
    assert int((kept != 0).sum()) == count
    assert float(kept.square().sum()) == pytest.approx(energy)
    assert torch.equal(kept[kept != 0], matrix[kept != 0])


@pytest.mark.parametrize(
    ("constraint", "most"), [("row", 12), ("column", 16), ("global", 16), ("splincol", 28), ("block", 16)]
)
def test_projection_of_ties_keeps_no_more_than_allowed(constraint: str, most: int) -> None:
    assert 0 < int((project(torch.ones(6, 8), 2, constraint) != 0).sum()) <= most
    assert not project(torch.zeros(6, 8), 2, constraint).any()


def test_unknown_constraint_is_named() -> None:
    with pytest.raises(ValueError, match="splincol"):
        project(torch.ones(2, 2), 1, "rows")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", [(20, 33), (33, 20)])
@pytest.mark.parametrize("Q", [1, 2, 3, 4])
def test_factors_meet_the_constraint_as_seen_by_the_caller(algorithm, shape, Q: int) -> None:
    target = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    small = min(shape)
    for constraint, axis in (("row", 1), ("column", 0)):
        factors = fit(algorithm, target, 3, Q, constraint)
        shapes = [(small, small)] * (Q - 1)
        wanted = [*shapes, shape] if shape[0] <= shape[1] else [shape, *shapes]
        assert [tuple(factor.shape) for factor in factors] == wanted
        assert all(int((factor != 0).sum(axis).max()) <= 3 for factor in factors)


def test_one_factor_is_the_projection() -> None:
    target = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
    assert torch.equal(fit(palm4msa, target, 2, 1, "row")[0], project(target, 2, "row"))


def test_hierarchical_is_better_than_flat_on_many_factors() -> None:
    target = torch.randn(48, 64, generator=torch.Generator().manual_seed(3))
    flat, staged = (relative_error(target, fit(a, target, 4, 4, iterations=30)) for a in ALGORITHMS)
    assert staged < flat


def test_hierarchical_splits_a_hadamard_matrix() -> None:
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    factors = fit(hierarchical, hadamard, 4, 2, iterations=60)
    assert relative_error(hadamard, factors) < 0.75


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edge_cases_stay_finite(algorithm, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(4)
    plain = torch.randn(6, 9, generator=random, dtype=dtype)
    cases = {
        "zero": torch.zeros(5, 7, dtype=dtype),
        "rank 1": plain[:, :1] @ plain[:1],
        "one row": plain[:1],
        "one column": plain[:, :1],
        "one entry": plain[:1, :1],
        "tiny": plain * 1e-30,
        "huge": plain * 1e30,
        "mixed": plain * 10 ** torch.linspace(-30, 30, plain.numel(), dtype=dtype).view_as(plain),
        "duplicated rows": plain[:1].repeat(5, 1),
    }
    for name, target in cases.items():
        for K, Q in ((1, 2), (2, 3), (100, 2)):
            factors = fit(algorithm, target, K, Q, iterations=8)
            assert all(factor.isfinite().all() and factor.dtype == dtype for factor in factors), name
            assert relative_error(target, factors) <= 1 + 1e-6, name


def test_dense_factors_reach_the_target() -> None:
    target = torch.randn(12, 18, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert relative_error(target, fit(palm4msa, target, 18, 2, iterations=50)) < 1e-6


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_seed_same_bits_and_target_untouched(algorithm) -> None:
    target = torch.randn(30, 40, generator=torch.Generator().manual_seed(6))
    before = target.clone()
    first, second = (fit(algorithm, target, 3, 3, seed=7) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(target, before)


def test_tolerance_stops_early_and_errors_are_reported() -> None:
    target = torch.randn(30, 40, generator=torch.Generator().manual_seed(8))
    seen: list[float] = []
    palm4msa(target, K=3, Q=2, iterations=500, tolerance=1e-3, seed=0, report=lambda i, n, e: seen.append(e))
    assert 2 < len(seen) < 200
    assert seen[-1] < seen[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_raising_from_the_report_cancels(algorithm) -> None:
    def cancel(iteration: int, total: int, error: float) -> None:
        raise JobCancelled

    with pytest.raises(JobCancelled):
        algorithm(torch.randn(20, 30), K=2, Q=2, iterations=10, tolerance=0.0, seed=0, report=cancel)
