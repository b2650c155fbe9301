"""Curves in a terminal, drawn with the dots of braille: eight to a character."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.text import Text

DOTS_ACROSS, DOTS_DOWN = 2, 4  # of one character
BRAILLE = 0x2800
# The bit of each dot of a character, by row and column.
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
POINT = "•"
COLUMNS_PER_POINT = 4


@dataclass(frozen=True)
class Curve:
    """Points by x; None where there is no value. Its points are joined, or marked one by one."""

    name: str
    points: Sequence[tuple[float, float | None]]
    style: str = ""
    is_joined: bool = True

    @property
    def known(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if y is not None and math.isfinite(y)]


@dataclass
class _Area:
    """Characters of a chart, addressed by dots, with their styles."""

    columns: int
    rows: int
    bits: dict[tuple[int, int], int] = field(default_factory=dict)
    marks: dict[tuple[int, int], str] = field(default_factory=dict)
    styles: dict[tuple[int, int], str] = field(default_factory=dict)

    def dot(self, x: int, y: int, style: str) -> None:
        cell = (x // DOTS_ACROSS, y // DOTS_DOWN)
        bit = BITS[y % DOTS_DOWN][x % DOTS_ACROSS]
        self.bits[cell] = self.bits.get(cell, 0) | bit
        self.styles[cell] = style

    def mark(self, x: int, y: int, style: str) -> None:
        cell = (x // DOTS_ACROSS, y // DOTS_DOWN)
        self.marks[cell] = POINT
        self.styles[cell] = style

    def has_line_at(self, x: int, y: int) -> bool:
        return (x // DOTS_ACROSS, y // DOTS_DOWN) in self.bits

    def character(self, cell: tuple[int, int]) -> str:
        bits = self.bits.get(cell, 0)
        return self.marks.get(cell, chr(BRAILLE | bits) if bits else " ")


def chart(
    curves: Sequence[Curve],
    columns: int,
    rows: int,
    x_name: str,
    show: Callable[[float], str],
    show_x: Callable[[float], str],
) -> Text:
    """The curves over one axis, named in a line above. `show` writes the values at the side,
    `show_x` those below.
    """
    known = [point for curve in curves for point in curve.known]
    if not known:
        return Text(f"{_names(curves).plain}: no look has a value")
    low, high = _range([y for _, y in known])
    left, right = _range([x for x, _ in known])

    labels = {0: show(high), rows // 2: show((low + high) / 2), rows - 1: show(low)}
    margin = max(map(len, labels.values()))
    area = _Area(max(8, columns - margin - 2), rows)
    across, down = area.columns * DOTS_ACROSS - 1, rows * DOTS_DOWN - 1
    for curve in sorted(curves, key=lambda each: not each.is_joined):  # lines first
        places = [
            (round((x - left) / (right - left) * across), round((high - y) / (high - low) * down))
            for x, y in curve.known
        ]
        _draw(area, curve, places)

    drawn = _names(curves)
    for row in range(rows):
        tick = "┤" if row in labels else "│"
        drawn.append(f"\n{labels.get(row, ''):>{margin}} {tick}")
        for column in range(area.columns):
            cell = (column, row)
            drawn.append(area.character(cell), style=area.styles.get(cell, ""))
    drawn.append(f"\n{'':>{margin}} └{'─' * area.columns}\n")
    drawn.append(_below(margin + 2, area.columns, show_x(left), x_name, show_x(right)))
    drawn.no_wrap = True
    return drawn


def _names(curves: Sequence[Curve]) -> Text:
    names = Text()
    for curve in curves:
        sign = "" if len(curves) == 1 else "⠤⠤ " if curve.is_joined else f"{POINT} "
        names.append(f"{'   ' if names else ''}{sign}{curve.name}", style=curve.style)
    return names


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From the least to the greatest; of equal ones a little around them."""
    low, high = min(values), max(values)
    room = 0.0 if high > low else (abs(low) or 1.0) / 2
    return low - room, high + room


def _draw(area: _Area, curve: Curve, places: Sequence[tuple[int, int]]) -> None:
    if not curve.is_joined or len(places) == 1:
        # Many points in a row would hide a line that they fall on.
        are_few = COLUMNS_PER_POINT * len(places) <= area.columns
        for x, y in places:
            if are_few or not area.has_line_at(x, y):
                area.mark(x, y, curve.style)
        return
    for (x, y), (next_x, next_y) in pairwise(places):
        count = max(abs(next_x - x), abs(next_y - y), 1)
        for index in range(count + 1):
            along = index / count
            area.dot(round(x + along * (next_x - x)), round(y + along * (next_y - y)), curve.style)


def _below(margin: int, columns: int, left: str, name: str, right: str) -> str:
    """The ends of the axis at their places, and its name between them."""
    room = columns - len(left) - len(right)
    return f"{'':{margin}}{left}{name:^{max(room, len(name) + 2)}}{right}"
