"""Sparsity sets of a factor, and the projection onto them.

splincol  in each row the K largest magnitudes, and in each column the K largest (the union of PSM-nets)
row       the K largest of each row
column    the K largest of each column
global    the K·max(rows, cols) largest of the matrix
block     the ⌊K·max(rows, cols)/b²⌋ blocks of largest energy, of a grid of b × b blocks from the upper
          left corner; the last ones may be cut by the border. b = 4, or 2 or 1 where K or a side of the
          matrix is smaller; the whole matrix once K·max(rows, cols) reaches its size
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CONSTRAINTS = ("splincol", "row", "column", "global", "block")
TRANSPOSED = {"row": "column", "column": "row"}
_BLOCK = 4
_AT_ONCE = 1 << 20  # entries ranked at a time: bounds the memory


def project(matrix: Tensor, K: int, constraint: str) -> Tensor:
    """Nearest matrix of a sparsity set: kept entries unchanged, exact zeros elsewhere."""
    return matrix * support(matrix, K, constraint)


def set_size(constraint: str, K: int, rows: int, cols: int) -> int:
    """The most non-zeros that a set allows in a factor of this shape."""
    per_row, per_column = rows * min(K, cols), cols * min(K, rows)
    allowed = {
        "splincol": per_row + per_column,
        "row": per_row,
        "column": per_column,
        "global": K * max(rows, cols),
        "block": K * max(rows, cols),
    }[constraint]
    return min(allowed, rows * cols)


def support(matrix: Tensor, K: int, constraint: str) -> Tensor:
    """Which entries the projection keeps; ties never exceed the counts of the set."""
    if constraint not in CONSTRAINTS:
        raise ValueError(f"constraint must be one of {', '.join(CONSTRAINTS)}, not {constraint!r}")
    count = min(K * max(matrix.shape), matrix.numel())
    if constraint == "block":
        return _largest_blocks(matrix, K, count)
    if constraint == "global":
        return _largest(matrix.reshape(1, -1), count).view_as(matrix)
    if constraint == "column":
        return _largest(matrix.mT, K).mT
    keep = _largest(matrix, K)
    return keep.logical_or_(_largest(matrix.mT, K).mT) if constraint == "splincol" else keep


def block_side(K: int, rows: int, cols: int) -> int:
    """b of the set `block`."""
    side = _BLOCK
    while side > min(K, rows, cols):
        side //= 2
    return side


def _largest_blocks(matrix: Tensor, K: int, count: int) -> Tensor:
    rows, cols = matrix.shape
    if count == matrix.numel():
        return torch.ones_like(matrix, dtype=torch.bool)
    b = block_side(K, rows, cols)
    padded = F.pad(matrix, (0, -cols % b, 0, -rows % b))
    grid = padded.reshape(padded.shape[0] // b, b, -1, b)
    norms = torch.linalg.vector_norm(grid, dim=(1, 3))
    keep = _largest(norms.reshape(1, -1), count // b**2).view_as(norms)
    return keep.repeat_interleave(b, 0).repeat_interleave(b, 1)[:rows, :cols]


def _largest(matrix: Tensor, K: int) -> Tensor:
    """The K largest magnitudes of each row."""
    rows, cols = matrix.shape
    if cols <= K:
        return torch.ones_like(matrix, dtype=torch.bool)
    if not matrix.is_cpu:
        return _first_largest(matrix.abs(), K)
    keep = torch.empty(rows, cols, dtype=torch.bool)
    # Ordered like the numbers themselves, and ranked faster.
    bits = torch.int64 if matrix.dtype == torch.float64 else torch.int32
    step = max(_AT_ONCE // cols, 1)
    for start in range(0, rows, step):
        part = matrix[start : start + step].contiguous().abs()
        ranked = np.partition(part.view(bits).numpy(), cols - K, axis=1)
        least = torch.from_numpy(ranked[:, cols - K, None]).view(matrix.dtype)
        chosen = torch.ge(part, least, out=keep[start : start + step])
        if np.count_nonzero(chosen.numpy()) > K * len(part):  # ties
            crowded = chosen.sum(1) > K
            chosen[crowded] = _first_largest(part[crowded], K)
    return keep


def _first_largest(size: Tensor, K: int) -> Tensor:
    keep = torch.zeros_like(size, dtype=torch.bool)
    return keep.scatter_(1, size.topk(K, dim=1, sorted=False).indices, True)
