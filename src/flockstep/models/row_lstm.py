"""An LSTM that reads an image of 28×28 row by row."""

from __future__ import annotations

from torch import Tensor, nn


class RowLSTM(nn.Module):
    """A linear layer from 28 pixels to 128, an LSTM of 128 over the rows, a class from the last:
    137,098 parameters.

    Takes (batch, 1, 28, 28) or (batch, 28, 28).

    Paper: Wongpanich, You & Demmel, "Rethinking the value of asynchronous solvers for distributed
    deep learning", 2020, which trains on MNIST with "28→128 transform, hidden 128". Unclear:
    whether the transform has a non-linearity (chosen: none), and the LSTM's biases (chosen: torch's
    two per gate, 512 parameters more than with one)."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Linear(28, 128)
        self.lstm = nn.LSTM(128, 128, batch_first=True)
        self.classify = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.transform(x.reshape(len(x), 28, 28)))
        logits: Tensor = self.classify(states[:, -1])
        return logits
