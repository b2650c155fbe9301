"""What a trace costs: the same workers train with one and without, in turns."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from statistics import median

import torch
from torch.nn import functional as F

import flockstep as fs
from benchmarks.harness import Benchmark, Case, Sample
from benchmarks.timing import seconds_per_call
from benchmarks.training import sgd
from flockstep.comm import Trace, events_per_worker
from flockstep.models import MLP

ROUNDS = 15
STEPS = 40
BATCH_SIZE = 16


def _measure(backend: str, workers: int) -> list[Sample]:
    def program(comm: fs.Comm) -> tuple[list[float], list[float]]:
        model = MLP(64, 128, 10)  # that of digits-mlp
        worker = fs.Worker(comm, model, sgd(model), fs.LocalSGD(period=8))
        random = torch.Generator().manual_seed(comm.rank)
        images = torch.randn(8, BATCH_SIZE, 64, generator=random)
        stream = cycle(images)
        labels = torch.arange(BATCH_SIZE) % 10

        def step() -> None:
            loss = F.cross_entropy(model(next(stream)), labels)
            loss.backward()
            worker.step(loss)

        # In turns of a fraction of a second, so that both feel whatever else the machine does.
        timed = partial(seconds_per_call, step, warm_up=8, calls=STEPS, barrier=comm.barrier)
        trace = Trace(events_per_worker(workers))
        traced, plain = [], []
        for _ in range(ROUNDS):
            comm.meter.trace = None
            plain.append(timed())
            comm.meter.trace = trace
            traced.append(timed())
        return traced, plain

    traced, plain = fs.launch(program, workers, backend)[0]
    ratio = median(one / other for one, other in zip(traced, plain, strict=True))
    return [Sample(ratio, {"traced": 1e3 * median(traced), "not": 1e3 * median(plain)})]


BENCHMARKS = tuple(
    Benchmark(
        [
            Case(
                f"trace_{backend}",
                f"a traced step against one without a trace: {what} (digits-mlp, LocalSGD(8))",
                bound=1.03,
                lower_is_better=True,
                figure_unit="ms",
            )
        ],
        partial(_measure, backend, workers),
        repeats=5,
    )
    for backend, workers, what in (
        ("sim", 8, "8 simulated workers"),
        ("local", 2, "2 local processes"),
    )
)
