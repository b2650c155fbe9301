"""Tests that compare times of the wall clock, on machines that may stand still for seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

TRIES = 3


def tried_again(test: Callable[..., None]) -> Callable[..., None]:
    """A test that must hold in one of three tries: a defect fails in all of them, a pause of the
    machine in one.
    """

    @wraps(test)
    def tries(*arguments: Any, **fixtures: Any) -> None:
        for _ in range(TRIES - 1):
            try:
                return test(*arguments, **fixtures)
            except AssertionError as late:
                print(f"tried again: {late}")
        return test(*arguments, **fixtures)

    return tries
