"""A loop in JAX on simulated workers or on processes of this machine; or one half of the workers in
JAX and the other in PyTorch, training the same model.

python examples/jax_loop.py              # 4 simulated workers
python examples/jax_loop.py local 2      # 2 processes
python examples/jax_loop.py sim 4 mixed  # every other worker is PyTorch's
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
import optax
import torch
from jax import numpy as jnp
from torch import nn
from torch.nn.functional import cross_entropy

import flockstep as fs

train, test = fs.dataset("digits")
optimizer = optax.sgd(0.1, momentum=0.9)
ORDER = ["0.weight", "0.bias", "2.weight", "2.bias"]  # that of the PyTorch module


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def outputs(params: Any, x: Any) -> Any:
    hidden = jnp.maximum(x @ params["0.weight"].T + params["0.bias"], 0)
    return hidden @ params["2.weight"].T + params["2.bias"]


@jax.jit
def gradients(params: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs(params, x), y)
        return losses.mean()

    return jax.value_and_grad(loss)(params)


def with_jax(comm: fs.Comm) -> Any:
    start = {name: array.detach().numpy() for name, array in make_module().named_parameters()}
    worker = fs.jax.Worker(comm, start, optimizer, strategy=fs.LocalSGD(period=4), order=ORDER)
    for x, y in worker.batches(train, batch_size=16, epochs=8):
        loss, grads = gradients(worker.params, x, y)
        worker.step(loss, grads)
    return jax.tree.map(np.asarray, worker.finish())


def with_torch(comm: fs.Comm) -> Any:
    model = make_module()
    worker = fs.Worker(
        comm,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        strategy=fs.LocalSGD(period=4),
    )
    for x, y in worker.batches(train, batch_size=16, epochs=8):
        loss = cross_entropy(model(x), y)
        loss.backward()
        worker.step(loss)
    worker.finish()
    return {name: array.detach().numpy() for name, array in model.named_parameters()}


def mixed(comm: fs.Comm) -> Any:
    return with_torch(comm) if comm.rank % 2 else with_jax(comm)


if __name__ == "__main__":
    backend = sys.argv[1] if len(sys.argv) > 1 else "sim"
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    params = fs.launch(mixed if sys.argv[3:] == ["mixed"] else with_jax, workers, backend)[0]
    x, y = (tensor.numpy() for tensor in test.tensors)
    accuracy = (outputs(params, x).argmax(1) == y).mean()
    print(f"{workers} workers on {backend}: test accuracy {accuracy:.3f}")
