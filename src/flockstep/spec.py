"""`RunSpec`: the whole description of one run, as a value that prints and reads back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from flockstep.backends import ON_FAILURE, Backend, Compute, Faults, Simulator
from flockstep.data import Assignment, BatchRule, Disjoint, Sampling
from flockstep.device import DEVICES
from flockstep.errors import FlockstepError, InvalidField, SpecError, UnknownName, did_you_mean
from flockstep.fields import (
    fitted,
    require,
    require_choice,
    require_integer,
    require_number,
    require_optimizer,
    require_path,
)
from flockstep.intervals import Interval
from flockstep.launch import BACKENDS, make_backend
from flockstep.network import MODEL, Network
from flockstep.notation import as_spec, written
from flockstep.optimizers import OptimizerSpec
from flockstep.randomness import require_seed
from flockstep.schedules import Constant, Schedule
from flockstep.strategies import Strategy
from flockstep.tasks import TASKS, Task, find_task, split_task_name

VERSION = 1  # of the form in which specs are written
DEFAULT_WORKERS = 8
LOOK_AT = ("due", "synchronisation")
RECALIBRATION_SAMPLES = 4096
SIMULATED = ("network", "compute", "lanes", "faults")  # settings of the simulator
BUDGETS = ("epochs", "steps", "seconds", "bytes")
MEASURES = (
    "replicas",
    "spread",
    "distance",
    "staleness",
    "time",
    "positions",
    "flatness",
    "training",
)


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides the outcome of a run. Texts are taken for every spec in it.

    Fields:
        task: a built-in name, `package.module:task`, or an `fs.Task`.
        strategy: how workers share what they learn, codec included.
        workers: how many; None is 8, and under torchrun as many as it has started.
        backend: "sim", "local", "torchrun" or "ray". The settings of an `fs.Simulator` become
            those of the spec; other backends are taken by name.
        epochs, steps, seconds, bytes: the budget, at most one of them: passes of all workers
            together over the data; optimizer steps of a worker; of the run's clock; sent by all
            workers. None: the task's epochs.
        target: the score at which the run ends, at the look at which it is reached.
        batch_size: of one worker, `fs.BatchGrowth`, or `fs.GlobalBatch`; None: the task's.
        lr: the learning rate of the optimizer, be it the task's.
        optimizer: None: the task's.
        schedule: of the learning rate; None: the task's.
        weight_decay_schedule: of the optimizer's weight decay; None: it stays as it is.
        batch_norm_group: how many neighbours in rank normalise their batches together, where the
            model has batch normalisation; None: each its own.
        assignment: which worker sees which samples; None: `fs.Disjoint()`.
        sampling: in which order; None: `fs.Sampling()`.
        drop_last: whether the last, smaller batch of each pass over the data is left out; its
            samples come again in other passes, which are shuffled anew.
        train_samples: how many of the training data are used, the first ones; None: all of them.
        validation: the share of the training data that is held out, and that looks are scored on;
            None: as the task has it.
        network, compute: the simulator's links and step times.
        faults: the simulator's workers that die, or pause and come back; None: none.
        look_every: how often the model is looked at: "1 epoch", "50 steps", "0.5 seconds".
        look_at: when such a look takes place: when it is "due", or at the first "synchronisation"
            of all replicas from there on, which the strategy must have. Looks for which the same
            one comes next are one.
        measure: what looks show besides: "replicas", "spread", "distance", "staleness", "time",
            "positions"; "training": how good the representative is on training data, 4,096 of
            them, evenly spaced and without the augmentation of `fs.InMemory`; and "flatness": what
            metrics say of the final model with noise on its parameters.
        recalibrate: on how many samples of the training data, evenly spaced and without the
            augmentation of `fs.InMemory`, the statistics of batch normalisation are computed anew
            for the model that stands for the run, at looks and at the end; True: 4,096; False: they
            stay as training has left them.
        seed: decides everything random; from 0 to 2**63 - 1.
        on_failure: when a worker is lost: "stop" or "continue".
        device: "cpu", "cuda" or "auto".
        lanes: simulated workers that compute side by side. No part of the outcome.

    Example:
        spec = fs.RunSpec("digits-mlp", fs.LocalSGD(period=8), workers=4, lr=0.1, epochs=2)
        fs.RunSpec.from_toml(spec.to_toml()) == spec
        fs.run(spec).metrics["test_accuracy"]
    """

    task: str | Task
    strategy: Strategy[Any]
    workers: int | None = None
    backend: str | Backend = "sim"
    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None
    bytes: int | None = None
    target: float | None = None
    batch_size: int | BatchRule | None = None
    lr: float | None = None
    optimizer: OptimizerSpec | None = None
    schedule: Schedule | None = None
    weight_decay_schedule: Schedule | None = None
    batch_norm_group: int | None = None
    assignment: Assignment = Disjoint()  # noqa: RUF009  it is frozen
    sampling: Sampling = Sampling()  # noqa: RUF009  it is frozen
    drop_last: bool = False
    train_samples: int | None = None
    validation: float | None = None
    network: Network | None = None
    compute: Compute | None = field(default=None, hash=False)  # it holds a mapping
    faults: Faults | None = field(default=None, hash=False)  # they hold one, too
    look_every: Interval = Interval(1, "epochs")  # noqa: RUF009  it is frozen
    look_at: str = "due"
    measure: tuple[str, ...] = ()
    recalibrate: int | bool = False
    seed: int = 0
    on_failure: str = "stop"
    device: str = "cpu"
    lanes: int | None = field(default=None, compare=False)

    if TYPE_CHECKING:
        # The fields have the types that they have once texts are read; more is taken.
        def __init__(
            self,
            task: str | Task,
            strategy: Strategy[Any] | str,
            workers: int | None = None,
            backend: str | Backend = "sim",
            **fields: Any,
        ) -> None: ...

    def __post_init__(self) -> None:
        self._take_backend()
        self._set("task", _named(self.task))
        for name in ("assignment", "sampling", "look_every"):
            if getattr(self, name) is None:
                self._set(name, _DEFAULTS[name])
        if self.workers is None and isinstance(self.backend, str) and self.backend != "torchrun":
            self._set("workers", DEFAULT_WORKERS)

        self._set("look_every", Interval.read(self.look_every, "look_every"))
        self._set("measure", _measures(self.measure))
        for name, hint in _HINTS.items():
            if name not in ("task", "backend", "look_every", "measure"):
                self._set(name, as_spec(name, getattr(self, name), hint))

        self._set("faults", Faults.read(self.faults))
        if self.recalibrate is True:
            self._set("recalibrate", RECALIBRATION_SAMPLES)
        self._check_numbers()
        self._check_rate()
        if self.batch_norm_group is not None:
            rule = f"be None with {self.strategy.name}, whose workers never wait and may not meet"
            require(self.strategy.waits, "batch_norm_group", rule, self.batch_norm_group)

    # ---- As text

    def to_toml(self) -> str:
        """The fields that differ from their defaults, one per line."""
        return "".join(f"{name} = {_toml(value)}\n" for name, value in self._table().items())

    @classmethod
    def from_toml(cls, text: str) -> RunSpec:
        """The spec that `to_toml` printed, or one like it."""
        return cls(**_whole_table(_parsed_toml(text)))

    def to_json(self) -> str:
        """The fields that differ from their defaults, as one JSON object."""
        return json.dumps(self._table())

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """The spec that `to_json` printed, or one like it."""
        return cls(**_whole_table(_parsed_json(text)))

    @classmethod
    def load(cls, path: str | Path) -> RunSpec:
        """The spec in a file that ends in .toml or .json. Errors name the file."""
        return cls(**load_table(path))

    @property
    def id(self) -> str:
        """16 hex digits of what decides the outcome. Order, defaults that are spelt out, those of
        the task too, and lanes make no difference.
        """
        table = self.resolved()._table()
        if self.strategy.revision:
            table["revision"] = self.strategy.revision
        if self.strategy.codec_revision and getattr(self.strategy, "codec", None) is not None:
            table["codec_revision"] = self.strategy.codec_revision
        if self.backend == "sim" and self.strategy.shares_tensors:
            table["network_model"] = MODEL
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]

    # ---- What a run makes of it

    def find_task(self) -> Task:
        """The task itself, where the spec has its name."""
        task = find_task(self.task, TASKS) if isinstance(self.task, str) else self.task
        if self.train_samples is not None:
            task = task.with_first_samples(self.train_samples)
        if self.validation is None:
            return task
        rule = "be None where the task has validation data of its own"
        require(task.validation is None, "validation", rule, self.validation)
        return dataclasses.replace(task, validation=self.validation)

    def resolved(self) -> RunSpec:
        """The same run with the task's and the simulator's defaults spelt out: budget, batch size,
        schedule, network, compute, and the optimizer with its rate.

        The optimizer stays None where the task's is a function; the batch size, where it depends on
        a number of workers that is not known yet."""
        task = self.find_task()
        found: dict[str, Any] = {
            "schedule": self.schedule or task.schedule or Constant(),
            "lanes": None,
        }
        if all(getattr(self, budget) is None for budget in BUDGETS):
            found["epochs"] = task.epochs
        if self.batch_size is None and (self.workers is not None or task.global_batch is None):
            found["batch_size"] = task.batch_size_for(self.workers or 1)
        if self.backend == "sim":
            found["network"] = self.network or Simulator().network
            found["compute"] = self.compute or Simulator().compute

        optimizer = self.optimizer or task.optimizer
        if isinstance(optimizer, OptimizerSpec):
            found["optimizer"] = optimizer if self.lr is None else optimizer.with_lr(self.lr)
            found["lr"] = None
        return dataclasses.replace(self, **found)

    def replace(self, **changes: Any) -> RunSpec:
        """The same run but for these fields. A budget takes the place of the one before, and so
        does a learning rate.
        """
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return RunSpec(**overridden(fields, checked_table(changes)))

    def make_optimizer(self, task: Task, parameters: Iterable[Any]) -> Optimizer:
        """The optimizer of a worker: the spec's or the task's, with the spec's learning rate."""
        optimizer = self.optimizer or task.optimizer
        if isinstance(optimizer, OptimizerSpec) and self.lr is not None:
            return optimizer.with_lr(self.lr)(parameters)
        made = optimizer(parameters)
        require_optimizer(made)
        if self.lr is not None:
            _scale_rates(made, self.lr)
        return made

    # ---- Inside

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _take_backend(self) -> None:
        """The name of a backend that is an object, and a simulator's settings."""
        options = {name: getattr(self, name) for name in SIMULATED}
        given = {name: value for name, value in options.items() if value is not None}
        if not isinstance(self.backend, Backend):
            name = fitted("backend", self.backend, str)
            if given or name not in BACKENDS:
                for option in ("network", "compute", "faults"):
                    given[option] = as_spec(option, options[option], _HINTS[option])
                make_backend(name, **given)  # complains if they do not fit together
            return

        backend = make_backend(self.backend, **given)
        if type(backend) is Simulator:
            for name in options:
                self._set(name, getattr(backend, name))
        for name, known in BACKENDS.items():
            if type(backend) is known:
                self._set("backend", name)

    def _check_numbers(self) -> None:
        counts = (
            "workers",
            "epochs",
            "steps",
            "bytes",
            "batch_size",
            "batch_norm_group",
            "train_samples",
            "lanes",
        )
        for name in counts:
            value = getattr(self, name)
            if isinstance(value, int):
                require_integer(name, value, 1)
        budgets = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(budgets) > 1:
            values = " and ".join(f"{name}={getattr(self, name)!r}" for name in budgets)
            names = " and ".join(map(repr, budgets))
            raise InvalidField(f"{names} must not be given together: one budget (got {values})")
        if self.seconds is not None:
            require_number("seconds", self.seconds, above=0, finite=True)
        if self.validation is not None:
            require_number("validation", self.validation, above=0, below=1)
        if self.target is not None:
            require(math.isfinite(self.target), "target", "be finite", self.target)
        require_seed(self.seed)
        require_choice("look_at", self.look_at, LOOK_AT)
        if self.recalibrate is not False:
            require_integer("recalibrate", self.recalibrate, 2)  # one sample has no variance
        require_choice("on_failure", self.on_failure, ON_FAILURE)
        require_choice("device", self.device, DEVICES)

    def _check_rate(self) -> None:
        if self.lr is not None:
            require_number("lr", self.lr, at_least=0, finite=True)
        if self.optimizer is None:
            return
        if self.lr is not None and self.optimizer.gives_lr:
            raise InvalidField(
                f"'lr' must not be given twice, here and in 'optimizer' (got {self.lr!r})"
            )
        (self.optimizer if self.lr is None else self.optimizer.with_lr(self.lr)).require_lr()

    def _table(self) -> dict[str, Any]:
        """Version and fields as plain numbers and texts, without those that are as by default."""
        if not isinstance(self.task, str):
            raise SpecError(
                f"task {self.task.name!r} cannot be written as text: it was made in a script; "
                "put it in a module and name it 'package.module:task'"
            )
        if not isinstance(self.backend, str):
            raise SpecError(
                f"backend {type(self.backend).__name__} cannot be written as text: "
                f"known are {', '.join(BACKENDS)}"
            )
        # How many workers there are by default depends on the backend.
        bare = RunSpec(self.task, self.strategy, backend=self.backend)
        defaults = {**vars(bare), "backend": _DEFAULTS["backend"]}
        table: dict[str, Any] = {"version": VERSION}
        for name in _HINTS:
            value = _written_field(getattr(self, name))
            is_needed = name in ("task", "strategy")
            if is_needed or value != _written_field(defaults[name]):
                table[name] = value
        return table


_HINTS = typing.get_type_hints(RunSpec)
_DEFAULTS = {each.name: each.default for each in dataclasses.fields(RunSpec)}


def load_table(path: str | Path) -> dict[str, Any]:
    """The fields of the spec in a file, as they stand there. Errors name the file."""
    require_path("path", path)
    path = Path(path)
    parsers = {".toml": _parsed_toml, ".json": _parsed_json}
    try:
        require(path.suffix in parsers, "file", "end in .toml or .json", path.name)
        table = _whole_table(parsers[path.suffix](path.read_text(encoding="utf-8")))
        RunSpec(**table)  # complains of fields that are wrong
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpecError(f"{path}: cannot be read: {reason}") from error
    except (InvalidField, UnknownName, SpecError) as error:
        raise type(error)(f"{path}: {error}") from error
    return table


def _whole_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a spec that needs no more."""
    fields = checked_table(table)
    for name in ("task", "strategy"):
        require(name in fields, name, "be given", None)
    return fields


def checked_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a spec, if all of them are, and the version is this one."""
    fields = dict(table)
    version = fields.pop("version", VERSION)
    is_read = type(version) is int and version == VERSION
    require(is_read, "version", f"be {VERSION}: no other can be read here", version)
    for name in fields:
        if name not in _HINTS:
            hint = did_you_mean(name, _HINTS)
            raise UnknownName(f"unknown field {name!r}; {hint}known: {', '.join(_HINTS)}")
    return fields


def overridden(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with changes. What says the same thing as a change goes: another budget, the
    learning rate in the optimizer.
    """
    kept = dict(fields)
    if any(changes.get(budget) is not None for budget in BUDGETS):
        kept |= dict.fromkeys(BUDGETS)

    if isinstance(changes.get("backend"), Backend):  # which has settings of its own
        kept |= dict.fromkeys(SIMULATED)

    optimizer = changes.get("optimizer")
    if optimizer is not None and as_spec("optimizer", optimizer, OptimizerSpec).gives_lr:
        kept["lr"] = None
    if changes.get("lr") is not None and kept.get("optimizer") is not None:
        kept["optimizer"] = as_spec("optimizer", kept["optimizer"], OptimizerSpec).without_lr()
    return kept | dict(changes)


def _named(task: str | Task) -> str | Task:
    """The name of a task that its name gives back; else the task itself."""
    if isinstance(task, str):
        if ":" in task:
            split_task_name(task)  # a module is not loaded before it is needed
        else:
            find_task(task, TASKS)
        return task
    require(isinstance(task, Task), "task", "be a name, or an fs.Task", task)
    if task.name not in TASKS and ":" not in task.name:
        return task
    try:
        same = find_task(task.name, TASKS)
    except FlockstepError:
        return task
    parts = [each.name for each in dataclasses.fields(Task)]
    is_same = all(_is_same(getattr(task, part), getattr(same, part)) for part in parts)
    return task.name if is_same else task


def _is_same(one: object, other: object) -> bool:
    is_plain = isinstance(one, int | float | str | Schedule | OptimizerSpec)
    return one is other or (is_plain and one == other)


def _measures(value: Any) -> tuple[str, ...]:
    """What is measured besides, from a text or several, in the order of the table."""
    texts = value.split(",") if isinstance(value, str) else value
    rule = f"be some of {', '.join(MEASURES)}"
    require(isinstance(texts, tuple | list), "measure", rule, value)
    chosen = [text.strip() if isinstance(text, str) else text for text in texts if text != ""]
    for each in chosen:
        require(each in MEASURES, "measure", rule, each)
    return tuple(each for each in MEASURES if each in chosen)


def _scale_rates(optimizer: Optimizer, lr: float) -> None:
    """Scale the rates of all groups such that the first has this one."""
    first = float(optimizer.param_groups[0]["lr"])
    require(first > 0, "lr", "be set in the optimizer itself, whose own rate is 0", lr)
    # All rates first: groups may share one tensor.
    rates = [float(group["lr"]) * (lr / first) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        if "initial_lr" in group:
            group["initial_lr"] = rate


def _written_field(value: Any) -> Any:
    """A field as a number, or a text, or several."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Interval) else written(value)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        # JSON's escapes are TOML's; that one character more must be escaped there.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _parsed_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers that are too long
        raise SpecError(f"not TOML: {error}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As TOML has it: a key that stands twice is an error, not the last one's."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands twice")
    return table


def _parsed_json(text: str) -> dict[str, Any]:
    try:
        table = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:  # also of numbers that are too long
        raise SpecError(f"not JSON: {error}") from error
    if not isinstance(table, dict):
        raise SpecError(f"not a JSON object, but a {type(table).__name__}")
    return table
