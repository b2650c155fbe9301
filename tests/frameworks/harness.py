"""The small problem of the strategies' tests, trained by PyTorch, by JAX and by NumPy: the same
flat model, the same batches.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import torch
from jax import numpy as jnp
from tests.strategies.harness import B, X, Y, net, train

import flockstep as fs

jnp.zeros(1).block_until_ready()  # JAX opens what it keeps open

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")  # as torch has them, which is their order
START = {name: tensor.detach().numpy() for name, tensor in net().named_parameters()}
SGD = optax.sgd(0.1)
MOMENTUM = optax.sgd(0.1, momentum=0.9)


def momentum(params: Any, grads: Any, lr: float, state: Any) -> None:
    """v ← 0.9 v + g;   x ← x − η v: torch's."""
    for name, gradient in grads.items():
        velocity = state.setdefault(name, np.zeros_like(gradient))
        velocity *= 0.9
        velocity += gradient
        params[name] -= lr * velocity


def numpy_gradients(params: Any, x: Any, y: Any) -> tuple[float, dict[str, Any], float]:
    """Loss, gradients and accuracy of two layers with a tanh between them, by hand."""
    hidden = np.tanh(x @ params["0.weight"].T + params["0.bias"])
    output = hidden @ params["2.weight"].T + params["2.bias"]
    shifted = output - output.max(1, keepdims=True)
    likely = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(likely[rows, y]).mean()

    error = likely.copy()
    error[rows, y] -= 1
    error /= len(y)
    inner = (error @ params["2.weight"]) * (1 - hidden**2)
    grads = {
        "0.weight": inner.T @ x,
        "0.bias": inner.sum(0),
        "2.weight": error.T @ hidden,
        "2.bias": error.sum(0),
    }
    return float(loss), grads, float((output.argmax(1) == y).mean())


@jax.jit
def jax_gradients(params: Any, x: Any, y: Any) -> Any:
    """Loss and accuracy, and gradients."""

    def loss(params: Any) -> Any:
        hidden = jnp.tanh(x @ params["0.weight"].T + params["0.bias"])
        output = hidden @ params["2.weight"].T + params["2.bias"]
        losses = optax.softmax_cross_entropy_with_integer_labels(output, y)
        return losses.mean(), (output.argmax(1) == y).mean()

    return jax.value_and_grad(loss, has_aux=True)(params)


def own_batches(comm: fs.Comm, steps: int) -> Any:
    """As `train` of the strategies' tests takes them."""
    mine = slice(comm.rank * B, (comm.rank + 1) * B)
    for x, y in zip(X[:steps], Y[:steps], strict=True):
        yield x[mine].numpy(), y[mine].numpy()


def with_torch(comm: fs.Comm, strategy: Any, steps: int, has_momentum: bool) -> fs.Worker:
    beta = 0.9 if has_momentum else 0.0
    worker, _ = train(comm, strategy, steps=steps, momentum=beta)
    return worker


def with_numpy(comm: fs.Comm, strategy: Any, steps: int, has_momentum: bool) -> fs.Worker:
    update = momentum if has_momentum else fs.numpy.sgd
    worker = fs.numpy.Worker(comm, START, update, strategy=strategy, lr=0.1)
    worker.total_steps = steps
    for x, y in own_batches(comm, steps):
        loss, grads, accuracy = numpy_gradients(worker.params, x, y)
        worker.step(loss, grads, accuracy)
    return worker


def with_jax(comm: fs.Comm, strategy: Any, steps: int, has_momentum: bool) -> fs.Worker:
    optimizer = MOMENTUM if has_momentum else SGD
    worker = fs.jax.Worker(comm, START, optimizer, strategy=strategy, lr=0.1, order=NAMES)
    worker.total_steps = steps
    for x, y in own_batches(comm, steps):
        (loss, accuracy), grads = jax_gradients(worker.params, x, y)
        worker.step(loss, grads, accuracy)
    return worker


FRAMEWORKS = {"torch": with_torch, "numpy": with_numpy, "jax": with_jax}


def trained(
    strategies: list[Any],
    framework: Any,
    backend: Any = None,
    workers: int = 4,
    steps: int = 7,
    has_momentum: bool = True,
) -> list[Any]:
    """Of each worker, for each strategy: its flat state before finish and after, and its bytes.
    `framework` is a name, or one for each rank.
    """

    def program(comm: fs.Comm) -> Any:
        name = framework if isinstance(framework, str) else framework[comm.rank]
        told, sent = [], 0
        with jax.enable_x64(True):
            for strategy in strategies:
                worker = FRAMEWORKS[name](comm, strategy, steps, has_momentum)
                before = worker.flat.state.clone()
                worker.finish()
                told.append((before, worker.flat.state.clone(), comm.meter.bytes_sent - sent))
                sent = comm.meter.bytes_sent
        return told

    # One lane: modules are made after steps, too, and draw from torch's own generator.
    return fs.launch(program, workers, backend or fs.Simulator(lanes=1))


def assert_alike(ours: list[Any], theirs: list[Any], tolerance: float) -> None:
    """Two runs agree, worker by worker and strategy by strategy, in numbers and bytes."""
    for of_one, of_other in zip(ours, theirs, strict=True):
        for (before, after, sent), (before_there, after_there, sent_there) in zip(
            of_one, of_other, strict=True
        ):
            assert torch.allclose(before, before_there, rtol=0, atol=tolerance)
            assert torch.allclose(after, after_there, rtol=0, atol=tolerance)
            assert sent == sent_there
