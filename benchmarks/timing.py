"""The one way in which everything here is timed."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter


def seconds_per_call(
    call: Callable[[], object],
    *,
    warm_up: int,
    calls: int,
    barrier: Callable[[], object] = lambda: None,
) -> float:
    """Mean seconds of `call`, after `warm_up` calls that do not count, between two barriers."""
    for _ in range(warm_up):
        call()
    barrier()
    began = perf_counter()
    for _ in range(calls):
        call()
    barrier()
    return (perf_counter() - began) / calls
