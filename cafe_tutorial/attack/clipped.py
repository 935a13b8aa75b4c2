"""The gradient behind an upload of which some entries were cut off: least squares on the others.

``FakeGradients`` in the reading ``clip`` cuts each entry to the size of a normal sample's value of the same rank. Entries that
were cut lie on that curve, whose scale the upload shows; all others are the true gradient's. A first layer's gradient over K
rows has rank K, so the entries that are left determine it: alternating least squares for its two factors, each row's
and column's equations over the entries that count.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from scipy.special import ndtri
from torch import Tensor

from ..checks import at_least_one
from ..defense.base import flat, unflat
from ..model import Parameters, VFLModel
from ..protocol import RoundView
from .ranks import bias_in_order, rank_of

STEPS = 300  # of alternating least squares at the most
PATIENCE = 20  # steps that must make the misfit a tenth smaller once the ridge is down, or they end
SURE = 0.9  # of the curve: an entry above may have been cut
FAR = 50  # entries at either end that count as cut: there a sample's values scatter about the curve
RIDGES = ((1e-3, None), (1e-4, None), (1e-2, 0.7), (1e-2, None))  # tried in turn, so that no column with few entries takes a direction for itself: at the start, and a step's factor; without one, the squared misfit
LAST = 1e-13  # ridge at the end
FITS = 1e-5  # of misfits: the largest of a solution, and of a bias; otherwise that stays as it was uploaded


def from_clipped(view: RoundView, model: VFLModel, *, steps: int = STEPS) -> tuple[RoundView, list[float]]:
    """The round with every first layer's gradient replaced by the one that its uncut entries tell, and each worker's misfit.

    What the other layers uploaded stays as it is, and so does a first layer's bias that is not determined to 1e-5. The misfit, M
    numbers, is the relative distance of a matrix of rank K to the weights that count, or the expected relative error of the
    bias where that is larger; 1 where the entries are too few to determine either.

    Raises
    ------
    ValueError : a batch that is not smaller than a first layer, whose gradient then is any matrix; ``steps`` below 1
    """
    at_least_one("steps", steps)
    rank = rank_of(view, model)
    gradients, misfits = {name: value.clone() for name, value in view.gradients.items()}, [0.0] * model.workers
    for g, group in enumerate(model.groups):
        for i, m in enumerate(group):
            upload = {name: value.double().cpu() for name, value in model.of_worker(view.gradients, m).items()}
            sure, (weight, bias) = uncut(upload), (upload[f"first.{kind}"] for kind in ("weight", "bias"))
            found, misfits[m], true_rank = completed(weight, sure["first.weight"], rank, steps=steps)
            if misfits[m] < 1:
                beside, error = bias_in_order(*(x.numpy() for x in (found, weight, bias)), true_rank, sure["first.bias"].numpy())
                misfits[m] = min(1.0, max(misfits[m], error))
                for kind, value in (("weight", found), ("bias", torch.from_numpy(beside) if misfits[m] < FITS else bias)):
                    gradients[f"group{g}.first.{kind}"][i] = value.to(gradients[f"group{g}.first.{kind}"])
    return replace(view, gradients=gradients), misfits


def uncut(upload: Parameters) -> dict[str, Tensor]:
    """Which entries of one worker's upload are surely the true ones, tensor by tensor: those well below the curve.

    The curve is σ |q_r| at rank r, with q_r the normal quantile. Each size is at most its own, so σ is the largest ratio.
    """
    values = flat(upload)
    n, order = len(values), values.argsort()
    q = torch.from_numpy(ndtri((torch.arange(n).double() + 0.5).numpy() / n)).abs()
    sizes, inner = values[order].abs(), torch.zeros(n, dtype=torch.bool)
    inner[FAR // 2 : n - FAR // 2] = True
    scale = (sizes / q)[inner & (q > 0.5)].amax()
    sure = torch.empty(n, dtype=torch.bool)
    inner[:FAR] = inner[n - FAR :] = False
    sure[order] = inner & (sizes < SURE * scale * q)
    return unflat(sure, upload)


def completed(X: Tensor, sure: Tensor, rank: int, *, steps: int = STEPS) -> tuple[Tensor, float, int]:
    """The matrix of at most this rank that is nearest to the sure entries of X (d2, d1) in float64, its misfit, and its rank.

    The rank is the smallest that fits as well: a direction too many would fit the rounding of sure entries, and say anything of the others.
    """
    result, (rows, columns) = X.clone(), (X.abs().amax(1) > 0, X.abs().amax(0) > 0)
    active = rows[:, None] & columns
    X, W = X[rows][:, columns], sure[rows][:, columns].double()
    if min(X.shape) <= rank or min(W.sum(0).amin(), W.sum(1).amin()) < rank:
        return result, 1.0, rank
    sizes = X.square().mean(1, keepdim=True).sqrt()
    X = X / sizes
    start = torch.linalg.svd(X, full_matrices=False)
    found, misfit = _alternated(X, W, start, rank, steps)
    while rank > 1 and misfit < FITS:
        fewer = _alternated(X, W, start, rank - 1, steps)
        if fewer[1] > 2 * misfit:
            break
        (found, misfit), rank = fewer, rank - 1
    result[active] = (found * sizes).flatten()
    return result, misfit, rank


def _alternated(X: Tensor, W: Tensor, start: tuple[Tensor, Tensor, Tensor], rank: int, steps: int) -> tuple[Tensor, float]:
    """The best of alternating least squares by each course of the ridge, until one fits, and its misfit; start : the SVD of X."""
    best = (X, float("inf"))
    for largest, fall in RIDGES:
        A, misfits, ridge = start[0][:, :rank] * start[1][:rank], [], largest
        for _ in range(steps):
            B = _fitted(torch.linalg.qr(A)[0], X, W, ridge)  # (columns, K)
            A = _fitted(B := torch.linalg.qr(B)[0], X.T, W.T, ridge)  # (rows, K)
            misfits.append(float((W * (A @ B.T - X)).norm() / (W * X).norm()))
            if len(misfits) > PATIENCE and misfits[-1] > 0.9 * misfits[-1 - PATIENCE] and (ridge == LAST or fall is None):
                break
            ridge = max(min(fall * ridge if fall else misfits[-1] ** 2, largest), LAST)
        best = min(best, (A @ B.T, misfits[-1]), key=lambda found: found[1])
        if best[1] < FITS:
            break
    return best


def _fitted(basis: Tensor, X: Tensor, W: Tensor, ridge: float) -> Tensor:
    """For each column of X (r, n) its coefficients (n, K) in the basis (r, K), over the entries where W (r, n) is 1."""
    rank = basis.shape[1]
    squares = (W.T @ (basis[:, :, None] * basis[:, None]).flatten(1)).view(-1, rank, rank)
    return torch.linalg.solve(squares + ridge * torch.eye(rank).to(squares), ((W * X).T @ basis)[:, :, None])[:, :, 0]
