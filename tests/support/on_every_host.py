"""What torchrun starts on every host of `backends/test_several_hosts.py`: it plays scenes and says
what came of each.

    torchrun … on_every_host.py FOLDER SCENE …

Every process prints a JSON line a scene. In FOLDER workers leave a file when they are in the middle
of a scene."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import flockstep as fs
from flockstep.tasks.builtin import TASKS

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
STEPS_BEFORE_LOSS = 5


def say_running(scene: str) -> None:
    """In a worker: leave a file, with the number of threads that it computes with."""
    (FOLDER / f"{scene} {RANK}").write_text(f"{torch.get_num_threads()}\n")


def go_on(backend: fs.Torchrun) -> dict[str, Any]:
    """Train slowly enough that a host can be lost meanwhile."""
    digits = TASKS["digits-mlp"]
    steps = 0

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        time.sleep(0.02)
        if steps == STEPS_BEFORE_LOSS + 1:
            say_running("go_on")
        return digits.loss(model, batch)

    task = dataclasses.replace(digits, name="slow digits", loss=loss)
    result = fs.run(task, fs.EAWild(period=4), backend=backend, epochs=3, on_failure="continue")
    return {"metrics": result.metrics, "lost": result.lost, "replicas": len(result.replicas)}


def stop(backend: fs.Torchrun) -> dict[str, Any]:
    """Average for ever: only the loss of a host ends this."""

    def program(comm: fs.Comm) -> None:
        tensor = torch.ones(1000)
        while True:
            comm.all_reduce(tensor, op="mean")
            say_running(f"stop {comm.size}")

    return {"returned": fs.launch(program, backend=backend)}


SCENES = {scene.__name__: scene for scene in (go_on, stop)}


def main() -> None:
    with fs.Torchrun() as backend:
        for name in sys.argv[2:]:
            scene, _, workers = name.partition("-of-")
            # After a host is lost those that are left play on as a smaller world: their ranks stay
            # as they are.
            if workers:
                os.environ["WORLD_SIZE"] = workers
            if int(os.environ["WORLD_SIZE"]) <= RANK:
                return
            try:
                outcome = SCENES[scene](backend)
            except fs.FlockstepError as error:
                outcome = {
                    "error": type(error).__name__,
                    "text": str(error),
                    "lost": getattr(error, "rank", None),
                }
            print(json.dumps({"scene": name, "at": time.time(), **outcome}), flush=True)


if __name__ == "__main__":
    main()
