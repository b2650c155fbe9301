"""A random stream of its own for each simulated worker, out of torch's single global generator.

While one worker runs at a time its state is swapped in and out with the baton: exact for whatever the program does,
`torch.manual_seed` included. Programs draw most while they build their models, so the lanes stay closed until every
worker has taken its first step.

With the lanes open several workers run at once, and each draw is made under a lock with the state of the worker
that draws. Draws are caught where Python calls torch. One that escapes would make the run irrepeatable; it moves
the generator, which is checked at every call, and raises instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flockstep.backends.base import stream_seed
from flockstep.errors import FlockstepError

_DRAWING_NAMES = (
    "bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_ poisson "
    "rand rand_like randint randint_like randn randn_like random_ randperm rrelu rrelu_ uniform_ "
    "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout "
    "feature_alpha_dropout_ native_dropout rrelu_with_noise rrelu_with_noise_"
)
# These draw only with a dropout above 0, the one float among their positional arguments. They are too long to make
# the lanes take turns without need.
_DROPPING_NAMES = "scaled_dot_product_attention lstm gru rnn_tanh rnn_relu"


def _functions(names: str) -> frozenset[Callable[..., Any]]:
    """The functions of torch with these names, wherever Python can reach them."""
    homes = (torch, torch.Tensor, torch._VF, torch.nn.functional, torch._C._nn)
    found = (getattr(home, name, None) for home in homes for name in names.split())
    return frozenset(function for function in found if function is not None)


class RandomStreams:
    """The random state of every worker, and whether they may run side by side."""

    def __init__(self, seed: int, workers: int) -> None:
        seeds = (stream_seed(seed, rank) for rank in range(workers))
        self._states = [torch.Generator().manual_seed(one).get_state() for one in seeds]
        self._drawing = threading.Lock()
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
            return
        with self._drawing:
            untouched = torch.equal(torch.get_rng_state(), self._resting)
        if not untouched:
            raise FlockstepError(
                f"rank {rank}, or a worker beside it, changed torch's global random generator in a way that lanes "
                "cannot follow (a late torch.manual_seed, or a draw inside compiled code): run with lanes=1"
            )

    def open_lanes(self, rank: int) -> None:
        """From now on workers run side by side. `rank` is the only one that runs at this moment."""
        self._states[rank] = torch.get_rng_state()
        self._resting = self._states[rank].clone()

    def draw(self, rank: int, function: Callable[[], Any]) -> Any:
        """Call `function` with the stream of `rank`."""
        if self._resting is None:
            return function()
        with self._drawing:
            torch.set_rng_state(self._states[rank])
            try:
                return function()
            finally:
                self._states[rank] = torch.get_rng_state()
                torch.set_rng_state(self._resting)


class CatchDraws(TorchFunctionMode):  # type: ignore[misc]
    """Sends the draws of the thread that enters it to the stream of `rank`."""

    _drawing = _functions(_DRAWING_NAMES)
    _dropping = _functions(_DROPPING_NAMES)

    def __init__(self, streams: RandomStreams, rank: int) -> None:
        super().__init__()
        self._streams = streams
        self._rank = rank

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._drawing or (func in self._dropping and _drops(args, kwargs)):
            return self._streams.draw(self._rank, lambda: func(*args, **kwargs))
        return func(*args, **kwargs)


def _drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, float) and value > 0 for value in (*args, kwargs.get("dropout_p")))
