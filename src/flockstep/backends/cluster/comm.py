"""`Comm` across hosts: agreement over the control channel, tensors over torch.distributed.

The coordinator lets a collective begin when all members have called the same; only then do tensors
move, so a mismatch is an error and never a hang. A call that repeats the one before moves its
tensors at once: who calls something else instead will ask, and those who then wait for it say so,
and hear."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flockstep.backends.cluster import groups
from flockstep.backends.cluster.control_channel import ControlChannel
from flockstep.backends.cluster.groups import (
    SLICE,
    Finish,
    Groups,
    patiently,
)
from flockstep.backends.cluster.wire import DTYPES
from flockstep.comm import Clock, Comm, Gathered, Meter, SharedTensor, shared_form, signature
from flockstep.errors import FlockstepError, MismatchError

# How long a broken connection may be known here before the coordinator says who is lost.
NEWS_SECONDS = 10.0


Move = Callable[[Any, Tensor, Finish, dict[str, Any]], None]
"""Moves a tensor within a process group, given how to wait and what was agreed."""

MakeShared = Callable[["ClusterComm", str, Tensor, int | None, bool], SharedTensor]
"""Makes a shared tensor of a comm: its name, one like it, its home, and whether this worker is the
first of its members, who gives it its value."""


class Broken(Exception):
    """A collective cannot be ended: one of its members is gone."""


@dataclass
class WorkerContext:
    """What all comms of one worker share."""

    control: ControlChannel
    groups: Groups
    seed: int
    continues: bool
    make_shared: MakeShared
    count_step: Callable[[], None]
    meter: Meter = field(default_factory=Meter)
    clock: Clock = field(default_factory=Clock)
    shared: dict[tuple[str, str], SharedTensor] = field(default_factory=dict)
    # The last tensors sent, which may be on their way: gloo forgets what nobody holds.
    sent: dict[tuple[str, int], Any] = field(default_factory=dict)
    # Held from a send until it stands in `sent`, so that it cannot take the place of the next one.
    sending: threading.Lock = field(default_factory=threading.Lock)


class ClusterComm(Comm):
    """A worker's handle on a group whose members may be on other hosts."""

    def __init__(self, context: WorkerContext, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks  # in the world
        self.rank = ranks.index(context.control.rank)
        self.size = len(ranks)
        self.seed = context.seed
        self.meter = context.meter
        self.clock = context.clock
        self.context = context
        self._seq = 0
        self._last: tuple[str, dict[str, Any]] | None = None  # the call before, and what was agreed
        # The call that moves its tensors without having asked.
        self._silent: dict[str, Any] | None = None

    @property
    def members(self) -> tuple[int, ...]:
        if not self.context.continues:
            return tuple(range(self.size))
        self.context.control.catch_up()
        return tuple(
            rank for rank, world in enumerate(self.ranks) if world not in self.context.control.lost
        )

    def _tell(self, text: str) -> None:
        self.context.control.tell("tell", text=text)

    # --- time, groups and shared tensors ----------------------------------------------------------

    def now(self) -> float:
        return self.context.clock.now()

    def elapse(self, seconds: float | None = None, *, times: float = 1.0) -> None:
        if seconds is None:
            self.context.count_step()
            self.meter.steps += 1
        # A worker that only computes hears here that the run is to stop.
        self.context.control.catch_up()

    def split(self, color: int) -> ClusterComm:
        with self.meter.call("split"):
            go = self._join("split", "split", data=int(color))
        return ClusterComm(self.context, go["group"], tuple(go["ranks"]))

    def _shared(self, name: str, like: Tensor, home: int | None) -> SharedTensor:
        text, key, known = (
            f"shared({name!r}: {shared_form(like, home)})",
            (self.name, name),
            self.context.shared,
        )
        while True:
            is_first = self._join("shared", text)["members"][0] == self.ranks[self.rank]
            tensor = known.get(key) or self.context.make_shared(
                self, name, like.detach(), home, is_first
            )
            # Nobody uses it before it has its first value. Who was to write that may be lost: then
            # the next does.
            if any(self._join("shared", text, data=int(is_first))["data"]):
                known[key] = tensor
                return tensor

    def _in_world(self, rank: int) -> int:
        return self.ranks[rank]

    # --- collectives ------------------------------------------------------------------------------

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        def move(group: Any, work: Tensor, finish: Finish, go: dict[str, Any]) -> None:
            groups.all_reduce(group, work, op, finish)

        self._move(f"all_reduce({op}) of {signature(tensor)}{self._inside}", tensor, move)

    def _all_gather(self, tensor: Tensor) -> Gathered:
        parts: list[Tensor] = []
        came: list[int] = []  # their ranks in the world

        def move(group: Any, work: Tensor, finish: Finish, go: dict[str, Any]) -> None:
            parts[:] = groups.all_gather(group, work, go["data"], finish)
            came[:] = go["members"]

        text = f"all_gather of {signature(tensor)}{self._inside}"
        self._move(
            text,
            tensor,
            move,
            must=f"all_gather of {tensor.dtype}{self._inside}",
            data=tensor.numel(),
            in_place=False,
        )
        rest = tensor.shape[1:]
        shaped = [
            part.view(tensor.shape) if part.numel() == tensor.numel() else part.view(-1, *rest)
            for part in parts
        ]
        return Gathered(shaped, map(self.ranks.index, came))

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        source = self.ranks[root]

        def move(group: Any, work: Tensor, finish: Finish, go: dict[str, Any]) -> None:
            groups.broadcast(group, work, go["members"].index(source), finish)

        self._move(f"broadcast from {root} of {signature(tensor)}", tensor, move, root=source)

    def _barrier(self) -> None:
        self._join("barrier", "barrier")

    def _join(
        self,
        call: str,
        text: str,
        *,
        must: str | None = None,
        data: Any = None,
        root: int | None = None,
        moves: bool = False,
    ) -> dict[str, Any]:
        """Wait until all members have come to the same call; who they are, and what each of them
        brings.
        """
        said = self._next_call(call, text, must=must, data=data, root=root, moves=moves)
        self._last = None
        return self.context.control.ask("join", call, late=False, **said)

    def _next_call(
        self,
        call: str,
        text: str,
        *,
        must: str | None = None,
        data: Any = None,
        root: int | None = None,
        moves: bool = False,
    ) -> dict[str, Any]:
        """Number the next call of this comm; what the coordinator is to know of it."""
        self._seq += 1
        return {
            "group": self.name,
            "seq": self._seq,
            "call": call,
            "signature": text,
            "must": must or text,
            "data": data,
            "root": root,
            "moves": moves,
        }

    def _move(
        self,
        text: str,
        tensor: Tensor,
        move: Move,
        *,
        must: str | None = None,
        data: Any = None,
        root: int | None = None,
        in_place: bool = True,
    ) -> None:
        """One collective: agree, move the tensors and, where workers may be lost, agree that all
        have moved.
        """
        call = text.partition("(")[0].partition(" ")[0]
        if self._last is not None and self._last[0] == text:
            self._repeat(call, text, tensor, move, self._last[1])
            return
        go = self._join(call, text, must=must, data=data, root=root, moves=True)
        if not self.context.continues:
            self._attempt(tensor, move, go)
            # Who brings data may bring other data next time.
            self._last = (text, go) if data is None else None
            return
        while go["members"]:
            # On a copy: what a broken attempt has done, or still does in torch's threads, must not
            # be seen.
            work = tensor.clone()
            try:
                self._attempt(work, move, go)
                went_well = True
            except Broken:
                went_well = False
            go = self.context.control.ask(
                "report", call, group=self.name, seq=self._seq, ok=went_well
            )
        if in_place:
            tensor.copy_(work)

    def _repeat(self, call: str, text: str, tensor: Tensor, move: Move, go: dict[str, Any]) -> None:
        """The call before once more: there is nothing to agree about."""
        control = self.context.control
        self._silent = self._next_call(call, text, moves=True)
        self._attempt(tensor, move, go)
        if self._silent is None:
            control.tell("moved", group=self.name, seq=self._seq)
        self._silent = None
        control.passed[self.name] = self._seq

    def _attempt(self, tensor: Tensor, move: Move, go: dict[str, Any]) -> None:
        members = tuple(go["members"])
        self._took_part = len(members)
        if len(members) == 1 or (tensor.numel() == 0 and go["data"][0] is None):
            if go["data"][0] is not None:
                move(None, tensor, lambda work: None, go)  # gathers its own
            return

        try:
            group = self._group(self.name, members, tensor.device)
            move(group, tensor, lambda work: self._finish(work, group, members), go)
        except FlockstepError:
            raise
        except RuntimeError as error:  # torch.distributed raises nothing more telling
            lost = self.context.control.await_loss(members, NEWS_SECONDS)
            if lost is None:
                raise
            raise Broken from error

    def _finish(self, work: Any, group: Any, members: tuple[int, ...]) -> None:
        """Wait for torch, a slice at a time; give up when a member is lost."""
        control = self.context.control
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError as error:
                if "Operation timed out" not in str(error):
                    raise
            if self._silent is not None:
                control.tell_waiting("join", self._silent["call"], late=True, **self._silent)
                self._silent = None
            try:
                self._check(members)
            except BaseException:
                groups.abandoned.append(group)
                raise

    # --- two workers ------------------------------------------------------------------------------

    def _send(self, tensor: Tensor, peer: int) -> None:
        world = self.ranks[peer]
        message = [DTYPES.index(tensor.dtype), tensor.numel()]
        waits_in = f"send to rank {world}"
        self.context.control.ask("send", waits_in, peer=world, group=self.name, message=message)
        if tensor.numel():
            copy = tensor.clone(memory_format=torch.contiguous_format).view(-1)
            name, pair = self._pair(peer)

            def post() -> None:
                with suppress(RuntimeError):  # a peer that is gone: whoever waits for it hears so
                    group = self.context.groups.of(name, pair, tensor.device)
                    with self.context.sending:
                        work = group.send([copy], pair.index(world), 0)
                        self.context.sent[name, peer] = work, copy

            if self.context.groups.has(name, pair, tensor.device):
                post()
            else:  # the peer may have to send something elsewhere before it comes to this
                threading.Thread(target=post, daemon=True).start()

    def _send_bytes(self, message: Tensor, peer: int, may_be_lost: bool) -> None:
        self._send(message, peer)

    def _recv(self, tensor: Tensor, peer: int) -> None:
        dtype, elements = self._announced(peer)
        self._require_alike(peer, dtype, elements, signature(tensor))
        self._take(tensor, peer)

    def _recv_bytes(self, peer: int, device: torch.device, may_be_lost: bool) -> Tensor:
        dtype, elements = self._announced(peer)
        any_bytes = elements if dtype == torch.uint8 else "any number"
        self._require_alike(peer, dtype, elements, f"{any_bytes} × {torch.uint8}")
        message = torch.empty(elements, dtype=torch.uint8, device=device)
        self._take(message, peer)
        return message

    def _announced(self, peer: int) -> tuple[torch.dtype, int]:
        """Wait for the next message of `peer`; what it is."""
        world = self.ranks[peer]
        answer = self.context.control.ask(
            "receive", f"recv from rank {world}", peer=world, group=self.name
        )
        dtype, elements = answer["message"]
        return DTYPES[dtype], elements

    def _require_alike(self, peer: int, dtype: torch.dtype, elements: int, expected: str) -> None:
        sent = f"{elements} × {dtype}"
        if sent != expected:
            rank = self.context.control.rank
            raise MismatchError(
                f"rank {self.ranks[peer]} sent {sent}, rank {rank} expected {expected}"
            )

    def _take(self, tensor: Tensor, peer: int) -> None:
        """Receive what was announced."""
        if elements := tensor.numel():
            whole = tensor.view(-1) if tensor.is_contiguous() else tensor.new_empty(elements)
            self._receive(whole, peer)
            if not tensor.is_contiguous():
                tensor.copy_(whole.view(tensor.shape))
        self.context.control.tell("taken", peer=self.ranks[peer], group=self.name)

    def _exchange(self, tensor: Tensor, peer: int) -> Tensor:
        # A send waits for nothing but the arrival of the one before, so both may send first.
        received = torch.empty_like(tensor)
        self._send(tensor, peer)
        self._recv(received, peer)
        return received

    def _exchange_bytes(self, message: Tensor, peer: int, may_be_lost: bool) -> Tensor:
        self._send_bytes(message, peer, may_be_lost)
        return self._recv_bytes(peer, message.device, may_be_lost)

    def _pair(self, peer: int) -> tuple[str, tuple[int, ...]]:
        return f"{self.name} pair", tuple(sorted((self.ranks[self.rank], self.ranks[peer])))

    def _receive(self, tensor: Tensor, peer: int) -> None:
        """Take a message that is under way; a peer that is gone is a lost worker."""
        (name, pair), world = self._pair(peer), self.ranks[peer]
        try:
            group = self._group(name, pair, tensor.device)
            patiently(
                lambda: group.recv([tensor], pair.index(world), 0).wait(), lambda: self._check(pair)
            )
        except Broken:
            raise self.context.control.lost[world] from None
        except RuntimeError as error:
            lost = self.context.control.await_loss(pair, NEWS_SECONDS)
            if lost is None:
                raise
            raise lost from error

    def _group(self, name: str, members: tuple[int, ...], device: torch.device) -> Any:
        groups = self.context.groups
        if not groups.has(name, members, device):
            patiently(lambda: groups.of(name, members, device), lambda: self._check(members))
        return groups.of(name, members, device)

    def _check(self, members: tuple[int, ...]) -> None:
        """Hear what is new while torch works; give up when a member is lost."""
        self.context.control.catch_up()
        if self.context.control.lost.keys() & set(members):
            raise Broken
