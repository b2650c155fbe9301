"""What theory says about the swarm of NoSync, to be asked before a run and compared with one after
it.

A particle is a worker's parameter under gradient noise of standard deviation σ: every step moves it
by η times the noise, then by β of the way towards the common mean. The mean cancels in the
difference of two particles, so these are exact for any number of workers; the paper's form with ω =
(1−β)² + β²/w is an approximation of them."""

from __future__ import annotations

import math

from flockstep.fields import require_number


def settled_distance(pull: float, lr: float, noise: float) -> float:
    """The expected distance of two particles once they have settled: 2(1−β)ησ / (√π √(2β−β²))."""
    require_number("pull", pull, above=0, at_most=1)
    return 2 * (1 - pull) * lr * noise / math.sqrt(math.pi * (2 * pull - pull**2))


def growing_distance(lr: float, noise: float, steps: int) -> float:
    """The expected distance of two particles that nothing pulls, after that many steps: 2ησ√t /
    √π.
    """
    return 2 * lr * noise * math.sqrt(steps / math.pi)


def pull_within(step_lengths: float) -> float:
    """The pull that keeps two particles within so many step lengths ησ of each other, on average,
    once settled.

    The inverse of `settled_distance`: β = 1 − k √(π / (4 + πk²)).
    """
    require_number("step_lengths", step_lengths, at_least=0)
    return 1 - step_lengths * math.sqrt(math.pi / (4 + math.pi * step_lengths**2))
