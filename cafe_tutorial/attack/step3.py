"""Step III: data and labels (eq. 9), its three terms one function each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..model import Parameters, VFLModel
from .presets import Hyperparameters


def gradient_distance(fake: Sequence[Tensor], real: Sequence[Tensor]) -> Tensor:
    """Squared L2 distance between two gradients over all of Θ, the first term of eq. 9."""
    return sum((f - r).square().sum() for f, r in zip(fake, real))


def total_variation(x: Tensor) -> Tensor:
    """Anisotropic total variation Σ|∂x| of each image: (…, C, h, w) to (…,); zero for table records."""
    if x.dim() < 4:
        return x.new_zeros(x.shape[:-1])
    down = (x[..., 1:, :] - x[..., :-1, :]).abs().sum((-3, -2, -1))
    return down + (x[..., :, 1:] - x[..., :, :-1]).abs().sum((-3, -2, -1))


def truncated_tv(parts: Sequence[Tensor], xi: float) -> Tensor:
    """TV_ξ, the second term of eq. 9: zero while the mean TV of a slice is at most ξ, else its sum over workers.

    parts : one (M_g, |s|, …) tensor a group. The mean over the batch and the workers decides, and each
    worker then contributes its batch mean, as in the released code.
    """
    by_worker = torch.cat([total_variation(x).mean(1) for x in parts])  # (M,)
    return by_worker.sum() if bool(by_worker.mean() > xi) else by_worker.new_zeros(())


def representation_distance(hidden: Sequence[Tensor], recovered: Sequence[Tensor]) -> Tensor:
    """Σ ‖ĥ_n - h(Θ_c, x̂_n)‖², the third term of eq. 9; (M_g, |s|, d1) a group."""
    return sum((h - r).square().sum() for h, r in zip(hidden, recovered))


def slopes(value: Tensor, variables: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of ``value`` in each variable, zero where it does not depend on it."""
    found = torch.autograd.grad(value, variables, allow_unused=True)
    return [torch.zeros_like(v) if g is None else g for g, v in zip(found, variables)]


def step3_gradients(
    model: VFLModel, parameters: Parameters, real: Parameters, x_hat: Sequence[Tensor], y_hat: Tensor,
    H_s: Sequence[Tensor], settings: Hyperparameters,
) -> tuple[Tensor, list[Tensor], Tensor]:  # fmt: skip
    """The objective of eq. 9 for one batch and its gradients.

    x_hat : one (M_g, |s|, …) tensor a group, fake parts; y_hat : (|s|, classes), fake labels before
    their softmax; H_s : (M_g, |s|, d1) a group, step II's estimates. ``real`` is the round's gradient.
    Returns the objective, the gradient of each group's fake parts, and the gradient of the fake labels.
    """
    x_hat = [x.detach().requires_grad_() for x in x_hat]
    y_hat = y_hat.detach().requires_grad_()
    names = list(parameters)
    leaves = {k: v.detach().requires_grad_() for k, v in parameters.items()}
    hidden, logits = model.forward(leaves, x_hat)
    objective = settings.gamma * representation_distance(hidden, H_s)
    if settings.beta:
        objective = objective + settings.beta * truncated_tv(x_hat, settings.xi)
    if settings.alpha:
        loss = model.loss(logits, y_hat.softmax(1))
        fake = torch.autograd.grad(loss, [leaves[k] for k in names], create_graph=True)
        objective = objective + settings.alpha * gradient_distance(fake, [real[k] for k in names])
    grads = slopes(objective, [*x_hat, y_hat])
    return objective.detach(), grads[:-1], grads[-1]
