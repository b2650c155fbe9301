"""Writes docs/strategies.md and a page for each strategy and codec, from the docstrings of their
classes: `python docs/generate.py`. Pages of what no longer exists are deleted. A test holds pages
and classes together.

A docstring has one line that says what the method does; its rule, the first indented paragraph,
which is typeset; what there is to explain; and the parts `Bytes:`, `Use:`, `Fields:`, `Paper:` and
`Example:`.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flockstep as fs
from flockstep.codecs import CODECS
from flockstep.strategies import STRATEGIES
from typeset import typeset

DOCS = Path(__file__).parent
INDEX = DOCS / "strategies.md"
FOLDERS: dict[str, Mapping[str, Any]] = {"strategies": STRATEGIES, "codecs": CODECS}

# Which strategies belong together. Each is in one group.
GROUPS = {
    "Synchronous": ("sync_sgd", "independent", "best_only"),
    "Averaging at intervals": (
        *("local_sgd", "post_local_sgd", "adacomm", "households", "diloco", "slowmo"),
    ),
    "The swarm": ("nosync", "pso_ps"),
    "The elastic family": ("easgd", "eamsgd", "ea_wild"),
    "Asynchronous gradients": (
        *("hogwild", "async_sgd", "downpour", "stale_sync", "all_to_all_sgd"),
    ),
    "Partial communication": ("gosgd", "ad_psgd", "d_psgd", "sgp"),
    "Codistillation": ("codistillation",),
}
CODEC_GROUP = "Codecs"

HEAD = r"""
# Strategies and codecs

A page for each method: its rule, its fields, what it sends, when to use it, its paper, and a run to
try. Behind each name stands the one on the command line. How to write a method yourself:
[a strategy of your own](own_strategy.md).

## Notation

| symbol | meaning |
| --- | --- |
| $w$ | the number of workers |
| $x_i$ | the parameters of worker $i$ |
| $g_i$, $g(x_i)$ | its gradient, on a batch of its own |
| $\eta$ | the learning rate of its optimizer |
| $\tilde{x}$ | a centre that all workers share |
| $\leftarrow$ | takes the value of |
| $\odot$ | the product of two vectors, element by element |

Bytes are those that all workers' calls put on the wire. For a tensor of n bytes: an all-reduce
2(w−1)n in all, a broadcast (w−1)n, an all-gather w(w−1)n, a read, write or add of a shared tensor
n, a blend 2n.
"""

EXAMPLE = """\
import flockstep as fs

result = {}
print(result.metrics["test_accuracy"])"""

SECTIONS = ("Bytes", "Use", "Fields", "Paper", "Papers", "Example")


# ---- What a docstring says


@dataclass(frozen=True)
class Documented:
    """The parts of a class's docstring."""

    spec: Any
    summary: str
    rule: str
    explanation: list[str]
    sections: Mapping[str, str]

    @classmethod
    def of(cls, spec: Any) -> Documented:
        summary, *paragraphs = re.split(r"\n\s*\n", inspect.getdoc(spec) or "")
        sections: dict[str, str] = {}
        rules: list[str] = []
        explanation: list[str] = []
        for paragraph in paragraphs:
            name, colon, text = paragraph.partition(":")
            if colon and name in SECTIONS:
                sections[name] = text
            elif paragraph.startswith("    ") and not rules:
                rules.append(paragraph)
            else:
                explanation.append(paragraph)
        if not rules:
            raise ValueError(f"{spec.__name__}: the docstring has no rule (an indented paragraph)")
        return cls(spec, _one_line(summary), rules[0], explanation, sections)

    @property
    def title(self) -> str:
        return str(self.spec.__name__)

    def formulas(self) -> list[str]:
        """The rule in LaTeX, one text for each display."""
        return typeset(self.rule, self.title)

    def meanings(self) -> dict[str, str]:
        """What the docstring says of each field."""
        lines = textwrap.dedent(self.sections.get("Fields", "").lstrip("\n"))
        entries = re.split(r"\n(?=\S)", lines) if lines else []
        found: dict[str, str] = {}
        for entry in entries:
            names, _, meaning = entry.partition(":")
            if meaning.strip():
                found |= dict.fromkeys(map(str.strip, names.split(",")), _one_line(meaning))

        declared = inspect.signature(self.spec).parameters
        for name in {*found} ^ {*declared}:
            where = "no field" if name in found else "a field that 'Fields:' does not explain"
            raise ValueError(f"{self.title}: {name!r} is {where}")
        return found

    def example(self) -> str:
        return textwrap.dedent(self.sections["Example"].lstrip("\n")).strip()


def _one_line(text: str) -> str:
    return " ".join(text.split())


# ---- A page


@dataclass(frozen=True)
class Link:
    title: str
    target: str

    def __str__(self) -> str:
        return f"[{self.title}]({self.target})"


def page(documented: Documented, group: str, neighbours: Sequence[Link]) -> str:
    """The page of a method. `neighbours`: links to the pages before and after it."""
    folder = _file(documented.spec).parent.name
    source = f"src/flockstep/{folder}/{Path(inspect.getfile(documented.spec)).name}"
    index = Link("Strategies and codecs", "../strategies.md")
    of_group = Link(group, f"../strategies.md#{group.lower().replace(' ', '-')}")
    parts = [
        f"{index} › {of_group}",
        f"# {documented.title}",
        f"`fs.{documented.title}`, on the command line `{documented.spec.name}`.",
        documented.summary,
        *(_fenced("math", each) for each in documented.formulas()),
        *map(_explained, documented.explanation),
        *_fields(documented),
        *_told(documented),
        "## Example",
        _fenced("python", EXAMPLE.format(documented.example())),
        "The same on the command line:",
        _fenced("console", command_line(documented)),
        f"Source: {Link(f'`{source}`', f'../../{source}')} · "
        f"{Link('what the symbols mean', '../strategies.md#notation')}",
        " · ".join(map(str, neighbours)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _explained(paragraph: str) -> str:
    """A paragraph of prose; one that is indented stays as it stands."""
    if paragraph.startswith("    "):
        return _fenced("text", textwrap.dedent(paragraph))
    return _one_line(paragraph)


def _fields(documented: Documented) -> Iterator[str]:
    """The table of fields: name, type, default, meaning."""
    meanings = documented.meanings()
    yield "## Fields"
    if not meanings:
        yield "None."
        return
    rows = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, parameter in inspect.signature(documented.spec).parameters.items():
        cells = [f"`{name}`", _type(parameter), _default(parameter), _sentence(meanings[name])]
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    yield "\n".join(rows)


def _type(parameter: inspect.Parameter) -> str:
    """`int` or `None`; codecs are a link to theirs."""
    kinds = re.split(r" \| (?![^\[]*\])", str(parameter.annotation))  # not tuple[int | None, ...]
    codecs = str(Link("codec", f"../strategies.md#{CODEC_GROUP.lower()}"))
    return " or ".join(codecs if kind == "Codec" else f"`{kind}`" for kind in kinds)


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return "required"
    is_text = isinstance(parameter.default, str)
    return f"`{json.dumps(parameter.default) if is_text else repr(parameter.default)}`"


def _told(documented: Documented) -> Iterator[str]:
    """What is sent, when to use it, and who published it."""
    titles = {"Bytes": "Bytes", "Use": "When to use it", "Paper": "Paper", "Papers": "Papers"}
    for name, title in titles.items():
        if name in documented.sections:
            yield f"## {title}"
            yield _sentence(_one_line(documented.sections[name]))


def _sentence(text: str) -> str:
    """With a capital, unless it begins with a name of code or a symbol."""
    first = text.split()[0]
    is_word = first.rstrip(",;:.").isalpha() and first.isascii() and len(first.rstrip(",;:.")) > 1
    return text[0].upper() + text[1:] if is_word and text[0].islower() else text


def command_line(documented: Documented) -> str:
    """The example's run as a command."""
    table = json.loads(example_spec(documented).to_json())
    del table["version"]
    strategy = ast.parse(table.pop("strategy"), mode="eval").body
    words = ["flockstep", "run", table.pop("task")]
    if isinstance(strategy, ast.Call):
        words.append(ast.unparse(strategy.func))
        for setting in strategy.keywords:
            words += ["--set", f"{setting.arg}={ast.unparse(setting.value)}"]
    else:
        words.append(ast.unparse(strategy))
    for name, value in table.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def example_spec(documented: Documented) -> fs.RunSpec:
    """What the example runs, without running it."""
    call = ast.parse(documented.example(), mode="eval").body
    if not isinstance(call, ast.Call) or ast.unparse(call.func) != "fs.run":
        raise ValueError(f"{documented.title}: the example is no call of fs.run")
    arguments = ast.unparse(call).removeprefix("fs.run")
    spec: fs.RunSpec = eval(f"fs.RunSpec{arguments}", {"fs": fs})
    return spec


# ---- All pages


def grouped() -> dict[str, list[Any]]:
    """The classes of each group, strategies and then codecs."""
    known = [name for names in GROUPS.values() for name in names]
    for name in {*known} ^ {*STRATEGIES}:
        state = "in no group" if name in STRATEGIES else "no strategy"
        raise ValueError(f"{name!r} is {state}: see GROUPS in docs/generate.py")
    groups = {title: [STRATEGIES[name] for name in names] for title, names in GROUPS.items()}
    return groups | {CODEC_GROUP: list(CODECS.values())}


def pages() -> dict[Path, str]:
    """The text of every generated file, the index first."""
    groups = grouped()
    titles = {spec: title for title, specs in groups.items() for spec in specs}
    files = {spec: _file(spec) for spec in titles}
    texts = {INDEX: _index(groups)}
    order = list(titles)
    for index, spec in enumerate(order):
        around = {"Before": order[:index][-1:], "Next": order[index + 1 :][:1]}
        neighbours = [
            Link(f"{word}: {each.__name__}", os.path.relpath(files[each], files[spec].parent))
            for word, found in around.items()
            for each in found
        ]
        texts[files[spec]] = page(Documented.of(spec), titles[spec], neighbours)
    return texts


def _file(spec: Any) -> Path:
    folder = next(folder for folder, table in FOLDERS.items() if spec in table.values())
    return DOCS / folder / f"{spec.name}.md"


def _index(groups: Mapping[str, Sequence[Any]]) -> str:
    lines = [HEAD.strip()]
    for title, specs in groups.items():
        lines += ["", f"## {title}", ""]
        if title == CODEC_GROUP:
            lines += ["How tensors are written on the wire: the field `codec` of a strategy.", ""]
        for spec in specs:
            link = Link(spec.__name__, str(_file(spec).relative_to(DOCS)))
            lines.append(f"- {link} `{spec.name}`: {Documented.of(spec).summary}")
    return "\n".join(lines) + "\n"


def write() -> None:
    """Write all pages, and delete those of what no longer exists."""
    texts = pages()
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in generated_files():
        if path not in texts:
            path.unlink()


def generated_files() -> list[Path]:
    """The pages that are there now."""
    return [INDEX, *(path for folder in FOLDERS for path in (DOCS / folder).glob("*.md"))]


if __name__ == "__main__":
    write()
