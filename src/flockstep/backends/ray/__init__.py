"""Workers as actors of a Ray cluster. Ray is imported by the modules beside this one, and only
when a run begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from flockstep.backends.base import Backend, Launch, one_interrupt, require_linux
from flockstep.backends.heartbeat import PATIENCE_SECONDS, require_patience
from flockstep.errors import FlockstepError
from flockstep.fields import require_choice, require_integer, require_number

if TYPE_CHECKING:
    from flockstep.backends.ray.actor_pool import ActorPool
    from flockstep.backends.ray.session import Session

PLACEMENTS = ("pack", "spread")


def ray_session() -> Session:
    """A connection to Ray for the length of a `with`: to the cluster that RAY_ADDRESS names, or to
    one that is started here.
    """
    if find_spec("ray") is None:
        raise FlockstepError("the Ray backend needs Ray: pip install 'flockstep[ray]'")
    from flockstep.backends.ray.session import Session

    return Session()


class Ray(Backend):
    """Actors of a Ray cluster: the one that RAY_ADDRESS names, or one that is started on this
    machine.

    A cluster that is started here listens on loopback only, has no dashboard, and ends with the
    launch. To launch often, keep it and its idle workers: `with fs.Ray() as kept:
    fs.launch(program, 4, backend=kept)`.

    Fields:
        placement: "pack" puts workers on few hosts, "spread" on many.
        household: this many neighbouring ranks always share a host; the placement is that of the
            households.
        resources: what Ray must have free for each worker, by Ray's names: {"CPU": 1} unless told.
        homes: how many actors hold the shards of shared tensors; by default one on each host, and
            two at least.
        patience: a worker, or a home, whose process has not run at all for that many seconds is
            lost; workers have it with the launcher, too. One that sleeps or computes for long is
            not lost. None: wait for ever.
    """

    def __init__(
        self,
        placement: str = "pack",
        household: int = 1,
        resources: Mapping[str, float] | None = None,
        homes: int | None = None,
        patience: float | None = PATIENCE_SECONDS,
    ) -> None:
        require_linux("ray")
        require_choice("placement", placement, PLACEMENTS)
        require_integer("household", household, 1)
        if homes is not None:
            require_integer("homes", homes, 1)
        require_patience(patience)
        for name, amount in (resources or {}).items():
            require_number(f"resources[{name!r}]", amount, at_least=0)
        self.placement = placement
        self.household = household
        self.resources = {"CPU": 1.0} if resources is None else dict(resources)
        self.homes = homes
        self.patience = patience
        self._kept = ExitStack()
        self._kept_pool: ActorPool | None = None

    def __enter__(self) -> Ray:
        self._kept_pool = self._make_pool(self._kept)
        return self

    def __exit__(self, *exception: object) -> None:
        self._kept_pool = None
        self._kept.close()

    def __repr__(self) -> str:
        fields = ("placement", "household", "resources", "homes", "patience")
        return f"Ray({', '.join(f'{name}={getattr(self, name)!r}' for name in fields)})"

    @one_interrupt()
    def run(self, launch: Launch) -> list[Any]:
        with ExitStack() as stack:
            pool = self._kept_pool or self._make_pool(stack)
            from flockstep.backends.ray.run import Run

            with Run(pool, launch, self.patience) as run:
                return run.wait()

    def _make_pool(self, stack: ExitStack) -> ActorPool:
        """Connect to Ray; both the connection and the pool end with the stack."""
        session = stack.enter_context(ray_session())
        from flockstep.backends.ray.actor_pool import ActorPool

        return stack.enter_context(
            ActorPool(session, self.placement, self.household, self.resources, self.homes)
        )
