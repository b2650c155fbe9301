"""All-reduce algorithms of the literature, written out with messages between two workers.

They give what `Comm.all_reduce` gives, up to the order of the additions. What differs is how many
messages follow one another, how long each is, and between whom they travel: the bytes and, in the
simulator, the seconds show it.

    flat                    the backend's own all-reduce, charged as a ring
    ring                    2(w−1) messages of n/w: summed on the way round, then handed on once
                            more
    tree                    at most 2⌈log₂w⌉ messages of n: summed up a binomial tree, broadcast
                            down it
    hierarchical            groups of G: ring inside each, ring between their leaders, from the
                            leader to all inside: 4(G−1) + 2(w/G−1) messages (Jia et al. 2018,
                            whose k is the size of a group)
    torus                   X×Y: reduce-scatter along rows, ring along columns, all-gather along
                            rows: 2(X−1) + 2(Y−1) messages (Mikami et al. 2018)

    hybrid                  hierarchical for tensors below a threshold, whose time is that of the
                            messages, and ring for larger ones, whose time is that of the bytes
                            (Jia et al. 2018)

`hierarchical:G`, `hybrid:G` and `torus:XxY` say the form; by default it is as near to a square as w
allows. `hybrid:G:BYTES` says the threshold, too, by default 1 MiB: where the two take equally long
depends on the network, and is for measurements to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from flockstep.comm.contract import Comm
from flockstep.errors import WorkerLost
from flockstep.fields import require

SMALL_BYTES = 1 << 20  # what a hybrid takes for small by default
FORM = re.compile(
    r"flat|ring|tree|hierarchical(:[1-9]\d*)?|torus(:[1-9]\d*x[1-9]\d*)?"
    r"|hybrid(:[1-9]\d*(:\d+)?)?"
)

Average = Callable[[Tensor], None]
"""Replaces a flat tensor on every worker by the mean over the workers."""


def require_algorithm(field: str, algorithm: object) -> None:
    known = isinstance(algorithm, str) and FORM.fullmatch(algorithm) is not None
    rule = (
        "be 'flat', 'ring', 'tree', 'hierarchical' or 'hierarchical:G', 'torus' or 'torus:XxY', "
        "'hybrid', 'hybrid:G' or 'hybrid:G:BYTES'"
    )
    require(known, field, rule, algorithm)


def averager(comm: Comm, algorithm: str) -> Average:
    """The algorithm of that name for all workers of `comm`, which make it together."""
    name, _, form = algorithm.partition(":")
    if name == "flat":
        return lambda tensor: _ignore(comm.all_reduce(tensor, op="mean"))
    if name == "hybrid":
        of_a_group, _, threshold = form.partition(":")
        if of_a_group:
            rule = f"have groups that divide the workers, {comm.size}"
            require(comm.size % int(of_a_group) == 0, "all_reduce", rule, algorithm)
        below = averager(comm, f"hierarchical:{of_a_group}".rstrip(":"))
        above = averager(comm, "ring")
        limit = int(threshold or SMALL_BYTES)
        return lambda tensor: (below if tensor.nbytes < limit else above)(tensor)
    if name == "hierarchical":
        size = int(form or _divisor(comm.size))
        require(
            comm.size % size == 0,
            "all_reduce",
            f"have groups that divide the workers, {comm.size}",
            algorithm,
        )
        inside, across = comm.split(comm.rank // size), comm.split(comm.rank % size)
        return _mean(lambda tensor: _hierarchical(inside, across, tensor), comm)
    if name == "torus":
        columns, rows = (
            map(int, form.split("x"))
            if form
            else (comm.size // _divisor(comm.size), _divisor(comm.size))
        )
        require(
            columns * rows == comm.size,
            "all_reduce",
            f"have X·Y = {comm.size}, the workers",
            algorithm,
        )
        row, column = comm.split(comm.rank // columns), comm.split(comm.rank % columns)
        return _mean(lambda tensor: _torus(row, column, tensor), comm)
    return _mean(lambda tensor: {"ring": _ring, "tree": _tree}[name](comm, tensor), comm)


def _mean(add_up: Average, comm: Comm) -> Average:
    def average(tensor: Tensor) -> None:
        add_up(tensor)
        tensor.div_(comm.size)

    return average


def _ring(comm: Comm, tensor: Tensor) -> None:
    chunks = tensor.tensor_split(comm.size)
    _reduce_scatter(comm, chunks)
    _all_gather(comm, chunks)


def _tree(comm: Comm, tensor: Tensor) -> None:
    sum_at_first(comm, tensor, range(comm.size))
    comm.broadcast(tensor, root=0)


def sum_at_first(
    comm: Comm, tensor: Tensor, ranks: Sequence[int], *, without_lost: bool = False
) -> None:
    """Sum the tensors of `ranks` up a binomial tree; the first of them has the sum. Others need not
    take part.

    A lost worker is an error, or, `without_lost`, what came through it is missing.
    """
    accept = suppress(WorkerLost) if without_lost else nullcontext()
    if comm.rank not in ranks:
        return
    place, distance = ranks.index(comm.rank), 1
    while distance < len(ranks):
        if place & distance:
            with accept:
                comm.send(tensor, ranks[place - distance])
            return
        if place + distance < len(ranks):
            with accept:
                tensor.add_(comm.recv(torch.empty_like(tensor), ranks[place + distance]))
                comm.has_summed(tensor.nbytes)
        distance *= 2


def broadcast_among(comm: Comm, tensor: Tensor, ranks: Sequence[int]) -> None:
    """Hand the tensor of the first of `ranks` down a binomial tree to the others of them. Other
    workers need not take part.
    """
    place, distance = ranks.index(comm.rank), 1
    while distance < len(ranks):
        if place < distance and place + distance < len(ranks):
            comm.send(tensor, ranks[place + distance])
        elif distance <= place < 2 * distance:
            comm.recv(tensor, ranks[place - distance])
        distance *= 2


def _hierarchical(inside: Comm, across: Comm, tensor: Tensor) -> None:
    _ring(inside, tensor)
    if inside.rank == 0:
        _ring(across, tensor)
    chunks = tensor.tensor_split(inside.size)
    if inside.rank == 0:
        for other in range(1, inside.size):
            inside.send(chunks[other], other)
    else:
        inside.recv(chunks[inside.rank], 0)
    _all_gather(inside, chunks)


def _torus(row: Comm, column: Comm, tensor: Tensor) -> None:
    chunks = tensor.tensor_split(row.size)
    _reduce_scatter(row, chunks)
    _ring(column, chunks[row.rank])
    _all_gather(row, chunks)


def _reduce_scatter(comm: Comm, chunks: Sequence[Tensor]) -> None:
    """Chunk r of worker r becomes the sum of all workers' chunk r."""
    for step in range(1, comm.size):
        arriving = chunks[(comm.rank - step - 1) % comm.size]
        arriving.add_(
            _pass_on(comm, chunks[(comm.rank - step) % comm.size], torch.empty_like(arriving))
        )
        comm.has_summed(arriving.nbytes)


def _all_gather(comm: Comm, chunks: Sequence[Tensor]) -> None:
    """Every worker's chunk r becomes that of worker r."""
    for step in range(comm.size - 1):
        _pass_on(
            comm, chunks[(comm.rank - step) % comm.size], chunks[(comm.rank - step - 1) % comm.size]
        )


def _pass_on(comm: Comm, leaving: Tensor, arriving: Tensor) -> Tensor:
    """Send to the right, receive from the left. One message may be on its way, so all may send
    first.
    """
    comm.send(leaving, (comm.rank + 1) % comm.size)
    return comm.recv(arriving, (comm.rank - 1) % comm.size)


def _divisor(number: int) -> int:
    """The largest divisor up to the root."""
    return next(divisor for divisor in range(int(number**0.5), 0, -1) if number % divisor == 0)


def _ignore(_: object) -> None:
    """For functions that return what nobody needs."""
