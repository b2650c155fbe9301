"""Simulates many workers, and few, in a process of its own; prints seconds and peak memory as
JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.simulator import simulated_seconds

MANY, FEW = 1024, 16


def main() -> None:
    torch.set_num_threads(1)
    # The many are timed between two timings of the few: should the machine slow down meanwhile,
    # both feel it.
    before = simulated_seconds(FEW, 1, warm_up=8, steps=64)
    many = simulated_seconds(MANY, 1, warm_up=1, steps=8)
    after = simulated_seconds(FEW, 1, warm_up=8, steps=64)
    measured = {
        "many": MANY,
        "many_seconds": many,
        "few_seconds": fmean([before, after]),
        "peak_bytes": _peak_bytes(),
    }
    print(json.dumps(measured))


def _peak_bytes() -> int:
    """Not `ru_maxrss`, which starts at the peak of the process that started this one."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kibibytes, _ = status["VmHWM"].split()
    return int(kibibytes) * 1024


if __name__ == "__main__":
    main()
