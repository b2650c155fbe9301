"""What each call costs in seconds, and how many bytes each worker puts on the wire for it.

α is the link's latency, β its seconds per byte, n the bytes of the tensor, w the workers. The
simulator charges these costs; a planner can ask for them without running anything. The byte counts
are those of the algorithm whose time is charged: added up over the ring, an all-reduce moves
exactly 2(w−1)n bytes."""

from __future__ import annotations

from flockstep.network.link import Link


def _rounds(workers: int) -> int:
    """⌈log₂ w⌉: how often a set that doubles must double to reach all workers."""
    return (workers - 1).bit_length()


def all_reduce_seconds(link: Link, workers: int, nbytes: float) -> float:
    """Ring: 2(w−1)α + 2((w−1)/w)nβ."""
    steps = 2 * (workers - 1)
    return steps * link.latency_seconds + steps / workers * nbytes / link.bytes_per_second


def summed_bytes(workers: int, nbytes: float) -> float:
    """((w−1)/w)n: each worker of a ring adds up all chunks but one."""
    return (workers - 1) / workers * nbytes


def all_gather_seconds(link: Link, workers: int, nbytes: float) -> float:
    """(w−1)(α + nβ); with tensors of different sizes, n is the largest."""
    return (workers - 1) * link.seconds(nbytes)


def broadcast_seconds(link: Link, workers: int, nbytes: float) -> float:
    """⌈log₂w⌉(α + nβ)."""
    return _rounds(workers) * link.seconds(nbytes)


def barrier_seconds(link: Link, workers: int) -> float:
    """⌈log₂w⌉α: a dissemination barrier of empty messages."""
    return _rounds(workers) * link.latency_seconds


def message_seconds(link: Link, nbytes: float) -> float:
    """α + nβ: a send, an exchange (both ways at once), a shared read, write or add."""
    return link.seconds(nbytes)


def blend_seconds(link: Link, nbytes: float) -> float:
    """2(α + nβ): the value travels there and the old one back."""
    return 2 * link.seconds(nbytes)


def all_reduce_bytes(workers: int, rank: int, elements: int, itemsize: int) -> int:
    """What `rank` sends in a ring of w chunks: all chunks but one while reducing, all but one
    while gathering.
    """

    def chunk(index: int) -> int:
        return elements // workers + (index % workers < elements % workers)

    return (2 * elements - chunk(rank + 1) - chunk(rank + 2)) * itemsize


def all_gather_bytes(workers: int, nbytes: int) -> int:
    """(w−1)n: a worker's own tensor travels to every other worker."""
    return (workers - 1) * nbytes


def broadcast_bytes(workers: int, distance: int, nbytes: int) -> int:
    """What the worker `distance` ranks after the root sends down a binomial tree; (w−1)n over
    all workers.
    """
    # In round k the 2^k workers that have the tensor send it on, each to the worker 2^k further
    # along.
    first_round = distance.bit_length()
    return sum(distance + (1 << k) < workers for k in range(first_round, _rounds(workers))) * nbytes
