"""A strategy's state as data: what can be written to a file and read back, and what cannot.

Data are tensors, numbers, texts, truth values, None, random generators, optimizers (of tensors
that are in the state too), and lists, tuples, deques, dicts and dataclasses of these. The rest is
handles, which tie a state to its run: comms, shared tensors, closures, hooks. `handle()` marks
their fields.

What is saved has two parts: tensors, for safetensors, and values, for JSON. Both go by dotted path,
such as `state.averager.memory.error`. What JSON does not have is a dict of one key: `{"deque": 2}`
stands for a deque of two parts, which have paths of their own."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flockstep.comm import HANDLE, SharedTensor
from flockstep.errors import FlockstepError

ROOT = "state"
DATA = (
    "a tensor, number, text, True, False, None, generator, optimizer, "
    "or a list, tuple, deque, dict or dataclass of these"
)

KINDS = ("float", "size", "generator", "list", "tuple", "deque", "dict", "optimizer", "dataclass")
UNKNOWN = object()

Tensors = dict[str, Tensor]
Values = dict[str, Any]


def save_state(state: Any, strategy: str | None = None) -> tuple[Tensors, Values]:
    """Copies of all data in a state: tensors (generators' states too) and JSON values, by path.

    `strategy` is a name for errors; by default that of the state's class."""
    tensors: Tensors = {}
    values: Values = {}
    _save(state, ROOT, tensors, values, strategy or type(state).__name__)
    return tensors, values


def load_state(state: Any, tensors: Tensors, values: Values) -> None:
    """Put what `save_state` gave into a state that `init` has made, or into the same one.

    In place, so that what shares memory still does; lengths of lists, deques and dicts become those
    that were saved. Handles stay as they are."""
    reader = _Reader(tensors, values)
    loaded = reader.load(state, ROOT)
    unknown = sorted({*tensors, *values} - reader.used)
    if unknown:
        raise FlockstepError(
            f"{unknown[0]!r} was saved, but {type(state).__name__} has no such field"
        )
    if loaded is not state and (isinstance(state, Tensor) or loaded != state):
        raise FlockstepError(
            f"a state must be an object that can change, such as a dataclass, to be loaded "
            f"(got a {type(state).__name__})"
        )


def read_state(tensors: Tensors, values: Values) -> Any:
    """What `save_state` was given, if that is made of tensors, numbers, texts, generators, lists,
    tuples, deques and dicts alone.
    """
    reader = _Reader(tensors, values)
    return reader.load(None, ROOT)


def shared_tensors(state: Any) -> dict[str, SharedTensor]:
    """The shared tensors among the handles of a state, by path. Their values are not part of it."""
    return dict(_shared(state, ROOT))


def _save(value: Any, path: str, tensors: Tensors, values: Values, owner: str) -> None:
    if path in tensors or path in values:
        raise FlockstepError(f"{owner}: two parts of the state have the name {path!r}")
    kind, inside = _described(value)
    if isinstance(value, Tensor):
        tensors[path] = value.detach().clone(memory_format=torch.contiguous_format)
    elif isinstance(value, torch.Generator | np.random.Generator):
        tensors[path] = _state_of(value)
        values[path] = kind
    elif kind is UNKNOWN:
        raise FlockstepError(
            f"{owner}: {path!r} must be data ({DATA}) or a field made with fs.handle() "
            f"(got a {type(value).__name__})"
        )
    else:
        values[path] = kind
    for name, part in inside:
        _save(part, f"{path}.{name}", tensors, values, owner)


def _described(value: Any) -> tuple[Any, Iterable[tuple[Any, Any]]]:
    """How JSON says what a value is, and its parts with their names."""
    name = type(value).__name__
    if value is None or type(value) in (bool, int, str):
        return value, ()
    if type(value) is float:
        return (value if math.isfinite(value) else {"float": repr(value)}), ()
    if isinstance(value, torch.Generator | np.random.Generator):
        return {"generator": type(value).__module__}, ()
    if type(value) is torch.Size:
        return {"size": list(value)}, ()
    if type(value) in (list, tuple, deque):
        return {name: len(value)}, enumerate(value)
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {"dict": list(value)}, value.items()
    if isinstance(value, torch.optim.Optimizer):
        return {"optimizer": name}, [("state_dict", value.state_dict())]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = _data_fields(value)
        return {"dataclass": name}, [(field.name, getattr(value, field.name)) for field in fields]
    return UNKNOWN, ()


def _data_fields(value: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(value) if not field.metadata.get(HANDLE)]


class _Reader:
    """What was saved, and which of it has been used."""

    def __init__(self, tensors: Tensors, values: Values) -> None:
        self.tensors = tensors
        self.values = values
        self.used: set[str] = set()

    def load(self, old: Any, path: str) -> Any:
        """The value at a path: the old one, changed in place, wherever that can be."""
        if path not in self.tensors and path not in self.values:
            raise FlockstepError(f"{path!r} is missing in what was saved")
        self.used.add(path)
        if path not in self.values:
            return _tensor(old, self.tensors[path])
        value = self.values[path]
        if not isinstance(value, dict):
            return value
        kind, detail = next(iter(value.items()), (None, None))
        if kind not in KINDS:
            raise FlockstepError(f"{path!r} must be one of {', '.join(KINDS)} (got {value!r})")
        return getattr(self, f"_{kind}")(old, path, detail)

    def _float(self, old: Any, path: str, text: str) -> float:
        return float(text)

    def _size(self, old: Any, path: str, sizes: list[int]) -> torch.Size:
        return torch.Size(sizes)

    def _generator(self, old: Any, path: str, module: str) -> Any:
        if not isinstance(old, torch.Generator | np.random.Generator):
            old = torch.Generator() if module.startswith("torch") else np.random.default_rng()
        _set_state(old, self.tensors[path])
        return old

    def _list(self, old: Any, path: str, length: int) -> list[Any]:
        before = old if isinstance(old, list) else []
        before[:] = self._parts(before, path, length)
        return before

    def _tuple(self, old: Any, path: str, length: int) -> tuple[Any, ...]:
        before = old if isinstance(old, tuple) else ()
        after = tuple(self._parts(before, path, length))
        unchanged = len(after) == len(before) and all(map(operator.is_, after, before))
        return before if unchanged else after

    def _deque(self, old: Any, path: str, length: int) -> deque[Any]:
        before = old if isinstance(old, deque) else deque[Any]()
        parts = self._parts(before, path, length)
        before.clear()
        before.extend(parts)
        return before

    def _parts(self, before: Any, path: str, length: int) -> list[Any]:
        return [
            self.load(before[n] if n < len(before) else None, f"{path}.{n}") for n in range(length)
        ]

    def _dict(self, old: Any, path: str, keys: list[Any]) -> dict[Any, Any]:
        before = old if isinstance(old, dict) else {}
        parts = {key: self.load(before.get(key), f"{path}.{key}") for key in keys}
        before.clear()
        before.update(parts)
        return before

    def _optimizer(self, old: Any, path: str, name: str) -> Any:
        _require_alike(old, path, name)
        old.load_state_dict(self.load(None, f"{path}.state_dict"))
        return old

    def _dataclass(self, old: Any, path: str, name: str) -> Any:
        _require_alike(old, path, name)
        for field in _data_fields(old):
            before = getattr(old, field.name)
            after = self.load(before, f"{path}.{field.name}")
            if after is not before:
                object.__setattr__(old, field.name, after)  # of a frozen one, too
        return old


def _tensor(old: Any, saved: Tensor) -> Tensor:
    fits = isinstance(old, Tensor) and old.shape == saved.shape and old.dtype == saved.dtype
    if not fits:
        return saved.clone()
    old.detach().copy_(saved)  # not a new one: others may look at this memory
    return old  # type: ignore[no-any-return]


def _require_alike(old: Any, path: str, name: str) -> None:
    if type(old).__name__ != name:
        raise FlockstepError(f"{path!r} was saved as a {name} (got a {type(old).__name__})")


def _state_of(generator: torch.Generator | np.random.Generator) -> Tensor:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    text = json.dumps(generator.bit_generator.state, default=np.ndarray.tolist)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _set_state(generator: torch.Generator | np.random.Generator, saved: Tensor) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(saved.cpu())
    else:
        generator.bit_generator.state = json.loads(bytes(saved.tolist()))


def _shared(value: Any, path: str) -> Iterator[tuple[str, SharedTensor]]:
    if isinstance(value, SharedTensor):
        yield path, value
    elif isinstance(value, list | tuple | deque):
        for n, part in enumerate(value):
            yield from _shared(part, f"{path}.{n}")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _shared(part, f"{path}.{key}")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _shared(getattr(value, field.name), f"{path}.{field.name}")
