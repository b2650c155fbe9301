"""The pages that are generated, the examples on them, and the one that is installed."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.test_typeset import is_balanced
from torch import nn

import flockstep as fs
import generate
from flockstep.codecs import CODECS
from flockstep.data import ASSIGNMENTS, DATASETS
from flockstep.schedules.schedules import SCHEDULES
from flockstep.strategies import STRATEGIES, save_state
from flockstep.tasks import TASKS

DOCS = Path(__file__).parents[1] / "docs"


SPECS = [*STRATEGIES.values(), *CODECS.values()]
of_every_method = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def page_of(spec: type) -> str:
    folder = "strategies" if spec in STRATEGIES.values() else "codecs"
    return (DOCS / folder / f"{spec.name}.md").read_text()


def example_of(spec: type) -> str:
    """The example of the docstring, which tests of strategies and of codecs run."""
    return inspect.getdoc(spec).split("Example:")[1].strip()


def fenced(language: str, page: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)\n```", page, flags=re.DOTALL)


def test_the_pages_of_methods_are_those_of_the_classes():
    pages = generate.pages()
    for path, text in pages.items():
        assert path.read_text() == text, "run: python docs/generate.py"
    assert sorted(pages) == sorted(generate.generated_files()), "run: python docs/generate.py"
    assert len(pages) == 1 + len(SPECS)


def test_writing_the_pages_deletes_those_of_what_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    monkeypatch.setattr(generate, "INDEX", tmp_path / "strategies.md")
    for folder in ("strategies", "codecs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "gone.md").write_text("# Gone")
    (tmp_path / "own_strategy.md").write_text("# Not generated")
    generate.write()
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.md")}
    assert written - {Path("own_strategy.md")} == {
        Path("strategies.md"),
        *(Path("strategies") / f"{name}.md" for name in STRATEGIES),
        *(Path("codecs") / f"{name}.md" for name in CODECS),
    }
    assert (tmp_path / "strategies.md").read_text() == (DOCS / "strategies.md").read_text()


@of_every_method
def test_a_page_has_all_of_its_parts(spec):
    page, told = page_of(spec), " ".join(inspect.getdoc(spec).split())
    assert page.splitlines()[2] == f"# {spec.__name__}"
    assert f"`fs.{spec.__name__}`, on the command line `{spec.name}`." in page
    rows = re.findall(r"^\| `(\w+)` \| (.*?[^\\]) \| (.*?) \| (.*) \|$", page, flags=re.MULTILINE)
    parameters = inspect.signature(spec).parameters
    assert [name for name, *_ in rows] == list(parameters)
    for name, _, default, meaning in rows:
        is_needed = parameters[name].default is inspect.Parameter.empty
        assert (default == "required") == is_needed
        assert meaning[1:].replace(r"\|", "|") in told
    assert "\n## Bytes\n" in page
    assert ("\n## When to use it\n" in page) == (spec in STRATEGIES.values())
    assert ("\n## Paper" in page) == (spec is not fs.Float16)
    assert f"`src/{inspect.getfile(spec).split('/src/')[1]}`" in page


@of_every_method
def test_a_page_shows_the_rule_as_latex_that_github_takes(spec):
    formulas = fenced("math", page_of(spec))
    assert formulas
    for each in formulas:
        assert is_balanced(each)
        assert each.count(r"\begin{") == each.count(r"\end{")
        assert not re.search(r"\\(operatorname|phantom|mbox|def|newcommand|require)\b", each)


@of_every_method
def test_the_example_of_a_page_is_that_of_the_docstring_and_the_command_is_the_same_run(
    spec, flockstep
):
    (block,) = fenced("python", page_of(spec))
    called = f"result = {example_of(spec)}"
    assert block == f'import flockstep as fs\n\n{called}\nprint(result.metrics["test_accuracy"])'

    (command,) = fenced("console", page_of(spec))
    done = flockstep(*shlex.split(command)[1:], "--print-spec")
    assert done.returncode == 0, done.stderr
    arguments = example_of(spec).removeprefix("fs.run")
    assert fs.RunSpec.from_toml(done.stdout) == eval(f"fs.RunSpec{arguments}")


def test_the_index_names_every_method_once_in_its_group():
    index = (DOCS / "strategies.md").read_text()
    links = re.findall(r"^- \[(\w+)\]\((\w+)/(\w+)\.md\) `(\w+)`: \S", index, flags=re.MULTILINE)
    assert {(title, name) for title, _, _, name in links} == {
        (spec.__name__, spec.name) for spec in SPECS
    }
    assert len(links) == len(SPECS)
    assert all(file == name for _, _, file, name in links)
    assert re.findall(r"^## (.*)", index, flags=re.MULTILINE) == [
        "Notation",
        *generate.GROUPS,
        "Codecs",
    ]


def test_a_strategy_without_a_group_is_an_error(monkeypatch):
    monkeypatch.delitem(generate.GROUPS, "Codistillation")
    with pytest.raises(ValueError, match="'codistillation' is in no group: see GROUPS"):
        generate.grouped()
    monkeypatch.setitem(generate.GROUPS, "Codistillation", ("codistillation", "gone"))
    with pytest.raises(ValueError, match="'gone' is no strategy: see GROUPS"):
        generate.grouped()


def test_docstrings_that_do_not_fit_their_class_are_errors():
    @dataclass
    class Method:
        """What it does.

            x ← y

        Fields:
            period: how often.
            perod: a name that is wrong.

        Example:
            fs.launch(print, 2)
        """

        name: ClassVar[str] = "method"
        period: int

    documented = generate.Documented.of(Method)
    with pytest.raises(ValueError, match="Method: 'perod' is no field"):
        documented.meanings()
    with pytest.raises(ValueError, match="Method: the example is no call of fs.run"):
        generate.command_line(documented)

    Method.__doc__ = Method.__doc__.replace("perod", "period").replace("x ←", "x ☃")
    with pytest.raises(ValueError, match="Method: no LaTeX is known for '☃'"):
        generate.Documented.of(Method).formulas()
    Method.__doc__ = "What it does.\n\n    x ← y\n\nFields:\n    period:\n"
    with pytest.raises(ValueError, match="Method: 'period' is a field that 'Fields:' does not"):
        generate.Documented.of(Method).meanings()
    Method.__doc__ = "What it does."
    with pytest.raises(ValueError, match="Method: the docstring has no rule"):
        generate.Documented.of(Method)


def headings(page: str) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    root = DOCS.parent
    pages = [*DOCS.rglob("*.md"), *root.glob("*.md"), *(root / "benchmarks").glob("*.md")]
    links = 0
    for page in pages:
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if re.match(r"\w+:", target):  # elsewhere
                continue
            links += 1
            path, _, anchor = target.partition("#")
            aim = page.parent / path if path else page
            assert aim.exists(), (page, target)
            assert not anchor or anchor in headings(aim.read_text()), (page, target)
    assert links > 100


def blocks(language: str) -> list[str]:
    page = (DOCS / "own_strategy.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def block(language: str) -> str:
    return blocks(language)[0]


@pytest.mark.cluster  # a pip and two programs of its own
def test_the_example_of_workers_that_fail_runs(capsys):
    page = (DOCS / "cluster.md").read_text()
    (example,) = [each for each in fenced("python", page) if "fs.Faults" in each]
    names: dict[str, object] = {}
    exec(example, names)
    lost = {each["rank"]: (each["step"], each["seconds"]) for each in names["result"].lost}
    assert lost.keys() == {3, 5}
    assert lost[3][0] == 20
    assert lost[5][1] == 0.4
    assert "'rank': 3" in capsys.readouterr().out


def test_a_strategy_of_ones_own_is_short_installs_and_runs(tmp_path):
    assert len(block("toml").splitlines()) + len(block("python").splitlines()) < 40
    package, site = tmp_path / "package", tmp_path / "site"
    package.mkdir()
    (package / "pyproject.toml").write_text(block("toml"))
    (package / "flockstep_follow.py").write_text(block("python"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(site),
    ]
    subprocess.run([*pip, str(package)], check=True, timeout=120, cwd=tmp_path)
    command = block("console").splitlines()[1].split()
    assert command[0] == "flockstep"
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", *command, "--json"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["strategy"] == "follow"
    assert told["fields"] == {"period": 2}
    assert told["metrics"]["test_accuracy"] > 0.7


def test_the_page_of_data_runs_and_names_everything(capsys):
    page = (DOCS / "data.md").read_text()
    names: dict[str, object] = {}
    for each in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(each, "data.md", "exec"), names)
    accuracy, ratio = map(float, capsys.readouterr().out.split())
    assert 0 < accuracy < 1
    assert 250 < ratio < 350
    assert all(f"`fs.{scheme.__name__}(" in page for scheme in ASSIGNMENTS.values())
    assert all(f"`{name}`" in page for name in [*TASKS, *DATASETS])
    recipes = {
        *SCHEDULES.values(),
        fs.BatchGrowth,
        fs.TwoStage,
        fs.RMSpropWarmup,
        fs.LARS,
        fs.LAMB,
        fs.SmoothedLoss,
    }
    assert all(f"`fs.{recipe.__name__}(" in page for recipe in recipes - {fs.Constant})


def test_the_page_of_programs_runs(capsys):
    """The sparse asynchronous SGD learns, of a hundredth of each change."""
    first, second = fenced("python", (DOCS / "own_program.md").read_text())
    names: dict[str, object] = {}
    exec(compile(first, "own_program.md", "exec"), names)
    said = re.match(r"accuracy (.*), (.*) bytes sent by rank 0, ", capsys.readouterr().out)
    accuracy, nbytes = map(float, said.groups())
    assert accuracy > 0.8
    messages, whole = 200 * 6 * 8, 4 * 640
    assert messages + 2 * whole < nbytes < messages + 2 * whole + 50 * whole / 4  # reads of changes
    exec(compile(second, "own_program.md", "exec"), names)
    assert capsys.readouterr().out == "1.0 1.0 1.0\n"


def test_the_example_runs_where_it_stands(local):
    names: dict[str, object] = {}
    exec(block("python"), names)
    result = fs.run("digits-mlp", names["Follow"](period=2), workers=2, backend=local, epochs=1)
    assert result.metrics["test_accuracy"] > 0.4


def test_the_example_with_a_state_of_data_and_handles_runs_and_is_saved():
    names: dict[str, object] = {}
    for each in blocks("python"):
        exec(each, names)
    board = names["Board"]()

    def program(comm):
        model = nn.Linear(2, 1)
        worker = fs.Worker(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), board)
        for _ in range(2 + comm.rank):
            loss = (model(torch.ones(2)) - comm.rank).square().sum()
            loss.backward()
            worker.step(loss)
        with comm.unmetered(), torch.no_grad():
            shown = board.preview(worker, worker.state)
        worker.finish()
        return torch.equal(shown, worker.flat.state), save_state(worker.state)[1]["state.visits"]

    assert not board.waits
    assert fs.launch(program, 3) == [(True, 2), (True, 3), (True, 4)]
    assert fs.run("digits-mlp", board, workers=2, epochs=1).metrics["test_accuracy"] > 0.4
