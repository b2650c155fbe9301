"""What the methods with asynchronous gradients share: parameters that live in one place, and
changes sent there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flockstep.comm import SharedTensor
from flockstep.strategies.sync_sgd import average_buffers

if TYPE_CHECKING:
    from flockstep.worker import Worker


@dataclass
class Server:
    """The parameters as they are known to all, and those that this worker read last.

    What a worker sends is the change that its own optimizer has made from the parameters it read:
    −ηg for plain SGD. Statistics of batch normalisation stay each worker's own until the end, when
    they are averaged."""

    value: SharedTensor
    read: Tensor

    @classmethod
    def of(cls, worker: Worker) -> Server:
        own = worker.flat.parameters
        return cls(worker.comm.shared("parameters", own), own.clone())

    def change(self, worker: Worker) -> Tensor:
        """What the worker has changed since it last read."""
        return worker.flat.parameters - self.read

    def fetch(self, worker: Worker) -> None:
        self.value.read(out=self.read)
        worker.flat.parameters.copy_(self.read)

    def preview(self, worker: Worker) -> Tensor:
        """The state of a model with the parameters that the server has now."""
        return torch.cat([self.value.read().to(self.read.device), worker.flat.buffers])

    def finish(self, worker: Worker) -> None:
        """Take the parameters over once everybody's last change has landed."""
        worker.comm.barrier()
        self.fetch(worker)
        average_buffers(worker)
