"""The direction of imports, and the public names."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import flockstep as fs
from flockstep.data import ASSIGNMENTS
from flockstep.strategies import STRATEGIES

SOURCE = Path(fs.__file__).parent

# What each part builds on. It may import from these and, through them, from what they build on.
BUILDS_ON = {
    "cli": {"report"},
    "report": {"study"},
    "study": {"training"},
    "training": {"result", "launch", "worker"},
    "result": {"spec", "folders"},
    "folders": set(),
    "spec": {"notation", "intervals", "launch", "tasks"},
    "notation": {"backends", "data", "strategies", "schedules"},
    "intervals": {"fields"},
    "launch": {"backends"},
    "jax": {"numpy"},
    "numpy": {"node_worker"},
    "node_worker": {"worker", "node"},
    "worker_optimizer": {"worker"},
    "worker": {
        "checkpoints",
        "modes",
        "data",
        "gradients",
        "agreement",
        "same_model",
        "schedules",
    },
    "checkpoints": {"strategies", "flat", "folders"},
    "agreement": {"comm"},
    "same_model": {"comm"},
    "tasks": {"models", "optimizers"},
    "strategies": {"comm", "codecs", "optimizers"},
    "backends": {"comm", "network", "randomness"},
    "models": {"comm", "data", "device", "modes"},
    "codecs": {"randomness"},
    "optimizers": {"comm", "schedules", "node"},
    "comm": {"network", "codecs"},
    "data": {"randomness", "folders"},
    "schedules": {"intervals"},
    "network": {"units"},
    "units": {"fields"},
    "node": {"flat"},
    "flat": {"fields"},
    "gradients": {"fields"},
    "modes": set(),
    "device": {"fields"},
    "randomness": {"fields"},
    "fields": {"errors"},
    "errors": set(),
}


def below(part: str) -> set[str]:
    """All parts that `part` may import from."""
    direct = BUILDS_ON[part]
    return direct.union(*map(below, direct))


def part_of(module: str) -> str:
    """`flockstep.backends.sim.comm` belongs to `backends`."""
    return module.split(".")[1]


def imports_of(path: Path) -> set[str]:
    """What a file imports of this library, by its whole name; what is for type checking left
    out.
    """
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flockstep"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("flockstep.")}
    return found


FILES = sorted(
    path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem[:2] != "__"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way_and_end_at_the_door_of_a_package(path):
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for name in imports_of(path):
        other = part_of(name)
        if other == own:
            continue
        assert other in below(own), f"{own} must not import {name}"
        if (SOURCE / other).is_dir():
            shown = importlib.import_module(f"flockstep.{other}").__all__
            assert name.removeprefix(f"flockstep.{other}.") in [*shown, f"flockstep.{other}"], (
                f"{name} is the inside of another package"
            )


@pytest.mark.parametrize("part", ["strategies", "worker", "tasks", "data", "comm", "models"])
def test_nothing_of_a_backend_leaks(part):
    """Strategies, workers and tasks know `Comm` alone."""
    assert "backends" not in below(part)
    assert not any(
        re.search(r"^\s*(import|from) torch\.distributed", path.read_text(), flags=re.MULTILINE)
        for path in FILES
        if path.relative_to(SOURCE).parts[0].removesuffix(".py") == part
    )


def test_the_two_backends_do_not_know_each_other():
    for name, other in (("sim", "local"), ("local", "sim")):
        for path in (SOURCE / "backends" / name).glob("*.py"):
            assert not any(f"backends.{other}" in module for module in imports_of(path))


def test_no_backend_imports_the_inside_of_another():
    """What several share stands beside them: `base`, `outcome`, `pickling`."""
    backends = SOURCE / "backends"
    for path in backends.rglob("*.py"):
        own = path.relative_to(backends).parts[0]
        for name in imports_of(path):
            _, part, *inside = name.split(".")
            if part == "backends" and own != "__init__.py" and (backends / inside[0]).is_dir():
                is_door = len(inside) == 2  # what the package itself shows
                assert is_door or inside[0] == own, f"{path}: {name} is the inside of another"


def test_everything_public_is_importable_and_documented():
    for name in fs.__all__:
        assert inspect.getdoc(getattr(fs, name)), name
    assert fs.__all__ == sorted(
        fs.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )


@pytest.mark.parametrize(
    "spec",
    [*STRATEGIES.values(), *ASSIGNMENTS.values(), fs.Network, fs.Compute, fs.RunSpec, fs.Interval],
    ids=lambda s: s.__name__,
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
    run = SimpleNamespace(**vars(fs) | {"run": partial(fs.run, target=0.7)})
    assert eval(example, {"fs": run}).metrics["test_accuracy"] >= 0.7


def test_importing_the_library_is_light():
    """No scientific stack, no compiler, no cluster before somebody asks for it."""
    code = (
        "import flockstep, sys\n"
        "heavy = ('sklearn', 'ray', 'scipy', 'torch._dynamo', 'tensorboard', 'mlflow', 'wandb', "
        "'PIL', 'jax', 'optax', 'transformers', 'accelerate', 'lightning')\n"
        "print([m for m in heavy if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
