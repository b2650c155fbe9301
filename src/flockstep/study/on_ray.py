"""The same runs as tasks of a Ray cluster: one that is there, or one that is started here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from flockstep.backends import ray_session
from flockstep.study.jobs import LOOK_SECONDS, Tick
from flockstep.study.one_run import Order, Places, carried_out, lost_record
from flockstep.study.records import Record


class RayJobs:
    """Runs on Ray, for the length of a `with`. `count`: at most so many at a time; None: as many
    as the cluster has cores.
    """

    def __init__(self, count: int | None, cores_here: int) -> None:
        self._count = count
        self._cores_here = cores_here
        self._stack = ExitStack()

    def __enter__(self) -> RayJobs:
        session = self._stack.enter_context(ray_session())
        if self._count is None:
            import ray

            # One that is started here takes any number of tasks, whatever cores there are.
            cores = ray.cluster_resources().get("CPU", 1)
            self._count = self._cores_here if session.is_own else max(1, int(cores))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def run(
        self, together: Sequence[Order], alone: Sequence[Order], tick: Tick
    ) -> Iterator[Record]:
        """Carry out orders and give their records as they come."""
        import ray

        # A task that is cancelled or whose process dies is recorded as failed, not tried again.
        task: Any = ray.remote(max_retries=0)(_carried_out)
        orders = [*together, *alone]
        # A task that asks for more cores than any host has would wait for ever.
        most = max(int(node["Resources"].get("CPU", 1)) for node in ray.nodes() if node["Alive"])
        under_way: dict[Any, Order] = {}
        try:
            while orders or under_way:
                while orders and len(under_way) < (self._count or 1):
                    order = orders.pop(0)
                    wanted = 1 if order.spec.backend == "sim" else order.spec.workers or 1
                    cores = min(wanted, most)
                    under_way[task.options(num_cpus=cores).remote(order)] = order
                ready, _ = ray.wait([*under_way], timeout=LOOK_SECONDS)
                for each in ready:
                    yield _record_of(each, under_way.pop(each))
                tick()
        finally:
            for each in under_way:
                ray.cancel(each, force=True)


def _carried_out(order: Order) -> Record:
    torch.set_num_threads(1)
    with Places() as places:
        return carried_out(order, places)


def _record_of(reference: Any, order: Order) -> Record:
    import ray
    from ray.exceptions import RayError

    try:
        record: Record = ray.get(reference)
    except RayError as error:
        return lost_record(order, f"Ray lost the run: {type(error).__name__}: {error}")
    return record
