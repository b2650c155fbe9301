"""One run of a study, from its spec to its record, whatever becomes of it."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from flockstep.backends import Backend, LocalProcesses, Ray
from flockstep.errors import SpecError
from flockstep.launch import make_backend
from flockstep.result import Result
from flockstep.spec import SIMULATED, RunSpec
from flockstep.study.records import Record, made_with
from flockstep.training import run_closely

SHOWN_MEASURES = ("positions", "time")
SHOWN_EVENTS = 160  # per worker
SHOWN_WORKERS = 16
DIGITS = 6  # of times that are shown
KINDS = ("computing", "waiting", "sending")
DROPPED = len(KINDS)


@dataclass(frozen=True)
class Order:
    """What a job is to run.

    Fields:
        shows: whether the record says where replicas went and what workers did when.
    """

    id: str
    spec: RunSpec
    shows: bool = False


class Places:
    """Backends that are kept from run to run: processes are started once."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._kept: dict[str, Backend] = {}

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def of(self, spec: RunSpec) -> Backend:
        if not isinstance(spec.backend, str):
            return spec.backend
        if spec.backend == "sim":  # one thread per run: other runs have the other cores
            settings = {name: getattr(spec, name) for name in SIMULATED}
            return make_backend("sim", **settings | {"lanes": 1})
        if spec.backend not in self._kept:
            made: Any = {"local": LocalProcesses, "ray": Ray}[spec.backend]()
            self._kept[spec.backend] = self._stack.enter_context(made)
        return self._kept[spec.backend]


def carried_out(order: Order, places: Places) -> Record:
    """The record of a run: of its result, or of what went wrong."""
    began, started = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    spec = order.spec
    record = Record(order.id, _written(spec), spec.seed, "failed", **made_with(), started=started)
    try:
        measure = SHOWN_MEASURES if order.shows else ()
        events = SHOWN_EVENTS if order.shows else None
        result, tracks = run_closely(spec, places.of(spec), measure, events)
    except Exception as error:  # noqa: BLE001
        # Whatever a run raises, it must not end the study.
        told = {
            "type": type(error).__name__,
            "message": str(error),
            "traceback": _without_folders("".join(traceback.format_exception(error))),
        }
        return replace(record, error=told, wall_seconds=time.perf_counter() - began)
    return replace(
        record,
        status="done",
        wall_seconds=time.perf_counter() - began,
        timeline=_timeline(tracks) if order.shows else None,
        **_told(result),
    )


def _without_folders(text: str) -> str:
    """`flockstep/worker.py`, wherever that was installed: records travel, folders do not."""
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        text = text.replace(f"{folder}{os.sep}", "")
    return text


def lost_record(order: Order, reason: str) -> Record:
    """The record of a run whose process is gone."""
    told = {"type": "WorkerLost", "message": reason, "traceback": ""}
    return Record(
        order.id, _written(order.spec), order.spec.seed, "failed", error=told, **made_with()
    )


def _written(spec: RunSpec) -> dict[str, Any] | None:
    try:
        table: dict[str, Any] = json.loads(spec.to_json())
    except SpecError:  # a task that exists in a script only
        return None
    return table


def _told(result: Result) -> dict[str, Any]:
    """What a record keeps of a result: not its tensors, nor its spec twice."""
    config = {name: value for name, value in result.config.items() if name not in ("spec", "id")}
    return {
        "metrics": result.metrics,
        "history": [dict(look) for look in result.history],
        "lost": result.lost,
        "config": config,
    }


def _timeline(tracks: list[Any]) -> dict[str, Any]:
    """The beginning of what each worker did: rows of kind, start and duration in seconds."""
    rows = []
    for track in tracks[:SHOWN_WORKERS]:
        table = [] if track is None else track[0].tolist()
        rows.append(
            [
                [int(kind), _rounded(start), _rounded(duration)]
                for kind, _, start, duration, *_ in table
                if kind < DROPPED
            ]
        )
    return {"kinds": KINDS, "workers": rows, "of": len(tracks)}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
