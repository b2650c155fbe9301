"""What the methods with asynchronous gradients share: parameters that live in one place, and
changes sent there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flockstep.codecs import Codec, Memory
from flockstep.comm import SharedTensor, handle
from flockstep.strategies._compressed import memory_of

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class ParameterServer:
    """The parameters as they are known to all, and those that this worker read last.

    What a worker sends is the change that its own optimizer has made from the parameters it read:
    −ηg for plain SGD. With a codec it sends C(change + e), and what that leaves out is e, the error
    that it remembers; the server, which knows what it read last, sends back what has changed since
    then.

    Statistics of batch normalisation stay each worker's own until the end, when they are
    averaged."""

    read: Tensor
    memory: Memory | None = None  # of the codec

    value: SharedTensor = handle()
    codec: Codec | None = handle(default=None)

    @classmethod
    def of(cls, worker: Worker, codec: Codec | None = None) -> ParameterServer:
        own = worker.flat.parameters
        memory = None if codec is None else memory_of(worker, codec, own)
        value = worker.comm.shared("parameters", own)
        return cls(own.clone(), memory, value=value, codec=codec)

    def change(self, worker: Worker) -> Tensor:
        """What the worker has changed since it last read."""
        return worker.flat.parameters - self.read

    def push(self, change: Tensor) -> None:
        """x ← x + change, or what the codec's message of it stands for."""
        self.value.add(change, codec=self.codec, memory=self.memory)

    def as_heard(self, change: Tensor) -> Tensor:
        """What the codec's message of a change stands for."""
        if self.codec is None:
            return change
        return self.value.as_sent(change, self.codec, self.memory)

    def fetch(self, worker: Worker) -> None:
        if self.codec is None:
            self.value.read(out=self.read)
        else:
            self.value.read_changes(out=self.read)
        worker.flat.parameters.copy_(self.read)

    def preview(self, worker: Worker) -> Tensor:
        """The state of a model with the server's parameters, once everybody's last change has
        landed.
        """
        settled = self._settled(worker)
        worker.comm.barrier()  # nobody changes the server before all have read
        return settled

    def finish(self, worker: Worker) -> None:
        """Take the parameters over once everybody's last change has landed."""
        worker.flat.state.copy_(self._settled(worker))
        self.read.copy_(worker.flat.parameters)

    def _settled(self, worker: Worker) -> Tensor:
        worker.comm.barrier()
        parameters = self.value.read(out=torch.empty_like(self.read))
        return torch.cat([parameters, mean_buffers(worker)])


def mean_buffers(worker: Worker) -> Tensor:
    """For methods that leave the statistics of batch normalisation to each worker until the end."""
    buffers = worker.flat.buffers.clone()
    if buffers.numel():
        worker.comm.all_reduce(buffers, op="mean")
    return buffers
