"""How launchers find each other: where the store is, and what becomes of one that goes too
early.
"""

from __future__ import annotations

import threading
import time

import pytest

from flockstep.backends.cluster.rendezvous import Rendezvous
from flockstep.backends.torchrun import World


class Store:
    """What launchers use of torch's store. One who sets the key `last` does not live to see
    more.
    """

    def __init__(self, last: str | None = None) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._last = last

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
        if key == self._last:
            raise SystemExit

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 10)
            return self._values[key].encode()


def test_a_launcher_that_goes_before_all_have_met_is_lost():
    """The others have its address and count on it: rank 0 must know."""
    store = Store(last="address 1")

    def come_and_go() -> None:
        with pytest.raises(SystemExit), Rendezvous(store, "127.0.0.1", 1, 2, None, "stop"):
            pass

    going = threading.Thread(target=come_and_go)
    going.start()
    with Rendezvous(store, "127.0.0.1", 0, 2, None, "stop") as rendezvous:
        going.join()
        deadline = time.monotonic() + 30
        while not rendezvous._coordinator.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        assert rendezvous._coordinator.lost.keys() == {1}


TWO_HOSTS = {"WORLD_SIZE": "2", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        # What its own name may mean to rank 0 alone.
        ({"RANK": "0", "MASTER_ADDR": "127.0.1.1"}, "127.0.0.1"),
        ({"RANK": "0", "MASTER_ADDR": "127.0.1.1", "LOCAL_WORLD_SIZE": "2"}, "127.0.1.1"),
        ({"RANK": "0", "MASTER_ADDR": "10.0.0.1"}, "10.0.0.1"),
        ({"RANK": "0", "MASTER_ADDR": "first", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "first"),
        ({"RANK": "1", "MASTER_ADDR": "first"}, "first"),
    ],
)
def test_the_store_is_where_all_find_it(variables, address):
    """Rank 0 hosts it unless torchrun does, on the one address by which the others reach it."""
    assert World.read(TWO_HOSTS | variables).store == (address, 29500)
