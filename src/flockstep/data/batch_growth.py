"""Batches that grow where learning rates would fall."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar

from flockstep.data.timetable import BatchRule, Growing, Timetable, require_within
from flockstep.fields import require, require_integer, require_marks, require_number


@dataclass(frozen=True)
class BatchGrowth(BatchRule):
    """Larger batches at each of some moments, in place of a decay of the learning rate.

        b(s) = min(b_max, round(b_0 · n^(number of marks ≤ s)))
        s: the share of all samples that is processed

    The noise of SGD falls with rate/batch: n times the batch calms it like a rate divided by n, in
    n times fewer steps.

    Fields:
        initial: b_0, the batch of one worker at the start.
        at: the marks, as fractions of all samples that the training will process.
        factor: n, what the batch is multiplied with at each mark.
        maximum: b_max, the largest batch of one worker; None: no limit.

    Paper: Smith, Kindermans, Ying and Le, "Don't Decay the Learning Rate, Increase the Batch Size",
    2018. It lets the rate fall where the batch cannot grow any more; that is left to a schedule.

    Example:
        fs.BatchGrowth(initial=32, at=(0.5, 0.75), factor=10, maximum=1024).size_at(0.6)     # 320
    """

    name: ClassVar[str] = "batch_growth"
    initial: int
    at: tuple[float, ...] = (0.5, 0.75)
    factor: float = 10
    maximum: int | None = None

    def __post_init__(self) -> None:
        require_integer("initial", self.initial, 1)
        require_marks("at", self.at)
        require_number("factor", self.factor, above=1, finite=True)
        if self.maximum is not None:
            require_integer("maximum", self.maximum, 1)
            require(
                self.maximum >= self.initial,
                "maximum",
                f"be at least initial, {self.initial}",
                self.maximum,
            )

    def timetable(
        self, held: tuple[int, ...], samples: int, passes: int, drop_last: bool
    ) -> Timetable:
        require_within("initial", self.initial, samples)
        return Growing(held, samples, passes, self.size_at, drop_last)

    def size_at(self, fraction: float) -> int:
        """The batch of one worker when `fraction` of all samples has been processed."""
        size = round(self.initial * self.factor ** bisect_right(self.at, fraction))
        return size if self.maximum is None else min(size, self.maximum)
