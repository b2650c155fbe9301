"""Random specs of every registered class, from the types of their fields."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

import flockstep as fs
from flockstep.codecs import CODECS
from flockstep.data import ASSIGNMENTS, ORDERS, SHUFFLES, BatchRule
from flockstep.errors import InvalidField
from flockstep.fields import kinds_of
from flockstep.network import PRESETS
from flockstep.notation import KINDS, _form, _kind_in
from flockstep.optimizers import NEEDED, OPTIMIZERS
from flockstep.schedules import SCHEDULES
from flockstep.spec import LOOK_AT, MEASURES
from flockstep.strategies import STRATEGIES

# The names of all classes, by kind. What is registered anew is tried without being named here.
REGISTERED: dict[type, list[str]] = {
    fs.Strategy: list(STRATEGIES),
    fs.Codec: list(CODECS),
    fs.Assignment: list(ASSIGNMENTS),
    fs.Sampling: ["sampling"],
    fs.Schedule: list(SCHEDULES),
    BatchRule: ["batch_growth", "global_batch"],
    fs.Network: ["network"],
    fs.Link: ["link", "network"],
    fs.Site: ["site"],
    fs.Route: ["route"],
    fs.LinkChange: ["link_change"],
    fs.Compute: ["compute"],
    fs.Faults: ["faults"],
    fs.Pause: ["pause"],
    fs.OptimizerSpec: list(OPTIMIZERS),
}
EVERY_CLASS = [(kind, name) for kind, names in REGISTERED.items() for name in names]

MOMENTS = st.floats(0, 1e9) | st.integers(1, 999).map(lambda steps: f"{steps} steps")
PAUSES = st.builds(fs.Pause, st.integers(0, 99), MOMENTS, st.floats(1e-9, 1e6))

# Fields that take some texts, or whose values must fit others, for which types say too little.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "sync_sgd.all_reduce": st.sampled_from(["flat", "ring", "tree", "torus:2x4", "hybrid:2:99"]),
    "local_sgd.momentum": st.sampled_from(["keep", "reset", "average"]),
    "households.momentum": st.sampled_from(["keep", "reset", "average"]),
    "nosync.score": st.sampled_from(["loss", "accuracy"]),
    "nosync.all_reduce": st.sampled_from(["flat", "tree"]),
    "nosync.representative": st.sampled_from(["mean", "best", "any"]),
    "best_only.score": st.sampled_from(["loss", "accuracy"]),
    "independent.representative": st.sampled_from(["mean", "best", "any"]),
    "pso_ps.decay": st.sampled_from(["attraction", "all", "position", "none"]),
    "pso_ps.personal_best": st.sampled_from(["every_step", "swarm_steps"]),
    "pso_ps.random": st.sampled_from(["scalar", "vector"]),
    "easgd.mode": st.sampled_from(["round_robin", "first_come", "sync"]),
    "easgd.order": st.sampled_from(["printed", "after_step"]),
    "easgd.representative": st.sampled_from(["centre", "mean", "best", "any"]),
    "eamsgd.mode": st.sampled_from(["round_robin", "first_come", "sync"]),
    "eamsgd.order": st.sampled_from(["printed", "after_step"]),
    "eamsgd.representative": st.sampled_from(["centre", "mean", "best", "any"]),
    "ea_wild.grouping": st.sampled_from(["adjacent", "random"]),
    "ea_wild.delegate": st.sampled_from(["first", "random"]),
    "ea_wild.order": st.sampled_from(["printed", "after_step"]),
    "ea_wild.representative": st.sampled_from(["centre", "mean", "best", "any", "first", "random"]),
    "gosgd.representative": st.sampled_from(["mean", "best", "any"]),
    "gosgd.peers": st.sampled_from(["random", "exponential"]),
    "ad_psgd.graph": st.sampled_from(["ring", "exponential", "complete", "one_peer_exponential"]),
    "ad_psgd.order": st.sampled_from(["after_step", "printed"]),
    "ad_psgd.representative": st.sampled_from(["mean", "best", "any"]),
    "d_psgd.graph": st.sampled_from(["ring", "exponential", "complete", "one_peer_exponential"]),
    "d_psgd.order": st.sampled_from(["printed", "after_step"]),
    "d_psgd.representative": st.sampled_from(["mean", "best", "any"]),
    "sgp.graph": st.sampled_from(["exponential", "ring", "complete"]),
    "sgp.representative": st.sampled_from(["mean", "best", "any"]),
    "codistillation.topology": st.sampled_from(["ring", "complete"]),
    "sign_sgd.scale": st.sampled_from(["mean", "one"]),
    "sampling.order": st.sampled_from(ORDERS),
    "faults.deaths": st.dictionaries(st.integers(0, 99), MOMENTS, max_size=3),
    "faults.pauses": st.lists(PAUSES, max_size=3).map(tuple),
    "faults.death_rate": st.floats(0, 1e6),
    "faults.pause_rate": st.floats(0, 1e6),
    "pause.at": MOMENTS,
    "sampling.shuffle": st.sampled_from(SHUFFLES),
    "muon.adjust_lr_fn": st.sampled_from([None, "original", "match_rms_adamw"]),
    "slow_start.epochs": st.tuples(*[st.floats(0.1, 99)] * 4),
    "slow_start.factors": st.tuples(*[st.floats(0, 1)] * 4),
    "network.household_size": st.integers(1, 64),
    "link.household_size": st.integers(1, 64),
    "network.neighbourhood_size": st.integers(1, 8),  # in households
    "link.neighbourhood_size": st.integers(1, 8),
}
MATRIX = st.integers(1, 4).flatmap(
    lambda size: st.tuples(*[st.tuples(*[st.floats(0.001, 1e9)] * size)] * size)
)
SPEEDS = st.lists(st.floats(0.001, 1e9) | st.just(math.inf), max_size=4).map(tuple)
PLAIN_LINKS = st.none() | st.builds(fs.Link, st.floats(0, 9), st.floats(0.001, 1e9))
SITES = st.lists(
    st.builds(
        fs.Site,
        st.sampled_from(["Oslo", "São Paulo", "none", "wan-100m"]),
        st.none() | st.integers(1, 9),
        PLAIN_LINKS,
        st.none() | st.floats(0.001, 1e9),
        st.none() | st.floats(0.001, 1e9),
    ),
    max_size=3,
    unique_by=lambda site: site.name,
).map(tuple)
CHANGES = st.lists(
    st.builds(
        fs.LinkChange,
        st.floats(0, 1e6),
        st.floats(0.001, 9),
        st.floats(0, 9),
        st.lists(st.integers(0, 9), max_size=2).map(tuple),
    ),
    max_size=3,
).map(lambda changes: tuple(sorted(changes, key=lambda change: change.seconds)))
for _kind in ("network", "link"):
    VALUES |= {
        f"{_kind}.latencies": st.none() | MATRIX,
        f"{_kind}.bandwidths": st.none() | MATRIX,
        f"{_kind}.sites": SITES,
        f"{_kind}.routes": st.just(()),
        f"{_kind}.uplink": SPEEDS,
        f"{_kind}.downlink": SPEEDS,
        f"{_kind}.trace": CHANGES,
        f"{_kind}.loss": st.floats(0, 0.99),
        f"{_kind}.framing": st.floats(1, 2),
    }
VALUES["network.inside"] = VALUES["network.nearby"] = VALUES["site.inside"] = PLAIN_LINKS
VALUES["site.name"] = st.sampled_from(["Oslo", "São Paulo", "none", "wan-100m"])
VALUES["route.source"] = VALUES["route.target"] = VALUES["link_change.site"] = VALUES["site.name"]
VALUES["link_change.ranks"] = st.lists(st.integers(0, 9), max_size=3).map(tuple)
STEPS = st.lists(st.integers(1, 10**6), max_size=3, unique=True).map(sorted)
MARKS = st.lists(st.floats(0.001, 0.999), max_size=4, unique=True).map(lambda at: tuple(sorted(at)))

# Whole numbers in fields of floats, too: a field's type makes them floats.
FLOATS = st.one_of(
    st.floats(0, 1), st.floats(0, 1e9, allow_subnormal=True), st.sampled_from([0, 1, 2])
)


def values_of(field: str, hint: Any) -> st.SearchStrategy[Any]:
    """What a field of that type may hold."""
    if field in VALUES:
        return VALUES[field]
    if field == "step_decay.at":
        in_epochs = STEPS.map(lambda at: tuple(f"{mark} epochs" for mark in at))
        return MARKS | STEPS.map(tuple) | in_epochs
    if field.endswith(".at") and hint == tuple[float, ...]:
        return MARKS
    kind = _kind_in(hint)
    if kind is not None:
        specs = st.sampled_from(REGISTERED[kind]).flatmap(lambda name: specs_of(kind, name))
        return st.none() | specs if type(None) in kinds_of(hint) else specs
    return st.one_of([_plain(field, each) for each in kinds_of(hint) if each is not fs.Comm])


def _plain(field: str, hint: Any) -> st.SearchStrategy[Any]:
    simple = {
        type(None): st.none(),
        bool: st.booleans(),
        int: st.integers(0, 9) | st.integers(1, 2**40),
        float: FLOATS,
    }
    if hint in simple:
        return simple[hint]
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(inside)
    if origin is tuple:
        return st.tuples(*[values_of(field, each) for each in inside])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(*[values_of(field, each) for each in inside], max_size=3)
    if getattr(hint, "__name__", "") == "Tensor":
        return FLOATS  # where a number does as well
    raise NotImplementedError(f"say in VALUES what {field} may be, a {hint}")


@st.composite
def specs_of(draw: st.DrawFn, kind: type, name: str) -> Any:
    """A spec of that class, with some of its fields given at random."""
    form = _form(kind, name)
    values = {}
    for field, hint in form.hints.items():
        if form.defaults[field] is NEEDED or draw(st.booleans()):
            values[field] = draw(values_of(f"{name}.{field}", hint))
    if kind in (fs.Network, fs.Link):
        _fit_tiers(draw, values)
        _fit_forms(draw, values)
    try:
        return form.make(**values)
    except InvalidField:
        return reject()


def _fit_tiers(draw: st.DrawFn, values: dict[str, Any]) -> None:
    """A link inside households has their size with it, and so has one in neighbourhoods."""
    sizes = {name: values.pop(name, None) for name in ("household_size", "neighbourhood_size")}
    if values.get("inside") is None:
        values.pop("inside", None)
        values.pop("nearby", None)
        return
    household = sizes["household_size"] or draw(VALUES["network.household_size"])
    values["household_size"] = household
    if values.get("nearby") is not None:
        count = sizes["neighbourhood_size"] or draw(VALUES["network.neighbourhood_size"])
        values["neighbourhood_size"] = household * count


def _fit_forms(draw: st.DrawFn, values: dict[str, Any]) -> None:
    """Tiers, a matrix or sites: not several at once, and routes between two of the sites."""
    if values.get("inside") is not None:
        forms = ("latencies", "bandwidths", "sites")
    elif values.get("sites"):
        forms = ("latencies", "bandwidths")
    else:
        forms = ()
    for form in forms:
        values.pop(form, None)
    names = [site.name for site in values.get("sites", ())]
    if len(names) > 1 and draw(st.booleans()):
        values["routes"] = (fs.Route(names[0], names[1], 0.5, draw(st.floats(1, 1e9))),)
    else:
        values.pop("routes", None)


def schedules() -> st.SearchStrategy[fs.Schedule]:
    """Schedules, and products of products of them."""
    one = st.sampled_from(REGISTERED[fs.Schedule]).flatmap(lambda name: specs_of(fs.Schedule, name))
    return st.recursive(one, lambda some: st.builds(lambda a, b: a * b, some, some), max_leaves=4)


def any_of(kind: type) -> st.SearchStrategy[Any]:
    if kind is fs.Schedule:
        return schedules()
    named = list(KINDS[kind].named.values())
    made = st.sampled_from(REGISTERED[kind]).flatmap(lambda name: specs_of(kind, name))
    return st.sampled_from(named) | made if named else made


@st.composite
def run_specs(draw: st.DrawFn) -> fs.RunSpec:
    """A run with everything at random."""
    fields: dict[str, Any] = {
        "workers": draw(st.none() | st.integers(1, 64)),
        "target": draw(st.none() | FLOATS),
        "batch_size": draw(st.none() | st.integers(1, 99) | any_of(BatchRule)),
        "schedule": draw(st.none() | any_of(fs.Schedule)),
        "weight_decay_schedule": draw(st.none() | any_of(fs.Schedule)),
        "assignment": draw(st.none() | any_of(fs.Assignment)),
        "sampling": draw(st.none() | any_of(fs.Sampling)),
        "drop_last": draw(st.booleans()),
        "validation": draw(st.none() | st.floats(0.01, 0.99)),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "measure": draw(st.lists(st.sampled_from(MEASURES))),
        "look_at": draw(st.sampled_from(LOOK_AT)),
        "recalibrate": draw(st.booleans() | st.integers(2, 2**40)),
        "look_every": draw(st.sampled_from(["2 epochs", "50 steps", "0.1 s", "5 min", 3])),
        "on_failure": draw(st.sampled_from(["stop", "continue"])),
        "device": draw(st.sampled_from(["cpu", "cuda", "auto"])),
        "backend": draw(st.sampled_from(["sim", "local", "torchrun", "ray"])),
    }
    budget = draw(st.sampled_from(["epochs", "steps", "seconds", "bytes", None]))
    if budget is not None:
        fields[budget] = draw(st.integers(1, 2**40))
    if fields["backend"] == "sim":
        fields["network"] = draw(st.none() | any_of(fs.Network))
        fields["compute"] = draw(st.none() | any_of(fs.Compute))
        fields["faults"] = draw(st.none() | any_of(fs.Faults))
        fields["lanes"] = draw(st.none() | st.integers(1, 4))

    optimizer = draw(st.none() | any_of(fs.OptimizerSpec))
    fields["optimizer"] = optimizer
    if optimizer is None or (not optimizer.gives_lr and optimizer.name != "two_stage"):
        fields["lr"] = draw(FLOATS)
    task = draw(st.sampled_from(["digits-mlp", "shakespeare-gpt", "cifar10-resnet20"]))
    if task == "cifar10-resnet20":  # which has validation data of its own
        fields["validation"] = None
    return fs.RunSpec(task, draw(any_of(fs.Strategy)), **fields)


__all__ = ["EVERY_CLASS", "PRESETS", "REGISTERED", "any_of", "run_specs", "schedules", "specs_of"]


# The fields of a run that a spec of each kind goes into.
PLACES = {
    fs.Codec: lambda codec: {"strategy": fs.SyncSGD(codec=codec)},
    fs.Strategy: lambda strategy: {"strategy": strategy},
    fs.Assignment: lambda assignment: {"assignment": assignment},
    fs.Sampling: lambda sampling: {"sampling": sampling},
    fs.Schedule: lambda schedule: {"schedule": schedule},
    BatchRule: lambda growth: {"batch_size": growth},
    fs.Network: lambda network: {"network": network},
    fs.Link: lambda link: {
        "network": link
        if isinstance(link, fs.Network)
        else fs.Network(1, 1, inside=link, household_size=2)
    },
    fs.Site: lambda site: {"network": fs.Network(1, 1, sites=(site,))},
    fs.Route: lambda route: {
        "network": fs.Network(
            1,
            1,
            sites=(fs.Site(route.source), fs.Site(route.target)),
            routes=(route,),
        )
    },
    fs.LinkChange: lambda change: {
        "network": fs.Network(
            1, 1, sites=() if change.site is None else (fs.Site(change.site),), trace=(change,)
        )
    },
    fs.Compute: lambda compute: {"compute": compute},
    fs.Faults: lambda faults: {"faults": faults},
    fs.Pause: lambda pause: {"faults": fs.Faults(pauses=pause)},
    fs.OptimizerSpec: lambda optimizer: {
        "optimizer": optimizer,
        "lr": 0.1 if optimizer.name != "two_stage" and not optimizer.gives_lr else None,
    },
}
