"""An optimizer as a value: its name and its fields, without parameters."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from flockstep.errors import InvalidField, plain_spelling, unknown_name
from flockstep.fields import fitted, known_spelling, require, require_rate
from flockstep.optimizers.lamb import LAMB
from flockstep.optimizers.lars import LARS
from flockstep.optimizers.matrix_decay import Decay, adamw_on_matrices, sparing_vectors
from flockstep.optimizers.rmsprop_warmup import RMSpropWarmup
from flockstep.optimizers.two_stage import Make, TwoStage

NEEDED = inspect.Parameter.empty  # the default of a field that has none

# Why some of torch's optimizers cannot train here.
UNFIT = {
    "lbfgs": "it needs a closure that computes the loss anew, and workers step without one",
    "sparse_adam": "it needs sparse gradients, and those of workers are dense",
}


@dataclass(frozen=True)
class OptimizerField:
    """One field of an optimizer: its type, and its default or `NEEDED`."""

    hint: Any
    default: Any


def _of_torch() -> dict[str, Callable[..., Optimizer]]:
    """torch's classes by the names of their modules, which are in snake case: `adamw`, `nadam`."""
    found: dict[str, Callable[..., Optimizer]] = {}
    for each in vars(torch.optim).values():
        if isinstance(each, type) and issubclass(each, Optimizer) and each is not Optimizer:
            module = each.__init__.__module__.rpartition(".")[2]
            found[module.lstrip("_")] = each
    return dict(sorted(found.items()))


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    name: make
    for name, make in {
        **_of_torch(),
        "lars": LARS,
        "lamb": LAMB,
        "rmsprop_warmup": RMSpropWarmup,
        "two_stage": TwoStage,
        "adamw_on_matrices": adamw_on_matrices,
    }.items()
    if name not in UNFIT
}


@dataclass(frozen=True, init=False)
class OptimizerSpec:
    """An optimizer by name, with its fields; called with parameters, it makes the optimizer.

    Names are those of torch.optim's classes in snake case (`adam_w` and `AdamW` are `adamw`), and
    ours: lars, lamb, rmsprop_warmup, two_stage and adamw_on_matrices. Fields are checked against
    the optimizer's own; those that equal its defaults are dropped.

    Every optimizer with weight decay takes one field more, `decay`: "all", or "weights", by which
    tensors of fewer than two dimensions do not decay: biases, and the scales and shifts of
    normalisation.

    Fields:
        name: of the optimizer.
        fields: pairs of name and value, in the order of the optimizer's own.

    Example:
        make_optimizer = fs.OptimizerSpec("sgd", lr=0.1, weight_decay=1e-4, decay="weights")
        optimizer = make_optimizer(model.parameters())
        fs.run("digits-mlp", fs.SyncSGD(), optimizer="adam(lr=0.001)")
    """

    name: str
    fields: tuple[tuple[str, Any], ...]
    # Whether a rate was given, be it the default.
    gives_lr: bool = dataclass_field(default=False, compare=False, repr=False)

    def __init__(self, name: str, **fields: Any) -> None:
        name = find_optimizer(name)
        known = fields_of(name)
        for field in fields:
            if field not in known:
                raise unknown_name(f"field of {name}", field, known)

        values: dict[str, Any] = {}
        for field, declared in known.items():
            # A rate may come later, by `with_lr`: it is missed when the optimizer is made.
            if field not in fields and declared.default is NEEDED and field != "lr":
                raise InvalidField(f"{field!r} of {name} must be given: {name}({field}=…)")
            if field in fields:
                value = _checked(name, field, fields[field], declared.hint)
                if value != declared.default:
                    values[field] = value

        object.__setattr__(self, "name", name)
        object.__setattr__(self, "fields", tuple(values.items()))
        object.__setattr__(self, "gives_lr", "lr" in fields)

    def __call__(self, parameters: Iterable[Any]) -> Optimizer:
        """The optimizer of these parameters, or groups of them."""
        self.require_lr()
        fields = dict(self.fields)
        if fields.pop("decay", "all") == "weights":
            parameters = sparing_vectors(parameters)
        try:
            return OPTIMIZERS[self.name](parameters, **fields)
        except (TypeError, ValueError) as error:
            if isinstance(error, InvalidField):
                raise
            raise InvalidField(f"'optimizer' {self.name} cannot be made: {error}") from error

    def __repr__(self) -> str:
        fields = "".join(f", {name}={value!r}" for name, value in self.fields)
        return f"OptimizerSpec({self.name!r}{fields})"

    def with_lr(self, lr: float) -> OptimizerSpec:
        """The same optimizer with that learning rate."""
        if "lr" not in fields_of(self.name):
            raise InvalidField(
                f"'lr' must be set in the parts of {self.name}, which has none itself (got {lr!r})"
            )
        return OptimizerSpec(self.name, **dict(self.fields) | {"lr": lr})

    def without_lr(self) -> OptimizerSpec:
        """The same optimizer with a learning rate that is yet to be said."""
        fields = dict(self.fields)
        fields.pop("lr", None)
        return OptimizerSpec(self.name, **fields)

    def require_lr(self) -> None:
        """Complain of a learning rate that was not given and has no default."""
        declared = fields_of(self.name).get("lr")
        if declared is not None and declared.default is NEEDED and "lr" not in dict(self.fields):
            raise InvalidField(f"'lr' of {self.name} must be given: {self.name}(lr=…)")


def find_optimizer(name: str) -> str:
    """The name in the table for one in any spelling: `AdamW` and `adam_w` are `adamw`."""
    require(isinstance(name, str), "name", "be an optimizer's name such as 'adam'", name)
    for known, reason in UNFIT.items():
        if plain_spelling(known) == plain_spelling(name):
            raise InvalidField(f"'optimizer' must not be {known}: {reason} (got {name!r})")
    return known_spelling("optimizer", name, OPTIMIZERS)


def require_steps_alone(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step computes the loss anew, as that of torch's LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is NEEDED:
        name = type(optimizer).__name__
        raise InvalidField(f"'optimizer' must not be {name}: {UNFIT['lbfgs']} (got {name!r})")


def require_decay(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose weight decay cannot be scheduled: it has none."""
    has_one = any("weight_decay" in group for group in optimizer.param_groups)
    rule = "be left out with an optimizer that has no weight decay"
    require(has_one, "weight_decay_schedule", rule, type(optimizer).__name__)


@functools.cache  # signatures do not change
def fields_of(name: str) -> Mapping[str, OptimizerField]:
    """What an optimizer can be told, from its signature."""
    make = OPTIMIZERS[name]
    signed = vars(make)["__init__"] if isinstance(make, type) else make
    hints = typing.get_type_hints(signed)
    found = {}
    for field, parameter in inspect.signature(make).parameters.items():
        if field != "params":
            # What makes an optimizer is a spec, too, where it is written as text.
            hint = OptimizerSpec if hints[field] == Make else hints[field]
            found[field] = OptimizerField(hint, parameter.default)
    if "weight_decay" in found and name != "adamw_on_matrices":  # which has its own rule
        found["decay"] = OptimizerField(Decay, "all")
    return found


def _checked(name: str, field: str, value: Any, hint: Any) -> Any:
    if hint is OptimizerSpec:
        rule = "be an fs.OptimizerSpec such as sgd(lr=0.1)"
        require(isinstance(value, OptimizerSpec), f"{name}.{field}", rule, value)
        value.require_lr()
        return value

    value = fitted(field, value, hint)
    if field == "lr":
        require_rate("lr", value)
    return _without_tensors(value)


def _without_tensors(value: Any) -> Any:
    """Numbers in place of tensors of one. All workers would share such a tensor, and a schedule
    that fills it would change the spec.
    """
    if isinstance(value, tuple):
        return tuple(map(_without_tensors, value))
    is_one = isinstance(value, Tensor) and value.numel() == 1
    return float(value) if is_one else value
