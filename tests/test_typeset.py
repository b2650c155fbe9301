"""Rules in Unicode become LaTeX that says the same, or an error that says whose rule is wrong."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import symbols
import typeset
from formulas import TypesetError, formula

FORMULAS = {
    # letters, accents, scripts
    "αβ ε φ ϕ ΔΩ": r"\alpha\beta\, \varepsilon\, \varphi\, \phi\, \Delta\Omega",
    "x̃ x̄ x̂ ẋ": r"\tilde{x}\, \bar{x}\, \hat{x}\, \dot{x}",
    "x_i x̃_i τ_0 W_ij": r"x_i\, \tilde{x}_i\, \tau_0\, W_{ij}",
    "x_{j−1} x_{t+1/2}": r"x_{j - 1}\, x_{t + 1/2}",
    "x_read x_at_start m_max m_min": r"x_{\text{read}}\, x_{\text{at start}}\, m_{\max}\, m_{\min}",
    "c1·r1_i": r"c_1 \cdot r_{1,i}",
    "x₀ log₂ T² Mᵀ x⁻¹": r"x_0 \log_2 T^2\, M^{\top}\, x^{-1}",
    "2^i 2^(t mod k) e^−x x_t^{(k)}": r"2^i\, 2^{t \bmod k}\, e^{-x}\, x_t^{(k)}",
    "x^* u_i'": r"x^*\, u_i'",
    "pBest_i loss_k": r"\mathrm{pBest}_i\, \mathrm{loss}_k",
    # operators and relations
    "x ← x − η g(x)": r"x \leftarrow x - \eta\, g(x)",
    "a·b × c ⊙ d ± e": r"a \cdot b \times c \odot d \pm e",
    "x ∈ N, y ∉ N, z ≠ 0": r"x \in N, y \notin N, z \neq 0",
    "x ≤ y ≥ z ≈ w": r"x \leq y \geq z \approx w",
    "u = −ηg": r"u = {-}\eta g",
    "1 … s": r"1\, \ldots\, s",
    "±65,504": r"\pm 65{,}504",
    # sums, roots, fractions
    "(1/w) Σ_{k∈N} x_k": r"\frac{1}{w} \sum_{k \in N} x_k",
    "√(a + b) √π": r"\sqrt{a + b}\, \sqrt{\pi}",
    "(x_0 − x̄)/γ": r"\frac{x_0 - \bar{x}}{\gamma}",
    "η_0 F_j / (η_j F_0)": r"\frac{\eta_0\, F_j}{\eta_j\, F_0}",
    "t (a − b)/c": r"t\, \frac{a - b}{c}",
    "1 − k√π/√(4+πk²)": r"1 - \frac{k\sqrt{\pi}}{\sqrt{4 + \pi k^2}}",
    "2(1−β)ησ/γ": r"\frac{2(1 - \beta)\eta\sigma}{\gamma}",
    "−a/2": r"- \frac{a}{2}",
    "x = −a/2": r"x = {-}\frac{a}{2}",
    "f(x)/T": r"\frac{f(x)}{T}",
    "softmax(f(x)/T)": r"\mathrm{softmax}\left(\frac{f(x)}{T}\right)",
    "(1/w)[a + Σ_j b_j]": r"\frac{1}{w}\left[a + \sum_j b_j\right]",
    "f = (1/2)": r"f = \left(\frac{1}{2}\right)",
    # brackets
    "⌈ τ ⌉ ⌊x⌋ ‖x‖ |x|": r"\lceil\tau\rceil\, \lfloor x\rfloor\, \lVert x\rVert\, \lvert x\rvert",
    "⌈ √x · τ ⌉": r"\left\lceil\sqrt{x} \cdot \tau\right\rceil",
    "u ∈ [0, 1)": r"u \in [0, 1)",
    "{x_k > 0}": r"\{x_k > 0\}",
    "p(y|x)": r"p(y \mid x)",
    "max|x| / 127": r"\frac{\max\lvert x\rvert}{127}",
    # words
    "argmin_j loss_j": r"\arg\min_j \mathrm{loss}_j",
    "mean over teachers of x": r"\text{mean over teachers of } x",
    "τ if x > 0": r"\tau\text{ if } x > 0",
    "loss + weight · ψ": r"\text{loss} + \text{weight} \cdot \psi",
    "wait until min_k c_k ≥ t": r"\text{wait until } \min_k c_k \geq t",
    "send (x, a) to a random peer": r"\text{send } (x, a)\text{ to a random peer}",
    "a_j x_j + a x": r"a_j\, x_j + a\, x",
    "a if b": r"a\text{ if } b",
    "in g's place": r"\text{in } g\text{'s place}",
    "the optimizer's step; at least 1": r"\text{the optimizer's step; at least } 1",
    "and/or": r"\text{and/or}",
    "loss/2": r"\frac{\text{loss}}{2}",
    # code
    "every push_period steps:": r"\text{every } \mathtt{push\_period}\text{ steps:}",
    "every `period`-th step": r"\text{every } \mathtt{period}\text{-th step}",
    'mode="first_come", best=1': (
        r"\mathtt{mode{=}}\text{“}\mathtt{first\_come}\text{”}, \mathtt{best{=}1}"
    ),
}


@pytest.mark.parametrize(("text", "latex"), FORMULAS.items(), ids=list(FORMULAS))
def test_a_formula(text, latex):
    assert formula(text, "Method") == latex


def displayed(rule: str) -> list[str]:
    return typeset.typeset(rule, "Method")


def test_one_line_is_not_aligned():
    assert displayed("    g ← h;   x ← y      no lock") == [
        r"g \leftarrow h; \quad x \leftarrow y \qquad \text{no lock}"
    ]
    assert displayed("finish: x ← x_k, k = argmin_i c_i") == [
        r"\text{finish:} \enspace x \leftarrow x_k, \quad k = \arg\min_i c_i"
    ]


def test_lines_are_aligned_at_their_arrows_and_labels_stand_before_them():
    assert displayed("""
        every step:   x_i ← y
        at the end:   loss = z
                      w ← 0
    """) == [
        "\\begin{aligned}\n"
        "& \\text{every step:} & x_i & \\leftarrow y \\\\\n"
        "& \\text{at the end:} & \\text{loss} & = z \\\\\n"
        "& & w & \\leftarrow 0\n"
        "\\end{aligned}"
    ]


def test_lines_of_words_are_aligned_at_the_left():
    assert displayed("t = 0:   x ← y\nelse:    the optimizer's step") == [
        "\\begin{aligned}\n"
        "& t = 0\\colon & & x \\leftarrow y \\\\\n"
        "& \\text{else:} & & \\text{the optimizer's step}\n"
        "\\end{aligned}"
    ]


def test_several_formulas_of_each_line_stand_in_columns():
    assert displayed("d = a;   x ← b\ne = c;   y ← d") == [
        "\\begin{aligned}\n"
        "d & = a; & x & \\leftarrow b \\\\\n"
        "e & = c; & y & \\leftarrow d\n"
        "\\end{aligned}"
    ]
    assert displayed("d = a;   x ← b\ne = c") == [
        "\\begin{aligned}\nd & = a; \\quad x \\leftarrow b \\\\\ne & = c\n\\end{aligned}"
    ]


def test_notes_stand_below_each_other_and_one_alone_behind_its_formula():
    assert displayed("x ← y     each step\nz ← 0     every push_period steps") == [
        "\\begin{aligned}\n"
        "x & \\leftarrow y & & \\text{each step} \\\\\n"
        "z & \\leftarrow 0 & & \\text{every } \\mathtt{push\\_period}\\text{ steps}\n"
        "\\end{aligned}"
    ]
    assert displayed("x ← y     each step\nz ← 0") == [
        "\\begin{aligned}\n"
        "x & \\leftarrow y \\qquad \\text{each step} \\\\\n"
        "z & \\leftarrow 0\n"
        "\\end{aligned}"
    ]


def test_lines_with_labels_and_without_are_displays_of_their_own():
    shown = displayed("x ← y\nN: the n best\nat the end:   x ← z")
    assert shown[0] == r"x \leftarrow y"
    assert shown[1].startswith("\\begin{aligned}\n& N\\colon & & \\text{the } n\\text{ best}")
    assert len(shown) == 2


def test_cases_have_a_brace():
    assert displayed("x → τ if x > τ, −τ if x < −τ, else 0;   k = 1") == [
        r"x \to \begin{cases} \tau & \text{if } x > \tau \\ {-}\tau & \text{if } x < {-}\tau \\ "
        r"0 & \text{else} \end{cases}; \quad k = 1"
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    {
        "x ☃ y": r"no LaTeX is known for '☃' \(U\+2603, SNOWMAN\) in 'x ☃ y'",
        "x̋ ← y": r"no LaTeX is known for '̋' \(U\+030B, COMBINING DOUBLE ACUTE ACCENT\)",
        "x # y": "no LaTeX is known for '#'",
        "`x→y`": "no LaTeX is known for the code 'x→y'",
        "(x + y": "a bracket is not closed by",
        "x) + y": "'\\)' closes nothing",
        "x_{i": "a bracket is not closed by '}'",
        "x /": "something is missing at the end",
        "/ x": "'/' has nothing above it",
        "√": "something is missing at the end",
        "x/+": r"'\+' does not belong where it stands",
    }.items(),
)
def test_what_cannot_be_typeset_is_an_error_that_names_whose_it_is(text, reason):
    with pytest.raises(TypesetError, match=f"^Method: {reason}"):
        displayed(text)


def test_an_empty_rule_is_an_error():
    with pytest.raises(TypesetError, match="Method: the rule is empty"):
        displayed("  \n")


KNOWN = "".join(
    symbols.KNOWN | symbols.LETTERS.keys() | {*"xyaNij_^12₀²ᵀ `\"'-"} | {*symbols.ACCENTS}
)
WORDS = st.sampled_from(["if", "else", "max", "x_i", "loss_k", "burn_in", "a", "  ", ":  ", ", "])


@given(st.lists(WORDS | st.sampled_from(KNOWN)).map("".join))
def test_whatever_comes_out_can_be_read_by_latex(rule):
    try:
        shown = displayed(rule)
    except TypesetError:
        return
    for latex in shown:
        assert is_balanced(latex)
        assert latex.isascii() or set(latex) - set(map(chr, range(128))) <= set("“”")
        assert latex.count(r"\left") == latex.count(r"\right") + latex.count(r"\leftarrow")


def is_balanced(latex: str) -> bool:
    """Whether every brace that is no symbol is closed, and none before it is open."""
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", latex):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0
