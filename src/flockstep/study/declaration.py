"""`Study`: a question, declared as a grid of runs with their seeds, comparisons and claims."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flockstep.errors import FlockstepError, InvalidField, SpecError, unknown_name
from flockstep.fields import (
    require,
    require_choice,
    require_flag,
    require_integer,
    require_number,
    require_path,
)
from flockstep.randomness import require_seed
from flockstep.study.cells import (
    Axis,
    Cell,
    as_text,
    axes_of,
    cells_of,
    expanded,
    matching,
    selected,
)
from flockstep.study.metrics import default_direction, is_cost, require_metric
from flockstep.study.tuning import Tuning
from flockstep.tasks import Task

if TYPE_CHECKING:
    from flockstep.study.outcome import Outcome

DIRECTIONS = ("higher", "lower")
TESTS = ("welch", "paired")
EXPECTATIONS = ("greater", "less", "better", "worse", "equal")
BUDGETS = ("epochs", "samples", "steps", "seconds", "bytes")
PUBLISHED_BY = ("difference", "value")
TAILS = ("greater", "less", "two-sided")
UNITS = {"": 1.0, "%": 0.01}
SINGULAR = {
    "hypotheses": "hypothesis",
    "published": "published figure",
    "printed_tests": "printed test",
}
DEFAULT_SEEDS = 5


def _as_labels(declared: Any, *names: str) -> None:
    """Levels as they are called, whatever they were written as."""
    for name in names:
        levels = getattr(declared, name)
        require(isinstance(levels, Mapping), name, "be a table of axes and levels", levels)
        object.__setattr__(declared, name, expanded(levels))


@dataclass(frozen=True)
class Hypothesis:
    """What is expected of some cells against others.

    Fields:
        cell: which cells, by the levels of some axes; of the other axes, each level in turn.
        expect: "greater", "less", "better", "worse", or "equal" within the margin.
        against: which levels the other side has instead; none: those of the baseline.
        than: where given, it is about differences: that of the cell to `against` is expected to be
            "greater" than the same difference at these levels. Differences are taken seed by seed.
        margin: for "equal", in the metric's unit; none: the study's.
        claim: the same in words.
        source: where it was published, if it was.
    """

    cell: Mapping[str, Any]
    expect: str
    against: Mapping[str, Any] = field(default_factory=dict)
    than: Mapping[str, Any] = field(default_factory=dict)
    margin: float | None = None
    claim: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        _as_labels(self, "cell", "against", "than")
        require_choice("expect", self.expect, EXPECTATIONS)
        if self.margin is not None:
            require_number("margin", self.margin, above=0, finite=True)


@dataclass(frozen=True)
class Published:
    """A figure that a paper printed.

    Fields:
        cell: the one cell that it is of.
        mean: as printed, in `unit`.
        deviation: the sample deviation over the paper's runs, if it says so.
        n: how many runs that were.
        unit: "%" for figures of which ours are shares from 0 to 1; else "".
        source: table, figure or page.
    """

    cell: Mapping[str, Any]
    mean: float
    deviation: float | None = None
    n: int | None = None
    unit: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        _as_labels(self, "cell")
        require_number("mean", self.mean, finite=True)
        if self.deviation is not None:
            require_number("deviation", self.deviation, at_least=0, finite=True)
        if self.n is not None:
            require_integer("n", self.n, 1 if self.deviation is None else 2)
        require_choice("unit", self.unit, UNITS)

    def in_our_unit(self, value: float) -> float:
        return value * UNITS[self.unit]


@dataclass(frozen=True)
class PrintedTest:
    """A test that a paper printed, or what it says of significance: `fs.retest` does it again.

    Where several are about the same two cells, the one that names more levels counts.

    Fields:
        cell: which cells, by the levels of some axes; {} stands for all.
        against: which levels the other side has instead; none: those of the baseline.
        p: as printed.
        significant: the verdict; none: whether p is below the study's alpha.
        tail: "greater", "less" or "two-sided"; none where the paper does not say.
        difference: as printed, in `unit`, where the figures of both sides were not.
        n: the runs on each side, beside a difference.
        unit: of the difference: "%", or "".
        source: table, figure or page.
    """

    cell: Mapping[str, Any]
    against: Mapping[str, Any] = field(default_factory=dict)
    p: float | None = None
    significant: bool | None = None
    tail: str | None = None
    difference: float | None = None
    n: int | None = None
    unit: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        _as_labels(self, "cell", "against")
        is_said = self.p is not None or self.significant is not None
        require(is_said, "p", "be given, or 'significant'", None)
        if self.p is not None:
            require_number("p", self.p, at_least=0, at_most=1)
        if self.significant is not None:
            require_flag("significant", self.significant)
        if self.tail is not None:
            require_choice("tail", self.tail, TAILS)
        if self.difference is not None:
            require_number("difference", self.difference, finite=True)
        if self.n is not None:
            require_integer("n", self.n, 2)
        require_choice("unit", self.unit, UNITS)

    @property
    def is_of_one_pair(self) -> bool:
        """Whether it has figures, which are of two cells only."""
        return self.p is not None or self.difference is not None


@dataclass(frozen=True)
class Study:
    """A grid of runs, repeated over seeds, with the comparisons that it is made for.

    Fields:
        question: in words.
        base: fields of an `fs.RunSpec` that all runs have. `{name}` in a text stands for the value
            of an axis or of something computed: "local_sgd(period={period})".
        axes: by name, a list of values, or a table of values with names. An axis that is called
            like a field of a run sets that field; another is for texts and expressions. A value
            that is itself a table sets several fields.
        zipped: tables of lists of one length, which go together.
        computed: by name, an expression of other names: "round(128 / workers)".
        exclude: cells that are left out, by the levels of some axes.
        seeds: how many, from 0, or a list of them.
        metric: a key of `result.metrics`, or "accuracy", "loss", "best_accuracy", "best_loss" of
            what looks are scored on.
        also_shown: other metrics, whose means stand beside it in tables; nothing is tested.
        direction: whether "higher" or "lower" is better.
        baseline: the levels that all others are compared with; the first of the strategies, or of
            the first axis, unless told.
        hypotheses: what is expected. `fs.Hypothesis`, or tables of its fields.
        budget: one of epochs, samples, steps, seconds and bytes, the same for all runs.
        target: a score; reports tell what it took to reach it, though runs go on behind it.
        margin: a difference that would not matter, in the metric's unit; for equivalence.
        test: "welch", or "paired" for runs that share their seeds.
        alpha: the rate of false alarms over a whole table.
        tune: gives every cell the same budget of learning rates, `fs.Tuning` or its table.
        published: figures that a paper printed. `fs.Published`, or tables of its fields.
        printed_tests: what it says of their significance. `fs.PrintedTest`, or tables.
        published_by: "difference": to the published figure of the baseline, which is what a scaled
            study can test; or "value".
        published_claim: what was published on the question, in a sentence or two.
        scaling: how the published setting was made smaller, and what can be seen at that size.
        full: what differs at the published scale, in the form of all this.
        name: how its folder is called; the name of its file unless told.
        path: the file that it is from, if it is from one.

    Example:
        study = fs.Study("Does a longer period cost accuracy?",
                         base={"task": "digits-mlp", "workers": 4, "epochs": 2,
                               "strategy": "local_sgd(period={period})"},
                         axes={"period": [1, 8]}, seeds=3)
        outcome = study.run()
        outcome.report("period.html")
    """

    question: str
    base: Mapping[str, Any]
    axes: Mapping[str, Any] = field(default_factory=dict)
    zipped: Sequence[Mapping[str, Any]] = ()
    computed: Mapping[str, str] = field(default_factory=dict)
    exclude: Sequence[Mapping[str, Any]] = ()
    seeds: int | Sequence[int] = DEFAULT_SEEDS
    metric: str = "test_accuracy"
    also_shown: Sequence[str] = ()
    direction: str | None = None
    baseline: Mapping[str, Any] | None = None
    hypotheses: Sequence[Hypothesis | Mapping[str, Any]] = ()
    budget: Mapping[str, float] | None = None
    target: float | None = None
    margin: float | None = None
    test: str = "welch"
    alpha: float = 0.05
    tune: Tuning | Mapping[str, Any] | None = None
    published: Sequence[Published | Mapping[str, Any]] = ()
    printed_tests: Sequence[PrintedTest | Mapping[str, Any]] = ()
    published_by: str = "difference"
    published_claim: str = ""
    scaling: str = ""
    full: Mapping[str, Any] = field(default_factory=dict)
    name: str = "study"
    path: Path | None = field(default=None, compare=False)

    # ---- Making one

    def __post_init__(self) -> None:
        for name in ("base", "axes", "computed", "full"):
            require(
                isinstance(getattr(self, name), Mapping), name, "be a table", getattr(self, name)
            )
        for name in ("base", "axes", "zipped", "exclude", "baseline", "budget", "full"):
            self._set(name, _plain(getattr(self, name)))
        self._set("hypotheses", _rows(Hypothesis, "hypotheses", self.hypotheses))
        self._set("published", _rows(Published, "published", self.published))
        self._set("printed_tests", _rows(PrintedTest, "printed_tests", self.printed_tests))
        if isinstance(self.tune, Mapping):
            self._set("tune", _row(Tuning, "tune", self.tune))
        self._check_values()
        self._check_cells()

    @classmethod
    def from_toml(cls, source: str | Path) -> Study:
        """The study in a file, or in a text of several lines. Errors name the file."""
        if isinstance(source, str) and "\n" in source:
            return cls._of_table(_parsed(source))
        require_path("source", source)
        path = Path(source)
        with _named(str(path)):
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise SpecError(f"cannot be read: {reason}") from error
            table = {"name": path.stem} | _parsed(text)
            rule = "be left out of the file"
            require("path" not in table, "path", rule, table.get("path"))
            return cls._of_table(table | {"path": path})

    @classmethod
    def _of_table(cls, table: Mapping[str, Any]) -> Study:
        study: Study = _row(cls, "study", table)
        return study

    def to_toml(self) -> str:
        """A text that `from_toml` gives back."""
        import tomli_w

        table = _given_fields(self)
        table.pop("path", None)
        return tomli_w.dumps(_as_toml(table), multiline_strings=True)

    def replace(self, **changes: Any) -> Study:
        """The same study but for these fields."""
        return dataclasses.replace(self, **changes)

    def at_full_scale(self) -> Study:
        """The study with the settings of `full`: base, axes and computed values are merged, all
        else is replaced.
        """
        require(bool(self.full), "full", "be in the study", None)
        table = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        for name, value in self.full.items():
            if name not in table or name in ("full", "name", "path"):
                known = set(table) - {"full", "name", "path"}
                raise unknown_name("field of [full]", name, known)
            merges = name in ("base", "axes", "computed") and isinstance(value, Mapping)
            table[name] = {**table[name], **value} if merges else value
        return Study(**table | {"full": {}, "name": f"{self.name}-full"})

    # ---- What it says

    @property
    def seed_list(self) -> tuple[int, ...]:
        seeds = self.seeds
        return tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)

    def with_seeds(self, count: int) -> Study:
        """The same study with so many seeds: the first of its own, and more behind them."""
        require_integer("seeds", count, 1)
        own = self.seed_list
        more = range(max(own) + 1, max(own) + 1 + max(0, count - len(own)))
        return self.replace(seeds=(*own[:count], *more))

    @property
    def claims(self) -> tuple[Hypothesis, ...]:
        """The hypotheses, once tables are read."""
        return tuple(each for each in self.hypotheses if isinstance(each, Hypothesis))

    @property
    def printed(self) -> tuple[Published, ...]:
        """The published figures, once tables are read."""
        return tuple(each for each in self.published if isinstance(each, Published))

    @property
    def tests_printed(self) -> tuple[PrintedTest, ...]:
        """The printed tests, once tables are read."""
        return tuple(each for each in self.printed_tests if isinstance(each, PrintedTest))

    @property
    def higher_is_better(self) -> bool:
        return (self.direction or default_direction(self.metric)) == "higher"

    @cached_property
    def all_axes(self) -> tuple[Axis, ...]:
        return axes_of(self.axes, self.zipped)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every combination of levels but the excluded ones, with the fields of its runs."""
        return cells_of(self.all_axes, self.base, self.computed, self.exclude)

    @cached_property
    def memory(self) -> dict[Any, Any]:
        """What was worked out of this study before."""
        return {}

    @property
    def baseline_levels(self) -> dict[str, str]:
        if self.baseline is not None:
            return selected("baseline", self.baseline, self.all_axes)
        if not self.all_axes:
            return {}
        by_name = {name: axis for axis in self.all_axes for name in axis.names}
        axis = by_name.get("strategy", self.all_axes[0])
        return dict(axis.levels[0].labels)

    def partner(self, cell: Cell, levels: Mapping[str, str]) -> Cell | None:
        """The cell that has these levels instead, and is as `cell` otherwise."""
        # Names of a zipped axis go together: who changes one, changes the axis.
        moved = {name for axis in self.all_axes if {*axis.names} & {*levels} for name in axis.names}
        kept = {name: label for name, label in cell.labels.items() if name not in moved}
        found = matching(self.cells, {**kept, **levels})
        return found[0] if found else None

    def run(self, **how: Any) -> Outcome:
        """Run what is missing, and give the outcome. See `fs.run_study`."""
        from flockstep.study.running import run_study

        return run_study(self, **how)

    # ---- Inside

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_values(self) -> None:
        for name in ("question", "name"):
            value = getattr(self, name)
            require(isinstance(value, str) and value.strip() != "", name, "be a text", value)
        for name in ("published_claim", "scaling"):
            value = getattr(self, name)
            require(isinstance(value, str), name, "be a text", value)
        is_file_name = not set(self.name) & set("/\\\0") and self.name not in (".", "..")
        require(is_file_name, "name", "be one that a folder can have", self.name)
        self._check_seeds()
        require_metric(self.metric)
        self._check_also_shown()
        if self.direction is not None:
            require_choice("direction", self.direction, DIRECTIONS)
        require_choice("test", self.test, TESTS)
        require_choice("published_by", self.published_by, PUBLISHED_BY)
        require_number("alpha", self.alpha, above=0, below=0.5)
        if self.target is not None:
            require_number("target", self.target, finite=True)
            is_given_twice = "target" in {*self.base, *self.axes, *self.computed}
            rule = "be given once: in [base], and runs end there, or for the study, and they go on"
            require(not is_given_twice, "target", rule, self.target)
        if self.margin is not None:
            require_number("margin", self.margin, above=0, finite=True)
        if self.budget is not None:
            self._check_budget(self.budget)

    def _check_also_shown(self) -> None:
        rule = "be a list of metrics that are means over runs"
        is_list = isinstance(self.also_shown, list | tuple)
        require(is_list, "also_shown", rule, self.also_shown)
        for name in self.also_shown:
            require_metric(name)
            require(not is_cost(name), "also_shown", rule, name)
        self._set("also_shown", tuple(self.also_shown))

    def _check_seeds(self) -> None:
        seeds = self.seeds
        if isinstance(seeds, int) and not isinstance(seeds, bool):
            require_integer("seeds", seeds, 1)
            return
        is_list = isinstance(seeds, Sequence) and not isinstance(seeds, str)
        require(is_list, "seeds", "be a number of seeds, or a list of them", seeds)
        listed = list(seeds) if isinstance(seeds, Sequence) else []
        require(bool(listed), "seeds", "have at least one", seeds)
        for seed in listed:
            require_seed(seed)
        require(len({*listed}) == len(listed), "seeds", "have none twice", listed)
        self._set("seeds", tuple(listed))

    def _check_budget(self, budget: Mapping[str, float]) -> None:
        require(isinstance(budget, Mapping), "budget", "be a table", budget)
        require(len(budget) == 1, "budget", f"have one of {', '.join(BUDGETS)}", dict(budget))
        for name, value in budget.items():
            if name not in BUDGETS:
                raise unknown_name("budget", name, BUDGETS)
            require_number(f"budget.{name}", value, above=0, finite=True)
            is_whole = name == "seconds" or float(value).is_integer()
            require(is_whole, f"budget.{name}", "be a whole number", value)
        for name in BUDGETS:
            is_set = name in self.base or name in self.axes or name in self.computed
            rule = f"be left to the budget, {dict(budget)}"
            require(not is_set, name, rule, self.base.get(name, self.axes.get(name)))

    def _check_cells(self) -> None:
        """Complain of whatever speaks of cells that do not exist."""
        require(bool(self.cells), "exclude", "leave a cell", self.exclude)
        labels = [cell.label for cell in self.cells]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        require(twice is None, "axes", "have levels that tell cells apart", twice)
        _ = self.baseline_levels
        known = self.cells
        for number, hypothesis in enumerate(self.claims, start=1):
            with _named(f"hypothesis {number}"):
                for pair in self.pairs_of(hypothesis):
                    self.pair_at(hypothesis, pair)
                rule = "be a direction: equality of costs to a target cannot be shown"
                is_equal_cost = hypothesis.expect == "equal" and is_cost(self.metric)
                require(not is_equal_cost, "expect", rule, hypothesis.expect)
                is_lacking = hypothesis.expect == "equal" and self.margin_of(hypothesis) is None
                rule = "be given, here or in the study, where 'equal' is expected"
                require(not is_lacking, "margin", rule, None)
        if self.full:
            with _named("[full]"):
                known = (*known, *self.at_full_scale().cells)
        for number, figure in enumerate(self.printed, start=1):
            with _named(f"published figure {number}"):
                found = matching(known, figure.cell)
                require(bool(found), "cell", "be one that exists", figure.cell)
                here = matching(self.cells, figure.cell)
                require(len(here) <= 1, "cell", f"be one cell, not {len(here)}", figure.cell)
        for number, test in enumerate(self.tests_printed, start=1):
            with _named(f"printed test {number}"):
                self._check_printed_test(test, known)
        self._check_published()

    def _check_printed_test(self, test: PrintedTest, known: Sequence[Cell]) -> None:
        for name, levels in (("cell", test.cell), ("against", test.against)):
            require(bool(matching(known, levels)), name, "be one that exists", levels)
        pairs = self.pairs_of_printed(test)
        rule = f"be one cell, not {len(pairs)}, where figures are printed"
        require(not test.is_of_one_pair or len(pairs) <= 1, "cell", rule, test.cell)
        rule = "be of another cell that exists"
        require(bool(pairs) or bool(self.full), "against", rule, test.against)

    def pairs_of_printed(self, test: PrintedTest) -> list[tuple[Cell, Cell]]:
        """The cells that a printed test is about, each with the one it was tested against; none
        where only the full setting has them.
        """
        against = dict(test.against) or self.baseline_levels
        others = [(cell, self.partner(cell, against)) for cell in matching(self.cells, test.cell)]
        return [(cell, other) for cell, other in others if other is not None and other is not cell]

    def _check_published(self) -> None:
        """Every printed figure gets a verdict: what that needs is there."""
        by_cell: dict[str, Published] = {}
        for figure in self.printed:
            for cell in self.cells_of_figure(figure):
                rule = f"have one figure of {cell.label}"
                require(cell.label not in by_cell, "published", rule, figure.cell)
                by_cell[cell.label] = figure
        if not by_cell:
            return
        rule = "be one that has a mean where figures were published"
        require(not is_cost(self.metric), "metric", rule, self.metric)
        if self.published_by == "value":
            require(self.margin is not None, "margin", "be given: how near is equal", None)
            return
        for label, figure in by_cell.items():
            (cell,) = [each for each in self.cells if each.label == label]
            other = self.partner(cell, self.baseline_levels)
            if other is None or other is cell:
                continue
            rule = f"have a figure of the baseline, {other.label}, or be compared by value"
            require(other.label in by_cell, "published", rule, figure.cell)
            is_equal = figure.mean == by_cell[other.label].mean
            rule = "be given where published figures are equal"
            require(self.margin is not None or not is_equal, "margin", rule, None)

    def cells_of_figure(self, figure: Published) -> list[Cell]:
        """The cell that a published figure is of; none where only the full setting has it."""
        return matching(self.cells, figure.cell)

    def margin_of(self, hypothesis: Hypothesis) -> float | None:
        return self.margin if hypothesis.margin is None else hypothesis.margin

    def pairs_of(self, hypothesis: Hypothesis) -> list[tuple[Cell, Cell]]:
        """The cells that it is about, each with the one it is compared with."""
        levels = selected("cell", hypothesis.cell, self.all_axes)
        against = selected("against", hypothesis.against, self.all_axes) or self.baseline_levels
        chosen = matching(self.cells, levels)
        require(bool(chosen), "cell", "be one that exists", levels)
        return [(cell, self._other("against", cell, against)) for cell in chosen]

    def pair_at(self, hypothesis: Hypothesis, pair: tuple[Cell, Cell]) -> tuple[Cell, Cell] | None:
        """The two cells at the levels of `than`; None for a hypothesis without them."""
        if not hypothesis.than:
            return None
        require(not is_cost(self.metric), "than", "be left out of costs to a target", self.metric)
        levels = selected("than", hypothesis.than, self.all_axes)
        one, other = (self._other("than", cell, levels) for cell in pair)
        return one, other

    def _other(self, field_name: str, cell: Cell, levels: Mapping[str, str]) -> Cell:
        """The cell with some other levels, which the field of a hypothesis names."""
        other = self.partner(cell, levels)
        if other is None:
            wanted = {**cell.labels, **levels}
            raise InvalidField(f"'{field_name}' must be a cell that exists (got {wanted})")
        require(other is not cell, field_name, "be another cell", dict(cell.labels))
        return other


def _parsed(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"not TOML: {error}") from error


def _rows(kind: Any, name: str, rows: Any) -> tuple[Any, ...]:
    """Several declared things, each given as itself or as the table of its fields."""
    is_list = isinstance(rows, Sequence) and not isinstance(rows, str)
    require(is_list, name, "be a list of tables", rows)
    singular = SINGULAR[name]
    return tuple(_row(kind, f"{singular} {number}", row) for number, row in enumerate(rows, 1))


def _row(kind: Any, name: str, row: Any) -> Any:
    if isinstance(row, kind):
        return row
    require(isinstance(row, Mapping), name, "be a table", row)
    known = {each.name: each for each in dataclasses.fields(kind)}
    needed = [each.name for each in known.values() if _default_of(each) is dataclasses.MISSING]
    with _named("" if name == "study" else name):
        for each in row:
            if each not in known:
                raise unknown_name("field", each, known)
        for each in needed:
            require(each in row, each, "be given", None)
        return kind(**row)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Errors inside begin with the name of what is wrong."""
    try:
        yield
    except FlockstepError as error:
        if not what:
            raise
        raise type(error)(f"{what}: {error}") from error


def _default_of(each: dataclasses.Field[Any]) -> Any:
    made: Callable[[], Any] | Any = each.default_factory
    return each.default if made is dataclasses.MISSING else made()


def _plain(value: Any) -> Any:
    """A value as a file would have it, so that studies compare: specs as texts, tuples as lists.
    What cannot be written stays as it is.
    """
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str | Task):
        return value
    try:
        return as_text(value)
    except SpecError:
        return value


def _given_fields(declared: Any) -> dict[str, Any]:
    """The fields of a study, or of a part of it, that differ from their defaults."""
    fields = dataclasses.fields(declared)
    values = {each.name: getattr(declared, each.name) for each in fields}
    given = {}
    for each in fields:
        value, default = values[each.name], _default_of(each)
        is_empty = isinstance(value, Sized) and not value and not default
        if value != default and not is_empty:
            given[each.name] = value
    return given


def _as_toml(value: Any) -> Any:
    """A value as TOML has it, which knows no none."""
    if isinstance(value, Hypothesis | Published | PrintedTest | Tuning):
        return _as_toml(_given_fields(value))
    if isinstance(value, Mapping):
        return {name: _as_toml(each) for name, each in value.items() if each is not None}
    if isinstance(value, tuple | list):
        return [_as_toml(each) for each in value]
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Task):
        raise SpecError(
            f"task {value.name!r} cannot be written as text: it was made in a script; "
            "put it in a module and name it 'package.module:task'"
        )
    return as_text(value)
