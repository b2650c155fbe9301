"""Who talks to whom: graphs of workers, and the weights with which neighbours mix."""

from __future__ import annotations

from collections.abc import Callable

GRAPHS: dict[str, Callable[[int], set[int]]] = {
    # By how many ranks neighbours differ, in a circle of w workers.
    "ring": lambda workers: {1},
    "exponential": lambda workers: {1 << k for k in range((workers - 1).bit_length())},
    "complete": lambda workers: set(range(1, workers)),
}

ONE_PEER = "one_peer_exponential"  # another graph at each step

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


def distance_in_turn(turn: int, workers: int) -> int:
    """2^(t mod τ), τ = ⌊log₂(w−1)⌋ + 1: how many ranks away the peer of a turn is in the one-peer
    exponential graph.
    """
    distances = sorted(GRAPHS["exponential"](workers))
    return distances[turn % len(distances)]


def bipartite_peers(rank: int, workers: int) -> list[int]:
    """The peers of a worker in the one-peer exponential graph between even and odd ranks, in the
    order of their turns: 1, 3, 5, 9, … ranks ahead.

    With an odd number of workers the circle closes between two even ranks: a peer beyond that is so
    many ranks behind instead."""
    distances = [1, *(1 + each for each in sorted(GRAPHS["exponential"](workers)) if each > 1)]
    peers = []
    for distance in distances:
        around = ((rank + distance) % workers, (rank - distance) % workers)
        peers += [peer for peer in around if (peer - rank) % 2][:1]
    return peers
