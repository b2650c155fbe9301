"""The loop of one worker."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flockstep.checkpoints import go_on_together
from flockstep.comm import Comm, Trace
from flockstep.device import on_device, worker_device
from flockstep.fields import number_in, require
from flockstep.models import distribute_batch_norm
from flockstep.modes import evaluating
from flockstep.tasks import Task
from flockstep.training.job import Job, sampling_of
from flockstep.training.observer import Observer, observer_of
from flockstep.training.scoring import of_table
from flockstep.training.snapshots import Resumed
from flockstep.worker import Worker


def train(comm: Comm, job: Job) -> dict[str, Any]:
    """One worker's whole training. It returns plain values and tensors, which every backend can
    carry.

    Each worker brings the figures of the whole run: not every launcher gets to see all workers'
    reports.
    """
    if job.trace_limit is not None:
        comm.meter.trace = Trace(job.trace_limit)
    task, spec = job.task, job.spec
    model = task.make_model().to(worker_device(spec.device, comm.rank))
    if job.start is not None:
        model.load_state_dict(job.start.model)
    if spec.batch_norm_group is not None:
        with comm.unmetered():
            together = comm.split(comm.rank // spec.batch_norm_group)
        model = distribute_batch_norm(model, together, lambda: worker.course.weight)
    optimizer = spec.make_optimizer(task, model.parameters())
    if job.start is not None and job.start.optimizer is not None:
        optimizer.load_state_dict(job.start.optimizer)
    worker = Worker(comm, model, optimizer, spec.strategy, job.schedule, spec.weight_decay_schedule)
    observer = observer_of(worker, job)
    if job.snapshots is not None:
        comm.watch_losses(job.snapshots.lose)

    if job.start is not None:
        observer.pass_over(job.start.steps)
    if not _go_on(worker, observer, job):
        _loop(worker, observer, job)
    if job.snapshots is not None:
        job.snapshots.at_end(worker, observer)
    observer.leave()
    report = _report(worker, observer, job)
    if observer.keeper is not None:
        observer.keeper.close()
    return report


def _go_on(worker: Worker, observer: Observer, job: Job) -> bool:
    """From a checkpoint, if there is one. Return whether this worker's last step lies behind it."""
    if job.resumed is None:
        return False
    if isinstance(job.resumed, Resumed):
        assert job.board is not None
        return job.resumed.go_on(worker, observer, job.board)
    data = go_on_together(worker, job.resumed)
    observer.load(data["observer"])
    if observer.keeper is not None:
        observer.keeper.go_on(data["keeper"])
    return bool(data["is_over"])


def _loop(worker: Worker, observer: Observer, job: Job) -> None:
    task, spec, model, snapshots = job.task, job.spec, worker.model, job.snapshots
    for batch in worker.batches(
        task.train,
        job.batch_size,
        job.passes,
        spec.assignment,
        sampling_of(spec),
        steps=job.steps,
        resume_at=0 if job.start is None else job.start.steps,
        drop_last=spec.drop_last,
    ):
        batch = on_device(batch, worker.flat.state.device)
        loss = task.loss(model, batch)
        _require_trainable(loss)
        loss = worker.adjust_loss(loss, batch)
        loss.backward()
        asks = spec.strategy.needs_accuracy
        again = None
        if spec.strategy.needs_loss_after_step:
            again = partial(task.loss, model, batch)
        worker.step(loss, _score(task, model, batch) if asks else None, again=again)
        if observer.after_step():
            break
        if snapshots is not None:
            snapshots.after_step(worker, observer)


def _report(worker: Worker, observer: Observer, job: Job) -> dict[str, Any]:
    comm, final = worker.comm, observer.final
    replica = worker.replica()[: worker.flat.count].detach().cpu().clone()
    measured, tested = observer.measured()
    if final is None:
        worker.finish()
        table = observer.end()
        look = table.look(job.epoch_at(worker, table))
        metrics = table.metrics()
    else:
        with torch.no_grad():
            worker.flat.state.copy_(final.shown)
        table, look = final.table, final.look
        metrics = table.metrics() | {"seconds": look.seconds}
    measured |= of_table(table, job.measure)
    leads = comm.rank == table.ranks[0]
    trace = comm.meter.trace
    return {
        "replica": replica,
        "model": _state_of(worker.model) if leads or job.model_from_all else None,
        "metrics": metrics | tested,
        "last_look": dict(look) | measured,
        "history": [dict(look) for look in observer.history],
        "has_reached": final is not None,
        "trace": None if trace is None else list(trace.table()),
    }


def _require_trainable(loss: object) -> None:
    can_train = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
    rule = "be a tensor of one number, computed from the model's parameters"
    require(can_train, "loss", rule, loss)


@torch.no_grad()
def _score(task: Task, model: nn.Module, batch: Any) -> float:
    """The metric on a training batch, in evaluation mode: another pass must not count in batch
    normalisation.
    """
    with evaluating(model):
        return number_in("metric", task.metric(model, batch))


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in model.state_dict().items()}
