"""A swarm: every worker is pulled towards the centre of mass of the best."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.codecs import Codec
from flockstep.comm import (
    Average,
    Background,
    Comm,
    averager,
    broadcast_from_first,
    handle,
    require_algorithm,
    sum_at_first,
)
from flockstep.fields import require, require_choice, require_integer, require_number
from flockstep.strategies._compressed import PublicCopies, require_codec
from flockstep.strategies._ranking import SCORES, last_score, lowest_first, told_by_all
from flockstep.strategies._representative import representative, require_representative
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class NoSyncState:
    centres: deque[Tensor]  # of the last exchanges, the oldest first
    wait: Background  # until the newest of them is there
    public: PublicCopies | None = None  # for a codec: of every particle

    average: Average = handle()  # over all workers
    group: Comm | None = handle()  # the workers of this particle


@dataclass(frozen=True)
class NoSync(Strategy[NoSyncState]):
    """After its own step every worker moves a part of the way towards a centre of mass.

        x_i ← (1−β) x_i + (β/n) Σ_{k∈N} x_k
        N: the n workers with the best score on their last batch
        with a codec:   x̂_k ← x̂_k + C(x_k − x̂_k),   k ∈ N
                        x_i ← x_i + β((1/n) Σ_{k∈N} x̂_k − x̂_i),   with x_i for x̂_i if i ∉ N

    pull=1 and best=None equal LocalSGD of the same period; best=1 and pull=1 equal BestOnly; pull=0
    has the trajectories of Independent, and sends nothing. finish, and looks before: the centre of
    mass of all, which is our choice; the paper does not say which model it evaluates. Statistics of
    batch normalisation are pulled with the parameters. How far apart the workers settle:
    `fs.settled_distance`.

    With `groups` a particle is a group of workers that average their gradients every step: NoSync
    is "orthogonal to existing data-parallel approaches". A particle's score is the mean of its
    members', and n counts particles; one worker of each sends its parameters.

    With a codec every worker keeps a public copy x̂_k of every particle, at first the common start:
    as many times the parameters and buffers as there are particles. Those of N send how they differ
    from their own, to all; the other copies stay as they are. What a message leaves out is a part
    of the next difference. A worker of N is pulled by what all know of it, as in CHOCO-SGD: so with
    best=None the mean of all is preserved, and what was not sent yet stays in x_i. Then pull=1 does
    not make replicas equal: a pull that is much stronger than the share of bytes which the codec
    keeps drives them apart, and LocalSGD is the method for it. Gradients inside groups travel as
    they are. With `staleness` the centre is an older one, x̂_i that of now.

    Bytes: best=None, one all-reduce of parameters and buffers every `period` steps. Otherwise, or
    with groups, one number per worker, and n−1 + w−1 messages of parameters, buffers and a count in
    all: summed at the best of N, and broadcast from there. With a codec, n messages to w−1 workers
    each, and the numbers as before. With groups also an all-reduce of the gradients per step inside
    each. At the end one all-reduce, or what the representative takes.

    Use: to keep workers apart but not too far, so that they explore a wide optimum together.

    Fields:
        pull: β, from 0 to 1.
        best: n, how many workers make the centre; None: all.
        period: optimizer steps between exchanges.
        staleness: pull towards the centre of so many exchanges before, so that it can travel while
            workers compute.
        score: what N is chosen by: "loss", or "accuracy" (the paper's choice), passed as
            `worker.step(loss, accuracy=…)`; `fs.run` takes the task's metric on the batch, at the
            cost of another forward pass.
        groups: how many particles there are, each of equally many neighbours in rank; None: every
            worker is one.
        codec: how differences to public copies are written on the wire; None: parameters as they
            are.
        all_reduce: how the centre of all is computed: "flat", "tree" (the paper's reduction tree)
            or another algorithm of SyncSGD's, with which a lost worker ends the run. Only where all
            workers make the centre, and without a codec.
        representative: which model stands for the run: the "mean", the "best" or "any".

    Paper: Isakov and Kinsy, "NoSync: Particle Swarm Inspired Distributed DNN Training", 2018.
    Public copies: Koloskova, Stich, Jaggi, 2019 (see DPSGD).

    Example:
        fs.run("digits-mlp", fs.NoSync(pull=0.1), workers=4)
    """

    name: ClassVar[str] = "nosync"
    pull: float
    best: int | None = None
    period: int = 1
    staleness: int = 0
    score: str = "loss"
    groups: int | None = None
    codec: Codec | None = None
    all_reduce: str = "flat"
    representative: str = "mean"

    def __post_init__(self) -> None:
        require_number("pull", self.pull, at_least=0, at_most=1)
        if self.best is not None:
            require_integer("best", self.best, 1)
        require_integer("period", self.period, 1)
        require_integer("staleness", self.staleness, 0)
        require_choice("score", self.score, SCORES)
        if self.groups is not None:
            require_integer("groups", self.groups, 1)
        require_algorithm("all_reduce", self.all_reduce)
        is_of_all = self.best is None and self.groups is None
        rule = "be 'flat' with 'best' or 'groups', whose centre is not of all workers"
        require(is_of_all or self.all_reduce == "flat", "all_reduce", rule, self.all_reduce)
        has_own_way = self.codec is None or self.all_reduce == "flat"
        rule = "be 'flat' with a codec, which has its own way"
        require(has_own_way, "all_reduce", rule, self.all_reduce)
        require_codec(self.codec)
        require_representative(self.representative)

    @property
    def needs_accuracy(self) -> bool:
        return self.best is not None and self.score == "accuracy"

    def next_synchronisation(self, steps: int, total_steps: int | None) -> int | None:
        becomes_the_centre = self.pull == 1 and self.staleness == 0 and self.codec is None
        return -(-steps // self.period) * self.period if becomes_the_centre else None

    def init(self, worker: Worker) -> NoSyncState:
        comm, group = worker.comm, None
        if self.groups is not None:
            divides = comm.size % self.groups == 0
            require(divides, "groups", f"divide the number of workers, {comm.size}", self.groups)
            group = comm.split(self._particle_of(comm.rank, comm))
        particles = comm.size if self.groups is None else self.groups
        fits = self.best is None or self.best <= particles
        kind = "workers" if self.groups is None else "groups"
        require(fits, "best", f"be at most the {kind}, {particles}", self.best)
        public = None
        if self.codec is not None:
            public = PublicCopies.of(worker, self.codec, range(particles))
        return NoSyncState(
            deque(maxlen=self.staleness + 1),
            Background(comm=comm),
            public,
            average=averager(comm, self.all_reduce),
            group=group,
        )

    def on_gradients(self, worker: Worker, state: NoSyncState) -> None:
        if state.group is not None:
            state.group.all_reduce(worker.flat.gradients, op="mean")

    def after_step(self, worker: Worker, state: NoSyncState) -> None:
        if worker.steps % self.period or self.pull == 0:
            return
        if self.staleness == 0:
            known = self._exchange(worker, state)
        else:
            state.wait()  # a centre is on its way at a time
            with worker.comm.in_background() as state.wait:
                known = self._exchange(worker, state)
        if len(state.centres) <= self.staleness:
            return
        own = worker.flat.state
        if known is own:
            own.lerp_(state.centres[0], self.pull)  # x ← (1−β) x + β·centre
        else:
            own.add_(state.centres[0] - known, alpha=self.pull)  # x ← x + β(centre − x̂)

    def _exchange(self, worker: Worker, state: NoSyncState) -> Tensor:
        """Have one more centre, and return what the pull is from: x_i, or x̂_i if that is new."""
        if state.public is None:
            centre, known = self._centre(worker, state), worker.flat.state
        else:
            centre, known = self._centre_of_copies(worker, state.public)
        state.centres.append(centre)
        return known

    def _centre(self, worker: Worker, state: NoSyncState) -> Tensor:
        """(1/n) Σ_{k∈N} x_k."""
        comm, own = worker.comm, worker.flat.state
        if self.best is None and self.groups is None:
            centre = own.clone()
            state.average(centre)
            return centre

        best_first = self._particles(worker)
        wide = own.to(torch.promote_types(own.dtype, torch.float32))
        # And how many it is the sum of, since some may be lost.
        total = torch.cat([wide, wide.new_ones(1)])
        sum_at_first(comm, total, best_first[: self.best], without_lost=True)
        others = [rank for rank in range(comm.size) if rank not in best_first]
        broadcast_from_first(comm, total, [*best_first, *others])
        return total[:-1].div_(total[-1]).to(own.dtype)

    def _centre_of_copies(self, worker: Worker, public: PublicCopies) -> tuple[Tensor, Tensor]:
        """(1/n) Σ_{k∈N} x̂_k, once those of N have sent how they differ from their copies; and x̂_i
        of this worker, or x_i if it is not in N.
        """
        comm, own = worker.comm, worker.flat.state
        senders = [*range(comm.size)]
        if self.best is not None or self.groups is not None:
            senders = self._particles(worker)[: self.best]

        mine = self._particle_of(comm.rank, comm)
        message = torch.empty(0, dtype=torch.uint8)
        if comm.rank in senders:
            message = public.message(own, mine)
        told = comm.all_gather(message).by_rank()

        heard = {
            self._particle_of(rank, comm): each for rank, each in told.items() if rank in senders
        }
        for particle, each in heard.items():
            public.hear(each, particle)
        if not heard:  # all of them were just lost
            return own.clone(), own
        total = torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))
        for particle in heard:
            total += public[particle]
        centre = total.div_(len(heard)).to(own.dtype)
        return centre, public[mine] if mine in heard else own

    def _particles(self, worker: Worker) -> list[int]:
        """The first worker that is there of each particle, the best particle first."""
        comm = worker.comm
        score = last_score(worker, self.score) if self.best is not None else 0.0
        scores: dict[int, list[float]] = {}
        speakers: dict[int, int] = {}
        for rank, told in told_by_all(comm, score).items():
            particle = self._particle_of(rank, comm)
            scores.setdefault(particle, []).append(told)
            speakers.setdefault(particle, rank)
        return lowest_first({rank: fmean(scores[each]) for each, rank in speakers.items()})

    def _particle_of(self, rank: int, comm: Comm) -> int:
        return rank if self.groups is None else rank * self.groups // comm.size

    def preview(self, worker: Worker, state: NoSyncState) -> Tensor:
        return representative(worker, worker.flat.state, self.representative)

    def finish(self, worker: Worker, state: NoSyncState) -> None:
        state.wait()
        worker.flat.state.copy_(self.preview(worker, state))
