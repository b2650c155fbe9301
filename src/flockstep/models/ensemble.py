"""Several models that answer as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flockstep.fields import require, require_model


class Ensemble(nn.Module):
    """The mean of what several models say, each in probabilities.

        p(x) = (1/k) Σ_i softmax(f_i(x)),     the output is log p(x)

    Of logarithms the softmax is p itself, so losses and metrics that take scores of classes take
    the ensemble as they take its members.

    Fields:
        models: one at least, whose last dimension has a score for each class.

    Paper: for models of one training, taken where its rate has collapsed (`fs.FinalCollapse` with
    cycles): Codreanu, Podareanu and Saletore, "Scale out for large minibatch SGD", 2017.

    Example:
        ensemble = fs.Ensemble(members)
        loss, accuracy = task.evaluate(ensemble)
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        members = list(models)
        require(len(members) > 0, "models", "be one at least", members)
        for model in members:
            require_model(model)
        self.members = nn.ModuleList(members)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        scores = [model(*inputs, **named) for model in self.members]
        logarithms = torch.stack([each.log_softmax(dim=-1) for each in scores])
        total: Tensor = logarithms.logsumexp(dim=0)
        return total - torch.tensor(float(len(scores)), dtype=total.dtype).log()
