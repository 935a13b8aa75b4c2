"""The private quantities that an attack looks for, computed from the private side, to check and to teach.

Only :class:`~cafe_tutorial.protocol.VerticalFL`, which holds the data, can be asked. No attack imports this module.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .protocol import VerticalFL


def row_gradients(vfl: VerticalFL) -> tuple[list[Tensor], list[Tensor]]:
    """v_n = ∂ℓ_n/∂u_n of each row's own loss and h_n, for the present Θ: a (N, d2) and a (N, d1) tensor a worker."""
    model, hidden, first, outputs = vfl.model, [], [], []
    parameters = {k: v.detach() for k, v in vfl.parameters.items()}
    known = vfl.hidden
    for m, x in enumerate(vfl.parts):
        own = model.of_worker(parameters, m)
        h = model.representation(m, parameters)(x) if known is None else known[m]  # (N, d1)
        u = (h @ own["first.weight"].T + own["first.bias"]).requires_grad_()  # (N, d2)
        outputs.append(model.upper(m, parameters)(u))
        hidden.append(h)
        first.append(u)
    logits = F.linear(torch.cat(outputs, 1), parameters["head.weight"], parameters["head.bias"])
    total = model.loss(logits, vfl.labels) * len(vfl.labels)  # the sum of the rows' own losses
    return list(torch.autograd.grad(total, first)), hidden
