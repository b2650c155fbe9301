"""How launchers of several hosts end a run together: what they bring to rank 0, and what they
hear from it.
"""

from __future__ import annotations

import select
import threading
from typing import Any

from torch import Tensor

from flockstep.backends.cluster.coordinator import Coordinator
from flockstep.backends.cluster.messages import FROM_LAUNCHERS, require_schema
from flockstep.backends.cluster.values import (
    decode,
    decode_error,
    encode,
    encode_error,
)
from flockstep.backends.cluster.wire import (
    TENSOR,
    Connection,
    Header,
    WireError,
    raw,
)
from flockstep.errors import FlockstepError, WorkerLost


class ResultCollector:
    """Rank 0's side. Every launcher says, on a connection of its own, how its worker ended."""

    def __init__(self, coordinator: Coordinator, workers: int) -> None:
        self._coordinator = coordinator
        self._workers = workers
        self._connections: dict[int, Connection] = {}
        self._results: dict[int, tuple[Any, list[Tensor]]] = {}
        self._told = False
        self._guard = threading.Lock()

    def serve(self, connection: Connection, rank: int) -> None:
        """Serve one launcher's connection until it ends."""
        with self._guard:
            if not 0 <= rank < self._workers or rank in self._connections:
                raise WireError(f"the launcher of rank {rank} is not awaited")
            self._connections[rank] = connection
        try:
            while (said := connection.hear()) is not None:
                require_schema(said, FROM_LAUNCHERS)
                match said["do"]:
                    case "result":
                        tensors = [_tensor(connection) for _ in range(said["tensors"])]
                        # What is no value is refused here, while its sender is known.
                        decode(said["tree"], tensors)
                        self._results[rank] = (said["tree"], tensors)
                    case "lost":
                        self._coordinator.declare_lost(rank, said["exit_code"], said["step"])
                    case "raised":
                        self._coordinator.fail(decode_error(said["error"]))
        except OSError:
            pass  # its host is gone: as good as a connection that ended
        finally:
            with self._guard:
                del self._connections[rank]
            if not self._told:
                self._coordinator.declare_lost(rank)

    def tick(self) -> None:
        """Call now and then: tell all launchers when the run is over, or why it has failed."""
        coordinator = self._coordinator
        coordinator.tick()
        ended = self._results.keys() | coordinator.lost.keys()
        if self._told or (coordinator.failure is None and len(ended) < self._workers):
            return
        self._told = True
        if coordinator.failure is not None:
            verdict: dict[str, Any] = {"failure": encode_error(coordinator.failure)}
        else:
            verdict = {"over": [encode_error(error) for error in coordinator.lost.values()]}
        with self._guard:
            connections = list(self._connections.values())
        for connection in connections:
            try:
                connection.say(verdict)
            except OSError:
                pass  # a launcher that is gone needs no verdict

    @property
    def is_empty(self) -> bool:
        """All launchers have heard and left."""
        return not self._connections

    def results(self, own: Any) -> dict[int, Any]:
        """What the workers returned, by rank; modules and dataclasses are made like those in
        `own`.
        """
        return {rank: decode(tree, tensors, own) for rank, (tree, tensors) in self._results.items()}


def _tensor(connection: Connection) -> Tensor:
    header = connection.header()
    if header is None or header.kind != TENSOR:
        raise WireError("a tensor of a result is missing")
    return connection.tensor(header)


class LauncherChannel:
    """A launcher's side of its connection to rank 0."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self.is_over = False
        self.lost: list[WorkerLost] = []

    def bring(self, value: Any) -> None:
        """Send what this rank's worker returned."""
        tensors: list[Tensor] = []
        try:
            tree = encode(value, tensors)
        except FlockstepError as error:
            raise FlockstepError(
                f"rank {self._rank} cannot send what its program returned: {error}"
            ) from error
        self._connection.say({"do": "result", "tree": tree, "tensors": len(tensors)})
        for tensor in tensors:
            header = Header(
                TENSOR,
                self._connection.run,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                length=tensor.nbytes,
            )
            self._connection.send(header, raw(tensor))

    def tell_lost(self, lost: WorkerLost) -> None:
        self._connection.say({"do": "lost", "exit_code": lost.exit_code, "step": lost.step})

    def tell_raised(self, error: BaseException) -> None:
        self._connection.say({"do": "raised", "error": encode_error(error)})

    def look(self, seconds: float) -> FlockstepError | None:
        """Listen for at most that long. The error, if the run has failed; `is_over` says that it
        has ended.
        """
        if self.is_over or not select.select([self._connection.socket], [], [], seconds)[0]:
            return None
        try:
            message = self._connection.hear()
        except OSError:
            message = None
        if message is None:
            return WorkerLost("the launcher of rank 0 is gone", rank=0)
        match message:
            case {"failure": dict(said)}:
                return decode_error(said)
            case {"over": list(losses)} if all(isinstance(said, dict) for said in losses):
                errors = [decode_error(said) for said in losses]
                self.lost = [error for error in errors if isinstance(error, WorkerLost)]
                self.is_over = True
                return None
        raise WireError(
            f"rank 0 told rank {self._rank} neither that the run is over nor why it has failed"
        )

    def close(self) -> None:
        self._connection.close()
