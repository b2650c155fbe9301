"""In the simulator every tick of a worker's clock is computing, waiting or sending."""

from __future__ import annotations

import pytest
from tests.strategies.harness import train
from tests.strategies.table import TABLE

import flockstep as fs
from flockstep.backends.sim.scheduler import TICKS_PER_SECOND
from flockstep.comm import Trace


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_every_tick_is_accounted_for(row):
    def program(comm):
        meter, elapse, computed = comm.meter, comm.elapse, 0
        meter.trace = Trace(100_000)

        def counted(*args, **options):
            nonlocal computed
            before = meter.clock()
            elapse(*args, **options)
            computed += meter.clock() - before

        comm.elapse = counted
        worker, _ = train(comm, row.strategy, steps=12)
        worker.finish()
        rows, _ = meter.trace.table()
        times = computed, meter.ticks_waiting, meter.ticks_sending
        return times, meter.clock(), rows, meter.bytes_sent

    compute = fs.Compute(0.01, jitter=0.2, slow={1: 2.0})
    for times, clock, rows, nbytes in fs.launch(program, row.workers, compute=compute):
        assert sum(times) == clock
        assert all(isinstance(ticks, int) and ticks >= 0 for ticks in times)
        for kind, ticks in enumerate(times):
            drawn = rows[rows[:, 0] == kind, 3].sum().item()
            assert drawn == pytest.approx(ticks / TICKS_PER_SECOND, abs=1e-12)
        assert rows[:, 4].sum().item() == nbytes
