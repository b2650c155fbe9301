"""`launch`: run a program once per worker, on any backend."""

from __future__ import annotations

from typing import Any

from flockstep.backends import (
    Backend,
    Compute,
    Hearer,
    Launch,
    LocalProcesses,
    Program,
    Ray,
    Simulator,
    Torchrun,
    Watcher,
)
from flockstep.fields import require, require_name
from flockstep.network import Network

BACKENDS: dict[str, type[Backend]] = {
    "sim": Simulator,
    "local": LocalProcesses,
    "torchrun": Torchrun,
    "ray": Ray,
}


def launch(
    program: Program,
    workers: int | None = None,
    backend: str | Backend = "sim",
    *,
    seed: int = 0,
    network: Network | str | None = None,
    compute: Compute | float | None = None,
    lanes: int | None = None,
    on_failure: str = "stop",
    watch: Watcher | None = None,
    hear: Hearer | None = None,
) -> list[Any]:
    """Run `program(comm)` once per worker; return what the programs returned, in rank order.

    Args:
        program: plain blocking code of one worker; a function, a closure, anything callable.
        workers: how many; under torchrun it says so itself, and this may be left out.
        backend: "sim" (virtual time, in this process), "local" (processes of this machine),
            "torchrun" (the processes that torchrun has started), "ray" (actors of a Ray cluster),
            or a backend object.
        seed: decides everything random; worker r draws from a stream of its own, made of (seed, r).
        network, compute, lanes: the simulator's links, or the name of a preset; its step times, or
            seconds; and how many workers compute side by side.
        on_failure: "stop": when one worker fails, all are stopped and its error is raised here.
            "continue": when a worker's process dies, the others go on, and its place in the list
            holds a `WorkerLost`; if nobody is left, the last one is raised. A program that raises
            stops the run all the same.
        watch: called every tenth of a second or so with the steps that each worker has done.
        hear: called with each text that a worker gives to `comm.tell`, in this process; under
            torchrun in that of rank 0.

    Example:
        results = fs.launch(lambda comm: comm.rank, workers=8)
    """
    require(callable(program), "program", "be callable", program)
    chosen = make_backend(backend, network=network, compute=compute, lanes=lanes)
    return chosen.run(Launch(program, chosen.size(workers), seed, on_failure, watch, hear))


def make_backend(backend: str | Backend, **options: Any) -> Backend:
    """The backend of that name with the options that were given; a backend object is taken as it
    is.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(backend, Backend):
        require(not given, next(iter(given), ""), "be set on the backend object", backend)
        return backend
    require_name("backend", backend, BACKENDS)
    if backend != "sim":
        for name, value in given.items():
            require(False, name, "be left out with a backend other than 'sim'", value)
    return BACKENDS[backend](**given)
