r"""The update rules of docstrings, which are written in Unicode, as LaTeX.

    typeset("x_i ← (1/w) Σ_k x_k", "LocalSGD")  # [r"x_i \leftarrow \frac{1}{w} \sum_k x_k"]

What a rule looks like:

    every `period` steps:   d = α(x_i − x̃);   x_i ← x_i − d      no lock
    at the end:             x ← √(a/b) · x̃

Two or more spaces divide a line into cells. A first cell that ends in a colon is a label; a line
that is indented further belongs to the label above it. A cell after one that ends in a comma or a
semicolon is one more formula; any other is a note. Letters are variables, words are text, and
`names_of_fields` are code. A character that is in none of the tables of `symbols` is an error.

Only what both MathJax, as GitHub uses it, and KaTeX know is written: no \operatorname, no \phantom.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from formulas import QUAD, Piece, TypesetError, joined, pieces_of


def typeset(rule: str, owner: str) -> list[str]:
    """The displayed formulas of a rule: one for each run of lines with labels, or without. `owner`
    is whose rule it is, for errors.
    """
    return [_laid_out(block) for block in _blocks(_rows(rule, owner))]


@dataclass(frozen=True)
class Row:
    """A line of a rule, as pieces."""

    label: list[Piece] | None  # None: the block has none; empty: that of the line above
    formulas: list[list[Piece]]
    note: list[Piece]


def _rows(rule: str, owner: str) -> list[Row]:
    lines = [line.rstrip() for line in rule.splitlines() if line.strip()]
    if not lines:
        raise TypesetError(f"{owner}: the rule is empty")
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    rows: list[Row] = []
    for line in lines:
        is_continued = line[margin] == " " and bool(rows) and rows[-1].label is not None
        label, cells = _cells(line.strip(), owner)
        if label is None and is_continued:
            label = []
        rows.append(_row(label, cells, owner))
    return rows


def _cells(line: str, owner: str) -> tuple[list[Piece] | None, list[str]]:
    """The label, if there is one, and what else stands in a line."""
    cells = re.split(r"\s{2,}", line)
    if len(cells) > 1 and cells[0].endswith(":"):
        return pieces_of(cells[0], owner), cells[1:]
    # A short label may have a single space after it: words alone, or a symbol.
    short = re.match(r"((?:[a-z]+(?: [a-z]+)*|[^\W\d_]):) (?=\S)", line)
    if short:
        return pieces_of(short[1], owner), re.split(r"\s{2,}", line[short.end() :])
    return None, cells


def _row(label: list[Piece] | None, cells: list[str], owner: str) -> Row:
    formulas = [cells[0]]
    while len(formulas) < len(cells) and formulas[-1][-1] in ",;":
        formulas.append(cells[len(formulas)])
    note = " ".join(cells[len(formulas) :])
    return Row(label, [pieces_of(each, owner) for each in formulas], pieces_of(note, owner))


def _blocks(rows: Sequence[Row]) -> list[list[Row]]:
    """Runs of rows that have labels, and that have none."""
    blocks: list[list[Row]] = []
    for row in rows:
        if not blocks or (blocks[-1][-1].label is None) != (row.label is None):
            blocks.append([])
        blocks[-1].append(row)
    return blocks


def _laid_out(rows: Sequence[Row]) -> str:
    """The rows below each other: labels, formulas aligned at their arrows, notes."""
    has_notes = sum(bool(row.note) for row in rows) > 1
    if not has_notes:
        rows = [_with_note_behind(row) for row in rows]
    if len(rows) == 1:
        label = [joined(rows[0].label), r"\enspace"] if rows[0].label else []
        return " ".join([*label, r" \quad ".join(map(_shown, rows[0].formulas))])

    in_columns = len({len(row.formulas) for row in rows}) == 1
    formulas = [row.formulas if in_columns else [_chained(row.formulas)] for row in rows]
    is_aligned = [all(map(_has_left_side, column)) for column in zip(*formulas, strict=True)]
    lines = []
    for row, chosen in zip(rows, formulas, strict=True):
        cells = [] if row.label is None else ["", joined(row.label)]
        for each, aligned in zip(chosen, is_aligned, strict=True):
            cells += _divided(each) if aligned else ["", _shown(each)]
        if has_notes:
            cells += ["", joined(row.note)]
        lines.append(re.sub("  +", " ", " & ".join(cells)).strip())
    body = " \\\\\n".join(lines)
    return f"\\begin{{aligned}}\n{body}\n\\end{{aligned}}"


def _with_note_behind(row: Row) -> Row:
    """With its note in the last formula, where it is the only one."""
    if not row.note:
        return row
    last = [*row.formulas[-1], Piece(r"\qquad", "operator"), *row.note]
    return Row(row.label, [*row.formulas[:-1], last], [])


def _chained(formulas: Sequence[list[Piece]]) -> list[Piece]:
    """Formulas as one, with wide spaces between them."""
    chain = list(formulas[0])
    for each in formulas[1:]:
        chain += [QUAD, *each]
    return chain


def _has_left_side(pieces: Sequence[Piece]) -> bool:
    """Whether something short stands before a relation: no more than one word."""
    roles = [piece.role for piece in pieces]
    return "relation" in roles and roles[: roles.index("relation")].count("text") <= 1


def _divided(pieces: Sequence[Piece]) -> list[str]:
    """What stands before the first relation, and the rest."""
    at = [piece.role for piece in pieces].index("relation")
    return [joined(pieces[:at]), _shown(pieces[at:])]


def _shown(pieces: Sequence[Piece]) -> str:
    """A whole formula; `x → a if p, b if q, else c` with a brace."""
    roles = [piece.role for piece in pieces]
    if "relation" not in roles:
        return joined(pieces)
    at = roles.index("relation") + 1
    end = len(pieces) - (roles[-1] == "punctuation")
    cases = _cases(pieces[at:end])
    if cases is None:
        return joined(_spread(pieces))
    return f"{joined(pieces[:at])} {cases}{joined(pieces[end:])}"


def _spread(pieces: Sequence[Piece]) -> list[Piece]:
    """With a wide space after a comma or semicolon that stands between two equations."""
    spread: list[Piece] = []
    parts = _split(pieces, ",;")
    for part, following in zip(parts, [*parts[1:], []], strict=True):
        spread += part
        if _is_equation(part) and _is_equation(following) and following[0] != QUAD:
            spread.append(QUAD)
    return spread


def _is_equation(pieces: Sequence[Piece]) -> bool:
    return any(piece.role == "relation" for piece in pieces)


def _cases(pieces: Sequence[Piece]) -> str | None:
    *conditions, last = _split(pieces, ",")
    conditions = [condition[:-1] for condition in conditions]
    is_else = bool(last) and (last[0].role, last[0].latex) == ("text", "else")
    if not conditions or not is_else:
        return None
    rows = []
    for condition in conditions:
        words = [piece.latex for piece in condition]
        if "if" not in words:
            return None
        at = words.index("if")
        rows.append(f"{joined(condition[:at])} & {joined(condition[at:])}")
    rows.append(rf"{joined(last[1:])} & \text{{else}}")
    return "\\begin{cases} " + r" \\ ".join(rows) + r" \end{cases}"


def _split(pieces: Sequence[Piece], marks: str) -> list[list[Piece]]:
    """Parts that end with one of the marks, but for the last."""
    parts: list[list[Piece]] = [[]]
    for piece in pieces:
        parts[-1].append(piece)
        if piece.role == "punctuation" and piece.latex in marks:
            parts.append([])
    return parts
