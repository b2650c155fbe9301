"""What a task costs, before anybody runs it: parameters, bytes, FLOPs, and whether its data are
there.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from flockstep.cli.commands import json_option
from flockstep.data import find_dataset, in_order
from flockstep.device import on_device
from flockstep.fields import require
from flockstep.models import count_parameters, flops_per_sample
from flockstep.tasks import TASKS, Task, find_task


def summary(task: Task) -> dict[str, Any]:
    """What can be said without data and without memory for the model."""
    with torch.device("meta"):
        model = task.model()
    batch = task.batch_size if task.global_batch is None else task.global_batch
    return {
        "parameters": count_parameters(model),
        "data": task.data or "its own",
        "there": task.data is None or find_dataset(task.data).is_there(),
        "epochs": task.epochs,
        "batch": f"{batch} {'each' if task.global_batch is None else 'in all'}",
    }


def inspect_task(task: Task) -> dict[str, Any]:
    """Parameters, their bytes, forward FLOPs of a sample, and FLOPs ÷ parameters.

    A built-in task is inspected without its data, and without memory for its model. Of another's
    data one sample is used.
    """
    is_built_in = TASKS.get(task.name) is task
    with torch.random.fork_rng(devices=[]), torch.device("meta" if is_built_in else "cpu"):
        model = task.make_model()
    require(count_parameters(model) > 0, "model", "have parameters", type(model).__name__)
    example = (
        find_dataset(task.data).example()
        if task.data
        else next(in_order(task.loaded().train, 1))[0]
    )
    example = on_device(example, next(model.parameters()).device)
    parameters, flops = count_parameters(model), flops_per_sample(model, example)
    return {
        "task": task.name,
        "model": type(model).__name__,
        "parameters": parameters,
        "trained": sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        ),
        "bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "flops_per_sample": flops,
        "cc_ratio": flops / parameters,
    }


@click.command()
@click.argument("task")
@json_option()
def inspect(task: str, for_machines: bool) -> None:
    """Print TASK's parameters, their bytes, its FLOPs and the ratio of computing to communicating.

    \b
    flockstep inspect digits-mlp
    flockstep inspect mypackage.tasks:mine --json
    """
    sys.path.insert(0, "")
    figures = inspect_task(find_task(task, TASKS))
    if for_machines:
        click.echo(json.dumps(figures))
        return
    table = Table("what", "figure", title=f"{task}: {figures['model']}")
    table.add_row("parameters", f"{figures['parameters']:,}")
    if figures["trained"] != figures["parameters"]:
        table.add_row("of them trained", f"{figures['trained']:,}")
    table.add_row("bytes", f"{figures['bytes']:,}")
    table.add_row("FLOPs of a sample, forward", f"{figures['flops_per_sample']:,.0f}")
    table.add_row("FLOPs ÷ parameters", f"{figures['cc_ratio']:,.1f}")
    Console().print(table)
