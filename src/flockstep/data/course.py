"""How far a worker has come through its data."""

from __future__ import annotations

from flockstep.data.batches import Batch, Plan, StreamPlan


class Course:
    """What a worker has taken of its data so far, over all its loops.

    Fields:
        samples: that it has taken.
        epoch: how often all workers together have gone over the data, once the batch that ends an
            epoch has been used.
        epochs_ended: the same, as soon as that batch is taken.
        passes: of this worker over its own samples.
        relative_size: the batch size by now, in terms of the first.
        taken: batches of the loop that is under way.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.epoch = 0
        self.epochs_ended = 0
        self.passes = 0
        self.relative_size = 1.0
        self.taken = 0
        self._plan: Plan | StreamPlan | None = None
        self._epochs_before = 0  # the plan

    def begin(self, plan: Plan | StreamPlan, resume_at: int) -> int:
        """Go by `plan` from now on, of which `resume_at` batches are taken already. Return how many
        passes went before.
        """
        self._plan, self.taken = plan, resume_at
        self._epochs_before, passes_before = self.epoch, self.passes
        samples, epochs, passes = plan.done_in(resume_at)
        self.samples += samples
        self.epoch += epochs
        self.passes += passes
        self.epochs_ended = self.epoch
        return passes_before

    def take(self, batch: Batch) -> None:
        self.samples += batch.samples
        self.relative_size = batch.relative_size
        self.taken += 1
        self.epochs_ended += batch.ends_epoch

    def used(self, batch: Batch) -> None:
        self.epoch += batch.ends_epoch
        self.passes += batch.ends_pass

    @property
    def epochs_done(self) -> float:
        """How many epochs had passed before the batch that was taken last, fractions too."""
        if self._plan is None or self._plan.timetable is None:
            return self.epoch
        # By batches rather than steps: gradients of several may be gathered for one step.
        before = max(0, self.taken - 1)
        return self._epochs_before + self._plan.timetable.epochs_done(before)
