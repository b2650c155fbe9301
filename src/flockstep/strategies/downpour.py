"""A parameter server that hears from each worker now and then."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from flockstep.codecs import Codec
from flockstep.fields import require_integer
from flockstep.strategies._compressed import require_codec
from flockstep.strategies._parameter_server import ParameterServer
from flockstep.strategies.base import Strategy

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass(frozen=True)
class Downpour(Strategy[ParameterServer]):
    """Add up changes locally, push their sum every n steps, fetch parameters every m.

        a ← a − η g(x_i);  x_i ← x_i − η g(x_i)        each step
        x ← x + a;  a ← 0                              every push_period steps
        x_i ← x                                        every fetch_period steps
        with a codec:   x ← x + C(a + e);  e ← what that leaves out;  a ← 0

    Period 1 for both equals AsyncSGD. With another optimizer than plain SGD its change takes the
    place of −ηg. What was fetched replaces the worker's parameters, changes
    not pushed yet included: these stay in a, as in the paper. Changes of all workers add up, so
    many workers or long periods want a smaller learning rate. Changes land
    whole, as AsyncSGD's. finish: the server's parameters, once all have pushed the rest, one after
    the other.

    A codec carries what is pushed, the last time too; a fetch brings only elements that have
    changed since the one before. What the last message leaves out, e, stays unsent: no gradient has
    seen it.

    Bytes: one add of the parameters, or the codec's message, every push_period steps and one read,
    or with a codec a read of changes, as AsyncSGD, every fetch_period steps; at the end one more
    push, unless just pushed, and one read.

    Use: as AsyncSGD, on a slower network.

    Fields:
        push_period: optimizer steps between pushes (n_push in the paper).
        fetch_period: optimizer steps between fetches (n_fetch).
        codec: how changes are written on the wire; None: as they are.

    Paper: Dean et al., "Large Scale Distributed Deep Networks", 2012.

    Example:
        fs.run("digits-mlp", fs.Downpour(), workers=2)
    """

    name: ClassVar[str] = "downpour"
    shares_tensors: ClassVar[bool] = True
    push_period: int = 5
    fetch_period: int = 5
    codec: Codec | None = None

    def __post_init__(self) -> None:
        require_codec(self.codec)
        require_integer("push_period", self.push_period, 1)
        require_integer("fetch_period", self.fetch_period, 1)

    @property
    def waits(self) -> bool:
        return False

    def init(self, worker: Worker) -> ParameterServer:
        return ParameterServer.of(worker, self.codec)

    def after_step(self, worker: Worker, state: ParameterServer) -> None:
        pushes, fetches = (
            worker.steps % self.push_period == 0,
            worker.steps % self.fetch_period == 0,
        )
        if not pushes and not fetches:
            return
        with state.value.changing():  # one worker at a time
            if pushes:
                self._push(worker, state)
            if fetches:
                unsent = state.change(worker)
                state.fetch(worker)
                # What was changed since then and not pushed is still x_i − read.
                state.read.sub_(unsent)

    def _push(self, worker: Worker, state: ParameterServer) -> None:
        state.push(state.change(worker))
        state.read.copy_(worker.flat.parameters)

    def preview(self, worker: Worker, state: ParameterServer) -> Tensor:
        settled, count = state.preview(worker), worker.flat.count
        unsent = torch.zeros_like(state.read)
        if self._has_unsent(worker):
            aside = dataclasses.replace(state, memory=copy.deepcopy(state.memory))
            unsent = aside.as_heard(state.change(worker))
        settled[:count] = self._with_all(worker, settled[:count], unsent)
        return settled

    def _with_all(self, worker: Worker, parameters: Tensor, unsent: Tensor) -> Tensor:
        """The parameters with what every worker has not pushed yet, added in rank order."""
        comm = worker.comm
        while True:
            leads = comm.rank == comm.members[0]
            own = parameters + unsent if leads else unsent  # the sum begins with the parameters
            total = torch.cat([own, own.new_tensor([leads])])
            comm.all_reduce(total)
            if total[-1]:  # or else the one who leads was just lost
                return total[:-1]

    def finish(self, worker: Worker, state: ParameterServer) -> None:
        with state.value.lock(in_turn=True):  # so that the sum is the same whoever comes first
            if self._has_unsent(worker):
                self._push(worker, state)
        state.finish(worker)

    def _has_unsent(self, worker: Worker) -> bool:
        return worker.steps % self.push_period != 0
