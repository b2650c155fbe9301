"""What theory says about the methods, to be asked before a run and compared with one after it.

*The swarm of NoSync.* A particle is a worker's parameter under gradient noise of standard deviation
σ: every step moves it by η times the noise, then by β of the way towards the common mean. The mean
cancels in the difference of two particles, so `settled_distance`, `growing_distance` and
`pull_within` are exact for any number of workers; `printed_distance` is the paper's own form with
ω = (1−β)² + β²/w, an approximation of them.

*Updates without a lock.* `lock_free_bound` says how small a step and how many updates are enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.fields import require, require_choice, require_integer, require_number


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


def printed_distance(pull: float, lr: float, noise: float, workers: int, steps: int) -> float:
    """The paper's form of the expected distance after that many steps (eq. 12):
    (2ησ/√π) √(Σ_{k=1}^{t} ω^k), with ω = (1−β)² + β²/w.

    It treats the particles as independent of the mean that they make up, and so lies above the
    exact value, the more the fewer workers there are. Without a pull it is `growing_distance`.
    """
    require_number("pull", pull, at_least=0, at_most=1)
    require_integer("workers", workers, 1)
    require_integer("steps", steps, 0)
    omega = (1 - pull) ** 2 + pull**2 / workers
    sum_of_powers = steps if omega == 1 else omega * (1 - omega**steps) / (1 - omega)
    return 2 * lr * noise * math.sqrt(sum_of_powers / math.pi)


def small_pull_distance(pull: float, lr: float, noise: float) -> float:
    """What the settled distance tends to as the pull becomes small (eq. 14): √2·ησ / (√π √β)."""
    require_number("pull", pull, above=0, at_most=1)
    return math.sqrt(2) * lr * noise / math.sqrt(math.pi * pull)


@dataclass(frozen=True)
class LockFreeBound:
    """What is enough for an expected error of at most ε.

    Fields:
        step_size: γ, at which to take every step.
        updates: k, of single components of x, after which E[f(x_k) − f*] ≤ ε.
    """

    step_size: float
    updates: int


def lock_free_bound(
    error: float,
    *,
    strong_convexity: float,
    lipschitz: float,
    gradient_bound: float,
    start_distance: float,
    lag: int,
    edge_size: int,
    variable_share: float,
    edge_share: float,
    safety: float = 0.99,
    form: str = "hogwild",
) -> LockFreeBound:
    """How many updates without a lock bring a sparse, strongly convex sum f(x) = Σ_e f_e(x_e) to an
    expected error of ε.

        γ = ϑεc / (2LM²Ω (1 + 6ρτ + 4τ²Ω√Δ))
        k ≥ 2LM²Ω (1 + 6ρτ + 6τ²Ω√Δ) log(LD₀/ε) / (c²ϑε)

    Each update draws an e, then one component v of it, and takes x_v ← x_v − γ|e| G_e(x)_v with a
    gradient computed at most τ updates ago. It holds where f is strongly convex with modulus c, its
    gradient Lipschitz with constant L, ‖G_e(x_e)‖ ≤ M wherever the iterates come, and γc < 1, which
    is checked.

    Fields:
        error: ε, above 0.
        strong_convexity: c.
        lipschitz: L, at least c.
        gradient_bound: M.
        start_distance: D₀ = ‖x₀ − x*‖², squared as in the paper.
        lag: τ, updates between reading and writing, at most.
        edge_size: Ω, components in the largest e.
        variable_share: Δ, the largest share of all e that one component is in.
        edge_share: ρ, the largest share of all e that one e has a component in common with.
        safety: ϑ, above 0 and below 1.
        form: "hogwild", as Niu et al. have it; "printed", as Wongpanich et al. restate it in their
            Proposition 1 (eq. 8 and 9): there the Ω before the bracket is missing, so that γ is Ω
            times larger and k Ω times smaller than what was proved.

    Papers: Niu, Recht, Ré, Wright, "Hogwild!", 2011, Proposition 4.1; Wongpanich, You, Demmel,
    2020, Proposition 1.

    Example:
        fs.lock_free_bound(0.1, strong_convexity=1, lipschitz=1, gradient_bound=2, start_distance=4,
                           lag=3, edge_size=2, variable_share=0.2, edge_share=0.3).updates
    """
    for field, value in (
        ("error", error),
        ("strong_convexity", strong_convexity),
        ("gradient_bound", gradient_bound),
        ("start_distance", start_distance),
    ):
        require_number(field, value, above=0, finite=True)
    require_number("lipschitz", lipschitz, at_least=strong_convexity, finite=True)
    require_integer("lag", lag, 0)
    require_integer("edge_size", edge_size, 1)
    require_number("variable_share", variable_share, above=0, at_most=1)
    require_number("edge_share", edge_share, above=0, at_most=1)
    require_number("safety", safety, above=0, below=1)
    require_choice("form", form, ("hogwild", "printed"))

    leading = edge_size if form == "hogwild" else 1  # Ω
    scale = 2 * lipschitz * gradient_bound**2 * leading  # 2LM²Ω
    conflicts = 6 * edge_share * lag  # 6ρτ
    torn = lag**2 * edge_size * math.sqrt(variable_share)  # τ²Ω√Δ

    step_size = safety * error * strong_convexity / (scale * (1 + conflicts + 4 * torn))
    stays_below = step_size * strong_convexity < 1
    require(stays_below, "error", "be so small that γc < 1 for the step size γ", error)

    halvings = max(0.0, math.log(lipschitz * start_distance / error))
    denominator = strong_convexity**2 * safety * error
    updates = scale * (1 + conflicts + 6 * torn) * halvings / denominator
    return LockFreeBound(step_size, math.ceil(updates))
