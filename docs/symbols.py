"""What the characters of a rule are in LaTeX. A character that is in none of these is an error."""

from __future__ import annotations

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

# A subscript of these alone, as in W_ij, is several indices and no word.
INDICES = set("ijklmnt")
# What may follow a variable called a, and never follows the article.
AFTER_A_VARIABLE = {
    *("and", "are", "at", "by", "else", "for", "from", "if", "in", "is", "mod", "of", "on", "or"),
    *("over", "per", "the", "to", "uniform", "where", "with"),
}

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
