"""Parts of a state that tie it to its run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flockstep.comm.contract import Comm

HANDLE = "is a handle"


def handle(**how: Any) -> Any:
    """A field of a state that is no data: a comm, a shared tensor, a closure, or whatever else
    `init` makes anew. It is not saved, and given by keyword. `how` goes to `dataclasses.field`.

        @dataclass
        class State:
            velocity: Tensor
            household: fs.Comm = fs.handle()
    """
    return dataclasses.field(kw_only=True, metadata={HANDLE: True}, **how)


@dataclass
class Background:
    """What `Comm.in_background` has sent on its way. Called, it waits until that has arrived.

    Fields:
        until: when that is, in ticks of the simulator's clock.
    """

    until: int = 0
    comm: Comm = handle()

    def __call__(self) -> None:
        self.comm._wait_for_background(self.until)
