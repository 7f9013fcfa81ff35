"""Each method against an independent reference: numpy, TensorLy called plainly, or a hand count."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tensorly
import torch
from tensorly.decomposition import partial_tucker

import psm_core as psm
from psm_core.methods.tt import balanced_factors, prime_factors
from psm_core.sparse import SparseMatrix


def real_matrix(rows: int, cols: int) -> torch.Tensor:
    """Decaying spectrum and a few large entries, as in trained layers."""
    rng = np.random.default_rng(5)
    low = rng.standard_normal((rows, 8)) @ rng.standard_normal((8, cols))
    spikes = rng.standard_normal((rows, cols)) * (rng.random((rows, cols)) < 0.05) * 4
    return torch.from_numpy(low + spikes + 0.3 * rng.standard_normal((rows, cols)))


def numpy_error(weight: torch.Tensor, rebuilt: torch.Tensor) -> float:
    w, r = weight.double().numpy(), rebuilt.double().numpy()
    return float(np.linalg.norm(w - r) / np.linalg.norm(w))


class TestSVD:
    def test_error_is_that_of_eckart_young(self) -> None:
        for weight in (real_matrix(30, 50), real_matrix(24, 54).reshape(24, 6, 3, 3)):
            values = np.linalg.svd(weight.reshape(weight.shape[0], -1).numpy(), compute_uv=False)
            for rank in (1, 5, 20):
                f = psm.SVD(rank=rank).fit(weight)
                expected = math.sqrt((values[rank:] ** 2).sum() / (values**2).sum())
                assert numpy_error(weight, f.reconstruct()) == pytest.approx(expected, rel=1e-9)
                assert f.parameters == rank * (weight.shape[0] + weight[0].numel())

    def test_full_rank_is_exact(self) -> None:
        weight = real_matrix(12, 20)
        assert psm.SVD(rank=12).fit(weight).relative_error(weight) < 1e-12


class TestPrune:
    def test_keeps_the_largest_entries_unchanged(self) -> None:
        weight = real_matrix(30, 40)
        f = psm.Prune(fraction=0.1).fit(weight)
        flat = weight.flatten().numpy()
        kept = np.sort(np.abs(flat))[-120:]
        rebuilt = f.reconstruct().flatten().numpy()
        assert np.array_equal(np.sort(np.abs(rebuilt[rebuilt != 0])), kept)
        assert np.array_equal(rebuilt[rebuilt != 0], flat[rebuilt != 0])
        assert f.parameters == 120
        dropped = (flat**2).sum() - (kept**2).sum()
        assert f.relative_error(weight) == pytest.approx(math.sqrt(dropped / (flat**2).sum()))

    def test_bytes_are_the_smaller_of_bitmap_and_indices(self) -> None:
        weight = torch.from_numpy(np.random.default_rng(0).standard_normal((40, 300))).float()
        dense = psm.Prune(fraction=0.5).fit(weight)
        assert dense.nbytes == 6000 * 4 + 40 * 300 // 8
        sparse = psm.Prune(fraction=0.01).fit(weight)
        # 120 values, 120 column indices of two bytes (300 > 255), 40 row counts of one byte.
        assert sparse.nbytes == 120 * 4 + 120 * 2 + 40


class TestTucker:
    def test_error_is_that_of_plain_tensorly(self) -> None:
        weight = real_matrix(16, 90).reshape(16, 10, 3, 3)
        for ranks in [(4, 3), (10, 8)]:
            f = psm.Tucker(*ranks, iterations=50, tolerance=0).fit(weight)
            with tensorly.backend_context("numpy", local_threadsafe=True):
                (core, (u, v)), _ = partial_tucker(
                    weight.numpy(), list(ranks), modes=[0, 1], n_iter_max=50, tol=0
                )
            expected = np.einsum("abyx,oa,ib->oiyx", core, u, v)
            assert f.relative_error(weight) == pytest.approx(
                numpy_error(weight, torch.from_numpy(expected)), rel=1e-6
            )
            assert f.parameters == 16 * ranks[0] + 10 * ranks[1] + 9 * ranks[0] * ranks[1]

    def test_planted_decomposition_is_recovered(self) -> None:
        rng = np.random.default_rng(1)
        core, u, v = (rng.standard_normal(s) for s in [(3, 2, 3, 3), (12, 3), (9, 2)])
        weight = torch.from_numpy(np.einsum("abyx,oa,ib->oiyx", core, u, v))
        assert psm.Tucker(rank_out=3, rank_in=2).fit(weight).relative_error(weight) < 1e-10

    def test_of_a_linear_layer_is_the_svd_and_says_so(self) -> None:
        weight = real_matrix(20, 30)
        f = psm.Tucker(rank_out=6, rank_in=4).fit(weight)
        svd = psm.SVD(rank=4).fit(weight)
        assert "SVD" in f.note
        assert f.parameters == svd.parameters == psm.Tucker(6, 4).storage((20, 30))
        assert torch.allclose(f.reconstruct(), svd.reconstruct())

    def test_budget_finds_the_closest_balanced_pair(self) -> None:
        shape = (24, 18, 3, 3)
        for fraction in (0.05, 0.2, 0.5):
            budget = fraction * math.prod(shape)
            best = max(
                stored
                for a, b in itertools.product(range(1, 25), range(1, 19))
                if (stored := 24 * a + 18 * b + 9 * a * b) <= budget and 1 / 1.5 <= (a / 24) / (b / 18) <= 1.5
            )
            assert psm.at_budget("tucker", shape, fraction).storage(shape) == best

    def test_ranks_that_add_nothing_are_not_stored_or_counted(self) -> None:
        method = psm.Tucker(rank_out=32, rank_in=1)
        f = method.fit(real_matrix(32, 144).reshape(32, 16, 3, 3))
        assert f.parameters == method.storage((32, 16, 3, 3)) == 32 * 9 + 16 + 9 * 9
        assert "[9, 1]" in f.note


class TestTensorTrain:
    def test_order_two_of_a_kernel_is_the_svd(self) -> None:
        weight = real_matrix(16, 90).reshape(16, 10, 3, 3)
        tt = psm.TensorTrain(rank=5, order=2).fit(weight)
        assert tt.relative_error(weight) == pytest.approx(psm.SVD(rank=5).fit(weight).history[-1])

    def test_full_rank_is_exact_in_every_order(self) -> None:
        for weight in (real_matrix(24, 36), real_matrix(12, 54).reshape(12, 6, 3, 3), real_matrix(7, 5)):
            shape = tuple(weight.shape)
            for order in range(2, 7):
                rank = int(psm.TensorTrain.largest(shape, "rank", order=order))
                f = psm.TensorTrain(rank=rank, order=order).fit(weight)
                assert f.relative_error(weight) < 1e-10, (shape, order)

    def test_error_is_within_the_bound_of_the_unfoldings(self) -> None:
        """TT-SVD is within √(order − 1) of the best, and no better than each unfolding's tail."""
        weight = real_matrix(24, 36)
        for order in (2, 3):
            f = psm.TensorTrain(rank=4, order=order).fit(weight)
            outs, ins = balanced_factors(24, order), balanced_factors(36, order)[::-1]
            axes = [axis for k in range(order) for axis in (k, order + k)]
            tensor = weight.numpy().reshape(*outs, *ins).transpose(axes)
            tails = []
            for k in range(1, order):
                left = math.prod(outs[:k]) * math.prod(ins[:k])
                values = np.linalg.svd(tensor.reshape(left, -1), compute_uv=False)
                tails.append((values[4:] ** 2).sum() / (values**2).sum())
            assert math.sqrt(max(tails)) - 1e-9 <= f.relative_error(weight) <= math.sqrt(sum(tails)) + 1e-9

    def test_counts_of_a_known_train(self) -> None:
        # 512 = 8·8·8, 784 = 7·8·14 reversed against it: cores 8·14, 8·8, 8·7, ranks 1-4-4-1.
        f = psm.TensorTrain(rank=4, order=3).fit(torch.randn(512, 784))
        assert f.parameters == 8 * 14 * 4 + 4 * 8 * 8 * 4 + 4 * 8 * 7

    def test_factors_of_dimensions(self) -> None:
        for number in (1, 2, 7, 12, 97, 360, 784, 4096):
            assert math.prod(prime_factors(number)) == number
            for count in range(2, 7):
                factors = balanced_factors(number, count)
                assert math.prod(factors) == number
                assert len(factors) == count
        assert balanced_factors(784, 3) == [7, 8, 14]
        assert balanced_factors(512, 3) == [8, 8, 8]


class TestPSM:
    @pytest.mark.parametrize("algorithm", ["palm4msa", "hierarchical"])
    @pytest.mark.parametrize("constraint", ["splincol", "row", "column", "global"])
    @pytest.mark.parametrize("Q", [1, 2, 3])
    def test_factors_obey_their_constraint(self, algorithm: str, constraint: str, Q: int) -> None:
        for weight in (real_matrix(14, 22), real_matrix(22, 14)):
            method = psm.PSM(K=3, Q=Q, algorithm=algorithm, constraint=constraint, iterations=15)
            f = method.fit(weight)
            assert f.parameters <= method.storage(tuple(weight.shape))
            for factor in f.factors:
                support = (factor.to_dense() if isinstance(factor, SparseMatrix) else factor) != 0
                rows, columns = support.sum(1), support.sum(0)
                longest = max(support.shape)
                if constraint == "row":
                    assert int(rows.max()) <= 3
                if constraint == "column":
                    assert int(columns.max()) <= 3
                limit = 3 * sum(support.shape) if constraint == "splincol" else 3 * longest
                assert int(support.sum()) <= limit

    @pytest.mark.parametrize("Q", [1, 2, 3])
    def test_joint_spends_exactly_its_budget(self, Q: int) -> None:
        weight = real_matrix(40, 60)
        f = psm.PSM(K=4, Q=Q).fit(weight)
        assert f.parameters == 4 * ((Q - 1) * 40 + 60)

    def test_joint_does_not_lose_to_its_special_cases(self) -> None:
        for weight in (real_matrix(64, 96), torch.randn(64, 96, dtype=torch.float64)):
            for fraction in (0.05, 0.1, 0.2, 0.3):
                error = psm.at_budget("psm", (64, 96), fraction).fit(weight).history[-1]
                rivals = [psm.at_budget(n, (64, 96), fraction) for n in ("svd", "prune")]
                assert error <= min(m.fit(weight).history[-1] for m in rivals) + 1e-9

    def test_more_factors_are_never_worse_at_the_same_budget(self) -> None:
        weight = real_matrix(48, 64)
        errors = [psm.at_budget("psm", (48, 64), 0.15, Q=Q).fit(weight).history[-1] for Q in (1, 2, 3)]
        assert errors[1] <= errors[0]
        assert errors[2] <= errors[1] + 1e-9
