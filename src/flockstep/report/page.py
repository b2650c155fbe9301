"""A report as one HTML page that needs nothing else: no network, no server, no second file.

It knows views (tables, figures, texts, code) and sections of them, and nothing of what they report.
Tables are in the HTML, so that they are there without scripts; figures are drawn over them by
plotly.js, which travels in the page, compressed.

Colours of figures are names, as the page has a light and a dark scheme. Anywhere in the `data` and
`layout` of a figure

    "@0" … "@9"   is a colour of the series ("@10" is "@0" again),
    "@text" "@muted" "@grid" "@axis" "@page" "@surface" "@accent" "@good" "@bad"
                  is one of the page itself,
    "@3/20"       is either of them with an opacity of 20 %,

as long as it is the whole text. Fonts, grids, margins and the colours of traces without one are set
by the page; a layout says what is particular to its figure, such as the titles of its axes."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib
import json
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeAlias

from flockstep.errors import FlockstepError, InvalidField
from flockstep.fields import require, require_choice, require_integer, shown
from flockstep.folders import write_whole
from flockstep.units import shown_number

Cell: TypeAlias = str | int | float | None
Tone: TypeAlias = Literal["good", "bad", "neutral", "unknown"]
Traces: TypeAlias = Sequence[Mapping[str, Any]]

# Told apart with every kind of colour blindness, the first six best, and with a contrast of at
# least 3 to the background. Blue, orange, green, mauve, brown, sky, violet, grey, wine, pine.
COLOURS = (
    "#2f4b9a", "#e8480a", "#0a8a5c", "#a8509c", "#6b4800",
    "#2092d8", "#4b2478", "#65696f", "#841a40", "#184838",
)  # fmt: skip
DARK_COLOURS = (
    "#6897f6", "#fa7024", "#32d9a5", "#d392c7", "#efd257",
    "#bceaff", "#9a77c0", "#9da996", "#c16866", "#6b948b",
)  # fmt: skip
# Of the page itself: by name in its style sheet and, with an @, in figures.
SCHEME = {
    "page": "#ffffff",
    "surface": "#f4f5f7",
    "text": "#1b1f24",
    "muted": "#57606a",
    "grid": "#e2e5e9",
    "axis": "#7d8590",
    "accent": "#1f4e9c",
    "good": "#0b6b48",
    "bad": "#b3261e",
}
DARK_SCHEME = {
    "page": "#14171c",
    "surface": "#1d2128",
    "text": "#e6e9ed",
    "muted": "#a5adb8",
    "grid": "#2c323a",
    "axis": "#727b87",
    "accent": "#8fb5ff",
    "good": "#4fd1a1",
    "bad": "#ff8f85",
}

SIGNIFICANT_DIGITS = 6  # of the numbers in figures: more than a screen can show
MOST_DECIMALS = 6  # of the numbers in tables; smaller ones are written as 1.2e-09
MOST_BUTTONS = 5  # a switch of more choices is a list to select from
FIGURE_HEIGHT = 420  # pixels, of layouts that do not say it
KEY = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

# The mark and the word of a verdict: its colour alone tells nobody who does not see it.
TONES: dict[str, tuple[str, str]] = {
    "good": ("✓", "Good"),
    "bad": ("✗", "Bad"),
    "neutral": ("=", "Neutral"),
    "unknown": ("?", "Not known"),
}

# Runs before the first line is shown: else tables would flash up where figures are to be.
FIRST_SCRIPT = (
    'document.documentElement.classList.add("scripted");'
    'if("DecompressionStream" in window)document.documentElement.classList.add("draws")'
)


@dataclass(frozen=True)
class TableView:
    """Rows under named columns; the first column names the rows.

    Texts are shown as they are, numbers with the digits that count; the CSV file has all digits.

    Fields:
        note: a line below the table.
        key: its id in the page and its name in file names; made from the title if empty."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            rule = f"have a value for each of the {len(self.columns)} columns of {self.title!r}"
            require(len(row) == len(self.columns), "rows", rule, row)


@dataclass(frozen=True)
class Variant:
    """One of several contents of a figure that a switch chooses from: its name on the switch, the
    traces and the layout as plotly.js takes them, and the same as a table.
    """

    name: str
    data: Traces
    layout: Mapping[str, Any]
    table: TableView


@dataclass(frozen=True)
class FigureView:
    """A figure, and the table with what it shows.

    Fields:
        data, layout: as plotly.js takes them; see the module for colours. Numbers are rounded to
            six digits, so give dates as texts.
        caption: below the figure.
        alt: what there is to see, in words, for those who do not see it.
        key: as of a table.
        name: of this content on the switch, where there are variants.
        variants: what the switch shows instead.
        switch: what the switch chooses, such as "against" or "task".
        log_axes: "x", "y" or "xy": axes that have a button for a logarithmic scale."""

    title: str
    data: Traces
    layout: Mapping[str, Any]
    caption: str
    alt: str
    table: TableView
    key: str = ""
    name: str = ""
    variants: Sequence[Variant] = ()
    switch: str = "Show"
    log_axes: str = ""

    def __post_init__(self) -> None:
        require_choice("log_axes", self.log_axes, ("", "x", "y", "xy"))
        if self.variants:
            names = [variant.name for variant in self.contents]
            rule = f"be different texts, one for each content of {self.title!r}"
            require(all(names) and len(set(names)) == len(names), "name", rule, names)

    @classmethod
    def of(
        cls,
        title: str,
        contents: Sequence[Variant],
        caption: str,
        alt: str,
        key: str = "",
        switch: str = "Show",
        log_axes: str = "",
    ) -> FigureView:
        """A figure with several contents, of which the first is shown first."""
        require(len(contents) > 0, "contents", "be at least one", contents)
        first, *others = contents
        return cls(
            title,
            first.data,
            first.layout,
            caption,
            alt,
            first.table,
            key,
            first.name,
            others,
            switch,
            log_axes,
        )

    @property
    def contents(self) -> list[Variant]:
        """All that the figure can show, what it shows first in front."""
        return [Variant(self.name, self.data, self.layout, self.table), *self.variants]


@dataclass(frozen=True)
class TextView:
    """Paragraphs of plain text under a title."""

    title: str
    paragraphs: Sequence[str]
    key: str = ""


@dataclass(frozen=True)
class CodeView:
    """Lines to copy: a command, a file."""

    title: str
    text: str
    language: str = ""
    key: str = ""


@dataclass(frozen=True)
class VerdictView:
    """An answer in words. `word` stands beside its mark; by itself it is that of the tone."""

    text: str
    tone: Tone = "neutral"
    detail: str = ""
    word: str = ""

    def __post_init__(self) -> None:
        require_choice("tone", self.tone, TONES)


View: TypeAlias = TableView | FigureView | TextView | CodeView


@dataclass(frozen=True)
class Section:
    """A part of the page, with a line in its table of contents."""

    title: str
    views: Sequence[View]
    intro: str = ""


@dataclass(frozen=True)
class Page:
    """A whole report.

    Fields:
        question: what it answers.
        lead: facts in few words each, such as the task, how many runs, the date.
        verdicts: the answers, above all else.
        footer: the last line.
        renews_every: seconds after which the page loads itself again, while what it reports goes
            on; None: it is final."""

    title: str
    question: str = ""
    lead: Sequence[str] = ()
    verdicts: Sequence[VerdictView] = ()
    sections: Sequence[Section] = ()
    footer: str = ""
    renews_every: int | None = None

    def __post_init__(self) -> None:
        if self.renews_every is not None:
            require_integer("renews_every", self.renews_every, 1)


def write_page(page: Page, path: str | os.PathLike[str]) -> None:
    """Write the page to a file; all of it, or nothing."""
    html = render(page)
    try:
        write_whole(Path(path), html)
    except OSError as error:
        raise InvalidField(
            f"'path' must be a file that can be written (got {str(path)!r}: {error.strerror})"
        ) from error


def render(page: Page) -> str:
    """The page as HTML. The same page is the same text, always."""
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise _missing("jinja2") from error

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_asset("page.html.j2"))
    library, library_hash = _plotly()
    scripts = {"first_script": FIRST_SCRIPT, "script": _asset("page.js")}
    names = _Names(page)
    return template.render(
        page=page,
        name=_slug(page.title) or "report",
        sections=[_placed_section(section, names) for section in page.sections],
        tones=TONES,
        most_buttons=MOST_BUTTONS,
        period="" if page.renews_every is None else _period(page.renews_every),
        light=dict(_variables(COLOURS, SCHEME)),
        dark=dict(_variables(DARK_COLOURS, DARK_SCHEME)),
        hashes=[*map(_hash, scripts.values()), library_hash],
        style=Markup(_asset("page.css")),
        library=library,
        **{name: Markup(text) for name, text in scripts.items()},
    )


def _missing(library: str) -> FlockstepError:
    return FlockstepError(f"pages need {library}: pip install {library}")


def _asset(name: str) -> str:
    return files("flockstep.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _plotly() -> tuple[str, str]:
    """plotly.js, compressed and in base64, and the hash by which the page lets it run."""
    try:
        offline: Any = importlib.import_module("plotly.offline")
    except ImportError as error:
        raise _missing("plotly") from error
    source: str = offline.get_plotlyjs()
    packed = gzip.compress(source.encode(), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode(), _hash(source)


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _variables(colours: Sequence[str], scheme: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The variables of the style sheet: --0 … --9 and those of the page."""
    for index, colour in enumerate(colours):
        yield str(index), colour
    yield from scheme.items()


def _period(seconds: int) -> str:
    """`every minute`, `every 90 seconds`."""
    count, unit = (seconds // 60, "minute") if seconds % 60 == 0 else (seconds, "second")
    return f"every {unit}" if count == 1 else f"every {count} {unit}s"


# --- Keys: what a view is called in addresses and file names ---


def _slug(text: str) -> str:
    """Small letters and digits, with hyphens between words: fit for an id and a file's name."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain)[:60].strip("-")


class _Names:
    """Gives every part of a page a key, and regions a label, that no other part has.

    Keys that the caller gave stay as they are. The template makes more ids out of keys, with
    underscores, which no key has."""

    def __init__(self, page: Page) -> None:
        given = [key for key in _given_keys(page) if key]
        for key, count in Counter(given).items():
            rule = "be small letters, digits and single hyphens"
            require(KEY.fullmatch(key) is not None, "key", rule, key)
            require(count == 1, "key", f"be used once (it is used {count} times)", key)
        self._keys = set(given)
        self._labels: set[str] = set()

    def key(self, given: str, title: str) -> str:
        """The given key, or one like the title."""
        return given or _new_name(_slug(title) or "part", "-", self._keys)

    def label(self, text: str) -> str:
        return _new_name(text, ", ", self._labels)


def _new_name(stem: str, joint: str, taken: set[str]) -> str:
    """The stem, or the stem and the first number that make a name which is not taken."""
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}{joint}{number}"
    taken.add(name)
    return name


def _given_keys(page: Page) -> Iterator[str]:
    for section in page.sections:
        for view in section.views:
            yield view.key
            if isinstance(view, FigureView):
                yield from (content.table.key for content in view.contents)


# --- What the template is given: views with their keys, and all values as texts ---


@dataclass(frozen=True)
class _PlacedSection:
    key: str
    title: str
    intro: str
    views: list[_PlacedTable | _PlacedFigure | _PlacedText]


@dataclass(frozen=True)
class _PlacedText:
    key: str
    label: str
    view: TextView | CodeView
    kind: Literal["text", "code"]


@dataclass(frozen=True)
class _PlacedCell:
    """A cell as it is shown. `value` is what the CSV file has, None where that is the same."""

    text: str
    value: str | None


@dataclass(frozen=True)
class _PlacedTable:
    key: str
    label: str
    view: TableView
    are_numbers: list[bool]  # by column
    rows: list[tuple[_PlacedCell, ...]]
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class _PlacedContent:
    name: str
    json: Any  # Markup: safe in a script element
    table: _PlacedTable


@dataclass(frozen=True)
class _PlacedFigure:
    key: str
    view: FigureView
    contents: list[_PlacedContent]
    height: int
    kind: Literal["figure"] = "figure"


def _placed_section(section: Section, names: _Names) -> _PlacedSection:
    key = names.key("", section.title)
    views = [_placed_view(view, names) for view in section.views]
    return _PlacedSection(key, section.title, section.intro, views)


def _placed_view(view: View, names: _Names) -> _PlacedTable | _PlacedFigure | _PlacedText:
    key = names.key(view.key, view.title)
    if isinstance(view, TableView):
        return _placed_table(view, key, names)
    if isinstance(view, FigureView):
        contents = [_placed_content(content, key, names) for content in view.contents]
        height = view.layout.get("height") or FIGURE_HEIGHT
        return _PlacedFigure(key, view, contents, round(height))
    if isinstance(view, CodeView):
        return _PlacedText(key, names.label(f"Code: {view.title}"), view, "code")
    return _PlacedText(key, "", view, "text")


def _placed_content(content: Variant, figure_key: str, names: _Names) -> _PlacedContent:
    key = names.key(content.table.key, f"{figure_key} {content.name or 'table'}")
    layout = {name: value for name, value in content.layout.items() if name != "template"}
    json_text = _json({"data": content.data, "layout": layout})
    return _PlacedContent(content.name, json_text, _placed_table(content.table, key, names))


def _placed_table(table: TableView, key: str, names: _Names) -> _PlacedTable:
    columns = [_placed_column([row[i] for row in table.rows]) for i in range(len(table.columns))]
    are_numbers = [any(map(_is_number, cells)) for cells in zip(*table.rows, strict=True)]
    rows = list(zip(*columns, strict=True))
    label = names.label(f"Table: {table.title}")
    return _PlacedTable(key, label, table, are_numbers or [False] * len(columns), rows)


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _placed_column(cells: Sequence[Cell]) -> list[_PlacedCell]:
    """The cells of a column; its numbers have the same decimals where they are of a size."""
    numbers = [float(cell) for cell in cells if isinstance(cell, int | float)]
    decimals = _decimals([abs(number) for number in numbers if math.isfinite(number)])
    return [_placed_cell(cell, decimals) for cell in cells]


def _decimals(sizes: Sequence[float]) -> int | None:
    """How many decimals show four digits of the largest; None if the least would lose its own."""
    if all(size.is_integer() for size in sizes):
        return 0 if max(sizes, default=0) < 1e15 else None
    decimals = max(0, 3 - math.floor(math.log10(max(sizes))))
    least = min(size for size in sizes if size)
    if least < 10 ** (1 - decimals) or decimals > MOST_DECIMALS:
        return None
    while decimals and all(f"{size:.{decimals}f}".endswith("0") for size in sizes):
        decimals -= 1  # 0.5 and 0.25 need no four
    return decimals


def _placed_cell(cell: Cell, decimals: int | None) -> _PlacedCell:
    if cell is None:
        return _PlacedCell("–", "")
    if isinstance(cell, bool):
        return _PlacedCell("yes" if cell else "no", None)
    if isinstance(cell, str):
        return _PlacedCell(cell, None)
    exact = str(int(cell)) if isinstance(cell, int) else repr(float(cell))
    text = _shown(cell, decimals)
    return _PlacedCell(text, None if text == exact else exact)


def _shown(number: float, decimals: int | None) -> str:
    if not math.isfinite(number):
        return "NaN" if math.isnan(number) else "∞" if number > 0 else "-∞"
    if decimals is not None:
        return f"{number:,.{decimals}f}"
    return shown_number(number) if abs(number) < 1e15 else f"{number:.4g}"


# --- Figures as JSON ---


def _json(value: object) -> Any:
    """Compact JSON that ends no script element and begins no other."""
    from markupsafe import Markup

    text = json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _plain(value: Any) -> Any:
    """Nothing but what JSON has: numbers rounded, those that are none as null."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return _rounded(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # arrays
        return _plain(value.tolist())
    raise InvalidField(f"'data' must be texts, numbers, lists and mappings (got {shown(value)})")


def _rounded(number: float) -> float | int | None:
    """Six digits, and no point where there is nothing behind it."""
    if not math.isfinite(number):
        return None
    rounded = float(f"{number:.{SIGNIFICANT_DIGITS}g}")
    is_short = rounded.is_integer() and abs(rounded) < 1e15
    return int(rounded) if is_short else rounded
