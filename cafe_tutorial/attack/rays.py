"""All rows of one batch as rays of a cone, by linear programmes.

With a basis Y of the batch's span, (d1 + 1, k), each h̃_i is Y a_i. When h comes from a ReLU, the a_i lie in the cone
{a : Y a ≥ 0}, and each of them makes many inequalities tight: the zeros of its h. Such a ray is likely to solve a linear
programme over the cone, and rewarding zeros makes it likelier (reweighted ℓ1 minimization, Candès et al. 2008).
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

REWEIGHTED = (0.1, 0.01, 0.01, 0.01)  # added to an entry, relative to the largest, before its weight is taken as the inverse
TIGHT = 1e-5  # an entry below this share of the largest counts as zero


class RayFinder:
    """Draws rays of {a : Y a ≥ 0} that have more zeros than a ray must have.

    basis : (d1 + 1, k), float64, orthonormal; seed : chooses the programmes
    """

    def __init__(self, basis: np.ndarray, seed: int):
        size = np.linalg.norm(basis, axis=1)
        kept = size > 1e-3 * size.max()
        self.rows = basis[kept] / size[kept, None]
        self.generator = np.random.default_rng(seed)

    def draw(self, known: np.ndarray) -> np.ndarray | None:
        """One ray that is no combination of the known ones, (f, k): unit coordinates (k,), or None where this draw finds none.

        A random row of Y, made orthogonal to the known rays, is held at 1; the sum of all entries of Y a is minimized,
        then their sum weighted by the inverse of what they were.
        """
        held = self.rows[self.generator.integers(len(self.rows))]
        if len(known):
            directions = np.linalg.qr(known.T)[0]
            held = held - directions @ (directions.T @ held)
        held = held / max(np.linalg.norm(held), 1e-300)
        weights = np.full(len(self.rows), 1 / len(self.rows))
        for added in (*REWEIGHTED, None):
            found = linprog(
                weights @ self.rows, A_ub=-self.rows, b_ub=np.zeros(len(self.rows)), A_eq=held[None], b_eq=[1.0],
                bounds=[(None, None)] * len(held), method="highs-ds",
            )  # fmt: skip
            if found.status != 0:
                return None
            entries = self.rows @ found.x
            entries = np.maximum(entries / entries.max(), 0)
            if (entries < TIGHT).sum() > 1.5 * len(held):
                return found.x / np.linalg.norm(found.x)
            if added is not None:
                weights = 1 / (entries + added)
                weights /= weights.sum()
        return None
