"""A batch's rows as rays of a cone, by linear programmes.

With a basis Y of the batch's span, (d1 + 1, k), each h̃_i is Y a_i. When h comes from a ReLU, the a_i lie in the cone
{a : Y a ≥ 0}, and each of them makes many inequalities tight: the zeros of its h. Which zeros, a rough picture tells: the
sum of the entries of Y a, each weighted by the inverse of what it is for the picture, is smallest at a ray with such zeros
(a step of reweighted ℓ1 minimization, Candès et al. 2008).
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

ADDED = 0.01  # to an entry, relative to the largest, before its inverse is the weight
TIGHT = 1e-5  # an entry below this share of the largest counts as zero
HINTS = 64  # random ones, for a whole cone
ERROR = 1e-6  # of a ray, as far as a programme's tolerance goes
PROGRAMMES = 3  # at most, each weighted by what the one before gave


class RayFinder:
    """Finds rays of {a : Y a ≥ 0} that have more zeros than any ray must have.

    basis : (d1 + 1, k), float64, orthonormal
    """

    def __init__(self, basis: np.ndarray):
        size = np.linalg.norm(basis, axis=1)
        self.kept = size > 1e-3 * size.max()
        self.basis, self.size = basis, size[self.kept]
        self.rows = basis[self.kept] / self.size[:, None]
        self.zeros = max(1.5 * basis.shape[1], 0.1 * len(self.rows))

    def near(self, hint: np.ndarray, known: np.ndarray) -> np.ndarray | None:
        """The ray near a rough h̃ that is no combination of the known rays.

        hint : (d1 + 1,); known : (f, k), unit coordinates. Returns unit coordinates (k,), or None where there is none.
        """
        held = hint @ self.basis
        if len(known):
            directions = np.linalg.qr(known.T)[0]
            held = held - directions @ (directions.T @ held)
        if np.linalg.norm(held) < 0.01 * np.linalg.norm(hint):
            return None
        entries = hint[self.kept] / self.size
        for _ in range(PROGRAMMES):
            weights = 1 / (np.maximum(entries / entries.max(), 0) + ADDED)
            found = linprog(
                weights @ self.rows / weights.sum(), A_ub=-self.rows, b_ub=np.zeros(len(self.rows)),
                A_eq=held[None] / np.linalg.norm(held), b_eq=[1.0], bounds=[(None, None)] * len(held), method="highs-ds",
            )  # fmt: skip
            if found.status != 0:
                return None
            entries = self.rows @ found.x
            if (entries < TIGHT * entries.max()).sum() > self.zeros:
                return found.x / np.linalg.norm(found.x)
        return None


def rays_by_chance(basis: Tensor, seed: int, known: Tensor) -> tuple[Tensor, Tensor]:
    """More rays like those of :func:`~cafe_tutorial.attack.cones.extreme_rays`, by programmes with random hints, as many as they find.

    basis : (d1 + 1, c), orthonormal; known : (f, d1 + 1), rays that need not be found
    """
    finder, rays = RayFinder(basis.cpu().numpy()), torch.nn.functional.normalize(known @ basis, dim=1).cpu()
    for hint in np.random.default_rng(seed).integers(0, 2, (HINTS, len(basis))):
        ray = finder.near(hint.astype(float), rays.numpy()) if len(rays) < basis.shape[1] else None
        if ray is not None:
            rays = torch.cat([rays, torch.from_numpy(ray)[None]])
    found = torch.nn.functional.normalize(rays[len(known) :].to(basis) @ basis.T, dim=1)
    return found, torch.full_like(found[:, 0], ERROR)
