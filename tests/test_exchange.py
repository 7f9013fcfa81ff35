"""The search of the joint fit, piece by piece, against brute force in float64."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import psm_core as psm
from psm_core.factorization import ShortcutProduct
from psm_core.methods._exchange import Pair, Problem, ranked
from psm_core.methods._operand import Operand
from psm_core.methods._trace import Trace
from psm_core.sparse import SparseMatrix


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sparse(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed) * (normal(*shape, seed=seed + 1) > 0.5)


def correlation(n: int) -> Tensor:
    inputs = normal(3 * n, n, seed=9).relu()
    second = inputs.T @ inputs
    return second / second.diagonal().sqrt() / second.diagonal().sqrt()[:, None]


@pytest.mark.parametrize(("rows", "cols"), [(20, 30), (300, 400)])  # without and with a sample
def test_ranked_is_the_largest_scores(rows: int, cols: int) -> None:
    values = [normal(rows, cols), normal(rows, 50, seed=3)]
    weights = [normal(rows, seed=4).abs(), normal(rows, seed=5).abs()]
    weights[0][3] = 0.0
    scores = torch.cat([(v.square() * w[:, None]).flatten() for v, w in zip(values, weights, strict=True)])
    for count in (1, 17, len(scores) // 10, len(scores) - 1):
        keep = torch.cat([mask.flatten() for mask in ranked(values, weights, count)])
        expected = min(count, int((scores > 0).sum()))
        assert int(keep.sum()) == expected
        assert float(scores[keep].sum()) == pytest.approx(float(scores.sort().values[-expected:].sum()))


def test_ranked_never_exceeds_the_count_on_ties() -> None:
    for size in (100, 90_000):
        ones = torch.ones(size // 10, 10)
        for count in (1, size // 3):
            assert int(ranked([ones], [torch.ones(size // 10)], count)[0].sum()) == count


def test_the_sampled_threshold_is_about_right_where_columns_differ() -> None:
    values = torch.randn(2048, 256, generator=torch.Generator().manual_seed(1))
    values *= torch.logspace(0, -3, 256)  # a power of two wide: a regular sample would see few columns
    count = 20_000
    found = int(ranked([values], [torch.ones(2048)], count, is_exact=False)[0].sum())
    assert 0.9 * count < found < 1.1 * count


def make_pair(m: int, n: int, metric: Tensor | None) -> Pair:
    problem = Problem(normal(m, n), metric, 200, Trace(lambda *step: None, 1))
    k = 5 + min(m, n)
    factors = [sparse(k, m, seed=11), sparse(k, n, seed=13)]
    problem.ones(factors[problem.side_of_ones]).fill_(1.0)
    return Pair(problem, [Operand.of(factor, problem.trace.pulse, factor != 0) for factor in factors])


def square_error(pair: Pair) -> float:
    left, right = (factor.dense() for factor in pair.factors)
    rest = pair.problem.target - left.T @ right
    metric = torch.eye(rest.shape[1]).double() if pair.problem.metric is None else pair.problem.metric
    return float(((rest @ metric) * rest).sum())


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
@pytest.mark.parametrize("in_metric", [False, True])
def test_improve_lowers_the_error_and_keeps_count_of_it(shape: tuple[int, int], in_metric: bool) -> None:
    pair = make_pair(*shape, correlation(shape[1]) if in_metric else None)
    supports = [factor.dense() != 0 for factor in pair.factors]
    last = square_error(pair)
    for side in (0, 1, 0, 1):
        pair.improve(side)
        assert square_error(pair) < last
        last = square_error(pair)
        assert float(pair.square) == pytest.approx(last)
    assert bool((pair.problem.ones(pair.factors[pair.problem.side_of_ones].dense()) == 1).all())
    for factor, support in zip(pair.factors, supports, strict=True):
        assert bool(((factor.dense() != 0) <= support).all())


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
@pytest.mark.parametrize("in_metric", [False, True])
def test_the_gain_of_an_entry_is_what_entering_it_gains(shape: tuple[int, int], in_metric: bool) -> None:
    pair = make_pair(*shape, correlation(shape[1]) if in_metric else None)
    before = square_error(pair)
    for side in (0, 1):
        slope, weights = pair.downhill(side), pair.weights(side)
        dense = pair.factors[side].dense()
        ones = torch.zeros_like(dense, dtype=torch.bool)
        if side == pair.problem.side_of_ones:
            pair.problem.ones(ones).fill_(True)
        for k, j in itertools.product(range(len(dense)), range(dense.shape[1])):
            if ones[k, j] or weights[k] == 0:
                continue
            changed = dense.clone()
            changed[k, j] += slope[k, j] / weights[k]  # the value that is best for it alone
            factors = list(pair.factors)
            factors[side] = Operand.of(changed, pair.problem.trace.pulse)
            gained = before - square_error(Pair(pair.problem, factors))
            assert gained == pytest.approx(float(slope[k, j] ** 2 / weights[k]), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(20, 12),
        nn.Linear(12, 20),
        nn.Linear(15, 15),
        nn.Conv2d(20, 12, 1, stride=2),
        nn.Conv2d(4, 16, 1),
        nn.Conv2d(3, 8, 3, padding=1, stride=2),
        nn.Conv2d(2, 40, 3, padding=2, dilation=2, padding_mode="reflect"),
    ],
    ids=str,
)
def test_a_shortcut_product_acts_as_its_dense_layer(layer: nn.Module, dense: bool) -> None:
    layer = layer.double()
    shape = tuple(layer.weight.shape)
    m, n = shape[0], layer.weight[0].numel()
    k = 3 + min(m, n)
    left, right = (normal(m, k), normal(k, n, seed=1)) if dense else (sparse(m, k), sparse(k, n, seed=4))
    padded = [left.clone(), right.clone()]
    side, axis = (0, 1) if m <= n else (1, 0)
    padded[side].narrow(axis, k - min(m, n), min(m, n)).add_(torch.eye(min(m, n)))
    weight = (padded[0] @ padded[1]).reshape(shape)
    factors = (left, right) if dense else (SparseMatrix.from_dense(left), SparseMatrix.from_dense(right))
    product = ShortcutProduct(psm.PSM(K=1), shape, factors)
    torch.testing.assert_close(product.reconstruct(), weight)
    torch.testing.assert_close(product.scaled(3).reconstruct(), 8 * weight)
    assert product.parameters == int((left != 0).sum() + (right != 0).sum())
    x = normal(2, n, seed=7) if isinstance(layer, nn.Linear) else normal(2, shape[1], 9, 8, seed=7)
    module = product.to_module(layer)
    with torch.no_grad():
        layer.weight.copy_(weight)
        torch.testing.assert_close(module(x), layer(x))
    module(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
