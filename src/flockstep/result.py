"""What a run gives back, and how it is kept in a folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flockstep.errors import FlockstepError, ResultError
from flockstep.task import Task, find_task
from flockstep.tasks import TASKS

FORMAT = 1


@dataclass
class Result:
    """A finished run.

    `metrics` has test_accuracy, test_loss, train_loss (mean of the last epoch), seconds (virtual or wall-clock, up
    to the end of finish), wall_seconds (starting the workers included), bytes_sent (all workers), exchanges and steps
    (of the worker with most), samples (all workers) and workers.
    """

    config: dict[str, Any]
    metrics: dict[str, float]
    history: list[dict[str, float]]
    replicas: list[Tensor]
    _model: nn.Module | None = field(default=None, repr=False)
    _model_state: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def model(self) -> nn.Module:
        """The model that the strategy's finish() chose."""
        if self._model is None:
            self._model = self._rebuild(find_task(self.config["task"], TASKS))
        return self._model

    def _rebuild(self, task: Task) -> nn.Module:
        model = task.model()
        try:
            model.load_state_dict(self._model_state)
        except RuntimeError as error:
            message = f"the saved model does not fit task {task.name!r}: {error}"
            raise ResultError(message) from error
        return model

    def save(self, folder: str | Path) -> Path:
        """Write the result into `folder`: result.json, model.safetensors, replicas.safetensors."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # A folder with a result.json is a whole result: an old one goes first, the new one comes last.
        (folder / "result.json").unlink(missing_ok=True)
        state = self._model.state_dict() if self._model is not None else self._model_state
        # safetensors refuses tensors that share memory, as views of a flat tensor and tied weights do.
        save_file(
            {name: value.detach().cpu().clone() for name, value in state.items()},
            folder / "model.safetensors",
        )
        save_file(
            {str(rank): value.cpu() for rank, value in enumerate(self.replicas)},
            folder / "replicas.safetensors",
        )
        content = {
            "format": FORMAT,
            "config": self.config,
            "metrics": self.metrics,
            "history": self.history,
        }
        unfinished = folder / "result.json.part"
        unfinished.write_text(json.dumps(content, indent=2) + "\n")
        unfinished.replace(folder / "result.json")
        return folder


def load_result(folder: str | Path, task: Task | None = None) -> Result:
    """Read what `Result.save` wrote.

    The model is rebuilt by the task that the result names. A task that cannot be found by its name, because it was
    made in a script, must be given.
    """
    folder = Path(folder)
    path = folder / "result.json"
    if not path.is_file():
        raise ResultError(f"{str(folder)!r} is not a result folder: it has no result.json")
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ResultError(f"{str(path)!r} has format {content['format']!r}, this version reads {FORMAT}")
        replicas = load_file(folder / "replicas.safetensors")
        result = Result(
            content["config"],
            content["metrics"],
            content["history"],
            [replicas[str(rank)] for rank in range(len(replicas))],
            _model_state=load_file(folder / "model.safetensors"),
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, FlockstepError):
            raise
        raise ResultError(f"{str(folder)!r} holds a damaged result: {error}") from error
    if task is not None:
        result._model = result._rebuild(task)
    return result


def versions() -> dict[str, str]:
    """What a result was made with."""
    from importlib.metadata import version

    return {"flockstep": version("flockstep"), "torch": str(torch.__version__)}
