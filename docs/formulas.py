"""One formula, written in Unicode, as LaTeX: characters become tokens, tokens become pieces, and
pieces are joined with the spaces that LaTeX needs.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from symbols import (
    ACCENTS,
    AFTER_A_VARIABLE,
    BRACKETS,
    CLOSING,
    INDICES,
    KNOWN,
    LETTERS,
    LOWERED,
    NAMED,
    OPERATORS,
    PUNCTUATION,
    RAISED,
    RELATIONS,
    SIGNS,
    SUMS,
    SYMBOLS,
    TALL,
    WORD_OPERATORS,
)

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


class TypesetError(ValueError):
    """A rule that cannot be typeset: the message names whose it is, and the character."""


def formula(text: str, owner: str) -> str:
    """One formula, for a line of text."""
    return joined(pieces_of(text, owner))


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
                f"{text!r}; give it some in docs/symbols.py"
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


def pieces_of(text: str, owner: str) -> list[Piece]:
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
            script = joined(self.sequence("}"))
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
        inner = joined(inside)
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
            latex = f"{joined(above)}/{below.latex}"
        pieces.append(Piece(latex, "atom", above[0].is_spaced))


def _scripted(mark: str, scripts: Sequence[str]) -> str:
    script = ",".join(scripts)
    return (mark + script if len(script) == 1 else f"{mark}{{{script}}}") if scripts else ""


def _over(pieces: Sequence[Piece]) -> str:
    return _bare(pieces[0]) if len(pieces) == 1 else joined(pieces)


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


def joined(pieces: Sequence[Piece]) -> str:
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
