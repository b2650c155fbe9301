"""Workers that torchrun has started, on one host or on many.

Every process that torchrun starts calls `launch` and becomes the launcher of one worker
(`cluster.rendezvous`).

It goes by the environment variables of torchrun (RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), GLOO_SOCKET_IFNAME, the interface to listen on, and FLOCKSTEP_TOKEN, the run's secret.

What is not there on every system where torch is, is imported when a run begins."""

from __future__ import annotations

import functools
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flockstep.backends.base import Backend, Launch, one_interrupt, require_linux, usable_cores
from flockstep.backends.heartbeat import PATIENCE_SECONDS
from flockstep.backends.local import LocalProcesses
from flockstep.errors import InvalidField
from flockstep.fields import require

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class World:
    """What torchrun tells a process that it starts."""

    rank: int
    size: int
    local_size: int
    master: tuple[str, int]
    # Where nobody else does: the variables were not set by torchrun but, say, by SLURM.
    hosts_store: bool
    attempt: str
    interface: str | None
    secret: str | None = field(repr=False)

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> World:
        def number(name: str, default: str = "") -> int:
            text = environment.get(name, default)
            require(
                text.isdigit(),
                name,
                "be set, as torchrun does: torchrun --nproc-per-node 4 SCRIPT",
                text or None,
            )
            return int(text)

        rank, size = number("RANK"), number("WORLD_SIZE")
        has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank,
            size,
            number("LOCAL_WORLD_SIZE", "1"),
            (environment.get("MASTER_ADDR", "127.0.0.1"), number("MASTER_PORT")),
            rank == 0 and not has_agent,
            environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
            environment.get("GLOO_SOCKET_IFNAME"),
            environment.get("FLOCKSTEP_TOKEN") or None,
        )

    @property
    def host(self) -> str:
        """The one address of this host to listen on: loopback if all workers are here, else that
        of the interface.
        """
        if self.interface is not None:
            return _address_of(self.interface)
        if self.local_size == self.size:
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect(self.master)
            address: str = probe.getsockname()[0]
        is_reachable = not address.startswith("127.")
        require(
            is_reachable,
            "GLOO_SOCKET_IFNAME",
            "name the interface by which other hosts reach this one",
            None,
        )
        return address

    @property
    def store(self) -> tuple[str, int]:
        """Where this process finds the store."""
        if not self.hosts_store:
            return self.master
        address = socket.gethostbyname(self.master[0])
        # A host's own name may mean loopback to itself, where those on other hosts would not find
        # the store.
        is_hidden = address.startswith("127.") and self.local_size != self.size
        return (self.host if is_hidden else address, self.master[1])


class Torchrun(Backend):
    """Processes that torchrun has started, on one host or many, over torch.distributed.

    Every process that torchrun starts calls `launch`; rank 0 gets all results, the others their own
    and None for the rest. A worker runs in a process of its own beside its launcher. To launch
    often, keep what it is forked from: `with fs.Torchrun() as backend: fs.launch(program,
    backend=backend)`.

    Fields:
        patience: a worker, or a launcher, whose process has not run at all for that many seconds
            is lost. One that sleeps or computes for long is not. None: wait for ever.
    """

    def __init__(self, patience: float | None = PATIENCE_SECONDS) -> None:
        require_linux("torchrun")
        self._local = LocalProcesses(patience)

    def __enter__(self) -> Torchrun:
        self._local.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._local.__exit__(*exception)

    def __repr__(self) -> str:
        return f"Torchrun(patience={self.patience!r})"

    @property
    def patience(self) -> float | None:
        return self._local.patience

    @property
    def is_lead(self) -> bool:
        return World.read().rank == 0

    @property
    def is_restart(self) -> bool:
        return int(World.read().attempt) > 0

    def size(self, workers: int | None) -> int:
        size = World.read().size
        require(
            workers in (None, size),
            "workers",
            f"be left out, or be {size} as torchrun says",
            workers,
        )
        return size

    @one_interrupt()
    def run(self, launch: Launch) -> list[Any]:
        from torch._C._distributed_c10d import PrefixStore

        from flockstep.backends.cluster import Rendezvous, be_worker

        world = World.read()
        self.size(launch.workers)
        store = PrefixStore(f"flockstep {world.attempt} {_next_launch()}", _store(world))
        with Rendezvous(
            store,
            world.host,
            world.rank,
            world.size,
            world.secret,
            launch.on_failure,
            self.patience,
        ) as rendezvous:
            threads = max(1, usable_cores() // world.local_size)
            membership = rendezvous.membership(launch.seed, world.store)
            body = functools.partial(
                be_worker,
                membership=membership,
                directory=rendezvous.directory,
                threads=threads,
                program=launch.program,
            )
            return rendezvous.launch(self._local, replace(launch, program=body))


_launches = 0


def _next_launch() -> int:
    """All launchers count their launches alike, and so find each other under the same number."""
    # The processes of torchrun have nothing else in common.
    global _launches  # noqa: PLW0603
    _launches += 1
    return _launches


@functools.cache
def _store(world: World) -> Store:
    """The connection to torchrun's store, one for the process."""
    from torch._C._distributed_c10d import TCPStore

    from flockstep.backends.cluster import GATHER_SECONDS

    # Left alone, torch would listen on all interfaces.
    listener = socket.create_server(world.store).detach() if world.hosts_store else None
    return TCPStore(
        *world.store,
        is_master=world.hosts_store,
        timeout=timedelta(seconds=GATHER_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _address_of(interface: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            message = (
                f"'GLOO_SOCKET_IFNAME' must be an interface with an address (got {interface!r})"
            )
            raise InvalidField(message) from None
    return socket.inet_ntoa(answer[20:24])
