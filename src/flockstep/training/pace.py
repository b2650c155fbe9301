"""When something will be the case: predictions that workers make together, and check."""

from __future__ import annotations

import math


def steps_until(limit: float, reached: float, steps: int) -> int:
    """After how many more steps to look again whether `limit` is reached, of which `steps` steps
    have reached so much.

    Half of the way that is left by the pace so far: a few looks, more of them near the end, rather
    than one at every step. As long as nothing is reached, in twice as many steps.
    """
    if reached <= 0:
        return max(1, steps)
    left = (limit - reached) / (reached / steps)
    return max(1, math.floor(left / 2))


def steps_in_all(limit: float, reached: float, steps: int) -> int | None:
    """How many steps it will take to reach `limit`, by the pace so far; None: nobody can say."""
    if reached <= 0 or steps == 0:
        return None
    return max(steps, math.ceil(steps * limit / reached))
