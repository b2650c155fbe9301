"""Separate models that learn from each other's predictions."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from flockstep.codecs import Codec
from flockstep.comm import Comm, broadcast_from_first, handle
from flockstep.errors import FlockstepError, WorkerLost
from flockstep.fields import (
    require,
    require_choice,
    require_integer,
    require_number,
)
from flockstep.strategies._compressed import PublicCopies, require_codec, written
from flockstep.strategies._ranking import ranked
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class CodistillationState:
    teachers: list[Tensor] = field(default_factory=list)  # parameters and buffers, flat
    public: PublicCopies | None = None  # for a codec: of this worker and its teachers, by peer
    is_distilled: bool = False  # whether the loss of this step had the teachers in it

    group: Comm = handle()
    peers: Comm = handle()  # the workers of the same place in all groups
    hook: RemovableHandle = handle()
    prediction: list[Tensor] = handle()  # the model's last output, as the hook has seen it
    lens: nn.Module = handle()  # a copy in evaluation mode, to see what teachers predict


@dataclass(frozen=True)
class Codistillation(Strategy[CodistillationState]):
    """Groups train separate models; each also learns to predict what its neighbours' models
    predict.

        after burn_in steps:   loss ← loss + weight · ψ(p, f(x)/T)
                               p = mean over teachers of softmax(f_teacher(x)/T)
        with a codec:   x̂_i ← x̂_i + C(x_i − x̂_i) is what teacher i is known as

    ψ is the cross entropy of soft targets, times T² so that `weight` means the same at every
    temperature. Teachers are the last received parameters of the neighbouring groups, in evaluation
    mode, renewed every `exchange_period` steps. Inside a group gradients are averaged (SyncSGD).
    All models start from the same parameters and differ by their data. finish: the group with the
    lowest loss. In a loop of your own, call `loss = worker.adjust_loss(loss, batch)` before
    `backward`; `batch[0]` is the model's input.

    With a codec a teacher sends how it differs from what its pupils have, x̂: what was sent last,
    and at first the common start. What a message leaves out is a part of the next difference. Each
    worker keeps x̂ of itself and of its teachers. Gradients inside a group travel as they are.

    Bytes: one all-reduce of the gradients per step inside each group; every exchange_period steps
    from burn_in on, all groups' parameters and buffers to all (an all-gather between the workers of
    the same place in their groups) or, in a ring, to the next, or the codec's messages; at the end
    one number per worker and one broadcast.

    Use: with more workers than one batch can use; teachers may be old, so exchanges can be rare.

    Fields:
        groups: how many models, at least 2, dividing the number of workers.
        exchange_period: optimizer steps between exchanges of parameters.
        burn_in: steps before the first exchange.
        weight: of the teachers' part of the loss.
        temperature: T.
        topology: the teachers are those of the next group ("ring") or of all others ("complete").
        codec: how changes of teachers are written on the wire; None: their parameters as they are.

    Paper: Anil et al., "Large scale distributed neural network training through online
        distillation", 2018.

    Example:
        fs.run("digits-mlp", fs.Codistillation(groups=2, exchange_period=8, burn_in=16), workers=4)
    """

    name: ClassVar[str] = "codistillation"
    groups: int
    exchange_period: int
    burn_in: int
    weight: float = 1.0
    temperature: float = 1.0
    topology: str = "ring"
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_codec(self.codec)
        require_integer("groups", self.groups, 2)
        require_integer("exchange_period", self.exchange_period, 1)
        require_integer("burn_in", self.burn_in, 0)
        require_number("weight", self.weight, at_least=0)
        require_number("temperature", self.temperature, above=0)
        require_choice("topology", self.topology, ("ring", "complete"))

    def init(self, worker: Worker) -> CodistillationState:
        comm = worker.comm
        require(
            comm.size % self.groups == 0,
            "groups",
            f"divide the number of workers, {comm.size}",
            self.groups,
        )
        size = comm.size // self.groups
        lens = copy.deepcopy(worker.model).eval()
        prediction: list[Tensor] = []

        def remember(module: nn.Module, inputs: Any, output: Any) -> None:
            if module.training and torch.is_grad_enabled():
                prediction[:] = [output]

        hook = worker.model.register_forward_hook(remember)
        group, peers = comm.split(comm.rank // size), comm.split(comm.rank % size)
        public = None
        if self.codec is not None:
            known = [*range(peers.size)]
            if self.topology == "ring":
                known = [peers.rank, (peers.rank - 1) % peers.size]
            public = PublicCopies.of(worker, self.codec, known)
        return CodistillationState(
            public=public,
            group=group,
            peers=peers,
            hook=hook,
            prediction=prediction,
            lens=lens,
        )

    def before_step(self, worker: Worker, state: CodistillationState) -> None:
        state.is_distilled = False
        since = worker.steps - self.burn_in
        if since >= 0 and since % self.exchange_period == 0:
            self._meet_teachers(worker, state)

    def _meet_teachers(self, worker: Worker, state: CodistillationState) -> None:
        own, peers = worker.flat.state, state.peers
        if state.public is not None:
            others = self._renewed_copies(own, peers, state.public)
        elif self.topology == "complete":
            told = peers.all_gather(own).by_rank()
            others = [other for rank, other in told.items() if rank != peers.rank]
        else:
            others = []
            with suppress(WorkerLost):
                peers.send(own, (peers.rank + 1) % peers.size)
            with suppress(WorkerLost):
                others = [peers.recv(torch.empty_like(own), (peers.rank - 1) % peers.size)]
        if others:  # teachers that are lost teach on as they were
            state.teachers = others

    def _renewed_copies(self, own: Tensor, peers: Comm, public: PublicCopies) -> list[Tensor]:
        """x̂ of the teachers, once each has sent C(x − x̂)."""
        message = public.message(own, peers.rank)
        if self.topology == "complete":
            told = peers.all_gather(message).by_rank()
            for rank, each in told.items():
                public.hear(each, rank)
            return [public[rank] for rank in told if rank != peers.rank]

        public.hear(message, peers.rank)
        teacher = (peers.rank - 1) % peers.size
        with suppress(WorkerLost):
            same = written(public.codec, message)
            peers.send(own, (peers.rank + 1) % peers.size, codec=same)
        with suppress(WorkerLost):
            change = peers.recv(torch.empty_like(own), teacher, codec=public.codec)
            public[teacher].add_(change)
            return [public[teacher]]
        return []

    def on_loss(
        self, worker: Worker, state: CodistillationState, loss: Tensor, batch: Any
    ) -> Tensor:
        state.is_distilled = True
        if not state.teachers:
            return loss
        inputs, heat = batch[0], self.temperature
        with torch.no_grad():
            teachers = [worker.flat.named(worker.model, teacher) for teacher in state.teachers]
            predictions = [functional_call(state.lens, teacher, (inputs,)) for teacher in teachers]
            targets = torch.stack(
                [F.softmax(prediction / heat, dim=-1) for prediction in predictions]
            ).mean(0)
        own = F.log_softmax(state.prediction[0] / heat, dim=-1)
        return loss - self.weight * heat**2 * (targets * own).sum(dim=-1).mean()

    def on_gradients(self, worker: Worker, state: CodistillationState) -> None:
        if state.teachers and not state.is_distilled:
            raise FlockstepError(
                f"rank {worker.comm.rank}: Codistillation is part of the loss: "
                "call loss = worker.adjust_loss(loss, batch) before loss.backward()"
            )
        state.prediction.clear()
        state.group.all_reduce(worker.flat.gradients, op="mean")

    def preview(self, worker: Worker, state: CodistillationState) -> Tensor:
        own, loss = worker.flat.state.clone(), torch.tensor(worker.smooth_loss, dtype=torch.float64)
        if worker.flat.buffers.numel():
            state.group.all_reduce(own[worker.flat.count :], op="mean")
        state.group.all_reduce(loss, op="mean")
        broadcast_from_first(worker.comm, own, ranked(worker.comm, float(loss)))
        return own

    def finish(self, worker: Worker, state: CodistillationState) -> None:
        worker.flat.state.copy_(self.preview(worker, state))
        state.hook.remove()
