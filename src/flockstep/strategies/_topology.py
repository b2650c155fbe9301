"""Who talks to whom: graphs of workers, and the weights with which neighbours mix."""

from __future__ import annotations

from collections.abc import Callable

GRAPHS: dict[str, Callable[[int], set[int]]] = {
    # By how many ranks neighbours differ, in a circle of w workers.
    "ring": lambda workers: {1},
    "exponential": lambda workers: {1 << k for k in range((workers - 1).bit_length())},
    "complete": lambda workers: set(range(1, workers)),
}

Edge = tuple[int, int]


def edges_of(graph: str, workers: int) -> list[Edge]:
    """The edges (low rank, high rank), in an order in which workers that go through their own never
    wait in a circle.

    Neighbouring edges of one kind come in turns, so that few wait for others.
    """
    found: dict[Edge, tuple[int, int]] = {}
    for distance in sorted(GRAPHS[graph](workers)):
        for rank in range(workers):
            other = (rank + distance) % workers
            if other != rank:
                turn = (rank // distance) % 2
                found.setdefault((min(rank, other), max(rank, other)), (distance, turn))
    return sorted(found, key=lambda edge: (*found[edge], edge))


def neighbours_of(rank: int, edges: list[Edge]) -> list[int]:
    """The neighbours of a worker, in the order of the edges."""
    return [low + high - rank for low, high in edges if rank in (low, high)]


def bipartite_neighbours(graph: str, rank: int, workers: int) -> list[int]:
    """The neighbours of other parity: even ranks talk to odd ones only, so that a ring of an odd
    number of workers is open between its two ends, which are both even.

    Of the exponential graph only the distance of one is odd, so here it has the distances 1 and 1 +
    2^k, k = 1, 2, …: 1, 3, 5, 9, 17."""
    distances = GRAPHS[graph](workers)
    if graph == "exponential":
        distances = {1} | {1 + distance for distance in distances if distance > 1}
    around = {(rank + sign * distance) % workers for distance in distances for sign in (1, -1)}
    return sorted(other for other in around if (other - rank) % 2)


def metropolis_weights(rank: int, edges: list[Edge]) -> dict[int, float]:
    """w_ij = 1 / (1 + max(degree_i, degree_j)) for each neighbour j. Symmetric, so mixing
    preserves the mean.
    """
    neighbours = neighbours_of(rank, edges)
    return {j: 1 / (1 + max(len(neighbours), len(neighbours_of(j, edges)))) for j in neighbours}
