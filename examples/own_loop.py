"""An ordinary PyTorch loop, changed in three places, on simulated workers or on processes of this
machine.

python examples/own_loop.py            # 8 simulated workers
python examples/own_loop.py local 2    # 2 processes
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import flockstep as fs

train, test = fs.dataset("digits")


def program(comm: fs.Comm) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    worker = fs.Worker(comm, model, optimizer, strategy=fs.LocalSGD(period=4))
    for x, y in worker.batches(train, batch_size=16, epochs=8):
        loss = cross_entropy(model(x), y)
        loss.backward()
        worker.step(loss)
    return worker.finish()


if __name__ == "__main__":
    backend = sys.argv[1] if len(sys.argv) > 1 else "sim"
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    model = fs.launch(program, workers, backend)[0].eval()
    x, y = test.tensors
    accuracy = (model(x).argmax(1) == y).float().mean()
    print(f"{workers} workers on {backend}: test accuracy {accuracy:.3f}")
