"""One replica of the model with its optimizer, its data and its strategy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, Subset

from flockstep.agreement import agreed
from flockstep.checkpoints import (
    Writer,
    drop_unfinished,
    go_on_together,
    newest,
    require_folder,
    require_same,
    save_together,
)
from flockstep.comm import Comm, Namespace, broadcast_from_first
from flockstep.data import (
    Assignment,
    Batches,
    BatchSize,
    Course,
    Disjoint,
    Sampling,
    plan_batches,
    share_of,
)
from flockstep.errors import CheckpointError, FlockstepError, NonFiniteLoss
from flockstep.fields import number_in, require, require_integer, require_optimizer, require_path
from flockstep.flat import FlatModel, FlatTensors, outside_tensors
from flockstep.gradients import Clipping, OnGradients, require_scaler, unscale
from flockstep.modes import evaluating
from flockstep.optimizers import require_decay, require_steps_alone
from flockstep.same_model import TORCH, Form, require_same_model
from flockstep.schedules import Paced, Progress, Schedule
from flockstep.strategies import Strategy

LOSS_MEMORY = 0.9
OF_THE_COURSE = ("epoch", "samples")
COUNTERS = ("steps", "total_steps", "loss", "smooth_loss", "accuracy", *OF_THE_COURSE)


class Worker:
    """Makes an ordinary training loop one of many that learn together.

        worker = fs.Worker(comm, model, optimizer, strategy=fs.LocalSGD(period=8))
        for x, y in worker.batches(dataset, batch_size=32, epochs=2):
            loss = cross_entropy(model(x), y)
            loss.backward()
            worker.step(loss)        # in place of optimizer.step() and optimizer.zero_grad()
        model = worker.finish()      # the model that represents the run

    All workers start from the parameters and buffers of rank 0, or of the lowest rank that is not
    lost. A worker that is alone trains plainly: its strategy has nobody to talk to and is not
    asked.

    `schedule` sets the learning rate before every step, as `fs.Cosine()` says, or `fs.Warmup(5) *
    fs.StepDecay()`; `weight_decay_schedule` sets the weight decay of the optimizer in the same way.

    Parameters that were frozen may be unfrozen later, by all workers after the same step. At their
    next step the strategy finishes and begins anew from the model that represents the run, with all
    that is trainable by then. What is frozen later stays as it is, unless others change it.

    Fields:
        gradient_norm: of the last step, before it was clipped; None where nothing is clipped.
    """

    _loop: Batches | None = None  # the last that was begun
    _total_steps: int | None = None  # that somebody has set
    _steps_before = 0  # the loop
    _accumulate = 1
    _is_after_step = False  # whose batches do not count as used before its end
    _writer: Writer | None = None  # of checkpoints
    _again: Callable[[], Tensor | float] | None = None  # computes the loss of the last batch
    _loss_after_step: float | None = None  # once somebody has asked

    def __init__(
        self,
        comm: Comm,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy[Any],
        schedule: Schedule | None = None,
        weight_decay_schedule: Schedule | None = None,
    ) -> None:
        self.model = model
        self._set_up(comm, optimizer, strategy, schedule, weight_decay_schedule)

    def _set_up(
        self,
        comm: Comm,
        optimizer: Any,
        strategy: Strategy[Any],
        schedule: Schedule | None,
        weight_decay_schedule: Schedule | None,
    ) -> None:
        require(isinstance(comm, Comm), "comm", "be what a launched program is given", comm)
        require_optimizer(optimizer)
        rule = "be a strategy such as fs.LocalSGD(period=8)"
        require(isinstance(strategy, Strategy), "strategy", rule, strategy)
        given = {"schedule": schedule, "weight_decay_schedule": weight_decay_schedule}
        for field, each in given.items():
            is_one = each is None or isinstance(each, Schedule)
            require(is_one, field, "be one such as fs.Cosine()", each)
        if weight_decay_schedule is not None:
            require_decay(optimizer)
        self.comm = comm
        self.optimizer = optimizer
        self.strategy = strategy
        # Alone there is nobody to talk to: the hooks of the base class do nothing but step.
        self._hooks: Strategy[Any] = strategy if comm.size > 1 else Strategy()
        self.schedule = schedule
        self.weight_decay_schedule = weight_decay_schedule
        self._paced = optimizer if isinstance(optimizer, Paced) else None
        require_steps_alone(optimizer)
        self._hooks.require_optimizer(optimizer)
        self.clipping: Clipping | None = None
        self.gradient_norm: float | None = None
        self.scaler: GradScaler | None = None  # the last one that `step` was given
        self._on_gradients: list[OnGradients] = []
        self.steps = 0
        self.course = Course()
        self.loss = math.nan
        self.smooth_loss = math.nan
        self.accuracy: float | None = None
        self._begin()
        self._open_step()

    def _begin(self) -> None:
        """Make the model flat and equal on all workers, and the strategy's state for it."""
        comm = self.comm
        self.flat = self._made_flat()
        comm.workers_made += 1
        self._names = Namespace(comm, f"worker {comm.workers_made}/")
        with torch.no_grad(), comm.unmetered(), self._names:
            require_same_model(comm, self._form())
            for tensor in (self.flat.state, *self.outside_tensors()):
                broadcast_from_first(comm, tensor, range(comm.size))
            self.state = self._hooks.init(self)

    # What depends on the framework: `flockstep.node` has it for others than PyTorch.

    def _made_flat(self) -> FlatTensors:
        model = self.model
        flat = FlatModel(model, self.comm.empty)
        meets_others = any(getattr(layer, "meets_others", False) for layer in model.modules())
        rule = "be one whose workers wait, as those of a layer over several workers must meet"
        require(self.strategy.waits or not meets_others, "strategy", rule, self.strategy)
        for group in self.optimizer.param_groups:
            known = all(flat.owns(parameter) for parameter in group["params"])
            name = type(self.optimizer).__name__
            require(known, "optimizer", "hold parameters of the model only", name)
        return flat

    def _form(self) -> Form:
        """What the workers' models must have in common."""
        named = self.flat.named(self.model, self.flat.state)
        shapes = [(name, tensor.shape) for name, tensor in named.items()]
        return Form.of(TORCH, self.flat.state.dtype, shapes)

    def outside_tensors(self) -> list[Tensor]:
        """What belongs to the model's state but not to its flat tensor."""
        return outside_tensors(self.model)

    def _clip(self, clipping: Clipping) -> float:
        """Return the norm that the gradients had."""
        return clipping.clip(self.model.parameters())

    def _batch(self, data: Any) -> Any:
        """A batch as the loop gets it."""
        return data

    @property
    def epoch(self) -> int:
        """How often all workers together have gone over the data."""
        return self.course.epoch

    @property
    def samples(self) -> int:
        """That this worker has taken."""
        return self.course.samples

    @property
    def total_steps(self) -> int | None:
        """Of the whole training: as it was set, or as the loop over `worker.batches` will make it,
        by how many batches have made a step so far.
        """
        if self._total_steps is not None or self._loop is None or self._loop.steps is None:
            return self._total_steps
        steps = self.steps - self._steps_before
        batches = self.course.taken if self._is_after_step else self.course.used
        if not batches:  # no step has been taken: nobody knows better
            steps, batches = 1, self._accumulate
        return self._steps_before + -(-steps * self._loop.steps // batches)

    @total_steps.setter
    def total_steps(self, steps: int | None) -> None:
        self._total_steps = steps

    @property
    def progress(self) -> Progress:
        """How far the training has come, for schedules."""
        return Progress(self.steps, self.total_steps, self.course.epochs_done)

    @property
    def loss_after_step(self) -> float:
        """On the last batch, of the parameters as they are now; that of before the step where
        `worker.step` was not told how to compute it `again`.
        """
        if self._loss_after_step is None:
            self._loss_after_step = self.loss if self._again is None else self._computed_again()
        return self._loss_after_step

    @loss_after_step.setter
    def loss_after_step(self, loss: float) -> None:
        self._loss_after_step = loss

    def _computed_again(self) -> float:
        assert self._again is not None
        # Another pass must not count in batch normalisation, nor draw what the next step would.
        with torch.no_grad(), evaluating(self.model), torch.random.fork_rng(devices=[]):
            return number_in("loss", self._again())

    def batches(
        self,
        dataset: Any,
        batch_size: BatchSize | None = None,
        epochs: int = 1,
        assignment: Assignment | None = None,
        sampling: Sampling | None = None,
        *,
        steps: int | None = None,
        resume_at: int = 0,
        accumulate: int = 1,
        prefetch: int = 0,
        drop_last: bool = False,
    ) -> Batches:
        """This worker's batches. All workers get the same number of them, in every epoch.

        An epoch here is a pass over this worker's own samples, of which `assignment` gives it
        C·N/M. `worker.epoch` counts how often all workers together have gone over the data,
        whatever the overlap.

        `dataset` may be tensors or arrays, a tuple, list or dict of these, or any torch Dataset; of
        an IterableDataset each worker takes every M-th sample. `batch_size` is a number,
        `fs.BatchGrowth`, or `fs.GlobalBatch`. With `drop_last` the last, smaller batch of each pass
        is left out; its samples come again in others, which are shuffled anew. With `steps` the
        loop ends after so many batches, if it has not ended before. With `resume_at` steps
        taken by an earlier run, the loop goes on with the very next batch, and the worker counts as
        if it had taken them: `steps` includes them.

        Where gradients of several batches make one step, `worker.total_steps` and schedules see it
        from the first step on. `accumulate` tells it before; `steps` and `resume_at` are then steps
        of so many batches.

        With `prefetch` a thread prepares so many batches while the model computes, for data sets
        that read files, say. For those that compute much in Python, `dataset` may be a torch
        DataLoader: its batch size, `shuffle`, `drop_last`, `collate_fn`, processes and all else are
        as it says, its samples this worker's part.
        """
        require_integer("resume_at", resume_at, 0)
        require_integer("accumulate", accumulate, 1)
        require_integer("prefetch", prefetch, 0)
        if isinstance(dataset, DataLoader):
            rule = "be left out with a DataLoader, which has its own prefetch_factor"
            require(prefetch == 0, "prefetch", rule, prefetch)
        if steps is not None:
            require_integer("steps", steps, 1)
        plan = plan_batches(
            dataset,
            batch_size,
            epochs,
            assignment or Disjoint(),
            sampling,
            workers=self.comm.size,
            rank=self.comm.rank,
            seed=self.comm.seed,
            drop_last=drop_last,
        )
        self._require_one_loop()
        most = None if steps is None else steps * accumulate
        if not self.course.is_resumed:
            self._accumulate = accumulate
            self._steps_before = self.steps
            self.steps += resume_at
        first = resume_at * accumulate
        self._loop = Batches(self.course, plan, first, most, prefetch, self._batch)
        return self._loop

    def share(self, dataset: Any, assignment: Assignment | None = None) -> Subset[Any]:
        """This worker's samples of a torch Dataset, for a loop that makes its own batches. All
        workers get equally many of them, and so equally many batches: where one has fewer, it
        sees its first ones again.

        The worker counts no epochs then, and what goes by the length of the training needs
        `worker.total_steps` to be set.
        """
        comm = self.comm
        return share_of(
            dataset, assignment or Disjoint(), workers=comm.size, rank=comm.rank, seed=comm.seed
        )

    def _require_one_loop(self) -> None:
        """What goes by the length of the whole training must not hear of another length later."""
        given = (self.schedule, self.weight_decay_schedule, self.strategy)
        askers = [each for each in given if each and each.needs_length]
        if askers and self._loop is not None and self._total_steps is None:
            raise FlockstepError(
                f"rank {self.comm.rank}: {askers[0]!r} goes by the length of the whole training, "
                "which a second worker.batches changes: call it once, and loop over "
                "worker.batches(…, epochs=N).by_epoch(), or set worker.total_steps first"
            )

    def adjust_loss(self, loss: Tensor, batch: Any) -> Tensor:
        """The loss with what the strategy adds to it. Call it before `backward`; most strategies
        add nothing.
        """
        with self._names:
            return self._hooks.on_loss(self, self.state, loss, batch)

    def clip_gradients(self, max_norm: float, norm_type: float = 2.0) -> None:
        """From now on the gradients of a step have at most this norm, as by
        `torch.nn.utils.clip_grad_norm_`. `math.inf` clips nothing; `worker.gradient_norm` says how
        large they were.

        It is done to what the step will use, after the exchange: to the mean gradient with SyncSGD,
        to a worker's own where it steps by itself. Methods that send changes to a server send what
        the optimizer has made of clipped gradients; AsyncSGD compensates delays after clipping.
        """
        self.clipping = Clipping(max_norm, norm_type)

    def on_gradients(self, callback: OnGradients) -> None:
        """From now on call `callback(gradients)` with the gradients that a step will use: one flat
        tensor, of which the parameters' `grad` are views. It may change them in place. It is called
        after the exchange, and before they are clipped.
        """
        require(callable(callback), "callback", "be callable", callback)
        self._on_gradients.append(callback)

    def agree(self, value: Any, how: str = "any") -> Any:
        """What the workers say together: whether `value` is true on any of them or, with "all", on
        all; with "mean" the mean of their numbers. All get the same answer.

            if worker.agree(loss < 0.1, "all"):
                break

        All workers call it, after the same step, also those that otherwise never wait. The eight
        bytes that each brings are counted."""
        return agreed(self.comm, value, how)

    def step(
        self,
        loss: Tensor | float,
        accuracy: float | None = None,
        *,
        scaler: GradScaler | None = None,
        again: Callable[[], Tensor | float] | None = None,
    ) -> bool:
        """Use the gradients: exchange as the strategy says, step, and clear them for the next
        step. Return whether a step was taken, which only a scaler can prevent.

        `scaler` is the one by which the loss of the backward pass was multiplied, one for each
        Worker; `loss` is without it. The gradients are unscaled before they are exchanged, and
        `scaler.update()` is called here. Where a gradient is not finite, the step is left out as if
        the batch had never been: on all workers if one of them has found it, which they tell each
        other at every step; by itself, a worker whose strategy never waits.

        `again` computes the loss of this batch once more, for methods that ask how good the
        parameters have become: `again=lambda: cross_entropy(model(x), y)`. It is called at most
        once, without gradients and in evaluation mode.
        """
        self._require_untouched()
        require_scaler(scaler)
        self._hear(loss, accuracy, again)
        if self.flat.is_outgrown:
            self._begin_anew()
        self.flat.collect_gradients()
        if self.course.weight != 1:
            self.flat.gradients.mul_(self.course.weight)
        self.scaler = scaler
        is_usable = scaler is None or not scaler.is_enabled() or self._unscale(scaler)
        if is_usable:
            self._take_step()
        else:
            self.flat.gradients.zero_()
        self.course.use()
        if is_usable:
            self._open_step()
        return is_usable

    def _hear(self, loss: Any, accuracy: float | None, again: Callable[[], Any] | None) -> None:
        """What a step is told, beside the gradients. They have been computed by now."""
        require(again is None or callable(again), "again", "be callable", again)
        self._record(number_in("loss", loss), accuracy)
        self._again, self._loss_after_step = again, None
        self.comm.elapse(times=self.course.relative_size)

    def _begin_anew(self) -> None:
        """With parameters that were frozen before."""
        with torch.no_grad(), self._names:
            self._hooks.finish(self, self.state)
        self._begin()
        self.note_changes()

    def _unscale(self, scaler: GradScaler) -> bool:
        agree = self.agree if self.strategy.waits else bool
        return unscale(scaler, self.optimizer, self.flat.gradients, agree)

    def _take_step(self) -> None:
        self._set_rates()
        with torch.no_grad(), self._names:
            self._hooks.on_gradients(self, self.state)
            for callback in self._on_gradients:
                callback(self.flat.gradients)
            if self.clipping is not None:
                self.gradient_norm = self._clip(self.clipping)
            self._hooks.optimizer_step(self, self.state)
            self.flat.gradients.zero_()
            self.steps += 1
            self._is_after_step = True
            try:
                self._hooks.after_step(self, self.state)
            finally:
                self._is_after_step = False

    def finish(self) -> nn.Module:
        """End the training: make this worker's model the one that represents the run, and return
        it.
        """
        self._end()
        return self.model

    def _end(self) -> None:
        if self._loop is not None:
            self._loop.pause()
        with torch.no_grad(), self._names:
            self._hooks.finish(self, self.state)
        if self._writer is not None:
            self._writer.wait()

    def replica(self) -> Tensor:
        """The flat state of this worker's own model."""
        return self._hooks.replica(self, self.state)

    def preview(self) -> Tensor:
        """The flat state of the model that stands for the run now; all workers call it together."""
        with self._names:
            return self._hooks.preview(self, self.state)

    def snapshot(self) -> nn.Module:
        """A copy of the model that stands for the run now, such as a member of an `fs.Ensemble`;
        all workers call it together, after the same step. It costs the run nothing.
        """
        with torch.no_grad(), self.comm.off_the_clock():
            state = self.preview()
            model = copy.deepcopy(self.model)
            model.load_state_dict(self.flat.named(self.model, state), strict=False)
        return model

    @property
    def is_in_loop(self) -> bool:
        """Whether a loop over `worker.batches` is under way."""
        return self._loop is not None and not self._loop.has_ended

    @property
    def has_more_batches(self) -> bool:
        """Whether that loop has batches left."""
        return self._loop is not None and self._loop.has_more

    def checkpoint(self, folder: str | Path, extras: Any = None, *, keep: int = 2) -> None:
        """Save all that this worker needs to go on: right after a step, on all workers together.

            if worker.steps % 1000 == 0:
                worker.checkpoint("runs/mine", {"scheduler": scheduler.state_dict()})

        `extras` are data of your own: numbers, texts, tensors, and lists and dicts of these. The
        files are written aside while the training goes on, at the latest when it finishes. Of
        whole checkpoints the last `keep` stay in the folder, which all workers must see.
        """
        require_integer("keep", keep, 1)
        require_path("folder", folder)
        folder = Path(folder).absolute()
        if self._writer is None or self._writer.folder != folder:
            if self._writer is not None:
                self._writer.wait()
            self._writer = self._new_writer(folder, keep)
        self._writer.keep = keep
        with self.comm.off_the_clock():
            save_together(self, self._writer, {"backend": self.comm.kind}, extras=extras)

    def _new_writer(self, folder: Path, keep: int) -> Writer:
        require_folder(folder)
        keeper = self.comm.kept_in.setdefault(folder, self)
        if keeper is not self:
            raise CheckpointError(
                f"rank {self.comm.rank}: {str(folder)!r} holds the checkpoints of another Worker "
                "of this comm: each has a folder of its own"
            )
        if self.comm.rank == self.comm.members[0]:
            drop_unfinished(folder)
        return Writer(folder, keep)

    def resume(self, folder: str | Path) -> Any:
        """Go on from the last whole checkpoint in a folder, on all workers together, before the
        first step. Return its extras, `{}` where there were none; None where the folder holds no
        checkpoint.

            extras = worker.resume("runs/mine")
            for x, y in worker.batches(dataset, batch_size=32, epochs=10):   # from the next batch
                …
        """
        require_path("folder", folder)
        checkpoint = newest(Path(folder).absolute())
        require_same(self.comm, checkpoint)
        if checkpoint is None:
            return None
        if "spec" in checkpoint.about:
            raise CheckpointError(
                f"{str(checkpoint.path)!r} is of fs.run: fs.resume goes on with it"
            )
        if checkpoint.about.get("backend") != self.comm.kind:
            raise CheckpointError(
                f"{str(checkpoint.path)!r} was taken {checkpoint.about.get('backend')} and cannot "
                f"go on {self.comm.kind}"
            )
        extras = go_on_together(self, checkpoint)["extras"]
        return {} if extras is None else extras

    def counters(self) -> dict[str, Any]:
        """What hooks of a strategy may ask of a worker, beside its model."""
        counters = {name: getattr(self, name) for name in COUNTERS}
        if self.strategy.needs_loss_after_step:
            counters["loss_after_step"] = self.loss_after_step
        return counters

    @contextmanager
    def changing_parameters(self) -> Iterator[None]:
        """Between two steps, a change of the parameters that is meant: the same on all workers, or
        each worker's own business.

            with worker.changing_parameters(), torch.no_grad():
                model.weight.clamp_(-1, 1)
        """
        yield
        self._loss_after_step = None  # which was of other parameters
        self.note_changes()

    def note_changes(self) -> None:
        """The parameters are as they are meant to be."""
        self._changes = self.flat.changes()

    def _require_untouched(self) -> None:
        if self.flat.changes() != self._changes:
            raise FlockstepError(
                f"rank {self.comm.rank}: the parameters were changed outside worker.step before "
                f"step {self.steps + 1}. worker.step calls optimizer.step() itself: leave yours "
                "out. A change that is meant belongs into `with worker.changing_parameters():`"
            )

    def _open_step(self) -> None:
        with torch.no_grad(), self._names:
            self._hooks.before_step(self, self.state)
        self.note_changes()

    def _set_rates(self) -> None:
        """What changes in the course of the training: an optimizer that has stages, and the
        learning rate.
        """
        if self._paced is not None:
            self._paced.at(self.progress)
        if self.schedule is not None:
            self.schedule.apply(self.optimizer, self.progress)
        if self.weight_decay_schedule is not None:
            self.weight_decay_schedule.apply(self.optimizer, self.progress, "weight_decay")

    def _record(self, loss: float, accuracy: float | None) -> None:
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"rank {self.comm.rank}: the loss is {loss} at step {self.steps + 1} "
                f"with {self.strategy!r}"
            )
        self.loss, self.accuracy = loss, accuracy
        first = math.isnan(self.smooth_loss)
        self.smooth_loss = (
            loss if first else LOSS_MEMORY * self.smooth_loss + (1 - LOSS_MEMORY) * loss
        )


class StandIn(Worker):
    """What a strategy sees of a worker, at a moment that may be over: data without a training.

    Its flat state is a copy, its comm its own. The model is made when a strategy asks for it.
    """

    def __init__(
        self, comm: Comm, like: Worker, state: Tensor, counters: Mapping[str, Any]
    ) -> None:
        self.comm = comm
        self.strategy = like.strategy
        self.schedule = like.schedule
        self.flat = like.flat.copy_with(state)
        self.course = Course()
        for name in OF_THE_COURSE:
            setattr(self.course, name, counters[name])
        for name in counters.keys() - set(OF_THE_COURSE):
            setattr(self, name, counters[name])
        self._like = like

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            self.model = copy.deepcopy(self._like.model)
            flat = FlatModel(self.model, self.comm.empty)
            flat.state.copy_(self.flat.state)
            self.flat = flat
            return self.model
        if name == "optimizer":
            raise FlockstepError(
                f"{type(self.strategy).__name__}: a look has no 'optimizer' of the workers': keep "
                "in the strategy's state what finish needs of it, or write a preview without it"
            )
        raise AttributeError(name)
