"""What a worker has put on the wire."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Meter:
    """What one worker has put on the wire. `exchanges` counts calls that moved a tensor."""

    bytes_sent: int = 0
    exchanges: int = 0
    paused: bool = False

    def count(self, nbytes: int) -> None:
        if not self.paused:
            self.bytes_sent += nbytes
            self.exchanges += 1
