"""The whole interface between a worker and the others: `Comm`, which hands out a `SharedTensor`.

Names follow MPI and torch.distributed. A backend supplies the methods marked *core*; the rest is
derived here, and a backend overrides what it can do faster. Public methods check their arguments
and count the traffic and its time, once for all backends; the underscored ones move the tensors and
tell the meter how long they waited for others.

Rules that hold on every backend:
- `all_reduce`, `broadcast` and `recv` change their tensor in place and return it; it may be of any
  strides.
- Collectives, `split` and `shared` are called by all members of the comm, in the same order, with
  tensors of the same dtype and number of elements (`all_gather` takes different lengths).
- One message may be on its way from a worker to another: `send` waits at most until the one before
  has been taken.
- Sums run in rank order, half-precision ones in float32, so equal inputs give equal bits on every
  backend.

Where the run goes on without workers that are lost (`on_failure="continue"`), ranks and `size` stay
as they were, and:
- A collective is one of those who take part: `all_reduce` with "mean" divides by their number,
  `all_gather` has their tensors and says whose they are. Who dies in the middle of it took part for
  all or for nobody.
- Nothing waits for the lost. Their locks are free, turns pass over them.
- `broadcast` from a lost root raises `WorkerLost` on every worker; `send`, `recv` and `exchange`
  with a lost peer raise it on the caller, though `recv` may still give what the peer sent before. A
  program may catch it and go on.

With a `codec` a tensor of a floating-point dtype travels as the codec's message, whose bytes are
counted, and what arrives is what the message stands for. What the codec must remember between the
messages of one stream is a `memory` that the caller keeps, as `codec.memory(tensor)` makes it;
without one nothing is remembered. All who take part say the same codec. A message between two
workers whose length the receiver cannot know (`codec.message_nbytes(tensor)` is None) has eight
bytes in front that say it.

A message that `may_be_lost` is not sent again where the network loses it: the receiver hears
`MessageLost` when it should have come, the sender nothing. All others arrive, and take as long as
that takes.
"""

from __future__ import annotations

import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from flockstep.codecs import Codec, Memory
from flockstep.comm.clock import Clock
from flockstep.comm.encoding import (
    LENGTH_BYTES,
    arrived,
    arriving,
    decoded,
    encoded,
    length_in,
    name_of,
    require_encodable,
    travelling,
)
from flockstep.comm.handles import Background
from flockstep.comm.meter import Meter
from flockstep.comm.reduction import REDUCTIONS, reduce_in_rank_order
from flockstep.comm.shared_tensor import SharedTensor
from flockstep.errors import FlockstepError, MismatchError, WorkerLost
from flockstep.fields import require, require_choice, require_tensor
from flockstep.network import costs
from flockstep.randomness import Purpose, load_generators, saved_generators, stream_seed


class Gathered(list[Tensor]):
    """What `Comm.all_gather` returns: the tensors of those who took part, in rank order.

    `ranks` says whose they are: all ranks of the comm, or those that are left where workers are
    lost."""

    def __init__(self, tensors: Iterable[Tensor], ranks: Iterable[int]) -> None:
        super().__init__(tensors)
        self.ranks = tuple(ranks)

    def by_rank(self) -> dict[int, Tensor]:
        """Each tensor under the rank that it came from."""
        return dict(zip(self.ranks, self, strict=True))


class Comm(ABC):
    """A worker's handle on the workers of one group: the world, or a part of it made by `split`."""

    rank: int
    size: int
    seed: int
    meter: Meter
    clock: Clock | None = None  # where time passes by itself
    # What comes before the names of shared tensors that are asked for now. Every Worker has its
    # own, so that two of them on one comm, or a program beside them, do not meet by accident.
    namespace = ""
    workers_made = 0
    # What the tensors of a collective are, where they are a codec's messages: members must agree.
    _inside = ""
    _message_nbytes: int | None = None  # of each of them, if that is known
    _took_part = 1  # how many did in the last all-reduce or all-gather
    _without_memory = 0  # all-reduces through a codec for which the caller keeps none

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this comm that are still there, as far as this worker knows."""
        return tuple(range(self.size))

    # --- collectives ------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: Tensor,
        op: str = "sum",
        *,
        codec: Codec | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """Replace `tensor` on every worker by the sum, mean, max or min over all workers; with a
        codec, by the sum or mean of what their messages stand for, the same bits on all of them.
        """
        require_tensor("tensor", tensor)
        require_choice("op", op, REDUCTIONS)
        require_encodable(tensor, codec, memory)
        if codec is not None:
            return self._all_reduce_encoded(tensor, op, codec, memory)
        averages_integers = op == "mean" and not tensor.dtype.is_floating_point
        require(not averages_integers, "op", "be 'sum', 'max' or 'min' for integers", op)
        if self.size > 1:
            nbytes = costs.all_reduce_bytes(
                self.size, self.rank, tensor.numel(), tensor.element_size()
            )
            with self.meter.call("all_reduce"):
                self.meter.count(nbytes)
                self._took_part = self.size
                self._all_reduce(tensor.detach(), op)
        return tensor

    def all_gather(
        self, tensor: Tensor, *, codec: Codec | None = None, memory: Memory | None = None
    ) -> Gathered:
        """Copies of every worker's tensor, in rank order, and whose they are. First dimensions may
        differ, but not with a codec.
        """
        require_tensor("tensor", tensor)
        require_encodable(tensor, codec, memory)
        if codec is not None:
            return self._all_gather_encoded(tensor, codec, memory)
        if self.size == 1:
            return Gathered([tensor.detach().clone()], [self.rank])
        with self.meter.call("all_gather"):
            self.meter.count(costs.all_gather_bytes(self.size, tensor.nbytes))
            gathered = self._all_gather(tensor.detach())
        self._took_part = len(gathered)
        self._require_lengths(gathered)
        return gathered

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Replace `tensor` on every worker by that of `root`."""
        require_tensor("tensor", tensor)
        self._require_rank("root", root)
        if self.size > 1:
            distance = (self.rank - root) % self.size
            with self.meter.call("broadcast"):
                self.meter.count(costs.broadcast_bytes(self.size, distance, tensor.nbytes))
                self._broadcast(tensor.detach(), root)
        return tensor

    def barrier(self) -> None:
        """Wait until every worker of this comm has come here."""
        if self.size > 1:
            with self.meter.call("barrier"):
                self._barrier()

    # --- two workers ------------------------------------------------------------------------------

    def send(
        self,
        tensor: Tensor,
        peer: int,
        *,
        codec: Codec | None = None,
        memory: Memory | None = None,
        may_be_lost: bool = False,
    ) -> None:
        """Send `tensor` to `peer`, which must `recv` it. Messages between two workers arrive in
        order.
        """
        require_tensor("tensor", tensor)
        self._require_peer(peer)
        require_encodable(tensor, codec, memory)
        message, is_known = travelling(tensor, codec, memory)
        with self.meter.call("send", self._in_world(peer)):
            self.meter.count(message.nbytes)
            if is_known:
                (self._try_send if may_be_lost else self._send)(message, peer)
            else:
                self._send_bytes(message, peer, may_be_lost)

    def recv(
        self,
        tensor: Tensor,
        peer: int,
        *,
        codec: Codec | None = None,
        may_be_lost: bool = False,
    ) -> Tensor:
        """Wait for the next message of `peer` and write it into `tensor`. The sender has said the
        same codec, and the same of whether it may be lost.
        """
        require_tensor("tensor", tensor)
        self._require_peer(peer)
        require_encodable(tensor, codec)
        message, is_known = arriving(tensor, codec)
        with self.meter.call("recv", self._in_world(peer)):
            if is_known:
                (self._try_recv if may_be_lost else self._recv)(message, peer)
            else:
                message = self._recv_bytes(peer, tensor.device, may_be_lost)
        if codec is not None:
            tensor.detach().copy_(arrived(message, codec, tensor))
        return tensor

    def exchange(
        self,
        tensor: Tensor,
        peer: int,
        *,
        codec: Codec | None = None,
        memory: Memory | None = None,
        may_be_lost: bool = False,
    ) -> Tensor:
        """Give `tensor` to `peer` and return a copy of the one that `peer` gives in the same
        call. Each of the two may be lost by itself.
        """
        require_tensor("tensor", tensor)
        self._require_peer(peer)
        require_encodable(tensor, codec, memory)
        message, is_known = travelling(tensor, codec, memory)
        with self.meter.call("exchange", self._in_world(peer)):
            self.meter.count(message.nbytes)
            if is_known:
                exchange = self._try_exchange if may_be_lost else self._exchange
                received = exchange(message, peer)
            else:
                received = self._exchange_bytes(message, peer, may_be_lost)
        return received if codec is None else arrived(received, codec, tensor)

    # --- groups, shared tensors, time (core) ------------------------------------------------------

    @abstractmethod
    def split(self, color: int) -> Comm:
        """A comm of the members that passed the same `color`, ranked as they are here."""

    def shared(self, name: str, like: Tensor, home: int | None = None) -> SharedTensor:
        """The shared tensor `name` of this comm, with the shape, dtype and first value of rank 0's
        `like`.

        By default it lives at nobody's: every access travels. It costs nothing to the worker
        `home`, if it lives there. Asked for again it is the same one, as it is by now: shape, dtype
        and home must be, too."""
        require(isinstance(name, str), "name", "be a text", name)
        require_tensor("like", like)
        if home is not None:
            self._require_rank("home", home)
        form = shared_form(like, home)
        known = self._forms.setdefault(self.namespace + name, form)
        if known != form:
            raise MismatchError(f"shared tensor {name!r} is {known} (got {form})")
        with self.meter.call("shared"):
            shared = self._shared(self.namespace + name, like, home)
        shared.name = name
        shared.comm = self
        shared.is_home = home == self.rank
        if home is not None and not shared.is_home:
            shared.peer = self._in_world(home)
        shared.counts_staleness = home is None and like.dtype.is_floating_point
        return shared

    def add_to_each(
        self,
        tensors: Sequence[SharedTensor],
        tensor: Tensor,
        scale: float = 1,
        *,
        codec: Codec | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """Add `scale` times `tensor` to each of several shared tensors, of which each lives at one
        worker, and return what was sent: the tensor, or what the codec's message stands for, of
        which all get the same. In the simulator and under torchrun no message waits for the arrival
        of the one before.
        """
        require_tensor("tensor", tensor)
        tensors = _one_home_each(tensors)
        for each in tensors:
            scale = each._checked_scale(tensor, scale)
        require_encodable(tensor, codec, memory)
        message, sent = None, tensor.detach()
        if codec is not None:
            message = encoded(codec, tensor, memory)
            sent = decoded(codec, message, tensor)
        with self.meter.call("add_to_each"):
            for each in tensors:
                each._count(sent.nbytes if message is None else message.nbytes)
            if tensors:
                type(tensors[0])._add_to_each(tensors, sent, scale, codec, message)
        return sent

    @functools.cached_property
    def kept_in(self) -> dict[Any, Any]:
        """Who of this comm's Workers keeps its checkpoints in which folder."""
        return {}

    @functools.cached_property
    def _forms(self) -> dict[str, str]:
        """What the shared tensors of this comm are, by name."""
        return {}

    @abstractmethod
    def _shared(self, name: str, like: Tensor, home: int | None) -> SharedTensor:
        """Core: all members must say the same of it, as `shared_form` has it."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since the run began: virtual in the simulator, wall-clock elsewhere."""

    @abstractmethod
    def elapse(self, seconds: float | None = None, *, times: float = 1.0) -> None:
        """Say that this worker has computed for `seconds`, or, by default, for a training step,
        `times` the usual.

        The simulator moves the worker's clock, by default as its compute model says. Where time
        passes by itself the clock stays alone. Every backend counts the steps, to name the last one
        of a worker that is lost."""

    def tell(self, text: str) -> None:
        """Give `text` to the process that launched this worker; `fs.launch(…, hear=print)` says who
        hears it there, soon and in order. It costs nothing and is not counted: for people who watch
        a run, never for what a method does.
        """
        require(isinstance(text, str), "text", "be a text", text)
        self._tell(text)

    def empty(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory for a tensor that will often be exchanged, where the backend
        likes it best.
        """
        return torch.empty(elements, dtype=dtype, device=device)

    @contextmanager
    def unmetered(self) -> Iterator[None]:
        """Calls inside cost nothing and count for nothing: for setting up, never for what a
        method does.
        """
        before, self.meter.paused = self.meter.paused, True
        try:
            yield
        finally:
            self.meter.paused = before

    @contextmanager
    def off_the_clock(self, is_done: bool = False) -> Iterator[None]:
        """What all workers of this comm do inside together takes no time of the run.

        Their clocks stand still, and nothing is counted. They go on in the order in which they
        came, so that who was behind is as far behind as before. `is_done`: this worker has nothing
        left to do, and nobody waits for its clock.
        """
        with self.unmetered():
            if self.clock is None:
                yield
                return
            self.clock.hold()
            try:
                yield
                time.sleep(self._lead(is_done))
            finally:
                self.clock.release()

    def _lead(self, is_done: bool) -> float:
        """By how many seconds this worker's clock is ahead of the last one's. All meet here."""
        mine = self.now()
        clocks = self.all_gather(torch.tensor(math.inf if is_done else mine, dtype=torch.float64))
        return 0.0 if is_done else mine - min(map(float, clocks))

    def catch_up(self, seconds: float) -> None:
        """This worker was off the clock, with nothing left to do, while the clocks of others went
        on to `seconds`. Its own goes there, and what it passes over was waiting.

        In the simulator clocks are not held, and none has to catch up.
        """
        if self.clock is not None:
            with self.meter.call("catch_up"):
                self.clock.catch_up(seconds)
                self.meter.waited(math.inf)  # the whole call

    def in_order(self, act: Callable[[], None]) -> None:
        """In virtual time: run `act` once no worker can do anything before this moment any more."""
        raise FlockstepError("only the simulator knows an order of all that workers do")

    def watch_order(self, act: Callable[[], None]) -> None:
        """In virtual time: from now on run `act`, in the order of all that workers do, whenever
        this worker has computed a step and before each of its calls to shared tensors has an
        effect.
        """
        raise FlockstepError("only the simulator knows an order of all that workers do")

    def watch_losses(self, act: Callable[[int], None]) -> None:
        """In virtual time: run `act` with the rank of every worker of the world that is lost, in
        the order of all that workers do; with those that were lost before, now. The same `act` is
        called once for each, whoever asks for it.
        """
        raise FlockstepError("only the simulator knows an order of all that workers do")

    @contextmanager
    def in_background(self) -> Iterator[Background]:
        """Collectives and messages inside travel while this worker computes; what it gives waits
        for their end.

        The simulator's clock stands still inside; elsewhere all is done inside. Not for shared
        tensors."""
        yield Background(comm=self)

    def has_summed(self, nbytes: float) -> None:  # noqa: B027
        """Said by algorithms that add up what others have sent: in virtual time it may take its
        time.
        """

    def _wait_for_background(self, until: int) -> None:  # noqa: B027
        """What travels in the background has arrived by `until`."""

    # --- checkpoints ------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """Checkpoints of one kind of comm are of no use to the other."""
        return "in virtual time" if self.meter.is_virtual else "where time passes by itself"

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps of this worker's comm: its clock and meter, and the random
        generators that its process shares.
        """
        return {"seconds": self.now(), "meter": self.meter.saved(), **saved_generators()}

    def saved_world(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of all that is between workers. Where time passes by itself it is
        taken when nothing is, but for the values of shared tensors.
        """
        return {}

    def go_back(self, own: dict[str, Any], world: dict[str, Any] | None) -> None:
        """All workers of the run, which has just begun, go on from what was saved. `world` is
        for one of them to know.
        """
        self.meter.load(own["meter"])
        load_generators(own)
        if self.clock is not None:
            self.clock.go_on_at(own["seconds"])

    @property
    def is_in_the_past(self) -> bool:
        """In virtual time: whether the next call was made before the run was saved, and is told
        what it heard then.
        """
        return False

    def standing_still(self) -> AbstractContextManager[None]:
        """In virtual time: nothing happens between workers inside."""
        raise FlockstepError("only the simulator can stand still")

    def keep_journal(self, is_on: bool) -> None:
        """In virtual time: from now on write down what this worker hears, for `saved_world`, or no
        more. What was written before is forgotten.
        """
        raise FlockstepError("only the simulator writes down what workers hear")

    # --- what a backend moves ---------------------------------------------------------------------

    @abstractmethod
    def _all_gather(self, tensor: Tensor) -> Gathered:
        """Core: the tensors of all who took part, freshly allocated, in rank order, and their
        ranks.
        """

    @abstractmethod
    def _send(self, tensor: Tensor, peer: int) -> None:
        """Core: the tensor may change as soon as this returns."""

    @abstractmethod
    def _recv(self, tensor: Tensor, peer: int) -> None:
        """Core: write the next message of `peer` into `tensor`."""

    def _all_reduce_encoded(
        self, tensor: Tensor, op: str, codec: Codec, memory: Memory | None
    ) -> Tensor:
        require(op in ("sum", "mean"), "op", "be 'sum' or 'mean' with a codec", op)
        if memory is None:
            self._without_memory += 1  # other numbers are drawn each time, the same on all workers
            seed = stream_seed(Purpose.WITHOUT_MEMORY, self.seed, self._without_memory)
            memory = codec.memory(tensor, seed=seed >> 1, rank=self.rank)
        total = tensor.detach().reshape(-1)  # itself, or a copy where it does not lie in one piece
        with self._agreeing(codec, tensor):
            codec.average(self, total, memory)
        if op == "sum":
            total.mul_(self._took_part)
        if total.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(total.view(tensor.shape))
        return tensor

    def _all_gather_encoded(self, tensor: Tensor, codec: Codec, memory: Memory | None) -> Gathered:
        with self._agreeing(codec, tensor):
            messages = self.all_gather(encoded(codec, tensor, memory))
        return Gathered((decoded(codec, each, tensor) for each in messages), messages.ranks)

    @contextmanager
    def _agreeing(self, codec: Codec, tensor: Tensor) -> Iterator[None]:
        """Collectives inside carry messages of this codec for tensors like this one."""
        self._inside = f" for {name_of(codec)} of {signature(tensor)}"
        self._message_nbytes = codec.message_nbytes(tensor)
        try:
            yield
        finally:
            self._inside, self._message_nbytes = "", None

    def _require_lengths(self, gathered: Gathered) -> None:
        """A backend with nothing but the core does not compare what its members call."""
        for rank, message in gathered.by_rank().items():
            if self._message_nbytes not in (None, message.nbytes):
                raise MismatchError(
                    f"rank {self._in_world(rank)} gave a message of {message.nbytes} bytes, rank "
                    f"{self._in_world(self.rank)} expected {self._message_nbytes}{self._inside}"
                )

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        gathered = self._all_gather(tensor)
        self._took_part = len(gathered)
        reduce_in_rank_order(gathered, op, out=tensor)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        brought = self._all_gather(tensor).by_rank()
        if root not in brought:
            raise WorkerLost(f"rank {root}, from which to broadcast, is lost", root)
        tensor.copy_(brought[root])

    def _barrier(self) -> None:
        self._all_gather(torch.empty(0))

    def _exchange(self, tensor: Tensor, peer: int) -> Tensor:
        received = torch.empty_like(tensor)
        # One side listens first, so that backends whose sends wait for the receiver do not
        # deadlock.
        if self.rank < peer:
            self._send(tensor, peer)
            self._recv(received, peer)
        else:
            self._recv(received, peer)
            self._send(tensor, peer)
        return received

    # Where the network can lose messages, a backend overrides the next six: what may be lost is not
    # sent again, and who should have heard it raises MessageLost.

    def _try_send(self, tensor: Tensor, peer: int) -> None:
        self._send(tensor, peer)

    def _try_recv(self, tensor: Tensor, peer: int) -> None:
        self._recv(tensor, peer)

    def _try_exchange(self, tensor: Tensor, peer: int) -> Tensor:
        return self._exchange(tensor, peer)

    def _send_bytes(self, message: Tensor, peer: int, may_be_lost: bool) -> None:
        """Send bytes of which the first eight say how many follow. Where the receiver hears how
        many there are, this is `_send`.
        """
        self._send(message[:LENGTH_BYTES], peer)
        self._send(message[LENGTH_BYTES:], peer)

    def _recv_bytes(self, peer: int, device: torch.device, may_be_lost: bool) -> Tensor:
        """The next message of `peer`, which went by `_send_bytes` from such a device."""
        head = torch.empty(LENGTH_BYTES, dtype=torch.uint8, device=device)
        self._recv(head, peer)
        message = torch.empty(length_in(head), dtype=torch.uint8, device=device)
        self._recv(message, peer)
        return torch.cat([head, message])

    def _exchange_bytes(self, message: Tensor, peer: int, may_be_lost: bool) -> Tensor:
        """As `_exchange`, of such messages."""
        if self.rank < peer:
            self._send_bytes(message, peer, may_be_lost)
            return self._recv_bytes(peer, message.device, may_be_lost)
        received = self._recv_bytes(peer, message.device, may_be_lost)
        self._send_bytes(message, peer, may_be_lost)
        return received

    def _tell(self, text: str) -> None:
        raise FlockstepError(f"{type(self).__name__} has no way to tell the launcher anything")

    def _in_world(self, rank: int) -> int:
        """The world's rank of a member, for the trace."""
        return rank

    def _require_rank(self, field: str, rank: int) -> None:
        require(0 <= rank < self.size, field, f"be a rank from 0 to {self.size - 1}", rank)

    def _require_peer(self, peer: int) -> None:
        self._require_rank("peer", peer)
        require(peer != self.rank, "peer", "be another worker than the caller", peer)


class Namespace:
    """Inside a `with`, shared tensors of a comm are those of this namespace."""

    def __init__(self, comm: Comm, prefix: str) -> None:
        self._comm = comm
        self._prefix = prefix
        self._before: list[str] = []

    def __enter__(self) -> None:
        self._before.append(self._comm.namespace)
        self._comm.namespace = self._prefix

    def __exit__(self, *_: object) -> None:
        self._comm.namespace = self._before.pop()


def broadcast_from_first(comm: Comm, tensor: Tensor, roots: Sequence[int]) -> None:
    """Broadcast from the first of `roots`, the same on every worker, that is not lost."""
    for root in roots[:-1]:
        with suppress(WorkerLost):  # raised on every worker alike: all try the next
            comm.broadcast(tensor, root)
            return
    comm.broadcast(tensor, roots[-1])


def shared_form(like: Tensor, home: int | None) -> str:
    """What all must agree about who ask for a shared tensor of one name."""
    where = "nobody" if home is None else f"rank {home}"
    return f"{like.dtype} of shape {tuple(like.shape)} at {where}"


def signature(tensor: Tensor) -> str:
    """What members of a collective must agree about."""
    return f"{tensor.numel()} × {tensor.dtype}"


def _one_home_each(tensors: Iterable[SharedTensor]) -> list[SharedTensor]:
    """Raise unless these are shared tensors of which each lives at one worker."""
    rule = "be shared tensors of which each has a 'home'"
    require(isinstance(tensors, Iterable), "tensors", rule, tensors)
    told = list(tensors)
    for each in told:
        require(isinstance(each, SharedTensor), "tensors", rule, each)
        require(each.is_home or each.peer >= 0, "tensors", rule, each.name)
    return told
