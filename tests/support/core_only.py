"""A backend that supplies just the core that `Comm` requires, to run the contract on all that is
derived from it.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor

import flockstep as fs
from flockstep.backends.base import Program
from flockstep.comm import Comm, Gathered, SharedTensor


class CoreComm(Comm):
    def __init__(self, inner: Comm) -> None:
        self._inner = inner
        self.rank, self.size, self.seed, self.meter = (
            inner.rank,
            inner.size,
            inner.seed,
            inner.meter,
        )

    def split(self, color: int) -> CoreComm:
        return CoreComm(self._inner.split(color))

    def _shared(self, name: str, like: Tensor, home: int | None) -> SharedTensor:
        return self._inner.shared(name, like, home)

    def now(self) -> float:
        return self._inner.now()

    def elapse(self, seconds: float | None = None, *, times: float = 1.0) -> None:
        self._inner.elapse(seconds, times=times)

    def _all_gather(self, tensor: Tensor) -> Gathered:
        return self._inner._all_gather(tensor)

    def _send(self, tensor: Tensor, peer: int) -> None:
        self._inner._send(tensor, peer)

    def _recv(self, tensor: Tensor, peer: int) -> None:
        self._inner._recv(tensor, peer)


class CoreOnly(fs.Simulator):
    def run(self, launch: fs.Launch) -> list[Any]:
        program = functools.partial(_with_core, launch.program)
        return super().run(replace(launch, program=program))


def _with_core(program: Program, comm: Comm) -> Any:
    return program(CoreComm(comm))
