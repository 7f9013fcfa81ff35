"""The sparse matrix against dense ones: structure, product, file form, damage."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch

from psm_core.errors import CheckpointError
from psm_core.sparse import SparseMatrix


def matrix_of(rows: int, cols: int, share: float, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((rows, cols)) * (rng.random((rows, cols)) < share))


def wide(cols: int) -> torch.Tensor:
    """Two entries, one in the last column, and empty rows around them."""
    dense = torch.zeros(4, cols, dtype=torch.float64)
    dense[1, cols - 1], dense[2, 0] = 2.5, -1.0
    return dense


EMPTY_ROWS = torch.diag(torch.tensor([0.0, 3.0, 0.0, -1.0, 0.0], dtype=torch.float64))
MATRICES = {
    "1x1": torch.tensor([[7.0]], dtype=torch.float64),
    "1x1 zero": torch.zeros(1, 1, dtype=torch.float64),
    "zero": torch.zeros(3, 5, dtype=torch.float64),
    "full": matrix_of(6, 7, 1.1),
    "row": matrix_of(1, 50, 0.3),
    "column": matrix_of(50, 1, 0.3),
    "empty rows": EMPTY_ROWS,
    "thin": matrix_of(40, 30, 0.01),
    "half": matrix_of(9, 31, 0.5),
    "255 columns": wide(256),
    "256 columns": wide(257),
    "65535 columns": wide(65536),
    "65536 columns": wide(65537),
    "70001 columns": wide(70001),
}
matrices = pytest.mark.parametrize("dense", MATRICES.values(), ids=MATRICES)


@matrices
def test_structure_is_that_of_scipy(dense: torch.Tensor) -> None:
    sparse, reference = SparseMatrix.from_dense(dense), scipy.sparse.csr_array(dense.numpy())
    assert sparse.shape == tuple(dense.shape)
    np.testing.assert_array_equal(sparse.values.numpy(), reference.data)
    np.testing.assert_array_equal(sparse.columns.numpy(), reference.indices)
    np.testing.assert_array_equal(sparse.row_starts.numpy(), reference.indptr)
    np.testing.assert_array_equal(sparse.rows_of_entries.numpy(), dense.numpy().nonzero()[0])
    assert torch.equal(sparse.to_dense(), dense)


@matrices
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_file_form_returns_the_same_matrix(dense: torch.Tensor, dtype: torch.dtype) -> None:
    sparse = SparseMatrix.from_dense(dense.to(dtype))
    packed = sparse.pack()
    back = SparseMatrix.unpack(packed, sparse.shape)
    assert back.values.dtype == dtype
    for name in ("values", "columns", "row_starts"):
        assert torch.equal(getattr(back, name), getattr(sparse, name))
        assert getattr(back, name).dtype == getattr(sparse, name).dtype
    assert torch.equal(back.to_dense(), dense.to(dtype))
    assert all(tensor.is_contiguous() for tensor in packed.values())


def indexed_bytes(dense: np.ndarray) -> int:
    """Bytes of column indices and row counts, each in the narrowest type for its largest value."""
    rows, cols = dense.nonzero()
    counts = np.bincount(rows, minlength=len(dense))

    def width(largest: int) -> int:
        return 1 if largest <= 255 else 2 if largest <= 65535 else 4

    return len(cols) * width(cols.max(initial=0)) + len(counts) * width(counts.max(initial=0))


@matrices
def test_bytes_are_those_of_the_smaller_index(dense: torch.Tensor) -> None:
    packed = SparseMatrix.from_dense(dense).pack()
    found = sum(t.numel() * t.element_size() for name, t in packed.items() if name != "values")
    bitmap = -(-dense.numel() // 8)
    assert found == min(bitmap, indexed_bytes(dense.numpy()))
    assert packed["values"].numel() == int(np.count_nonzero(dense.numpy()))


def test_bytes_by_hand() -> None:
    def index_bytes(dense: torch.Tensor) -> int:
        packed = SparseMatrix.from_dense(dense).pack()
        return sum(t.numel() * t.element_size() for name, t in packed.items() if name != "values")

    assert index_bytes(wide(256)) == 2 * 1 + 4 * 1
    assert index_bytes(wide(257)) == 2 * 2 + 4 * 1
    assert index_bytes(wide(65536)) == 2 * 2 + 4 * 1
    assert index_bytes(wide(65537)) == 2 * 4 + 4 * 1
    assert index_bytes(torch.ones(3, 5)) == 2  # 15 bits
    assert index_bytes(torch.zeros(3, 5)) == 2  # a bitmap beats three counts
    row = torch.zeros(1, 100_000)
    row[0, :300] = 1.0
    assert index_bytes(row) == 300 * 2 + 1 * 2


@matrices
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_product_is_the_dense_one(dense: torch.Tensor, batch: int) -> None:
    x = torch.randn(dense.shape[1], batch, dtype=torch.float64)
    product = SparseMatrix.from_dense(dense).matmul(x)
    assert product.shape == (dense.shape[0], batch)
    np.testing.assert_allclose(product.numpy(), dense.numpy() @ x.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["full", "empty rows", "half", "1x1", "column"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    sparse = SparseMatrix.from_dense(MATRICES[name])
    x = torch.randn(sparse.shape[1], 2, dtype=torch.float64, requires_grad=True)
    values = sparse.values.clone().requires_grad_()

    def product(v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return SparseMatrix(v, sparse.columns, sparse.row_starts, sparse.shape).matmul(x)

    def rebuild(v: torch.Tensor) -> torch.Tensor:
        return SparseMatrix(v, sparse.columns, sparse.row_starts, sparse.shape).to_dense()

    assert torch.autograd.gradcheck(product, (values, x))
    assert torch.autograd.gradcheck(rebuild, (values,))


def test_an_input_of_another_height_is_refused() -> None:
    sparse = SparseMatrix.from_dense(MATRICES["half"])
    for rows in (30, 32, 62):
        with pytest.raises(RuntimeError):
            sparse.matmul(torch.ones(rows, 2, dtype=torch.float64))
    with pytest.raises(RuntimeError):
        SparseMatrix.from_dense(MATRICES["zero"]).matmul(torch.ones(4, 2, dtype=torch.float64))


def damaged_indices() -> list[dict[str, torch.Tensor]]:
    """Every way to spoil the indices of a 4×300 matrix with rows of 0, 1, 2 and 0 entries."""
    values = torch.tensor([1.0, 2.0, 3.0])
    columns, counts = torch.tensor([299, 0, 7]), torch.tensor([0, 1, 2, 0])
    good = {"values": values, "columns": columns, "row_counts": counts}
    assert SparseMatrix.unpack(good, (4, 300)).to_dense()[2, 7] == 3.0
    bits = np.zeros(4 * 300, dtype=bool)
    bits[[599, 600, 607]] = True
    bitmap = torch.from_numpy(np.packbits(bits))
    assert SparseMatrix.unpack({"values": values, "bitmap": bitmap}, (4, 300)).to_dense()[1, 299] == 1.0
    flipped = bitmap.clone()
    flipped[3] ^= 16
    return [
        good | {"columns": torch.tensor([300, 0, 7])},
        good | {"columns": torch.tensor([-1, 0, 7])},
        good | {"columns": torch.tensor([0, 7])},
        good | {"columns": torch.tensor([299, 7, 7])},  # one place twice
        good | {"columns": torch.tensor([299, 7, 0])},  # out of order
        good | {"row_counts": torch.tensor([0, 1, 1, 0])},
        good | {"row_counts": torch.tensor([0, 1, 2])},
        good | {"row_counts": torch.tensor([0, 1, 2, 0, 0])},
        good | {"row_counts": torch.tensor([0, -1, 4, 0])},
        good | {"values": values[:2]},
        good | {"values": values.reshape(3, 1)},
        good | {"columns": columns.reshape(3, 1)},
        {"values": values, "bitmap": flipped},
        {"values": values, "bitmap": bitmap[:-1]},
        {"values": values, "bitmap": torch.cat([bitmap, bitmap[:1]])},
        {"values": values[:2], "bitmap": bitmap},
    ]


@pytest.mark.parametrize("case", range(16))
def test_damaged_indices_are_named(case: int) -> None:
    tensors = damaged_indices()
    assert len(tensors) == 16
    with pytest.raises(CheckpointError, match="4×300"):
        SparseMatrix.unpack(tensors[case], (4, 300))
