"""The gradient behind an upload that keeps its order alone.

An upload in the order of the true gradient, as ``FakeGradients`` makes it (nearly, in the reading ``clip``), is φ(G) for an unknown
increasing φ. The true average over K rows has rank K, far below its size, and almost no other increasing function of the
upload has: so the order tells the first layer's gradient up to a factor. Alternating projections find it: onto the
matrices of rank K by an SVD, and onto those in the upload's order by isotonic regression. The rows of units that were
silent in the whole batch tell where zero is; without it a shift of all entries could stand in for the weakest direction.

The bias entries are few and far out, so they come afterwards: b lies in the span of the recovered columns, and its
entries' places among the weights tell its coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.special import ndtri

from ..checks import at_least_one
from ..model import VFLModel
from ..protocol import RoundView

STEPS = 400  # alternating projections at the most
PLAIN = 30  # of them before momentum sets in and the weights of rows are kept
PATIENCE = 25  # steps that must make the misfit a tenth smaller, or they end
POWERS = (3, 2)  # of the normal scores that are the first guess, tried in turn: gradients have heavy tails
FITS = 1e-3  # misfit above which another first guess is tried
WEAK, WHOLE = 1e-4, 0.9  # of the largest row: one that vanishes; of all ranks: nearly all
SILENT = 0.1  # a silent unit's entries reach over less of the ranks


@dataclass(frozen=True)
class Order:
    """The order of a matrix' entries. places : (n,), flat positions, ascending; ranks : (d2, d1); zeros : (first, last) rank known to be zero, or None"""

    places: np.ndarray
    ranks: np.ndarray
    zeros: tuple[int, int] | None


def from_order(view: RoundView, model: VFLModel, *, steps: int = STEPS) -> tuple[RoundView, list[float]]:
    """The round with every first layer's gradient replaced by the one its order tells, and each worker's misfit.

    The gradients are as large as the upload's weights; what the other layers uploaded stays as it is. The misfit, M numbers,
    tells how far each is from rank K, all its rows taken as equally large: where it is not small, the order was not one of
    such a gradient, or was not solved. A small one is no proof: measured errors are ten to a thousand times as large.

    Raises
    ------
    ValueError : a batch that is not smaller than a first layer, whose gradient then is any matrix; ``steps`` below 1
    """
    at_least_one("steps", steps)
    rank = rank_of(view, model)
    gradients, misfits = {name: value.clone() for name, value in view.gradients.items()}, [0.0] * model.workers
    for g, group in enumerate(model.groups):
        for i, m in enumerate(group):
            weight, bias = gradients[f"group{g}.first.weight"][i], gradients[f"group{g}.first.bias"][i]
            upload = weight.double().cpu().numpy()
            if not upload.any():
                misfits[m] = 1.0
                continue
            found, misfits[m] = low_rank_in_order(upload, rank, steps=steps)
            found *= np.linalg.norm(upload) / np.linalg.norm(found)
            beside, _ = bias_in_order(found, upload, bias.double().cpu().numpy(), rank)
            weight.copy_(weight.new_tensor(found)), bias.copy_(bias.new_tensor(beside))
    return replace(view, gradients=gradients), misfits


def rank_of(view: RoundView, model: VFLModel) -> int:
    """The rank of the first layers' gradients, K; ``ValueError`` where it is no restriction."""
    rank = len(view.indices)
    for m in range(model.workers):
        if rank >= min(model.d1[m], model.d2[m]):
            raise ValueError(f"view.indices holds {rank} rows, worker {m}'s first layer is {model.d2[m]} x {model.d1[m]}; a batch must be smaller than both")
    return rank


def low_rank_in_order(upload: np.ndarray, rank: int, *, steps: int = STEPS) -> tuple[np.ndarray, float]:
    """A matrix (d2, d1) of nearly this rank in the order of the upload (d2, d1), up to a factor, and its misfit."""
    order, best = order_of(upload), (upload, np.inf)
    for power in POWERS:
        X = _projected(first_guess(upload, order, power), order, rank, steps)
        best = min(best, (X, misfit_of(X, rank, order.ranks)), key=lambda found: found[1])
        if best[1] < FITS:
            break
    return best


def _projected(X: np.ndarray, order: Order, rank: int, steps: int) -> np.ndarray:
    before, size, misfits, since = X, np.ones((len(X), 1)), [], 0
    for step in range(steps):
        if step <= PLAIN and step % 5 == 0:
            size = balanced(X)
        low, misfit = truncated((X + since / (since + 3) * (X - before)) * size, rank)
        rises = step <= PLAIN or misfit > misfits[-1]  # then momentum starts again
        since = 0 if rises else since + 1
        before, X = X, in_order(low / size, order, size**2)
        X /= np.linalg.norm(X * size)
        misfits.append(misfit)
        if step > PLAIN + PATIENCE and min(misfits[-PATIENCE:]) > 0.9 * min(misfits[:-PATIENCE]):
            break
    return X


def balanced(X: np.ndarray) -> np.ndarray:
    """Factors of the rows of X, (d2, 1), that make large ones count for less; the rank stays what it is.

    Otherwise a few of the largest entries, which nothing bounds from above, can stand in for the weakest direction.
    """
    rows = np.square(X).mean(1, keepdims=True)
    return (rows + 0.01 * rows.mean()) ** -0.25


def order_of(upload: np.ndarray) -> Order:
    """The order, with zero from the first to the last of the rows that reach over the fewest ranks, unless these are no silent units'."""
    places, ranks = upload.ravel().argsort(kind="stable"), np.empty(upload.shape, dtype=np.int64)
    ranks.ravel()[places] = np.arange(upload.size)
    first, last = ranks.min(1), ranks.max(1)
    least = (last - first).min()
    silent = last - first <= 2 * least
    return Order(places, ranks, (int(first[silent].min()), int(last[silent].max())) if least < SILENT * upload.size else None)


def misfit_of(X: np.ndarray, rank: int, ranks: np.ndarray) -> float:
    """The relative distance of X's rows to that rank, all of one size; 1 where a few entries alone carry X, which any order allows.

    ranks : (d2, d1), of the upload; rows of X that vanish must not reach over nearly all of them
    """
    norms = np.linalg.norm(X, axis=1)
    weak = norms <= WEAK * norms.max()
    if weak.any() and np.ptp(ranks[weak]) > WHOLE * ranks.size:
        return 1.0
    return truncated(X[~weak] / norms[~weak, None], rank)[1]


def first_guess(upload: np.ndarray, order: Order, power: float) -> np.ndarray:
    """Normal scores of the ranks, (d2, d1), counted from zero and raised to a power, their signs kept."""
    scores = ndtri((np.arange(upload.size) + 0.5) / upload.size)
    if order.zeros:
        scores -= scores[sum(order.zeros) // 2]
    X = np.empty(upload.size)
    X[order.places] = np.sign(scores) * np.abs(scores) ** power
    return X.reshape(upload.shape)


def in_order(X: np.ndarray, order: Order, weights: np.ndarray) -> np.ndarray:
    """The nearest matrix to X (d2, d1) in that order, squares of a row counted by ``weights`` (d2, 1)."""
    weights = np.broadcast_to(weights, X.shape).ravel()[order.places]
    values = isotonic_regression(X.ravel()[order.places], weights=weights).x
    if order.zeros:
        first, last = order.zeros
        values[:first], values[first : last + 1], values[last + 1 :] = values[:first].clip(max=0), 0.0, values[last + 1 :].clip(min=0)
    nearest = np.empty_like(values)
    nearest[order.places] = values
    return nearest.reshape(X.shape)


def truncated(X: np.ndarray, rank: int) -> tuple[np.ndarray, float]:
    """The nearest matrix to X (d2, d1) of that rank, and the relative distance to it."""
    _, vectors = np.linalg.eigh(X @ X.T)
    kept = vectors[:, -rank:]
    low = kept @ (kept.T @ X)
    return low, float(np.linalg.norm(X - low) / np.linalg.norm(X))


def bias_in_order(found: np.ndarray, upload: np.ndarray, bias: np.ndarray, rank: int, known: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """The bias gradient (d2,) from its entries' places among the weights' (d2, d1), whose values are ``found``, and its expected relative error.

    known : (d2,), entries that are taken as they are; the error is infinite where too few are known or have a place
    """
    values, uploaded = np.sort(found, axis=None), np.sort(upload, axis=None)
    places = uploaded.searchsorted(bias)
    inside = (places > 0) & (places < len(values))  # the others are only known to be larger than all weights
    below, above = (values[np.clip(places - shift, 0, len(values) - 1)] for shift in (1, 0))
    if known is not None:
        below[known] = above[known] = bias[known]
        inside |= known
    below, above = below[inside], above[inside]
    basis = np.linalg.eigh(found @ found.T)[1][:, -rank:]  # (d2, K)
    sure = 1 / (above - below + 1e-7 * np.abs(values).max())
    equations = basis[inside] * sure[:, None]
    beside = basis @ np.linalg.lstsq(equations, (above + below) / 2 * sure, rcond=None)[0]
    sizes = np.linalg.svd(equations, compute_uv=False)
    determined = len(equations) >= rank and sizes[-1] > 0 and beside.any()
    return beside, float(np.linalg.norm(1 / sizes) / np.linalg.norm(beside)) if determined else np.inf
