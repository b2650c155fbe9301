"""From axes to cells: every combination of levels, and the fields that its runs have."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from flockstep.errors import FlockstepError, InvalidField, SpecError, did_you_mean, unknown_name
from flockstep.fields import require, shown
from flockstep.intervals import Interval
from flockstep.notation import written
from flockstep.spec import RunSpec
from flockstep.study.expressions import (
    evaluated,
    filled_in,
    names_in_expression,
    names_in_text,
)
from flockstep.tasks import Task

SPEC_FIELDS = [each.name for each in fields(RunSpec)]


@dataclass(frozen=True)
class Level:
    """One place on an axis: how it is called, and what it sets."""

    labels: Mapping[str, str]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """What is varied: one name, or several that go together."""

    names: tuple[str, ...]
    levels: tuple[Level, ...]

    @property
    def telling(self) -> tuple[str, ...]:
        """The names that tell its levels apart: the first, if it does."""
        first = [level.labels[self.names[0]] for level in self.levels]
        return self.names[:1] if len({*first}) == len(first) else self.names

    def label(self, level: Level) -> str:
        """How a level is called on this axis."""
        return ", ".join(level.labels[name] for name in self.telling)


@dataclass(frozen=True)
class Cell:
    """One combination of levels.

    Fields:
        labels: the level on each axis, by the axis' name.
        fields: of the `fs.RunSpec` of its runs, all but the seed.
    """

    labels: Mapping[str, str]
    fields: Mapping[str, Any]
    varying: tuple[str, ...] = ()  # the names that tell cells apart
    speaking: frozenset[str] = frozenset()  # those whose levels speak for themselves

    @property
    def label(self) -> str:
        """How people read it: `local_sgd(period=8)`, or `households=4, period=8`."""
        if not self.varying:
            return "the only cell"
        return ", ".join(map(self._told, self.varying))

    def _told(self, name: str) -> str:
        label = self.labels[name]
        return label if name in self.speaking else f"{name}={label}"

    def spec(self, seed: int) -> RunSpec:
        """The run of one seed."""
        try:
            return RunSpec(**{**self.fields, "seed": seed})
        except FlockstepError as error:
            raise type(error)(f"cell {self.label}: {error}") from error


def as_text(value: Any) -> str:
    """A value as people and files have it."""
    if isinstance(value, str):
        return value
    if isinstance(value, Interval):
        return str(value)
    return value.name if isinstance(value, Task) else written(value)


# ---- Axes


def axes_of(axes: Mapping[str, Any], zipped: Sequence[Mapping[str, Any]]) -> tuple[Axis, ...]:
    """All axes, in the order in which they are declared."""
    made = [_axis(name, values) for name, values in axes.items()]
    made += [_zipped_axis(number, table) for number, table in enumerate(zipped, start=1)]
    names = [name for axis in made for name in axis.names]
    for name in names:
        require(names.count(name) == 1, "axes", f"have {name!r} once", names)
        require(name != "seed", "axes", "leave the seed to 'seeds'", name)
    return tuple(made)


def _axis(name: str, values: Any) -> Axis:
    field = f"axes.{name}"
    if isinstance(values, Mapping):
        require(bool(values), field, "have a level", values)
        levels = [_level(name, str(label), value) for label, value in values.items()]
        return Axis((name,), tuple(levels))
    _require_list(field, values)
    levels = [_level(name, as_text(value), value) for value in values]
    labels = [level.labels[name] for level in levels]
    require(len({*labels}) == len(labels), field, "have no value twice", labels)
    return Axis((name,), tuple(levels))


def _level(name: str, label: str, value: Any) -> Level:
    return Level({name: label}, value if isinstance(value, Mapping) else {name: value})


def _zipped_axis(number: int, table: Any) -> Axis:
    field = f"zipped {number}"
    require(isinstance(table, Mapping) and bool(table), field, "be a table of lists", table)
    for name, values in table.items():
        _require_list(f"{field}.{name}", values)
    lengths = {name: len(values) for name, values in table.items()}
    require(len({*lengths.values()}) == 1, field, "have lists of one length", lengths)
    names = tuple(table)
    levels = [
        Level(
            {name: as_text(value) for name, value in zip(names, row, strict=True)},
            dict(zip(names, row, strict=True)),
        )
        for row in zip(*table.values(), strict=True)
    ]
    rows = [tuple(level.labels.values()) for level in levels]
    require(len({*rows}) == len(rows), field, "have no row twice", rows)
    return Axis(names, tuple(levels))


def _require_list(field: str, values: Any) -> None:
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    require(is_list and len(values) > 0, field, "be a list of values, or a table of them", values)


# ---- Choosing cells


def expanded(levels: Mapping[str, Any]) -> dict[str, str]:
    """Levels as they are called, whatever they were written as."""
    return {name: as_text(value) for name, value in levels.items()}


def selected(field: str, levels: Any, axes: Iterable[Axis]) -> dict[str, str]:
    """Levels of some axes, if there are such."""
    require(isinstance(levels, Mapping), field, "be a table of axes and levels", levels)
    known = {
        name: [level.labels[name] for level in axis.levels] for axis in axes for name in axis.names
    }
    found = expanded(levels)
    for name, label in found.items():
        if name not in known:
            raise unknown_name(f"axis in '{field}'", name, known)
        found[name] = _known_level(label, known[name])
        if found[name] not in known[name]:
            raise unknown_name(f"level of {name} in '{field}'", label, known[name])
    return found


def _known_level(label: str, known: Sequence[str]) -> str:
    """The level that is meant: 1 is 1.0, too."""
    try:
        same = [each for each in known if float(each) == float(label)]
    except ValueError:  # one of them is no number
        same = []
    return same[0] if same and label not in known else label


def matching(cells: Iterable[Cell], levels: Mapping[str, str]) -> list[Cell]:
    """The cells that have these levels."""
    return [cell for cell in cells if levels.items() <= cell.labels.items()]


# ---- Cells


def cells_of(
    axes: Sequence[Axis],
    base: Mapping[str, Any],
    computed: Mapping[str, str],
    exclude: Sequence[Mapping[str, Any]],
) -> tuple[Cell, ...]:
    """Every combination but those that are left out."""
    _check_names(axes, base, computed)
    left_out = [selected("exclude", levels, axes) for levels in exclude]
    varying = tuple(name for axis in axes if len(axis.levels) > 1 for name in axis.telling)
    # Names that a person gave to settings, and what is a name itself.
    groups = {name for axis in axes for name in axis.names if name not in _set_by(axis)}
    speaking = frozenset({"strategy", "task", *groups})
    cells = []
    for levels in itertools.product(*(axis.levels for axis in axes)):
        labels = {name: label for level in levels for name, label in level.labels.items()}
        if any(each.items() <= labels.items() for each in left_out):
            continue
        values = {name: value for level in levels for name, value in level.values.items()}
        names = _Names({**base, **values}, computed)
        cells.append(Cell(labels, names.fields(), varying, speaking))
    return tuple(cells)


def _check_names(
    axes: Sequence[Axis], base: Mapping[str, Any], computed: Mapping[str, str]
) -> None:
    """Every name is a field of a run, or is asked for by something."""
    for name in base:
        if name not in SPEC_FIELDS:
            raise unknown_name("field in [base]", name, SPEC_FIELDS)
    require("seed" not in base, "seed", "be left to 'seeds'", base.get("seed"))
    for name in ("task", "strategy"):
        sources = [*base, *computed, *(key for axis in axes for key in _set_by(axis))]
        require(name in sources, name, "be in [base] or an axis", None)
    for name in computed:
        taken = name in base or any(name in _set_by(axis) for axis in axes)
        require(not taken, f"computed.{name}", "be given once", computed[name])

    asked = _asked_for(axes, base, computed)
    for axis in axes:
        for name in {*axis.names, *_set_by(axis)}:
            is_group = name in axis.names and name not in _set_by(axis)
            if not is_group and name not in SPEC_FIELDS and name not in asked:
                hint = did_you_mean(name, SPEC_FIELDS)
                raise InvalidField(
                    f"'axes.{name}' must be a field of a run, or stand in a text or an expression "
                    f"as {{{name}}}; {hint}nothing asks for it"
                )
    for name in computed:
        rule = "be a field of a run, or be asked for"
        require(name in SPEC_FIELDS or name in asked, f"computed.{name}", rule, computed[name])


def _set_by(axis: Axis) -> set[str]:
    return {name for level in axis.levels for name in level.values}


def _asked_for(
    axes: Sequence[Axis], base: Mapping[str, Any], computed: Mapping[str, str]
) -> set[str]:
    values = [
        *base.values(),
        *(v for axis in axes for lv in axis.levels for v in lv.values.values()),
    ]
    asked: set[str] = set()
    for text in values:
        if isinstance(text, str):
            asked |= names_in_text(text)
    for name, text in computed.items():
        asked |= names_in_expression(f"computed.{name}", text)
    return asked


class _Names:
    """The values of all names in one cell, each worked out when it is asked for."""

    def __init__(self, given: Mapping[str, Any], computed: Mapping[str, str]) -> None:
        self._given = given
        self._computed = computed
        self._known: dict[str, Any] = {}
        self._under_way: list[str] = []

    def fields(self) -> dict[str, Any]:
        """All that are fields of a run."""
        names = [*self._given, *self._computed]
        return {name: self[name] for name in names if name in SPEC_FIELDS}

    def __getitem__(self, name: str) -> Any:
        if name in self._known:
            return self._known[name]
        if name in self._under_way:
            circle = " → ".join([*self._under_way[self._under_way.index(name) :], name])
            raise SpecError(f"circular values: {circle}")
        self._under_way.append(name)
        self._known[name] = self._worked_out(name)
        self._under_way.pop()
        return self._known[name]

    def _worked_out(self, name: str) -> Any:
        if name in self._computed:
            return evaluated(f"computed.{name}", self._computed[name], self.__getitem__)
        if name not in self._given:
            raise unknown_name("value", name, [*self._given, *self._computed])
        value = self._given[name]
        if not isinstance(value, str):
            return value
        inside = names_in_text(value)
        if len(inside) == 1 and value.strip() == f"{{{min(inside)}}}":
            return self[min(inside)]  # the value itself, not its text
        return filled_in(value, lambda each: shown_in_text(self[each]))


def shown_in_text(value: Any) -> str:
    """A value within a longer text."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value)) if abs(value) < 2**53 else shown(value)
    return as_text(value)
