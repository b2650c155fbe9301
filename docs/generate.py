"""Writes docs/strategies.md from the classes' docstrings: `python docs/generate.py`. A test
holds the two together.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

from flockstep.codecs import CODECS
from flockstep.strategies import STRATEGIES

PAGE = Path(__file__).with_name("strategies.md")
HEAD = """\
# Strategies and codecs

Written by `python docs/generate.py` from the docstrings; `help(fs.LocalSGD)` has the whole of each,
with its fields. w workers, x_i the parameters of worker i, g_i its gradient, η the learning rate,
x̃ a shared centre. Bytes are those that all workers' calls put on the wire: an all-reduce of n
bytes 2(w−1)n in all, a broadcast (w−1)n, an all-gather w(w−1)n, a read, write or add of a shared
tensor n, a blend 2n.

How to write one of your own: [a strategy of your own](own_strategy.md).
"""


def section(text: str, *names: str) -> str:
    """The paragraph that begins with one of the names and a colon, in one line."""
    found = re.search(rf"^(?:{'|'.join(names)}): (.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    return " ".join(found[1].split()) if found else "–"


def rule(text: str) -> str:
    """The first indented paragraph: the update rule."""
    found = re.search(r"\n\n((?:    .*\n?)+)", text)
    lines = found[1].strip("\n").splitlines() if found else []
    return "<br>".join(f"`{re.sub(r'  +', '  ', line.strip().replace('`', ''))}`" for line in lines)


def row(spec: Any) -> str:
    text = inspect.getdoc(spec) or ""
    fields = ", ".join(field.name for field in dataclasses.fields(spec))
    summary = " ".join(text.split("\n\n")[0].split())
    cells = [
        f"`fs.{spec.__name__}({fields})`<br>`{spec.name}`",
        f"{summary}<br>{rule(text)}",
        *([section(text, "Use")] if "\nUse: " in text else []),
        section(text, "Bytes"),
        section(text, "Papers?"),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    strategies = [
        "| name | rule | when to use it | bytes | paper |",
        "| --- | --- | --- | --- | --- |",
    ]
    strategies += map(row, STRATEGIES.values())
    codecs = [
        "| name | rule | bytes of a message | paper |",
        "| --- | --- | --- | --- |",
        *map(row, CODECS.values()),
    ]
    return "\n".join([HEAD, *strategies, "", "## Codecs", "", *codecs, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
