"""A small problem in double precision that every strategy test trains on, and ways to look at
the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flockstep as fs

W, B, STEPS = 4, 6, 20
GENERATOR = torch.Generator().manual_seed(2)
X = torch.randn(STEPS, 8 * B, 10, dtype=torch.float64, generator=GENERATOR)
Y = torch.randint(3, (STEPS, 8 * B), generator=GENERATOR)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def net_with_statistics() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)
    ).double()


class Vector(nn.Module):
    """Numbers that gradients of a test's own making move."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(start.clone())


def drive(
    comm: fs.Comm,
    strategy: fs.Strategy[Any],
    start: Tensor,
    gradients: Sequence[Tensor],
    lr: float = 1.0,
) -> fs.Worker:
    """A worker that has used the given gradients, one a step, from the common start."""
    model = Vector(start)
    worker = fs.Worker(comm, model, sgd(model, lr), strategy)
    worker.total_steps = len(gradients)
    for gradient in gradients:
        model.x.grad = gradient.clone()
        worker.step(0.0, accuracy=0.0)
    return worker


def in_order(
    strategy: fs.Strategy[Any],
    order: Sequence[int],
    gradients: Sequence[Tensor],
    start: Tensor,
    lr: float,
) -> list[tuple[Tensor, Tensor]]:
    """Steps that workers take one after the other in the given order; each worker's numbers
    before and after finish.
    """

    def program(comm: fs.Comm) -> tuple[Tensor, Tensor]:
        model = Vector(start)
        worker = fs.Worker(comm, model, sgd(model, lr), strategy)
        for rank, gradient in zip(order, gradients, strict=True):
            if comm.rank == rank:
                model.x.grad = gradient.clone()
                worker.step(0.0)
            comm.barrier()
        before = model.x.detach().clone()
        worker.finish()
        return before, model.x.detach().clone()

    return fs.launch(program, 1 + max(order))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def momentum_with(strategy: fs.Strategy[Any]) -> float:
    """What the workers' own optimizers have: one method is for plain SGD alone."""
    return 0.0 if getattr(strategy, "delay_compensation", 0.0) else 0.9


def train(
    comm: fs.Comm,
    strategy: fs.Strategy[Any],
    *,
    lr: float = 0.1,
    momentum: float = 0.0,
    steps: int = STEPS,
    total_steps: int | None = None,
    make_model: Any = net,
    after: Callable[[fs.Worker], object] = lambda worker: None,
) -> tuple[fs.Worker, list[float]]:
    """A worker that has trained on its own share of each batch, not finished yet, and its
    losses. `after` is called after each step; `total_steps` are those of a run that this one is
    the beginning of.
    """
    model = make_model()
    worker = fs.Worker(comm, model, sgd(model, lr, momentum), strategy)
    worker.total_steps = total_steps or steps
    losses = []
    for x, y in zip(X[:steps], Y[:steps], strict=True):
        mine = slice(comm.rank * B, (comm.rank + 1) * B)
        batch = (x[mine], y[mine])
        output = model(batch[0])
        loss = worker.adjust_loss(F.cross_entropy(output, batch[1]), batch)
        loss.backward()
        worker.step(loss, accuracy=float((output.argmax(1) == batch[1]).double().mean()))
        losses.append(worker.loss)
        after(worker)
    return worker, losses


def distributed(
    strategy: fs.Strategy[Any],
    backend: Any = "sim",
    workers: int = W,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> list[tuple[Tensor, Tensor]]:
    """Every worker's parameters before and after finish."""

    def program(comm: fs.Comm) -> tuple[Tensor, Tensor]:
        worker, _ = train(comm, strategy, **how)
        before = flat(worker.model)
        return before, flat(worker.finish())

    return fs.launch(program, workers, backend, **(options or {}))


def single(
    steps: int = STEPS,
    lr: float = 0.1,
    momentum: float = 0.0,
    workers: int = W,
    make_model: Any = net,
) -> Tensor:
    """One process on the batches of all workers together."""
    model = make_model()
    optimizer = sgd(model, lr, momentum)
    for x, y in zip(X[:steps], Y[:steps], strict=True):
        F.cross_entropy(model(x[: workers * B]), y[: workers * B]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def assert_same(
    one: Sequence[tuple[Tensor, ...]], other: Sequence[tuple[Tensor, ...]], tolerance: float = 0.0
) -> None:
    """Two runs agree, worker by worker; with no tolerance to the bit."""
    for ours, theirs in zip(one, other, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=tolerance, atol=tolerance * 1e-3), (a - b).abs().max()
