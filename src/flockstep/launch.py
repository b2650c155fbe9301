"""`launch`: run a program once per worker, on any backend."""

from __future__ import annotations

from typing import Any

from flockstep.backends import (
    PATIENCE_SECONDS,
    Backend,
    Compute,
    Faults,
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
    faults: Faults | None = None,
    patience: float | None = PATIENCE_SECONDS,
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
        faults: the simulator's workers that die or pause.
        patience: on the other backends, a worker whose process has not run at all for that many
            seconds is lost as if it had died. None: wait for ever.
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
    chosen = make_backend(
        backend, patience, network=network, compute=compute, lanes=lanes, faults=faults
    )
    return chosen.run(Launch(program, chosen.size(workers), seed, on_failure, watch, hear))


def make_backend(
    backend: str | Backend, patience: float | None = PATIENCE_SECONDS, **options: Any
) -> Backend:
    """The backend of that name with the options that were given; a backend object is taken as it
    is. All options but `patience` are the simulator's.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if patience != PATIENCE_SECONDS:
        given["patience"] = patience
    if isinstance(backend, Backend):
        require(not given, next(iter(given), ""), "be set on the backend object", backend)
        return backend
    require_name("backend", backend, BACKENDS)
    for name, value in given.items():
        if name == "patience":
            require(backend != "sim", name, "be left out with backend 'sim'", value)
        else:
            require(backend == "sim", name, "be left out with a backend other than 'sim'", value)
    return BACKENDS[backend](**given)
