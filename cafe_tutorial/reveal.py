"""The private quantities that an attack looks for, computed from the private side, to check and to teach.

Only :class:`~cafe_tutorial.protocol.VerticalFL`, which holds the data, can be asked. No attack imports this module.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from .protocol import VerticalFL


def row_gradients(vfl: VerticalFL) -> tuple[list[Tensor], list[Tensor]]:
    """v_n = ∂ℓ_n/∂u_n of each row's own loss and h_n, for the present Θ: a (N, d2) and a (N, d1) tensor a worker."""
    model, hidden, first, outputs = vfl.model, [], [], []
    for m, x in enumerate(vfl.parts):
        own = {k: v.detach() for k, v in model.of_worker(vfl.parameters, m).items()}
        with torch.no_grad():
            h = model.representation(m, vfl.parameters)(x)  # (N, d1)
        u = (h @ own["first.weight"].T + own["first.bias"]).requires_grad_()  # (N, d2)
        upper = {k.removeprefix("upper."): v for k, v in own.items() if k.startswith("upper.")}
        outputs.append(functional_call(model.template(m).upper, upper, (u,)))
        hidden.append(h)
        first.append(u)
    logits = F.linear(torch.cat(outputs, 1), vfl.parameters["head.weight"].detach(), vfl.parameters["head.bias"].detach())
    total = model.loss(logits, vfl.labels) * len(vfl.labels)  # the sum of the rows' own losses
    return list(torch.autograd.grad(total, first)), hidden
