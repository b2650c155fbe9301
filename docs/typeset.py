r"""The update rules of docstrings, which are written in Unicode, as LaTeX.

    typeset("x_i ← (1/w) Σ_k x_k", "LocalSGD")  # [r"x_{i} \leftarrow \frac{1}{w}\sum_{k}x_{k}"]

What a rule looks like:

    every `period` steps:   d = α(x_i − x̃);   x_i ← x_i − d      no lock
    at the end:             x ← √(a/b) · x̃

Two or more spaces divide a line into cells. A first cell that ends in a colon is a label; a line
that is indented further belongs to the label above it. A cell after one that ends in a comma or a
semicolon is one more formula; any other is a note. Letters are variables, words are text, and
`names_of_fields` are code. A character that is in none of the tables below is an error.

Only what both MathJax, as GitHub uses it, and KaTeX know is written: no \operatorname, no \phantom.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

LETTERS = {
    "α": r"\alpha",
    "β": r"\beta",
    "γ": r"\gamma",
    "δ": r"\delta",
    "ε": r"\varepsilon",
    "ζ": r"\zeta",
    "η": r"\eta",
    "θ": r"\theta",
    "ι": r"\iota",
    "κ": r"\kappa",
    "λ": r"\lambda",
    "μ": r"\mu",
    "ν": r"\nu",
    "ξ": r"\xi",
    "π": r"\pi",
    "ρ": r"\rho",
    "σ": r"\sigma",
    "τ": r"\tau",
    "υ": r"\upsilon",
    "φ": r"\varphi",
    "χ": r"\chi",
    "ψ": r"\psi",
    "ω": r"\omega",
    "ϕ": r"\phi",
    "ϑ": r"\vartheta",
    "Γ": r"\Gamma",
    "Δ": r"\Delta",
    "Θ": r"\Theta",
    "Λ": r"\Lambda",
    "Ξ": r"\Xi",
    "Π": r"\Pi",
    "Φ": r"\Phi",
    "Ψ": r"\Psi",
    "Ω": r"\Omega",
    "ℓ": r"\ell",
}
ACCENTS = {
    "\u0302": r"\hat",
    "\u0303": r"\tilde",
    "\u0304": r"\bar",
    "\u0305": r"\bar",
    "\u0307": r"\dot",
}
RELATIONS = {
    "←": r"\leftarrow",
    "→": r"\to",
    "↦": r"\mapsto",
    "⇒": r"\Rightarrow",
    "=": "=",
    "≠": r"\neq",
    "<": "<",
    ">": ">",
    "≤": r"\leq",
    "≥": r"\geq",
    "≪": r"\ll",
    "≫": r"\gg",
    "≈": r"\approx",
    "≡": r"\equiv",
    "∼": r"\sim",
    "~": r"\sim",
    "∝": r"\propto",
    "∈": r"\in",
    "∉": r"\notin",
    "⊂": r"\subset",
    "⊆": r"\subseteq",
}
OPERATORS = {
    "+": "+",
    "−": "-",
    "-": "-",
    "±": r"\pm",
    "∓": r"\mp",
    "·": r"\cdot",
    "⋅": r"\cdot",
    "×": r"\times",
    "*": "*",
    "÷": r"\div",
    "⊙": r"\odot",
    "⊗": r"\otimes",
    "⊕": r"\oplus",
    "∘": r"\circ",
    "∪": r"\cup",
    "∩": r"\cap",
    "∖": r"\setminus",
    "∧": r"\wedge",
    "∨": r"\vee",
}
SIGNS = "+−-±∓"
SYMBOLS = {
    "…": r"\ldots",
    "∞": r"\infty",
    "∅": r"\emptyset",
    "∇": r"\nabla",
    "∂": r"\partial",
    "⊤": r"\top",
    "∀": r"\forall",
    "∃": r"\exists",
    "ℝ": r"\mathbb{R}",
    "𝔼": r"\mathbb{E}",
    "½": r"\tfrac{1}{2}",
    "%": r"\%",
    "'": "'",
    "′": "'",
}
SUMS = {"Σ": r"\sum", "∑": r"\sum", "∏": r"\prod", "∫": r"\int"}
PUNCTUATION = ",;:."
NAMED = {
    "argmin": r"\arg\min",
    "argmax": r"\arg\max",
    **{
        name: rf"\{name}"
        for name in ("min", "max", "log", "exp", "lim", "sup", "inf", "sin", "cos")
    },
}
WORD_OPERATORS = {"mod": r"\bmod"}

BRACKETS = {
    "(": ("(", ")]"),
    "[": ("[", ")]"),
    "{": (r"\{", "}"),
    "⌈": (r"\lceil", "⌉"),
    "⌊": (r"\lfloor", "⌋"),
    "⟨": (r"\langle", "⟩"),
    "|": (r"\lvert", "|"),
    "‖": (r"\lVert", "‖"),
}
CLOSING = {
    ")": ")",
    "]": "]",
    "}": r"\}",
    "⌉": r"\rceil",
    "⌋": r"\rfloor",
    "⟩": r"\rangle",
    "|": r"\rvert",
    "‖": r"\rVert",
}
TALL = (r"\frac", r"\sum", r"\prod", r"\int", r"\sqrt")

LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ᵢⱼₖₗₘₙₚₛₜ", "0123456789+-ijklmnpst", strict=True))
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁱⁿᵗ", "0123456789+-int", strict=True)) | {"ᵀ": r"\top"}

INDICES = set("ijklmnt")
# What may follow a variable called a, and never follows the article.
AFTER_A_VARIABLE = {
    *("and", "are", "at", "by", "else", "for", "from", "if", "in", "is", "mod", "of", "on", "or"),
    *("over", "per", "the", "to", "uniform", "where", "with"),
}

_LETTERS = "A-Za-z" + "".join(LETTERS)
_MARKS = "".join(ACCENTS)
TOKEN = re.compile(
    rf"""
      (?P<space>\s+)
    | `(?P<code>[^`]+)`
    | "(?P<quoted>[^"]*)"
    | (?P<setting>[A-Za-z]{{2,}}\w*=(?:"[^"]*"|\w+))         # mode="sync"; x = 1 is an equation
    | (?P<name>[A-Za-z]{{2,}}\d*(?:_[A-Za-z0-9]{{2,}})+)     # burn_in; neither x_read nor loss_i
    | (?P<word>[A-Za-z]{{2,}}\d*(?:[-'’][A-Za-z]+)*(?:['’](?=\s|$))?)
    | (?P<ending>(?<=[\w`])(?:['’]s|-[a-z]{{2,}})\b)          # of g's and `period`-th
    | (?P<letter>[{_LETTERS}][{_MARKS}]*)
    | (?P<index>(?<=[{_LETTERS}{_MARKS}])\d+)                # of c1
    | (?P<number>\d+(?:,\d{{3}})*(?:\.\d+)?)
    | _(?P<subscript>[A-Za-z0-9]+(?:_[A-Za-z0-9]+)*)
    | (?P<script>[_^])
    | (?P<lowered>[{"".join(LOWERED)}]+)
    | (?P<raised>[{"".join(RAISED)}]+)
    | (?P<symbol>.)
    """,
    re.VERBOSE,
)
KNOWN = {
    *RELATIONS,
    *OPERATORS,
    *SYMBOLS,
    *SUMS,
    *PUNCTUATION,
    *BRACKETS,
    *CLOSING,
    *"/√",
}


class TypesetError(ValueError):
    """A rule that cannot be typeset: the message names whose it is, and the character."""


def typeset(rule: str, owner: str) -> list[str]:
    """The displayed formulas of a rule: one for each run of lines with labels, or without. `owner`
    is whose rule it is, for errors.
    """
    return [_laid_out(block) for block in _blocks(_rows(rule, owner))]


def formula(text: str, owner: str) -> str:
    """One formula, for a line of text."""
    return _joined(_pieces(text, owner))


# ---- From characters to pieces


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    is_spaced: bool  # whether a space stands before it

    def is_one_of(self, symbols: str) -> bool:
        return self.kind == "symbol" and self.text in symbols


def _tokens(text: str, owner: str) -> list[Token]:
    # A letter and its accent in two characters; other symbols, such as ≠, stay whole.
    text = "".join(unicodedata.normalize("NFD", each) if each.isalpha() else each for each in text)
    tokens: list[Token] = []
    is_spaced = False
    for found in TOKEN.finditer(text):
        kind = found.lastgroup or "symbol"
        if kind == "space":
            is_spaced = True
            continue
        value = found[kind]
        if kind == "symbol" and value not in KNOWN:
            name = unicodedata.name(value, "no name")
            raise TypesetError(
                f"{owner}: no LaTeX is known for {value!r} (U+{ord(value):04X}, {name}) in "
                f"{text!r}; give it some in docs/typeset.py"
            )
        tokens.append(Token(kind, value, is_spaced))
        is_spaced = False
    return tokens


@dataclass(frozen=True)
class Piece:
    """A part of a formula. `role`: "text", whose LaTeX is still to be wrapped; "atom"; "function",
    around which TeX makes spaces itself; "sign"; "operator"; "relation"; "punctuation".
    """

    latex: str
    role: str
    is_spaced: bool = False
    inner: str | None = None  # what stands between the brackets, if it is all in a pair of them


QUAD = Piece(r"\quad", "operator")


def _pieces(text: str, owner: str) -> list[Piece]:
    parser = _Parser(_tokens(text, owner), text, owner)
    pieces = parser.sequence()
    if parser.rest:
        raise parser.error(f"{parser.rest[0].text!r} closes nothing")
    return pieces


@dataclass
class _Parser:
    rest: list[Token]
    text: str
    owner: str
    # In subscripts and superscripts a fraction is written with a slash.
    is_small: bool = field(default=False)

    def error(self, reason: str) -> TypesetError:
        return TypesetError(f"{self.owner}: {reason} in {self.text!r}")

    def sequence(self, closers: str = "") -> list[Piece]:
        """Pieces up to one of the closing brackets, or another one that fits nothing here."""
        pieces: list[Piece] = []
        while self.rest:
            token = self.rest[0]
            if token.is_one_of(closers) or token.is_one_of(")]}⌉⌋⟩"):
                break
            if token.is_one_of("/"):
                self._divide(pieces)
            else:
                pieces.append(self._piece())
        return pieces

    def _piece(self) -> Piece:
        token = self.rest[0]
        if token.kind == "word" and token.text in WORD_OPERATORS:
            self.rest.pop(0)
            return Piece(WORD_OPERATORS[token.text], "operator", token.is_spaced)
        if token.kind != "symbol":
            return self._factor()
        if token.text in PUNCTUATION:
            self.rest.pop(0)
            return Piece(token.text, "punctuation", token.is_spaced)
        if token.text in RELATIONS:
            self.rest.pop(0)
            return Piece(RELATIONS[token.text], "relation", token.is_spaced)
        if token.text == "|" and not self._is_closed_later():
            self.rest.pop(0)
            return Piece(r"\mid", "relation", token.is_spaced)
        if token.text in OPERATORS:
            self.rest.pop(0)
            if token.text in SIGNS and token.is_spaced and not self._is_space_next():
                return Piece(f"{{{OPERATORS[token.text]}}}", "sign", True)
            return Piece(OPERATORS[token.text], "operator", token.is_spaced)
        return self._factor()

    def _is_space_next(self) -> bool:
        return not self.rest or self.rest[0].is_spaced

    def _is_closed_later(self) -> bool:
        """Whether a bar is the first of two."""
        depth = 0
        for token in self.rest[1:]:
            if token.is_one_of("|") and depth == 0:
                return True
            depth += token.is_one_of("([{⌈⌊⟨") - token.is_one_of(")]}⌉⌋⟩")
            if depth < 0:
                return False
        return False

    # ---- What stands between two operators

    def _factor(self) -> Piece:
        """A letter, number, word, function or bracket, with its scripts and its arguments."""
        if not self.rest:
            raise self.error("something is missing at the end")
        token = self.rest.pop(0)
        if token.kind == "ending":
            return Piece(token.text, "text", token.is_spaced)
        if token.kind == "symbol" and token.text in BRACKETS:
            return self._with_scripts(self._bracketed(token))
        if token.is_one_of("√"):
            under = self._factor()
            return Piece(rf"\sqrt{{{_bare(under)}}}", "atom", token.is_spaced)

        if self._is_prose(token):
            return Piece(token.text, "text", token.is_spaced)

        piece = self._with_scripts(Piece(*self._base(token), token.is_spaced))
        if token.kind in ("letter", "word") and self._is_attached(
            "([" + "|‖" * (token.text in NAMED)
        ):
            arguments = self._bracketed(self.rest.pop(0))
            piece = Piece(piece.latex + arguments.latex, "atom", token.is_spaced)
        return piece

    def _is_attached(self, opening: str) -> bool:
        """Whether one of these comes next, without a space."""
        return bool(self.rest) and not self.rest[0].is_spaced and self.rest[0].is_one_of(opening)

    def _is_prose(self, token: Token) -> bool:
        """Words are, unless they have a script or arguments."""
        if token.kind != "word" or token.text in NAMED:
            return token.text in ("a", "A") and self._is_article()
        has_script = bool(self.rest) and self.rest[0].kind in ("subscript", "script", "lowered")
        return not (has_script or self._is_attached("(["))

    def _is_article(self) -> bool:
        """Whether a letter a is followed by a word that makes it one."""
        if not self.rest or not self.rest[0].is_spaced or self.rest[0].kind != "word":
            return False
        return self.rest[0].text not in AFTER_A_VARIABLE

    def _base(self, token: Token) -> tuple[str, str]:
        """The LaTeX of a token alone, and its role."""
        if token.kind in ("code", "name", "quoted", "setting"):
            return self._code(token), "atom"
        if token.kind == "number":
            return token.text.replace(",", "{,}"), "atom"
        if token.kind == "letter":
            return _letter(token.text), "atom"
        if token.kind == "word":
            role = "function" if token.text in NAMED else "atom"
            return NAMED.get(token.text, rf"\mathrm{{{token.text}}}"), role
        if token.text in SUMS:
            return SUMS[token.text], "function"
        if token.text in SYMBOLS:
            return SYMBOLS[token.text], "atom"
        raise self.error(f"{token.text!r} does not belong where it stands")

    def _code(self, token: Token) -> str:
        """In the letters of a typewriter, but for quotes, which maths has none of."""
        shown = f'"{token.text}"' if token.kind == "quoted" else token.text
        if not re.fullmatch(r"[\w .,:=()/*+\"-]*", shown, re.ASCII):
            raise self.error(f"no LaTeX is known for the code {shown!r}")
        latex = ""
        for part in re.findall(r'"[^"]*"|[^"]+', shown):
            name = re.sub(r"([.,:=()/*+-])", r"{\1}", part.strip('"').replace("_", r"\_"))
            letters = rf"\mathtt{{{name.replace(' ', chr(92) + ' ')}}}"
            latex += rf"\text{{“}}{letters}\text{{”}}" if part.startswith('"') else letters
        return latex

    def _with_scripts(self, piece: Piece) -> Piece:
        below: list[str] = []
        above: list[str] = []
        while self.rest and not self.rest[0].is_spaced:
            token = self.rest[0]
            if token.kind not in ("subscript", "index", "lowered", "raised", "script"):
                break
            self.rest.pop(0)
            if token.kind == "subscript":
                below.append(_subscript(token.text))
            elif token.kind == "index":
                below.append(token.text)
            elif token.kind == "lowered":
                below.append("".join(LOWERED[each] for each in token.text))
            elif token.kind == "raised":
                above.append("".join(RAISED[each] for each in token.text))
            else:
                (below if token.text == "_" else above).append(self._script())

        if not below and not above:
            return piece
        latex = piece.latex + _scripted("_", below) + _scripted("^", above)
        return Piece(latex, piece.role, piece.is_spaced)

    def _script(self) -> str:
        """What follows _ or ^: something in braces or parentheses, or a single factor."""
        outside, self.is_small = self.is_small, True
        if self._is_attached("{"):
            self.rest.pop(0)
            script = _joined(self.sequence("}"))
            self._close("}")
        else:
            sign = OPERATORS[self.rest.pop(0).text] if self._is_attached(SIGNS) else ""
            rest = self.rest.pop(0).text if self._is_attached("*") else _bare(self._factor())
            script = sign + rest
        self.is_small = outside
        return script

    def _bracketed(self, opening: Token) -> Piece:
        left, closers = BRACKETS[opening.text]
        inside = self.sequence(closers)
        right = CLOSING[self._close(closers)]
        inner = _joined(inside)
        is_fraction = len(inside) == 1 and inner.startswith(r"\frac")
        if opening.text == "(" and is_fraction and self._is_coefficient():
            return Piece(inner, "atom", opening.is_spaced)

        space = " " if left.startswith("\\l") and inner[:1].isalpha() else ""
        latex = f"{left}{space}{inner}{right}"
        if any(each in inner for each in TALL):
            latex = rf"\left{left}{space}{inner}\right{right}"
        return Piece(latex, "atom", opening.is_spaced, inner if opening.text == "(" else None)

    def _is_coefficient(self) -> bool:
        """Whether what comes is what a fraction in parentheses multiplies."""
        if not self.rest:
            return False
        token = self.rest[0]
        is_symbol = token.kind == "symbol" and token.text not in (*SUMS, *BRACKETS, "√", "·")
        return not is_symbol and token.kind not in ("word", "script", "raised")

    def _close(self, closers: str) -> str:
        if not self.rest or not self.rest[0].is_one_of(closers):
            raise self.error(f"a bracket is not closed by {' or '.join(map(repr, closers))}")
        return self.rest.pop(0).text

    def _divide(self, pieces: list[Piece]) -> None:
        """Take the numerator from the end of the pieces and put a fraction there."""
        slash = self.rest.pop(0)
        if not pieces or pieces[-1].role in ("operator", "relation", "punctuation"):
            raise self.error("'/' has nothing above it")
        is_between_words = pieces[-1].role == "text" and not slash.is_spaced
        if is_between_words and self.rest and self.rest[0].kind == "word":
            pieces.append(Piece("/", "text"))
            return

        above = [pieces.pop()]
        # With a space before it the slash divides the whole product, η_0 F_j / (η_j F_0); with none
        # what has none either, as in t ησ/2.
        while pieces and pieces[-1].role == "atom" and (slash.is_spaced or not above[0].is_spaced):
            above.insert(0, pieces.pop())
        below = self._factor()
        latex = rf"\frac{{{_over(above)}}}{{{_bare(below)}}}"
        if self.is_small:
            latex = f"{_joined(above)}/{below.latex}"
        pieces.append(Piece(latex, "atom", above[0].is_spaced))


def _scripted(mark: str, scripts: Sequence[str]) -> str:
    script = ",".join(scripts)
    return (mark + script if len(script) == 1 else f"{mark}{{{script}}}") if scripts else ""


def _over(pieces: Sequence[Piece]) -> str:
    return _bare(pieces[0]) if len(pieces) == 1 else _joined(pieces)


def _bare(piece: Piece) -> str:
    """Without the parentheses around all of it."""
    if piece.inner is not None:
        return piece.inner
    return _text(piece.latex) if piece.role == "text" else piece.latex


def _letter(text: str) -> str:
    """A variable, with its accents: x, α, x̃."""
    latex = LETTERS.get(text[0], text[0])
    for mark in text[1:]:
        latex = rf"{ACCENTS[mark]}{{{latex}}}"
    return latex


def _subscript(name: str) -> str:
    """An index, ij, is set as variables; read_by_i and push as words."""
    if name in NAMED:
        return NAMED[name]
    if len(name) == 1 or name.isdigit() or set(name) <= INDICES:
        return name
    return _text(name.replace("_", " "))


def _text(words: str) -> str:
    return rf"\text{{{words}}}"


# ---- From pieces to a formula


def _joined(pieces: Sequence[Piece]) -> str:
    """LaTeX of pieces in a row."""
    latex = ""
    index = 0
    while index < len(pieces):
        piece = pieces[index]
        before = pieces[index - 1] if index else None
        if piece.role == "text":
            end = _end_of_text(pieces, index)
            after = pieces[end] if end < len(pieces) else None
            latex = _appended(latex, _text(_phrase(pieces[index:end], before, after)))
            index = end
            continue
        if piece.role in ("operator", "relation"):
            latex += f" {piece.latex} "
        elif piece.role == "punctuation":
            latex += _punctuation(piece, pieces[index + 1 : index + 2])
        else:
            is_product = before is not None and before.role == piece.role == "atom"
            space = (r"\, " if is_product else " ") if piece.is_spaced else ""
            latex = _appended(latex + space, piece.latex)
        index += 1
    return re.sub("  +", " ", latex).strip()


def _appended(latex: str, more: str) -> str:
    """A space keeps the name of a command from the letters that follow."""
    is_run_together = re.search(r"\\[A-Za-z]+$", latex) and more[:1].isalpha()
    return f"{latex} {more}" if is_run_together else latex + more


def _punctuation(piece: Piece, following: Sequence[Piece]) -> str:
    if piece.latex == ":":
        return r"\colon "
    is_before_maths = following and following[0].is_spaced and following[0].role != "text"
    return f"{piece.latex} " if is_before_maths else piece.latex


def _end_of_text(pieces: Sequence[Piece], start: int) -> int:
    """Where words end, with the punctuation that follows them."""
    end = start
    while end < len(pieces) and pieces[end].role in ("text", "punctuation"):
        end += 1
    return end


def _phrase(pieces: Sequence[Piece], before: Piece | None, after: Piece | None) -> str:
    """Words, with the spaces that TeX would not make between them and the maths around."""
    words = "".join((" " if piece.is_spaced else "") + piece.latex for piece in pieces)
    is_after_maths = before is not None and before.role not in ("operator", "relation")
    if not is_after_maths:
        words = words.removeprefix(" ")
    is_before_maths = after is not None and after.is_spaced
    needs_space = after is not None and after.role not in ("operator", "relation")
    return words + " " if is_before_maths and needs_space else words


# ---- From lines to a display


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
        return _pieces(cells[0], owner), cells[1:]
    # A short label may have a single space after it: words alone, or a symbol.
    short = re.match(r"((?:[a-z]+(?: [a-z]+)*|[^\W\d_]):) (?=\S)", line)
    if short:
        return _pieces(short[1], owner), re.split(r"\s{2,}", line[short.end() :])
    return None, cells


def _row(label: list[Piece] | None, cells: list[str], owner: str) -> Row:
    formulas = [cells[0]]
    while len(formulas) < len(cells) and formulas[-1][-1] in ",;":
        formulas.append(cells[len(formulas)])
    note = " ".join(cells[len(formulas) :])
    return Row(label, [_pieces(each, owner) for each in formulas], _pieces(note, owner))


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
        label = [_joined(rows[0].label), r"\enspace"] if rows[0].label else []
        return " ".join([*label, r" \quad ".join(map(_shown, rows[0].formulas))])

    in_columns = len({len(row.formulas) for row in rows}) == 1
    formulas = [row.formulas if in_columns else [_chained(row.formulas)] for row in rows]
    is_aligned = [all(map(_has_left_side, column)) for column in zip(*formulas, strict=True)]
    lines = []
    for row, chosen in zip(rows, formulas, strict=True):
        cells = [] if row.label is None else ["", _joined(row.label)]
        for each, aligned in zip(chosen, is_aligned, strict=True):
            cells += _divided(each) if aligned else ["", _shown(each)]
        if has_notes:
            cells += ["", _joined(row.note)]
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
    return [_joined(pieces[:at]), _shown(pieces[at:])]


def _shown(pieces: Sequence[Piece]) -> str:
    """A whole formula; `x → a if p, b if q, else c` with a brace."""
    roles = [piece.role for piece in pieces]
    if "relation" not in roles:
        return _joined(pieces)
    at = roles.index("relation") + 1
    end = len(pieces) - (roles[-1] == "punctuation")
    cases = _cases(pieces[at:end])
    if cases is None:
        return _joined(_spread(pieces))
    return f"{_joined(pieces[:at])} {cases}{_joined(pieces[end:])}"


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
        rows.append(f"{_joined(condition[:at])} & {_joined(condition[at:])}")
    rows.append(rf"{_joined(last[1:])} & \text{{else}}")
    return "\\begin{cases} " + r" \\ ".join(rows) + r" \end{cases}"


def _split(pieces: Sequence[Piece], marks: str) -> list[list[Piece]]:
    """Parts that end with one of the marks, but for the last."""
    parts: list[list[Piece]] = [[]]
    for piece in pieces:
        parts[-1].append(piece)
        if piece.role == "punctuation" and piece.latex in marks:
            parts.append([])
    return parts
