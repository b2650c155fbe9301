"""How much a model suffers when noise is added to its parameters: how broad its optimum is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flockstep.fields import (
    require,
    require_choice,
    require_flag,
    require_integer,
    require_model,
    require_number,
)
from flockstep.randomness import Purpose, require_seed, torch_stream
from flockstep.result import shown_score
from flockstep.tasks import TASKS, Task, find_task
from flockstep.training.progress_bar import counting_bar
from flockstep.units import shown_number

if TYPE_CHECKING:
    from pandas import DataFrame

SCALES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)
NOISES = ("relative", "absolute")
DATA = ("test", "validation", "train")
NOISE_SCALES = (0.1, 0.2, 0.5)  # of runs that measure flatness


@dataclass(frozen=True)
class Draw:
    """What a model scores with one draw of noise. `accuracy` is what the task's metric gives."""

    scale: float
    draw: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class AtScale:
    """Mean and standard deviation over the draws of one scale; no deviation of a single draw."""

    scale: float
    draws: int
    loss: float
    loss_deviation: float | None
    accuracy: float
    accuracy_deviation: float | None


@dataclass(frozen=True, repr=False)
class Flatness:
    """What `fs.flatness` has found.

    Fields:
        draws: a row for each score: scale, draw, loss, accuracy.
        noise, data, seed: as they were asked for.
        metric_name: what people read of the score as.
    """

    draws: tuple[Draw, ...]
    noise: str
    data: str
    seed: int
    metric_name: str = "accuracy"

    @property
    def by_scale(self) -> list[AtScale]:
        """Means and deviations, a row for each scale."""
        scales = dict.fromkeys(each.scale for each in self.draws)
        return [
            _summed_up([each for each in self.draws if each.scale == scale]) for scale in scales
        ]

    def table(self) -> DataFrame:
        """Every draw as a row: scale, draw, loss, accuracy."""
        from pandas import DataFrame

        return DataFrame([vars(each) for each in self.draws])

    def __repr__(self) -> str:
        """A line for each scale."""
        name = self.metric_name
        lines = [f"Flatness under {self.noise} noise, on the {self.data} data"]
        for each in self.by_scale:
            score = shown_score(name, each.accuracy)
            lines.append(
                f"  scale {shown_number(each.scale)}: {name} {score}, "
                f"loss {shown_number(each.loss)} ({each.draws} draw{'s' * (each.draws > 1)})"
            )
        return "\n".join(lines)


def flatness(
    model: nn.Module,
    task: str | Task,
    scales: Sequence[float] = SCALES,
    draws: int = 5,
    noise: str = "relative",
    data: str = "test",
    seed: int = 0,
    *,
    progress: bool | None = None,
) -> Flatness:
    """Loss and score of `model` on the data of `task`, with Gaussian noise on its parameters.

        relative:  w + s·rms(w)·ε,   rms(w) = ‖w‖/√n of the tensor w of n parameters
        absolute:  w + s·ε,          ε ~ N(0, 1) for every parameter, s a scale

    A broad optimum loses little. Relative noise means the same to layers whose parameters are large
    and small, and to models trained in different ways; a tensor of zeros gets none of it. All
    parameters get noise; buffers, such as the statistics of batch normalisation, get none.

    Every scale has the same `draws` of ε, and so has every model of the same shape: curves of two
    models differ by the models. Scale 0 is the model's own score, and has one row. `data` is
    "test", "validation" or "train", not augmented. The model is left as it was.

    `progress` shows a bar on stderr; by default only where that is a terminal.

    Example:
        result = fs.run("digits-mlp", fs.NoSync(pull=0.1), workers=4)
        print(fs.flatness(result.model, "digits-mlp", scales=(0, 0.1, 0.3)))
    """
    require_model(model)
    task = find_task(task, TASKS) if isinstance(task, str) else task
    require(isinstance(task, Task), "task", "be a name, or an fs.Task", task)
    scales = _checked_scales(scales)
    require_integer("draws", draws, 1)
    require_choice("noise", noise, NOISES)
    require_choice("data", data, DATA)
    require_seed(seed)
    if progress is not None:
        require_flag("progress", progress)
    task = task.loaded()
    samples = getattr(task, data)
    require(samples is not None, "data", f"be data that task {task.name!r} has", data)

    found: list[Draw] = []
    noisy = [scale for scale in scales if scale]
    total = draws * len(noisy) + (0.0 in scales)
    with counting_bar(f"flatness on {task.name}", total, "scores", progress) as advance:

        def score(scale: float, draw: int) -> None:
            found.append(Draw(scale, draw, *task.evaluate(model, samples)))
            advance()

        with _left_as_it_was(model) as own:
            if 0.0 in scales:
                score(0.0, 0)
            for draw in range(draws):
                directions = _directions(own, noise, seed, draw)
                for scale in noisy:
                    _move(model, own, directions, scale)
                    score(scale, draw)
    found.sort(key=lambda each: (scales.index(each.scale), each.draw))
    return Flatness(tuple(found), noise, data, seed, task.score_name)


def under_noise(model: nn.Module, task: Task) -> dict[str, float]:
    """The metrics of a run that measures flatness: loss and score on the test data, means over
    draws of relative noise. They are the same draws for all runs, of a stream of their own.
    """
    found: dict[str, float] = {}
    for each in flatness(model, task, NOISE_SCALES, progress=False).by_scale:
        found[f"test_accuracy_noise_{each.scale:g}"] = each.accuracy
        found[f"test_loss_noise_{each.scale:g}"] = each.loss
    return found


def _checked_scales(scales: Any) -> list[float]:
    rule = "be numbers such as (0, 0.01, 0.1)"
    require(isinstance(scales, Iterable) and not isinstance(scales, str), "scales", rule, scales)
    scales = [each.item() if hasattr(each, "item") else each for each in scales]  # of arrays, too
    require(len(scales) > 0, "scales", rule, scales)
    for scale in scales:
        require_number("scales", scale, at_least=0, finite=True)
    require(len({*scales}) == len(scales), "scales", "be different from each other", scales)
    return [*map(float, scales)]


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[list[Tensor]]:
    """Gives copies of the parameters; behind it they and the buffers are what they were."""
    tensors = [each.detach() for each in (*model.parameters(), *model.buffers())]
    own = [each.clone() for each in tensors]
    try:
        yield own[: len([*model.parameters()])]
    finally:
        for tensor, was in zip(tensors, own, strict=True):
            tensor.copy_(was)


def _directions(own: Sequence[Tensor], noise: str, seed: int, draw: int) -> list[Tensor]:
    """What is added at scale 1."""
    random = torch_stream(Purpose.PARAMETER_NOISE, seed, draw)
    directions = []
    for parameter in own:
        drawn = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        if noise == "relative":
            drawn *= parameter.double().square().mean().sqrt().cpu()
        directions.append(drawn.to(parameter.device, parameter.dtype))
    return directions


def _move(
    model: nn.Module, own: Sequence[Tensor], directions: Sequence[Tensor], scale: float
) -> None:
    for parameter, start, direction in zip(model.parameters(), own, directions, strict=True):
        parameter.detach().copy_(start.add(direction, alpha=scale))


def _summed_up(draws: Sequence[Draw]) -> AtScale:
    losses = [each.loss for each in draws]
    scores = [each.accuracy for each in draws]
    return AtScale(
        draws[0].scale,
        len(draws),
        fmean(losses),
        _deviation(losses),
        fmean(scores),
        _deviation(scores),
    )


def _deviation(values: Sequence[float]) -> float | None:
    """None of one value, and where a model has left all numbers behind."""
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
