"""A task: model, optimizer, loss, data and metric, bundled so that one call or one command can
run it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from flockstep.data import GlobalBatch, in_order, is_stream, source_of
from flockstep.device import on_device
from flockstep.errors import FlockstepError, UnknownName, own_code_error, unknown_name
from flockstep.fields import number_in, require, require_integer, require_model
from flockstep.modes import evaluating
from flockstep.randomness import Purpose, numpy_stream
from flockstep.schedules import Schedule
from flockstep.tasks.fit import require_fit
from flockstep.tasks.label_smoothing import SmoothedLoss

EVALUATION_BATCH = 1024
DEFAULT_BATCH = 32


@dataclass(frozen=True, eq=False)  # data have no equality that is worth its time
class Task:
    """What is trained. All but the names and numbers are callables, so that every worker can make
    its own.

    Fields:
        name: how it is called in tables and results.
        model: makes a fresh model.
        optimizer: makes an optimizer for the given parameters.
        loss: `loss(model, batch)` gives the mean loss of a batch, as a scalar tensor.
        train, test: data sets (as `Worker.batches` takes them), or functions that load them.
        metric: `metric(model, batch)` gives the mean score of a batch; accuracy, for a classifier.
        batch_size, epochs: what a run uses unless told otherwise; the batch is that of one worker,
            32 if neither it nor global_batch is given.
        global_batch: in place of batch_size, the batch of all workers together, which a run divides
            among them.
        schedule: of the learning rate; None: it stays as it is.
        data: the name of the built-in data set that it needs, if it does.
        validation: what looks are scored on: a data set, a function that loads one, or a share that
            is held out of `train`; None: the test data.
        evaluation_batch: how many samples are scored at once; fewer need less memory.
        metric_name: what people read of the score as. None: "accuracy" for
            `fs.classification_accuracy`, else the name of the function.

    Example:
        fs.Task("mine", model=Net, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                loss=fs.classification_loss, metric=fs.classification_accuracy,
                train=(x, y), test=(test_x, test_y))
    """

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    loss: Callable[[nn.Module, Any], Tensor]
    train: Any
    test: Any
    metric: Callable[[nn.Module, Any], Tensor | float]
    batch_size: int | None = None
    epochs: int = 5
    global_batch: int | None = None
    schedule: Schedule | None = None
    data: str | None = None
    validation: Any = None
    metric_name: str | None = None
    evaluation_batch: int = EVALUATION_BATCH

    def __post_init__(self) -> None:
        is_name = isinstance(self.name, str) and self.name.strip() != ""
        require(is_name, "name", "be a text that is not empty", self.name)
        for field in ("loss", "metric"):
            require(callable(getattr(self, field)), field, "be callable", getattr(self, field))
        for field in ("model", "optimizer"):
            value = getattr(self, field)
            rule = f"be a function that makes one, not the {field} itself: each worker has its own"
            require(callable(value) and not isinstance(value, nn.Module), field, rule, value)
        self._check_batch()
        require_integer("epochs", self.epochs, 1)
        require_integer("evaluation_batch", self.evaluation_batch, 1)
        if isinstance(self.validation, int | float):
            share = 0 < self.validation < 1
            require(share, "validation", "be above 0 and below 1, or a data set", self.validation)
        is_schedule = self.schedule is None or isinstance(self.schedule, Schedule)
        require(is_schedule, "schedule", "be one such as fs.Cosine()", self.schedule)
        is_name = self.metric_name is None or (
            isinstance(self.metric_name, str) and self.metric_name.isprintable()
        )
        require(is_name, "metric_name", "be a text of one line", self.metric_name)

    def _check_batch(self) -> None:
        if self.global_batch is None:
            if self.batch_size is None:
                object.__setattr__(self, "batch_size", DEFAULT_BATCH)
            require_integer("batch_size", self.batch_size, 1)
            return
        require_integer("global_batch", self.global_batch, 1)
        rule = f"be None where 'global_batch' is given, {self.global_batch}"
        require(self.batch_size is None, "batch_size", rule, self.batch_size)

    def batch_size_for(self, workers: int) -> int | GlobalBatch:
        """The batch of one worker, if nobody says otherwise."""
        if self.batch_size is not None:
            return self.batch_size
        assert self.global_batch is not None
        each, rest = divmod(self.global_batch, workers)
        return GlobalBatch(self.global_batch) if rest or not each else each

    def require_samples(self) -> None:
        """The batch of all workers must not be larger than the data."""
        if self.global_batch is not None and not is_stream(self.train):
            samples = source_of(self.train).samples
            rule = f"be at most the number of samples, {samples}"
            require(self.global_batch <= samples, "global_batch", rule, self.global_batch)

    def make_model(self) -> nn.Module:
        """A fresh model; complains of what is none."""
        model = self.model()
        require_model(model)
        return model

    def check(self) -> nn.Module:
        """Complain of a model that cannot be trained, of data that do not fit it, and of scores
        that are no numbers, before any worker starts. Returns the model that was tried.
        """
        with torch.random.fork_rng(devices=[]):
            model = self.make_model()
            trainable = any(parameter.requires_grad for parameter in model.parameters())
            require(trainable, "model", "have a trainable parameter", type(model).__name__)
            is_known = isinstance(self.loss, SmoothedLoss) or self.loss in CROSS_ENTROPIES
            if is_known:
                self._check_labels(model)
            if not is_known or self.metric is not classification_accuracy:
                self._try_scores(model)
        return model

    def _check_labels(self, model: nn.Module) -> None:
        for field in ("train", "test", "validation"):
            data = getattr(self, field)
            if data is not None:
                # Probabilities can be trained with; accuracy asks which class is the right one.
                is_counted = field != "train" and self.metric is classification_accuracy
                require_fit(
                    model, data, field, self.loss is token_loss, takes_probabilities=not is_counted
                )

    def _try_scores(self, model: nn.Module) -> None:
        """A loss or a metric of one's own, on the first batch that looks will be scored on."""
        if is_stream(self.watched):
            return  # to look into a stream might use it up
        batch, _ = next(in_order(self.watched, self.evaluation_batch), (None, 0))
        field = "test" if self.validation is None else "validation"
        require(batch is not None, field, "have at least one sample", 0)
        model.eval()
        try:
            self._scores_of(model, batch)
        except FlockstepError:
            raise
        except Exception as error:
            raise own_code_error(f"task {self.name!r}", error) from error

    def with_first_samples(self, count: int) -> Task:
        """The same task, trained on the first `count` samples."""
        require_integer("train_samples", count, 1)
        return replace(self, train=functools.partial(_first_of, self.train, count))

    def loaded(self) -> Task:
        """The same task with its data in memory, and the validation data apart from the others."""
        train, test, validation = (
            data() if callable(data) else data for data in (self.train, self.test, self.validation)
        )
        if isinstance(validation, float):
            train, validation = held_out(train, validation)
        return replace(self, train=train, test=test, validation=validation)

    @property
    def score_name(self) -> str:
        """What people read of the score as; never "accuracy" where it may be something else."""
        if self.metric_name:
            return self.metric_name
        if self.metric is classification_accuracy:
            return "accuracy"
        name = getattr(self.metric, "__name__", "")
        return name if name.isidentifier() else "score"  # a lambda has no name of its own

    @property
    def watched(self) -> Any:
        """The data that looks are scored on."""
        return self.test if self.validation is None else self.validation

    def model_of(self, state: Mapping[str, Tensor]) -> nn.Module:
        """A model with that state. The caller's random stream stays as it was."""
        with torch.random.fork_rng(devices=[]):
            model = self.make_model()
        model.load_state_dict(state)
        return model

    def evaluate(self, model: nn.Module, data: Any = None) -> tuple[float, float]:
        """Mean loss and mean score of `model` on `data`, by default the test data."""
        return mean_scores(self.scores(model, self.test if data is None else data))

    @torch.no_grad()
    def scores(self, model: nn.Module, data: Any, part: int = 0, parts: int = 1) -> Tensor:
        """A row for each batch of `data`: its summed loss, its summed score, its samples.

        Of several `parts`, that share the work, each does every so many-th batch; the rows of the
        others are zero.
        """
        device = next(model.parameters()).device
        rows = []
        with evaluating(model):
            for number, (batch, count) in enumerate(in_order(data, self.evaluation_batch)):
                if number % parts != part:
                    rows.append((0.0, 0.0, 0.0))
                    continue
                batch = on_device(batch, device)
                loss, score = self._scores_of(model, batch)
                rows.append((loss * count, score * count, count))
        return torch.tensor(rows, dtype=torch.float64)

    @torch.no_grad()
    def _scores_of(self, model: nn.Module, batch: Any) -> tuple[float, float]:
        loss = number_in("loss", self.loss(model, batch))
        return loss, number_in("metric", self.metric(model, batch))


def mean_scores(rows: Tensor) -> tuple[float, float]:
    """Mean loss and mean score, from the rows of `Task.scores`; added up in their order."""
    loss, score, samples = (sum(column) for column in rows.T.tolist())
    return loss / samples, score / samples


def _first_of(train: Any, count: int) -> Any:
    dataset = train() if callable(train) else train
    require(not is_stream(dataset), "train_samples", "be None with an IterableDataset", count)
    samples = source_of(dataset).samples
    require(count <= samples, "train_samples", f"be at most the number of them, {samples}", count)
    return Subset(dataset, range(count))


def held_out(dataset: Any, share: float) -> tuple[Any, Any]:
    """The rest and a share of `dataset`, drawn at random, the same in every run."""
    require(not is_stream(dataset), "validation", "be a data set with an IterableDataset", share)
    samples = source_of(dataset).samples
    count = round(share * samples)
    inside = 0 < count < samples
    require(inside, "validation", f"leave samples on both sides, of {samples}", share)
    order = numpy_stream(Purpose.VALIDATION, 0).permutation(samples)
    return Subset(dataset, sorted(order[count:])), Subset(dataset, sorted(order[:count]))


def classification_loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of `model(inputs)` and labels, for batches of (inputs, labels)."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of each next token, for batches of (tokens, next tokens) and a model that
    scores each of them.
    """
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def classification_accuracy(model: nn.Module, batch: Any) -> float:
    """The share of labels that `model(inputs)` gives the highest score."""
    inputs, labels = batch
    return float((model(inputs).argmax(dim=-1) == labels).double().mean())


CROSS_ENTROPIES = (classification_loss, token_loss)


def split_task_name(name: str) -> tuple[str, str]:
    """`package.module` and `task` of `package.module:task`."""
    module, _, attribute = name.partition(":")
    is_named = all(part.isidentifier() for part in (*module.split("."), attribute))
    require(is_named, "task", "be a name, or package.module:task", name)
    return module, attribute


def find_task(name: str, known: dict[str, Task]) -> Task:
    """A built-in task by name, or the object behind `package.module:attribute`."""
    require(isinstance(name, str), "task", "be a name, or package.module:task", name)
    if name in known:
        return known[name]
    if ":" not in name:
        raise unknown_name("task", name, [*known, "package.module:task"])
    module, attribute = split_task_name(name)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownName(f"cannot load task {name!r}: {error}") from error
    require(isinstance(found, Task), "task", "name an fs.Task", f"{name}, a {type(found).__name__}")
    task: Task = replace(found, name=name)
    return task
