"""A random stream of its own for each simulated worker, out of torch's single global generator.

While one worker runs at a time, its state is swapped in and out with the baton: exact for whatever
the program does, `torch.manual_seed` included. Workers side by side would draw from each other's
stream. So the lanes stay closed until every worker has taken its first step, and open only if none
of these steps drew; a model with dropout runs in one lane. Should a program start to draw later,
the generator has moved, which is checked at every call, and the run stops rather than give figures
that cannot be repeated."""

from __future__ import annotations

import torch

from flockstep.errors import FlockstepError
from flockstep.randomness import Purpose, torch_stream


class TorchStates:
    """The random state of every worker, and whether they may run side by side."""

    def __init__(self, seed: int, workers: int) -> None:
        self._states = [
            torch_stream(Purpose.WORKER, seed, rank).get_state() for rank in range(workers)
        ]
        self._somebody_draws = False
        self._resting: torch.Tensor | None = None  # the global state while lanes are open

    @property
    def lanes_are_open(self) -> bool:
        return self._resting is not None

    def enter(self, rank: int) -> None:
        """`rank` goes on."""
        if self._resting is None:
            torch.set_rng_state(self._states[rank])

    def leave(self, rank: int) -> None:
        """`rank` stops running for now."""
        if self._resting is None:
            self._states[rank] = torch.get_rng_state()
        elif not torch.equal(torch.get_rng_state(), self._resting):
            raise FlockstepError(
                f"rank {rank}, or a worker beside it, drew from torch's global generator "
                "for the first time after its first step; "
                "workers side by side cannot do that repeatably: run with lanes=1"
            )

    def first_step_done(self, rank: int) -> None:
        """`rank`, the only one that runs, has computed its first step since it last entered."""
        if not torch.equal(torch.get_rng_state(), self._states[rank]):
            self._somebody_draws = True

    def open_lanes(self) -> None:
        """From now on workers may run side by side, if none of them draws."""
        if not self._somebody_draws:
            self._resting = torch.get_rng_state()

    def saved(self) -> dict[str, bool]:
        return {"somebody_draws": self._somebody_draws, "lanes_are_open": self.lanes_are_open}

    def load(self, saved: dict[str, bool], states: list[torch.Tensor]) -> None:
        """Go on as it was saved, with the state of each worker. All of them sleep."""
        self._states = list(states)
        self._somebody_draws = saved["somebody_draws"]
        self._resting = torch.get_rng_state() if saved["lanes_are_open"] else None


class LeftAlone:
    """For programs that do not draw: torch's generator is left alone, whoever uses it meanwhile."""

    lanes_are_open = False

    def enter(self, rank: int) -> None: ...

    def leave(self, rank: int) -> None: ...

    def first_step_done(self, rank: int) -> None: ...

    def open_lanes(self) -> None: ...

    def saved(self) -> dict[str, bool]:
        return {}

    def load(self, saved: dict[str, bool], states: list[torch.Tensor]) -> None: ...
