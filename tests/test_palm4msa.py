"""PALM4MSA against pyfaust, its projections against brute force, and its behaviour at the edges."""

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from psm_core.methods._operand import Operand
from psm_core.methods._palm4msa import ORDERS, hierarchical, palm4msa
from psm_core.methods._sparsity_sets import CONSTRAINTS, project, set_size
from psm_core.progress import JobCancelled

ALGORITHMS = (palm4msa, hierarchical)


def quiet(iteration: int, total: int, error: float) -> None:
    assert 0 <= iteration <= total
    assert math.isfinite(error)


def fit(algorithm, target: Tensor, K: int, Q: int, constraint="splincol", iterations=20, **options):
    settings = {"iterations": iterations, "tolerance": 0.0, "seed": 0, "report": quiet}
    return algorithm(target, K=K, Q=Q, constraint=constraint, **settings | options)


def relative_error(target: Tensor, factors: list[Tensor], metric: Tensor | None = None) -> float:
    """Recomputed in float64 by NumPy, on targets of unit size; in a metric if one is given."""
    exact = target.double().numpy()
    scale = np.abs(exact).max() or 1.0
    product = np.eye(len(exact)) / scale
    for factor in factors:
        product = product @ factor.double().numpy()
    if metric is not None:
        values, vectors = np.linalg.eigh(metric.double().numpy())
        root = vectors * np.sqrt(values.clip(0))
        return float(np.linalg.norm((product - exact / scale) @ root) / np.linalg.norm(exact / scale @ root))
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


def pyfaust_error(target: Tensor, K: int, Q: int, iterations: int, order: str, constraint: str) -> float:
    pyfaust = pytest.importorskip("pyfaust")
    from pyfaust.fact import palm4msa as reference
    from pyfaust.factparams import ParamsPalm4MSA, StoppingCriterion

    assert pyfaust
    wide = target.double().numpy()
    wide = np.asfortranarray(wide if wide.shape[0] <= wide.shape[1] else wide.T)
    m, n = wide.shape
    shapes = [(m, m)] * (Q - 1) + [(m, n)]
    # Its own start: zero for the factor that is updated first, identities for the others.
    parameters = ParamsPalm4MSA(
        [reference_set(constraint, shape, K) for shape in shapes],
        StoppingCriterion(iterations),
        is_update_way_R2L=order == "right-to-left",
    )
    product = reference(wide, parameters).toarray()
    return float(np.linalg.norm(product - wide) / np.linalg.norm(wide))


def reference_set(constraint: str, shape: tuple[int, int], K: int):
    from pyfaust import proj

    if constraint == "global":
        return proj.sp(shape, K * max(shape)).constraint
    return {"splincol": proj.splincol, "row": proj.splin, "column": proj.spcol}[constraint](
        shape, K
    ).constraint


@pytest.mark.parametrize(("Q", "order"), [(2, ORDERS[0]), (3, ORDERS[0]), (4, ORDERS[0]), (3, ORDERS[1])])
def test_no_worse_than_pyfaust(Q: int, order: str) -> None:
    for name, target in trained_layers().items():
        K = max(2, round(0.06 * min(target.shape)))
        ours = relative_error(target, fit(palm4msa, target, K, Q, iterations=10, order=order))
        assert ours <= 1.01 * pyfaust_error(target, K, Q, 10, order, "splincol"), name


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("constraint", ["row", "column", "global"])
def test_no_worse_than_pyfaust_in_other_sets(constraint: str, order: str) -> None:
    target = trained_layers()["conv 64×288"]
    ours = relative_error(target, fit(palm4msa, target, 4, 3, constraint, iterations=15, order=order))
    assert ours <= 1.01 * pyfaust_error(target, 4, 3, 15, order, constraint)


def reference_sweep(target: np.ndarray, K: int, order: str, sweeps: int) -> np.ndarray:
    """λS₁S₂ after sweeps of the algorithm as it is written, with exact spectral norms."""
    m, n = target.shape
    factors = [np.eye(m), np.eye(m, n)]
    places = [1, 0] if order == "right-to-left" else [0, 1]
    factors[places[0]] *= 0
    lam = 1.0
    for _ in range(sweeps):
        for q in places:
            left = factors[0] if q else np.eye(m)
            right = np.eye(n) if q else factors[1]
            c = 1.001 * lam**2 * np.linalg.norm(left, 2) ** 2 * np.linalg.norm(right, 2) ** 2
            gradient = lam * left.T @ (lam * left @ factors[q] @ right - target) @ right.T
            moved = factors[q] - gradient / c
            kept = project(torch.from_numpy(moved), K, "splincol").numpy()
            lam *= np.linalg.norm(kept)
            factors[q] = kept / np.linalg.norm(kept)
        product = factors[0] @ factors[1]
        lam = (target * product).sum() / (product**2).sum()
    return lam * product


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("least", [1, 10_000])
def test_a_sweep_is_the_published_one(order: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psm_core.methods._operand._LEAST", least)  # compressed, and dense
    monkeypatch.setattr("psm_core.methods._palm4msa._FIRST_STEPS", 300)  # exact spectral norms here too
    monkeypatch.setattr("psm_core.methods._palm4msa._STEPS", 300)
    target = torch.randn(24, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    for sweeps in (1, 2):
        factors = fit(palm4msa, target, 2, 2, iterations=sweeps, order=order)
        expected = reference_sweep(target.numpy(), 2, order, sweeps)
        error = np.linalg.norm((factors[0] @ factors[1]).numpy() - expected) / np.linalg.norm(expected)
        assert error < 1e-9


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
    assert count <= set_size(constraint, K, *shape)


@pytest.mark.parametrize(
    ("constraint", "most"), [("row", 12), ("column", 16), ("global", 16), ("splincol", 28), ("block", 16)]
)
def test_projection_of_ties_keeps_no_more_than_allowed(constraint: str, most: int) -> None:
    assert 0 < int((project(torch.ones(6, 8), 2, constraint) != 0).sum()) <= most
    assert not project(torch.zeros(6, 8), 2, constraint).any()


def test_unknown_constraint_and_order_are_named() -> None:
    with pytest.raises(ValueError, match="splincol"):
        project(torch.ones(2, 2), 1, "rows")
    with pytest.raises(ValueError, match="right-to-left"):
        fit(palm4msa, torch.ones(2, 2), 1, 2, order="up")


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


def test_hierarchical_halves_the_error_of_a_hadamard_matrix() -> None:
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    factors = fit(hierarchical, hadamard, 4, 2, iterations=60)
    assert relative_error(hadamard, factors) < 0.6


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


def correlated(n: int, seed: int = 10) -> Tensor:
    """A second moment of inputs that are far from white: eigenvalues from 1 to 1e-4."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4 * n, n, generator=random, dtype=torch.float64)
    inputs = inputs * torch.logspace(0, -2, n, dtype=torch.float64) + inputs.mean(1, keepdim=True)
    return inputs.T @ inputs / len(inputs)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize("Q", [1, 2, 3])
def test_the_metric_is_what_is_minimized(algorithm, order: str, shape: tuple[int, int], Q: int) -> None:
    target = torch.randn(shape, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    C = correlated(shape[1])
    seen: list[float] = []
    plain = fit(algorithm, target, 3, Q, order=order)
    refined = fit(
        algorithm, target, 3, Q, order=order, metric=C, report=lambda i, n, e: seen.append(e), iterations=30
    )
    error = relative_error(target, refined, C)
    assert error < 0.97 * relative_error(target, plain, C)
    assert min(seen) == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_a_white_metric_changes_little_and_none_changes_nothing(algorithm, shape: tuple[int, int]) -> None:
    target = torch.randn(shape, generator=torch.Generator().manual_seed(12), dtype=torch.float64)
    plain, same, zero, white, double = (
        fit(algorithm, target, 3, 3, **options)
        for options in (
            {},
            {"metric": None},
            {"metric": torch.zeros(shape[1], shape[1], dtype=torch.float64)},
            {"metric": torch.eye(shape[1], dtype=torch.float64)},
            {"metric": 4096 * torch.eye(shape[1], dtype=torch.float64)},
        )
    )
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, same, zero, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(white, double, strict=True))
    assert relative_error(target, white) <= relative_error(target, plain) * (1 + 1e-9)


def test_a_dense_factor_in_the_metric_reaches_the_target() -> None:
    target = torch.randn(6, 10, generator=torch.Generator().manual_seed(13), dtype=torch.float64)
    C = correlated(10)
    assert relative_error(target, fit(palm4msa, target, 10, 2, metric=C), C) < 1e-6


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", [0])
def test_an_ill_conditioned_metric_stays_finite(algorithm, order: str, seed: int) -> None:
    """Also where the inner product of W with the first product is negative."""
    random = torch.Generator().manual_seed(seed)
    for shape in [(1, 9), (9, 1), (6, 9), (9, 6)]:
        target = torch.randn(shape, generator=random)
        inputs = torch.randn(shape[1], shape[1], generator=random) * torch.logspace(0, -6, shape[1])
        for C in (inputs @ inputs.T, inputs[:, :1] @ inputs[:, :1].T):
            factors = fit(algorithm, target, 2, 3, "row", metric=C, order=order)
            assert all(factor.isfinite().all() for factor in factors)


@pytest.mark.parametrize("density", [0.05, 0.9])
def test_operand_multiplies(density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psm_core.methods._operand._LEAST", 1)
    monkeypatch.setattr("psm_core.methods._operand._COMPRESSED_WORK", 100)
    monkeypatch.setattr("psm_core.methods._operand._DENSE_WORK", 100)
    random = torch.Generator().manual_seed(14)
    matrix = torch.randn(30, 50, generator=random, dtype=torch.float64)
    matrix = matrix * (torch.rand(30, 50, generator=random) < density)
    pulses: list[int] = []
    operand = Operand.of(matrix, lambda: pulses.append(1))
    assert (operand.columns is not None) == (density < 0.2)
    right, left = (torch.randn(n, 70, generator=random, dtype=torch.float64) for n in (50, 30))
    assert torch.allclose(operand.times(right), matrix @ right)
    assert len(pulses) > 1
    assert torch.allclose(operand.transposed.times(left), matrix.T @ left)
    assert torch.equal(operand.dense(), matrix)
    assert torch.allclose(operand.inner(2 * matrix), 2 * matrix.square().sum())
    assert torch.equal(operand.add_to(torch.ones_like(matrix)), matrix + 1)
