"""Looks written down for the tools that people watch trainings with.

with fs.TensorBoard("runs/first") as log:
    fs.run("digits-mlp", fs.LocalSGD(8), on_look=log)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from flockstep.errors import FlockstepError, InvalidField, unknown_name
from flockstep.fields import require, require_path
from flockstep.folders import why_not

PROJECT = "flockstep"  # under which the tools list the runs


class Logger(ABC):
    """Base class: called with every look, it writes all numbers of it down, by step; for
    `fs.run(on_look=…)`. Inside a `with`; behind it all is on disk.
    """

    package: ClassVar[str]  # that it needs, and the extra that brings it
    extra: ClassVar[str]

    def __init__(self, folder: str | Path, config: Mapping[str, Any] | None = None) -> None:
        """`config` is what the run is, to be written down beside the looks."""
        if find_spec(self.package) is None:
            needs = f"pip install 'flockstep[{self.extra}]'"
            raise FlockstepError(f"{type(self).__name__} needs {self.package}: {needs}")
        require_path("folder", folder)
        self.folder = Path(folder)
        reason = why_not(self.folder)
        if reason is not None:
            raise InvalidField(
                f"'folder' of {type(self).__name__} must be one that takes files "
                f"(got {str(folder)!r}: {reason})"
            )
        self._open({name: str(value) for name, value in (config or {}).items()})

    def __call__(self, look: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in look.items() if isinstance(value, int | float)}
        self._write(int(look["step"]), numbers)

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(went_well=kind is None)

    @abstractmethod
    def _open(self, config: Mapping[str, str]) -> None: ...

    @abstractmethod
    def _write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    @abstractmethod
    def _close(self, went_well: bool) -> None: ...


class TensorBoard(Logger):
    """Event files in a folder, for `tensorboard --logdir FOLDER`.

    Example:
        with fs.TensorBoard("runs/first") as log:
            fs.run("digits-mlp", fs.LocalSGD(8), on_look=log)
    """

    package, extra = "tensorboard", "tensorboard"

    def _open(self, config: Mapping[str, str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder))
        if config:
            rows = "".join(f"| {name} | {value} |\n" for name, value in config.items())
            self._writer.add_text("config", f"| field | value |\n|---|---|\n{rows}")

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # people look while the run goes on

    def _close(self, went_well: bool) -> None:
        self._writer.close()


class MLflow(Logger):
    """A run of the experiment "flockstep" in a data base in a folder, for `mlflow ui
    --backend-store-uri sqlite:///FOLDER/mlflow.db`.

    Example:
        with fs.MLflow("mlruns") as log:
            fs.run("digits-mlp", fs.LocalSGD(8), on_look=log)
    """

    package, extra = "mlflow", "mlflow"

    def _open(self, config: Mapping[str, str]) -> None:
        from mlflow import MlflowClient

        store = self.folder.resolve()  # MLflow gives up stores that are plain files
        self._client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
        known = self._client.get_experiment_by_name(PROJECT)
        if known is None:
            files = (store / "artifacts").as_uri()
            number = self._client.create_experiment(PROJECT, artifact_location=files)
        else:
            number = known.experiment_id
        self._run = self._client.create_run(number).info.run_id
        for name, value in config.items():
            self._client.log_param(self._run, name, value)

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self._run, name, value, step=step)

    def _close(self, went_well: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if went_well else "FAILED")


class WandB(Logger):
    """An offline run of Weights & Biases in a folder, for `wandb sync FOLDER/wandb/offline-run-…`.
    Nothing is sent anywhere.

    Example:
        with fs.WandB("runs/first") as log:
            fs.run("digits-mlp", fs.LocalSGD(8), on_look=log)
    """

    package, extra = "wandb", "wandb"

    def _open(self, config: Mapping[str, str]) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project=PROJECT,
            dir=self.folder,
            config=dict(config),
            mode="offline",
            settings=settings,
            reinit="create_new",
        )

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def _close(self, went_well: bool) -> None:
        self._run.finish(exit_code=0 if went_well else 1)


LOGGERS: dict[str, type[Logger]] = {each.extra: each for each in (TensorBoard, MLflow, WandB)}


def open_logger(text: str, config: Mapping[str, Any] | None = None) -> Logger:
    """The logger that a text such as `tensorboard:runs/first` names."""
    name, _, folder = text.partition(":")
    require(bool(folder), "--log", "be LOGGER:FOLDER, such as tensorboard:runs/first", text)
    if name not in LOGGERS:
        raise unknown_name("logger", name, LOGGERS)
    return LOGGERS[name](folder, config)
