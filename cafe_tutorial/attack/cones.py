"""Rows that share all their batches: the extreme rays of a cone.

The spans of such a group's batches meet in as many dimensions as the group has rows that leak. With a basis Y
of that intersection, (d1 + 1, c), each h̃_i is Y a_i, and row k of Y is Σ_i h̃_i(k) c_i with the dual basis c_i · a_j = δ_ij.
When h comes from a ReLU, these coefficients are not negative and many are zero: the rows of Y fill a cone whose c
extreme rays are the c_i, provided that each h̃_i has an entry that is zero in all the others (separable
non-negative factorization). The a_i follow by inverting the matrix of the c_i.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

ZEROS = (1e-3, 1e-4, 1e-5, 1e-6)  # an entry of h̃ below this share of the largest one counts as zero, ever more strictly


def extreme_rays(basis: Tensor) -> tuple[Tensor, Tensor] | None:
    """The h̃_i of a group, each up to a factor, and how far they are off.

    basis : (d1 + 1, c), float64, orthonormal. Returns unit vectors (c, d1 + 1) and the expected error of each,
    (c,), from how well its zeros fit; None where the entries do not fill a cone with c rays.
    """
    Y = basis.cpu().numpy()
    size = np.linalg.norm(Y, axis=1)
    kept = size > 1e-3 * size.max()
    inside = _positive_functional(Y[kept] / size[kept, None])
    if inside is None:
        return None
    vertices = _successive_projection(Y[kept] / (Y[kept] @ inside)[:, None])
    if np.linalg.cond(vertices) > 1e6:
        return None
    H = np.linalg.solve(vertices.T, Y.T)  # (c, d1 + 1): row i is zero where vertex i has no part
    rays, errors = zip(*(_polish(Y, h, kept) for h in H))
    if not all(map(math.isfinite, errors)):
        return None
    if min(float(r.min()) for r in rays) < -ZEROS[0]:
        return None
    return torch.from_numpy(np.array(rays)).to(basis), torch.tensor(errors, dtype=basis.dtype, device=basis.device)


def _positive_functional(rows: np.ndarray) -> np.ndarray | None:
    """A vector with a positive product with every row, by a linear programme; None where there is none."""
    count, c = rows.shape
    objective = np.append(np.zeros(c), -1.0)
    found = linprog(objective, A_ub=np.c_[-rows, np.ones(count)], b_ub=np.zeros(count), bounds=[(-1, 1)] * c + [(None, 1)], method="highs")
    return found.x[:c] if found.status == 0 and found.x[c] > 1e-9 else None


def _successive_projection(points: np.ndarray) -> np.ndarray:
    """c points that span the simplex of all, the farthest one from what is spanned so far each time: (c, c)."""
    rest, chosen = points.copy(), []
    for _ in range(points.shape[1]):
        j = int(np.linalg.norm(rest, axis=1).argmax())
        chosen.append(j)
        direction = rest[j] / np.linalg.norm(rest[j])
        rest = rest - np.outer(rest @ direction, direction)
    return points[chosen]


def _polish(Y: np.ndarray, h: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, float]:
    """The unit vector Y a that is as small as possible at the zeros of h, and how far it is off; infinite without zeros."""
    error = math.inf
    for share in ZEROS:
        zeros = kept & (np.abs(h) < share * np.abs(h).max())  # where all are zero nothing is learned
        if zeros.sum() < 4 * Y.shape[1]:
            break
        _, values, right = np.linalg.svd(Y[zeros], full_matrices=False)
        h = Y @ right[-1]
        h = h / np.linalg.norm(h) * np.sign(h.sum())
        error = values[-1] / max(values[-2], 1e-300)
    return h, error
