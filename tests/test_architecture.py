"""The direction of imports, the public names, and the size of modules."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import flockstep as fs
from flockstep.data import ASSIGNMENTS
from flockstep.strategies import STRATEGIES

SOURCE = Path(fs.__file__).parent

# Each part may import only from parts further down, and from its own. Those on one line do not import each other.
LAYERS = [
    {"__main__", "__init__"},
    {"cli"},
    {"demo", "listing", "data_commands"},
    {"training", "inspection", "picture"},
    {"result", "progress"},
    {"launch", "tasks", "specs", "recalibration"},
    {"backends", "task", "worker"},
    {"strategies", "models", "counting", "fit"},
    {"optimizer_state", "all_reduce"},
    {"comm", "flat", "data", "codecs", "topology", "theory", "recipes"},
    {"network", "meter", "reduction", "device"},
    {"fields"},
    {"errors"},
]


def part_of(module: str) -> str:
    """`flockstep.backends.sim.comm` belongs to `backends`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path) -> set[str]:
    """The modules of this library that a file imports, those for type checking left out."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flockstep"):
            found |= {
                f"{node.module}.{alias.name}" if node.module == "flockstep" else node.module for alias in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("flockstep")}
    return found


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path):
    rank = {part: depth for depth, layer in enumerate(LAYERS) for part in layer}
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for module in imports_of(path):
        other = part_of(module)
        assert other == own or rank[other] > rank[own], f"{own} must not import {module}"


@pytest.mark.parametrize("part", ["strategies", "worker.py", "flat.py", "training.py", "comm.py", "data", "network"])
def test_nothing_of_a_backend_leaks(part):
    """Strategies, workers and the loop know `Comm` alone; only the launch in `training` names a backend at all."""
    paths = [SOURCE / part] if part.endswith(".py") else (SOURCE / part).glob("*.py")
    for path in paths:
        backends = {module for module in imports_of(path) if part_of(module) == "backends"}
        assert backends <= ({"flockstep.backends.base", "flockstep.backends.sim"} if part == "training.py" else set())
        assert "import torch.distributed" not in path.read_text()


def test_the_two_backends_do_not_know_each_other():
    for name, other in (("sim", "local"), ("local", "sim")):
        for path in (SOURCE / "backends" / name).glob("*.py"):
            assert not any(f"backends.{other}" in module for module in imports_of(path))


def test_everything_public_is_importable_and_documented():
    for name in fs.__all__:
        assert inspect.getdoc(getattr(fs, name)), name
    assert fs.__all__ == sorted(fs.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


@pytest.mark.parametrize(
    "spec", [*STRATEGIES.values(), *ASSIGNMENTS.values(), fs.Network, fs.Compute], ids=lambda s: s.__name__
)
def test_specs_are_frozen_dataclasses(spec):
    assert dataclasses.is_dataclass(spec)
    assert spec.__dataclass_params__.frozen


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=lambda s: s.__name__)
def test_a_strategys_docstring_has_its_parts(strategy):
    text = inspect.getdoc(strategy)
    assert "Bytes:" in text
    assert "Use:" in text
    assert "Example:" in text
    if dataclasses.fields(strategy):
        assert "Fields:" in text
        assert "Paper" in text
        assert all(f"{field.name}:" in text for field in dataclasses.fields(strategy))
    example = text.split("Example:")[1].strip()
    metrics = eval(example, {"fs": fs}).metrics
    assert metrics["test_accuracy"] > 0.7


def test_modules_fit_in_one_sitting():
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 300, path


def test_importing_the_library_is_light():
    """No scientific stack, no compiler, no cluster before somebody asks for it."""
    code = "import flockstep, sys; print([m for m in ('sklearn', 'ray', 'scipy', 'torch._dynamo') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
