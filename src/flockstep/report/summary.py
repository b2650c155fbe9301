"""What a run was and what it came to, in words and figures for a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from flockstep.backends import Compute, Faults
from flockstep.network import Network
from flockstep.notation import read
from flockstep.result import Result, is_virtual, shown_score, strategy_text
from flockstep.spec import BUDGETS
from flockstep.units import shown_megabytes, shown_number

PLACES = {
    "sim": "simulated workers",
    "local": "local processes",
    "torchrun": "workers under torchrun",
    "ray": "workers on Ray",
}
SCORES = {
    "test_accuracy": "of the final model",
    "train_accuracy": "of the final model, on training data",
}
NOTES = {
    "test_loss": "of the final model",
    "train_loss": "mean of the last epoch",
    "test_replicas_mean": "of the workers' own models",
    "test_replicas_max": "of the best of them",
    "test_replicas_min": "of the worst of them",
    "bytes_sent": "by all workers together",
    "exchanges": "of the worker with most",
    "steps": "of the worker with most",
    "samples": "of all workers together",
    "wall_seconds": "the wall's clock, starting the workers included",
}


def heading(config: Mapping[str, Any]) -> Group:
    """What was run, where, and what time and messages cost there; a line each, never wrapped."""
    place = PLACES.get(config["backend"], f"workers on {config['backend']}")
    lines = [
        Text(f"{config['task']}, {config['workers']} {place}", style="bold"),
        Text(strategy_text(config), style="bold"),
    ]
    if "network" in config:  # in the simulator
        network = read(Network, config["network"]).in_words()
        compute = read(Compute, config["compute"]).in_words()
        lines += [Text(f"network {network}"), Text(compute)]
    if "faults" in config:
        lines.append(Text(read(Faults, config["faults"]).in_words()))
    return _group(lines)


def how_trained(config: Mapping[str, Any]) -> Group:
    """How it was trained."""
    known = {name: value for name, value in config.items() if value is not None}
    budget = [f"{known[name]:,} {name}" for name in BUDGETS if name in known]
    optimizer = _as_call(known.get("optimizer", ""))
    lines = [
        [f"optimizer {optimizer}", *_named(known, "lr")],
        [*budget, *_named(known, "batch_size", "target", "seed")],
        _named(known, "assignment", "schedule"),
    ]
    return _group([Text(", ".join(line)) for line in lines])


def _named(known: Mapping[str, Any], *names: str) -> list[str]:
    """Older results do not have all of them."""
    return [f"{name.replace('_', ' ')} {known[name]}" for name in names if name in known]


def _as_call(optimizer: str) -> str:
    """`OptimizerSpec('sgd', lr=0.1)` as `sgd(lr=0.1)`, and a function by its name."""
    if optimizer.startswith("<function "):
        return optimizer.split()[1]
    return re.sub(r"^OptimizerSpec\('(\w+)'(?:, )?", r"\1(", optimizer)


def _group(lines: list[Text]) -> Group:
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def metrics_table(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> Table:
    """A row for each metric, under the name that it has in `result.metrics`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("metric", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("", style="dim", overflow="fold")
    for name, value in metrics.items():
        table.add_row(*map(Text, _row(config, name, value)))  # not as rich's markup
    return table


def _row(config: Mapping[str, Any], name: str, value: Any) -> tuple[str, str, str]:
    """A metric's name, its value with its unit, and what there is to know of it."""
    if name in SCORES:
        score = config.get("metric_name", "accuracy")
        # Other scores have the key of an accuracy, so that results compare by the same keys.
        note = SCORES[name] if score == "accuracy" else f"{name} in result.metrics"
        return name.replace("accuracy", score), shown_score(score, value), note
    if name.startswith("test_replicas"):
        return name, *_of_replicas(config, name, value)
    if name.startswith("test_accuracy_noise"):
        shown = shown_score(config.get("metric_name", "accuracy"), value)
        return name, shown, "of the final model with noise on its parameters"
    if name == "seconds":
        note = "virtual: the simulator's clock" if is_virtual(config) else "the wall's clock"
        return name, _with_unit(name, value), note
    if name.endswith("_to_target"):
        note = "the target was not reached" if value is None else "until a look reached the target"
        return name, _with_unit(name, value), note
    return name, _with_unit(name, value), NOTES.get(name, "")


def _of_replicas(config: Mapping[str, Any], name: str, value: Any) -> tuple[str, str]:
    if isinstance(value, list):
        return f"{len(value)} scores", "of the workers' own models, in result.metrics"
    return shown_score(config.get("metric_name", "accuracy"), value), NOTES.get(name, "")


def _with_unit(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, int | float):
        return str(value)
    if name.startswith("bytes"):
        return shown_megabytes(value)
    if "seconds" in name:
        return f"{shown_number(value)} s"
    return f"{value:,}" if isinstance(value, int) else shown_number(value)


def lost_lines(result: Result) -> list[str]:
    """Which workers were lost, and when."""
    lines = []
    for lost in result.lost:
        when = "" if lost["seconds"] is None else f", at {shown_number(lost['seconds'])} s"
        lines.append(f"rank {lost['rank']} was lost after step {lost['step']}{when}")
    return lines
