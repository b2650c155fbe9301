"""What a run gives back, and how it is kept in a folder."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flockstep.backends import Backend, Simulator
from flockstep.errors import FlockstepError, InvalidField, ResultError, SpecError
from flockstep.fields import require, require_number, require_path
from flockstep.folders import empty_folders_removed, is_there, why_not
from flockstep.notation import written
from flockstep.spec import BUDGETS, RunSpec
from flockstep.tasks import TASKS, Task, find_task
from flockstep.units import shown_megabytes, shown_number

FORMAT = 2
READABLE = (1, 2)
RECORD = "result.json"


@dataclass(frozen=True)
class Look(Mapping[str, Any]):
    """One row of a run's history: the state of the whole run at one moment.

    `look.accuracy` and `look["accuracy"]` are the same; as a mapping it has what is known.

    Fields:
        step: optimizer steps of a worker so far; where workers take different numbers, their mean.
        epoch: how often all workers together have gone over the data.
        samples: that all workers together have processed.
        seconds: of the run's clock, the same for all workers.
        bytes_sent: by all workers together.
        train_loss: the mean over all workers and their steps since the look before.
        loss, accuracy: of the representative, the model that stands for the run at this moment, on
            the validation data where the task has some, else on the test data; `accuracy` is what
            the task's metric gives, whatever that is.
        train_accuracy: the same of 4,096 of the training data, or of all, if there are fewer.
        replicas_mean, replicas_max, replicas_min: the accuracy of the workers' own replicas.
        spread: the root mean square distance of the replicas from their centre.
        distance_mean: the mean over all pairs of replicas of their Euclidean distance.
        distance_per_parameter: the mean over all pairs of replicas and all parameters of how much
            a parameter differs, as `fs.settled_distance` tells it. Of more than 64 workers, both
            are of 2,016 pairs that are drawn at random, the same ones at every look.
        staleness_mean, staleness_max: of updates of shared tensors so far: how many updates by
            others had come since the worker read what its own is based on.
        staleness_histogram: pairs of a staleness and how many updates had it; from 64 on a pair
            stands for all from its own staleness up to the double of it.
        computing, waiting, sending: the shares of each worker's time so far, in rank order.
        positions: where each replica is, as 16 numbers, in rank order: a random projection of its
            parameters.
    """

    step: int
    epoch: float
    samples: int | None
    seconds: float
    bytes_sent: int
    train_loss: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    train_accuracy: float | None = None
    replicas_mean: float | None = None
    replicas_max: float | None = None
    replicas_min: float | None = None
    spread: float | None = None
    distance_mean: float | None = None
    distance_per_parameter: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    staleness_histogram: list[list[int]] | None = None
    computing: list[float] | None = None
    waiting: list[float] | None = None
    sending: list[float] | None = None
    positions: list[list[float]] | None = None

    def __getitem__(self, name: str) -> Any:
        value = getattr(self, name) if name in LOOK_FIELDS else None
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in LOOK_FIELDS if getattr(self, name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


LOOK_FIELDS = tuple(field.name for field in dataclasses.fields(Look))


@dataclass(repr=False)
class Result:
    """A finished run. docs/results.md says what every figure is.

    `metrics` has test_accuracy (what the task's metric gives), test_loss, train_loss (mean of the
    last epoch), seconds (virtual or wall-clock, up to the end of finish), wall_seconds (starting
    the workers included), bytes_sent (all workers), exchanges and steps (of the worker with most),
    samples (all workers), workers (that started) and lost (how many of them). A run that ends
    within an epoch has the train_loss of its last steps, as many as the epoch before had. An epoch
    of a stream is one pass over it. With measure="replicas" it has test_replicas (the score of
    every worker's own model on the test data, in rank order, before they become one) and
    test_replicas_mean, _max and _min.

    `lost` has a dict for each worker that was lost: rank, step (its last one), seconds (when it was
    missed) and exit_code. Of those no replica is left, and all figures are of the others alone.

    Where several processes launch one run together, as under torchrun, each gets a result, with the
    replica of its own worker only; that of rank 0 has all, and it alone saves. Where its own worker
    is lost, a process other than rank 0's gets no figures and no model."""

    config: dict[str, Any]
    metrics: dict[str, Any]
    history: list[Look]
    replicas: list[Tensor]
    lost: list[dict[str, Any]] = field(default_factory=list)
    spec: RunSpec | None = None
    _model: nn.Module | None = None
    _model_state: dict[str, Tensor] = field(default_factory=dict)
    # Another process has the whole result, and saves it.
    _is_copy: bool = False

    def __repr__(self) -> str:
        """Five lines, for a notebook."""
        config, metrics = self.config, self.metrics
        name = config.get("metric_name", "accuracy")
        looks = [shown_score(name, look.accuracy) for look in self.history]
        way = " → ".join([looks[0], *looks[1:][-1:]]) if looks else "–"
        figures = {
            f"test {name}": shown_score(name, metrics.get("test_accuracy")),
            "test loss": shown_score("loss", metrics.get("test_loss")),
            "train loss": shown_score("loss", metrics.get("train_loss")),
        }
        return "\n".join(
            [
                f"Result of {config['task']} with {strategy_text(config)}, "
                f"{metrics['workers']} workers, backend {config['backend']}",
                "  " + ", ".join(f"{name} {value}" for name, value in figures.items()),
                f"  {self._costs()}",
                f"  {len(looks)} look{'s' if len(looks) != 1 else ''}: {name} {way}",
                "  more in .metrics, .history, .model, .replicas, .config; .save(folder) keeps it",
            ]
        )

    def _costs(self) -> str:
        metrics = self.metrics
        if "seconds" not in metrics:
            return "no figures: the process of rank 0 has them"
        clock = "virtual" if is_virtual(self.config) else "of the wall's clock"
        return (
            f"{shown_number(metrics['seconds'])} s {clock}, {metrics['steps']:,} steps, "
            f"{metrics['exchanges']:,} exchanges, {shown_megabytes(metrics['bytes_sent'])} sent"
        )

    def epochs_to(self, accuracy: float) -> float | None:
        """How often all workers together had gone over the data at the first look whose accuracy
        was at least this; None: no look's was. How finely it is told depends on `look_every`.

        Example:
            fs.run("digits-mlp", fs.NoSync(0.1), look_every="10 steps").epochs_to(0.87)
        """
        require_number("accuracy", accuracy)
        reached = (
            look.epoch
            for look in self.history
            if look.accuracy is not None and look.accuracy >= accuracy
        )
        return next(reached, None)

    @property
    def model(self) -> nn.Module:
        """The model that the strategy's finish() chose."""
        if self._model is None:
            if not self._model_state:
                raise ResultError(
                    "the worker of this process was lost: the process of rank 0 has the model"
                )
            self._model = self._rebuild(find_task(self.config["task"], TASKS))
        return self._model

    def _rebuild(self, task: Task) -> nn.Module:
        try:
            return task.model_of(self._model_state)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            message = f"the saved model does not fit task {task.name!r}: {reason}"
            raise ResultError(message) from error

    def save(self, folder: str | Path) -> Path:
        """Write the result into `folder`: result.json, model.safetensors, replicas.safetensors.

        Warns before it takes the place of an earlier result; if the new one cannot be written, the
        earlier one stays. Of processes that launched the run together, that of rank 0 writes; in
        the others this does nothing."""
        require_path("folder", folder)
        folder = Path(folder)
        if self._is_copy:
            return folder
        if has_result(folder):
            warnings.warn(
                f"the earlier result in {str(folder)!r} will be overwritten", stacklevel=2
            )
        write_result(self, folder)
        return folder


def has_result(folder: Path) -> bool:
    """Whether a folder has a result that saving another would overwrite."""
    return is_there(folder / RECORD)


def write_result(result: Result, folder: Path) -> None:
    """Put the files of a result in their place, all of them or none."""
    state = result._model_state if result._model is None else result._model.state_dict()
    tensors = {
        # safetensors refuses tensors that share memory, as views of a flat tensor and tied weights
        # do.
        "model.safetensors": {name: each.detach().cpu().clone() for name, each in state.items()},
        "replicas.safetensors": {str(i): each.cpu() for i, each in enumerate(result.replicas)},
    }
    content = {
        "format": FORMAT,
        "config": result.config,
        "metrics": result.metrics,
        "history": [dict(look) for look in result.history],
        "lost": result.lost,
    }
    unfinished = {name: folder / f"{name}.part" for name in (*tensors, RECORD)}
    with empty_folders_removed(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, each in tensors.items():
                save_file(each, unfinished[name])
            unfinished[RECORD].write_text(as_json(content, indent=2) + "\n")
            # A folder with a result.json is a whole result: an old one goes first, the new one
            # comes last.
            (folder / RECORD).unlink(missing_ok=True)
            for name, path in unfinished.items():
                path.replace(folder / name)
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ResultError(f"{str(folder)!r} takes no result: {reason}") from error
        finally:
            for path in unfinished.values():
                with suppress(OSError):
                    path.unlink(missing_ok=True)


def as_json(content: Any, indent: int | None = None) -> str:
    """Text of JSON, which has no number for infinity or "not a number": these become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(content), indent=indent, allow_nan=False)


def require_result_folder(folder: Path) -> None:
    """Complain of a folder in which a result cannot be saved. What was not there is not left."""
    with empty_folders_removed(folder):
        reason = why_not(folder)
    if reason is not None:
        raise InvalidField(
            f"'out' must be a folder that takes files (got {str(folder)!r}: {reason})"
        )


def load_result(folder: str | Path, task: str | Task | None = None) -> Result:
    """Read what `Result.save` wrote.

    The model is rebuilt by the task that the result names. A task that cannot be found by its name,
    because it was made in a script, must be given."""
    require_path("folder", folder)
    if isinstance(task, str):
        task = find_task(task, TASKS)
    require(task is None or isinstance(task, Task), "task", "be a name, or an fs.Task", task)
    folder = Path(folder)
    result = load_figures(folder)
    with _reading(folder):
        replicas = load_file(folder / "replicas.safetensors")
        result.replicas = [replicas[str(index)] for index in range(len(replicas))]
        result._model_state = load_file(folder / "model.safetensors")
        result.spec = _spec(result.config)
    if task is not None:
        result._model = result._rebuild(task)
    return result


def load_figures(folder: Path) -> Result:
    """A saved result as far as people read it: config, metrics, history and who was lost. Its
    tensors may be large, and its spec may need a package that is not here.
    """
    path = folder / RECORD
    if not has_result(folder):
        raise ResultError(f"{str(folder)!r} is not a result folder: it has no {RECORD}")
    with _reading(folder):
        content = json.loads(path.read_text())
        if content["format"] not in READABLE:
            known = " and ".join(map(str, READABLE))
            raise ResultError(
                f"{str(path)!r} has format {content['format']!r}, this version reads {known}"
            )
        looks = [_look(row) for row in content["history"]]
        lost = content.get("lost", [])  # which older results do not have
        return Result(content["config"], content["metrics"], looks, [], lost)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Makes one clear line of whatever is wrong with a folder's files."""
    try:
        yield
    except ResultError:
        raise
    except FlockstepError as error:
        raise ResultError(f"{str(folder)!r}: its spec cannot be read here: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ResultError(f"{str(folder)!r} holds a damaged result: {error}") from error


def described(spec: RunSpec, task: Task, place: Backend) -> dict[str, Any]:
    """What a run was, in plain values: for tables, and for who has no Flockstep at hand."""
    strategy, whole = spec.strategy, spec.resolved()
    names: list[str] = []
    if dataclasses.is_dataclass(strategy):  # one without fields need not be one
        names = [each.name for each in dataclasses.fields(strategy)]
    budgets = {name: getattr(whole, name) for name in BUDGETS}
    about: dict[str, Any] = {
        "task": task.name,
        "strategy": strategy.name,
        "fields": {name: _plain(getattr(strategy, name)) for name in names},
        "workers": spec.workers,
        "backend": spec.backend if isinstance(spec.backend, str) else type(place).__name__,
        "metric_name": task.score_name,
        "clock": "virtual" if place.is_virtual else "wall",
        "settings": repr(place),  # of the backend: network, step times and lanes, defaults too
        **{name: value for name, value in budgets.items() if value is not None},
        "batch_size": _plain(whole.batch_size),
        "optimizer": repr(whole.optimizer or task.optimizer),
        "lr": whole.lr,  # None where the optimizer above says it
        "batch_norm_group": spec.batch_norm_group,
        "assignment": repr(spec.assignment),
        "sampling": repr(spec.sampling),
        "drop_last": spec.drop_last,
        "train_samples": spec.train_samples,
        "validation": spec.validation,
        "schedule": repr(whole.schedule),
        "weight_decay_schedule": spec.weight_decay_schedule and repr(spec.weight_decay_schedule),
        "target": spec.target,
        "look_every": str(spec.look_every),
        "look_at": spec.look_at,
        "recalibrate": spec.recalibrate,
        "measure": list(spec.measure),
        "seed": spec.seed,
        "on_failure": spec.on_failure,
        "device": spec.device,
        "versions": versions(),
    }
    if isinstance(place, Simulator):
        about |= {"network": written(place.network), "compute": written(place.compute)}
        if place.faults is not None:
            about["faults"] = written(place.faults)
    try:
        return about | {"spec": json.loads(spec.to_json()), "id": spec.id}
    except SpecError as reason:  # a task that exists in a script only
        return about | {"spec": None, "not_written": str(reason)}


def strategy_text(config: Mapping[str, Any]) -> str:
    """The strategy of a run as a call; one of a script as far as its fields say."""
    if config.get("spec"):
        return str(config["spec"]["strategy"])
    fields = ", ".join(f"{name}={value}" for name, value in config["fields"].items())
    return f"{config['strategy']}({fields})" if fields else config["strategy"]


def is_virtual(config: Mapping[str, Any]) -> bool:
    """Whether the seconds of a run are those of the simulator's clock."""
    return bool(config.get("clock", config["backend"]) in ("virtual", "sim"))


def shown_score(name: str, value: float | None) -> str:
    """A score as people read it: an accuracy in per cent, others as they are."""
    if value is None:
        return "–"
    is_share = name == "accuracy" and math.isfinite(value)
    return f"{100 * value:.4g}%" if is_share else shown_number(value)


def _plain(value: Any) -> Any:
    """What JSON has as it is; the rest as Python would write it."""
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _spec(config: dict[str, Any]) -> RunSpec | None:
    """The spec of a saved run; None where it could not be written, or the run is an old one."""
    written = config.get("spec")
    return None if written is None else RunSpec.from_json(json.dumps(written))


def _look(row: dict[str, Any]) -> Look:
    """A row as it was saved; older ones do not tell the samples."""
    return Look(**{"samples": None} | row)


def versions() -> dict[str, str]:
    """What a result was made with."""
    from importlib.metadata import version

    return {"flockstep": version("flockstep"), "torch": str(torch.__version__)}
