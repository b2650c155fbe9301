"""One torchrun for many tests: its processes launch what the tests give them, with as many ranks as
each asks for.

Run as a script it is the program that torchrun starts; imported it is the backend that the tests
see."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import cloudpickle

import flockstep as fs
from flockstep.backends import PATIENCE_SECONDS, torchrun

RANKS = 8
START_SECONDS = 90


def send(connection: socket.socket, value: Any) -> None:
    payload = cloudpickle.dumps(value)
    connection.sendall(struct.pack("!Q", len(payload)) + payload)


def receive(connection: socket.socket) -> Any:
    length = connection.recv(8, socket.MSG_WAITALL)
    if not length:
        return None
    return cloudpickle.loads(connection.recv(struct.unpack("!Q", length)[0], socket.MSG_WAITALL))


class TorchrunSession(fs.Backend):
    """`torchrun --nproc-per-node 8`, kept. `outcomes` has what each rank's launch came to in the
    last run.
    """

    def __init__(self) -> None:
        self._folder = Path(mkdtemp())
        listener = socket.socket(socket.AF_UNIX)
        listener.settimeout(START_SECONDS)
        listener.bind(str(self._folder / "socket"))
        listener.listen(RANKS)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(RANKS),
            __file__,
        ]
        self._process = subprocess.Popen(
            [*command, str(self._folder / "socket")], env=_clean_environment()
        )
        self._ranks: dict[int, socket.socket] = {}
        with listener:
            while len(self._ranks) < RANKS:
                connection, _ = listener.accept()
                self._ranks[receive(connection)] = connection
        self.outcomes: list[tuple[bool, Any, Any]] = []
        self.patience: float | None = PATIENCE_SECONDS

    def close(self) -> None:
        for connection in self._ranks.values():
            connection.close()
        try:
            self._process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.terminate()  # torchrun ends all that it has started
            self._process.wait(START_SECONDS)
            raise
        (self._folder / "socket").unlink()
        self._folder.rmdir()

    def size(self, workers: int | None) -> int:
        return workers or RANKS

    def run(self, launch: fs.Launch) -> list[Any]:
        watch, hear, workers = launch.watch, launch.hear, launch.workers
        sent = replace(launch, watch=None, hear=None)
        cloudpickle.dumps(sent)  # an error in the test, not in the middle of a message
        for rank in range(RANKS):
            asked = (watch is not None, hear is not None)
            order = sent if rank < workers else None, asked, self.patience
            send(self._ranks[rank], order)
        failed: BaseException | None = None
        while isinstance(said := receive(self._ranks[0]), dict):
            try:
                if failed is None:
                    hear(said["told"]) if "told" in said else watch(said["steps"])
            except BaseException as error:  # noqa: BLE001  raised when all have ended
                failed = error
            send(self._ranks[0], failed is None)
        self.outcomes = [said, *(receive(self._ranks[rank]) for rank in range(1, workers))]
        if failed is not None:
            raise failed
        went_well, outcome, cause = self.outcomes[0]
        if not went_well:
            outcome.__cause__ = cause  # pickles lose it
            raise outcome
        return outcome


def _clean_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def serve(path: str) -> None:
    rank = int(os.environ["RANK"])
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    with fs.Torchrun() as backend:
        send(connection, rank)
        while (order := receive(connection)) is not None:
            launch, (is_watched, is_heard), backend._local.patience = order
            if launch is None:
                torchrun._next_launch()  # as if it had taken part
                continue
            os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(launch.workers)

            def pass_on(**said: Any) -> None:
                send(connection, said)
                if not receive(connection):
                    raise KeyboardInterrupt

            def watch(steps: Any) -> None:
                pass_on(steps=steps)

            def hear(told: str) -> None:
                pass_on(told=told)

            try:
                asked = replace(
                    launch, watch=watch if is_watched else None, hear=hear if is_heard else None
                )
                outcome = True, backend.run(asked), None
            except BaseException as error:  # noqa: BLE001  the test is told
                outcome = False, error, error.__cause__
            try:
                send(connection, outcome)
            except Exception as error:  # noqa: BLE001  it cannot be pickled
                send(connection, (False, fs.FlockstepError(f"{outcome[1]} ({error})"), None))


if __name__ == "__main__":
    serve(sys.argv[1])
