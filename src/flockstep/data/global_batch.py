"""One batch for all workers together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flockstep.data.timetable import (
    BatchRule,
    Dealt,
    Steady,
    Timetable,
    require_within,
)
from flockstep.fields import require, require_integer


@dataclass(frozen=True)
class GlobalBatch(BatchRule):
    """So many samples a step of all workers together, exactly, however many workers there are.

        b_r = G/M where it is whole, else one of the two numbers around it, in turns: Σ b_r = G
        g_r ← g_r · b_r·M/G

    Where the batches of a step differ in size, each worker's gradient is weighted with its own, so
    that their mean is that of all G samples. At the end of a pass over the data there may be fewer,
    unless the last batch is dropped.

    Fields:
        size: G. At least the number of workers.

    Example:
        fs.run("digits-mlp", fs.SyncSGD(), workers=7, batch_size=fs.GlobalBatch(64))
    """

    name: ClassVar[str] = "global_batch"
    size: int

    def __post_init__(self) -> None:
        require_integer("size", self.size, 1)

    def timetable(
        self, held: tuple[int, ...], samples: int, passes: int, drop_last: bool
    ) -> Timetable:
        rule = f"be at least the number of workers, {len(held)}"
        require(self.size >= len(held), "global_batch", rule, self.size)
        require_within("global_batch", self.size, samples)
        kind = Dealt if self.size % len(held) else Steady
        table = kind(held, samples, passes, self.size, drop_last)
        rule = f"leave every worker its share with drop_last=True: they hold {min(held)} and more"
        require(table.steps > 0, "global_batch", rule, self.size)
        return table
