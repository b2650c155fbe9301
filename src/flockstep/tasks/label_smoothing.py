"""Labels that leave some doubt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from flockstep.fields import require_number


@dataclass(frozen=True)
class SmoothedLoss:
    """Cross-entropy with labels that give every class a little; for batches of (inputs, labels).

        L = −Σ_c q_c log p_c,     q = (1 − ε) · one-hot(label) + ε / classes

    Only while the model trains: in evaluation it is plain cross-entropy, so that test losses
        compare.

    Fields:
        smoothing: ε.

    Paper: Szegedy, Vanhoucke, Ioffe, Shlens and Wojna, "Rethinking the Inception Architecture for
    Computer Vision", 2016.

    Example:
        fs.Task("mine", Net, make_optimizer, loss=fs.SmoothedLoss(0.1), train=(x, y), test=…)
    """

    name: ClassVar[str] = "smoothed"
    smoothing: float = 0.1

    def __post_init__(self) -> None:
        require_number("smoothing", self.smoothing, at_least=0, below=1)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        smoothing = self.smoothing if model.training else 0.0
        return nn.functional.cross_entropy(model(inputs), labels, label_smoothing=smoothing)
