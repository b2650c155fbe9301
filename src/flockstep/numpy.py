"""A worker for a model whose parameters are NumPy arrays, with gradients from wherever you like.

    def program(comm):
        params = {"w": np.zeros((10, 3)), "b": np.zeros(3)}
        worker = fs.numpy.Worker(comm, params, strategy=fs.LocalSGD(period=8), lr=0.1)
        for x, y in worker.batches((inputs, targets), batch_size=32, epochs=2):
            loss, grads = loss_and_gradients(worker.params, x, y)
            worker.step(loss, grads)
        return worker.finish()

Nothing is copied but the gradients: `worker.params` are views of the flat tensor that strategies
exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flockstep.comm import Comm
from flockstep.errors import CheckpointError, InvalidField
from flockstep.fields import require
from flockstep.node import Leaves, Node
from flockstep.node_worker import NodeWorker
from flockstep.schedules import Schedule
from flockstep.strategies import Strategy

Arrays = dict[str, NDArray[Any]]
State = dict[str, Any]
Update = Callable[[Arrays, Arrays, float, State], Any]
"""`update(params, grads, lr, state)` changes the arrays of `params` in place, puts new ones of the
same shape and type into it, or returns a dict of new ones. In `state`, a dict that is empty at
first, it may keep arrays and numbers from step to step, such as those of momentum."""

FLOATS = (np.float16, np.float32, np.float64)


def sgd(params: Arrays, grads: Arrays, lr: float, state: State) -> None:
    """Plain stochastic gradient descent.

    x ← x − η g"""
    for name, gradient in grads.items():
        params[name] -= lr * gradient


class Worker(NodeWorker):
    """A worker of a dict of NumPy arrays.

    `update` is the optimizer's step; plain SGD if it is left out. `buffers` are arrays that are
    exchanged with the parameters but get no gradients: hand new ones to `worker.step(loss, grads,
    buffers=…)`. Arrays stand in the flat tensor in the order of their dicts, which must be the
    same on all workers.

    `worker.params` and `worker.buffers` may be read only: a step is `worker.step`'s business. Who
    means to change them does it inside `with worker.changing_parameters():`.

    `finish` returns copies of the parameters, or with `buffers` a pair of both.
    """

    node: NumpyNode

    def __init__(
        self,
        comm: Comm,
        params: Mapping[str, NDArray[Any]],
        update: Update = sgd,
        *,
        strategy: Strategy[Any],
        lr: float,
        schedule: Schedule | None = None,
        buffers: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        super().__init__(comm, NumpyNode(params, update, lr, buffers), strategy, schedule)

    @property
    def params(self) -> Arrays:
        """Where the next gradient is to be taken."""
        return self.node.params

    @property
    def buffers(self) -> Arrays:
        return self.node.buffers

    @contextmanager
    def changing_parameters(self) -> Iterator[None]:
        """Between two steps, a change of the parameters that is meant.

        with worker.changing_parameters():
            worker.params["w"].clip(-1, 1, out=worker.params["w"])
        """
        self.node.allow_changes(True)
        try:
            with super().changing_parameters():
                yield
        finally:
            self.node.allow_changes(False)


class NumpyNode(Node):
    """A dict of arrays that are views of the flat tensor."""

    def __init__(
        self,
        params: Mapping[str, NDArray[Any]],
        update: Update = sgd,
        lr: float = 0.1,
        buffers: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        require(callable(update), "update", "be a function of params, grads, lr and state", update)
        self._start = _tensors("params", params)
        self._start_of_buffers = {} if buffers is None else _tensors("buffers", buffers)
        require(bool(self._start), "params", "have an array", params)
        self._leaves = Leaves.of(self._start)
        self._buffers = Leaves.of(self._start_of_buffers, self._leaves.dtype)
        elements = self._buffers.elements
        super().__init__(self._leaves.shapes, self._leaves.dtype, buffer_elements=elements, lr=lr)
        self._update = update
        self.is_plain_sgd = update is sgd
        self._has_buffers = buffers is not None
        self.state: State = {}

    def leaves(self) -> list[tuple[str, Sequence[int]]]:
        return [*self._leaves.named_shapes, *self._buffers.named_shapes]

    def fill(self, state: Tensor) -> None:
        count = self._leaves.elements
        self._leaves.copy("params", list(self._start.values()), state[:count])
        self._buffers.copy("buffers", list(self._start_of_buffers.values()), state[count:])

    def show(self, state: Tensor) -> None:
        params, buffers = self._views(state)
        # Views of views: NumPy lets those of another's memory become read-only for good.
        self.params = {name: array.view() for name, array in params.items()}
        self.buffers = {name: array.view() for name, array in buffers.items()}
        self.allow_changes(False)

    def allow_changes(self, are_allowed: bool) -> None:
        """Of the arrays that were shown."""
        for array in (*self.params.values(), *self.buffers.values()):
            array.flags.writeable = are_allowed

    def gather(self, gradients: Any, flat: Tensor) -> None:
        _copy("gradients", gradients, self._leaves, flat)

    def gather_buffers(self, buffers: Any, flat: Tensor) -> None:
        _copy("buffers", buffers, self._buffers, flat)

    def update(self, parameters: Tensor, gradients: Tensor) -> None:
        views, grads = _arrays(self._leaves, parameters), _arrays(self._leaves, gradients)
        params = dict(views)
        result = self._update(params, grads, self.settings["lr"], self.state)
        new = params if result is None else result
        if not _are_same(new, views):
            self._take(new, parameters)

    def _take(self, params: Any, flat: Tensor) -> None:
        """Copy what an update has put in the place of the parameters' own arrays."""
        tensors = _named("params", params, self._leaves)
        # An array may be another's view of the flat tensor, which is about to change.
        self._leaves.copy("params", [tensor.clone() for tensor in tensors], flat)

    def model_of(self, state: Tensor) -> Any:
        params, buffers = self._views(state.clone())
        return (params, buffers) if self._has_buffers else params

    def _views(self, state: Tensor) -> tuple[Arrays, Arrays]:
        count = self._leaves.elements
        return _arrays(self._leaves, state[:count]), _arrays(self._buffers, state[count:])

    def batch(self, data: Any) -> Any:
        return as_arrays(data)

    def state_tensors(self) -> list[Tensor]:
        return [torch.from_numpy(np.array(self.state[name])) for name in self._floating()]

    def put_state_tensors(self, tensors: Sequence[Tensor]) -> None:
        for name, tensor in zip(self._floating(), tensors, strict=True):
            value = self.state[name]
            if isinstance(value, np.ndarray):
                value[...] = tensor.numpy()
            else:
                self.state[name] = type(value)(tensor.item())

    def _floating(self) -> list[str]:
        """What of the state is floating-point numbers, in an order in which the same names meet on
        all workers: that of the parameters, then that of the alphabet.
        """
        places = {name: place for place, name in enumerate(self._leaves.names)}
        names = sorted(self.state, key=lambda name: (places.get(name, len(places)), str(name)))
        self._require_state()
        return [name for name in names if np.asarray(self.state[name]).dtype.kind == "f"]

    def _require_state(self) -> None:
        for name, value in self.state.items():
            is_plain = isinstance(value, np.ndarray | np.generic | int | float)
            rule = "keep arrays and numbers only, such as np.zeros_like(grads['w'])"
            require(is_plain, "state", rule, f"a {type(value).__name__} at {name!r}")

    def reset_state(self) -> None:
        self.state.clear()

    def saved_state(self) -> Any:
        self._require_state()
        return {name: _saved(value) for name, value in self.state.items()}

    def load_state(self, saved: Any) -> None:
        if not isinstance(saved, dict):
            raise CheckpointError("the checkpoint is of another framework's optimizer")
        self.state = {name: _loaded(value) for name, value in saved.items()}


def _saved(value: Any) -> Any:
    """Of an optimizer's state, for a checkpoint: Python's numbers as they are, and in a list those
    of NumPy's that are no arrays.
    """
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return [torch.from_numpy(np.array(value))] if isinstance(value, np.generic) else value


def _loaded(saved: Any) -> Any:
    """The other way round."""
    if isinstance(saved, Tensor):
        return saved.numpy().copy()
    return saved[0].numpy()[()] if isinstance(saved, list) else saved


def as_arrays(data: Any) -> Any:
    """A batch whose tensors are NumPy arrays, in the same memory."""
    if isinstance(data, Tensor):
        return data.numpy(force=True)
    if isinstance(data, Mapping):
        return {name: as_arrays(part) for name, part in data.items()}
    if type(data) in (list, tuple):
        return type(data)(map(as_arrays, data))
    return data


def _tensors(field: str, arrays: Any) -> dict[str, Tensor]:
    """A dict of arrays as tensors in the same memory."""
    is_dict = isinstance(arrays, Mapping)
    require(is_dict, field, "be a dict of arrays", arrays)
    return {name: _tensor(field, name, array) for name, array in arrays.items()}


def _tensor(field: str, name: str, array: Any) -> Tensor:
    is_array = isinstance(array, np.ndarray | np.generic)  # arrays of no dimensions become numbers
    if not is_array or array.dtype not in FLOATS:
        rule = "be an array of float16, float32 or float64"
        raise InvalidField(f"{field!r} must {rule} at {name!r} (got {_kind(array)})")
    array = np.asarray(array)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch takes no others
    return torch.from_numpy(array)


def _kind(value: Any) -> str:
    """`a list`, or `a Tensor of torch.float32`: what stands in the place of an array."""
    dtype = getattr(value, "dtype", None)
    if isinstance(value, np.ndarray | np.generic):
        return str(dtype)
    of_dtype = "" if dtype is None else f" of {dtype}"
    return f"a {type(value).__name__}{of_dtype}"


def _copy(field: str, arrays: Any, leaves: Leaves, flat: Tensor) -> None:
    leaves.copy(field, _named(field, arrays, leaves), flat)


def _named(field: str, arrays: Any, leaves: Leaves) -> list[Tensor]:
    """A dict of arrays, in the order of the flat tensor."""
    tensors = _tensors(field, arrays)
    leaves.require_names(field, list(tensors))
    return [tensors[name] for name in leaves.names]


def _are_same(arrays: Any, others: Arrays) -> bool:
    """Whether a dict holds these very arrays."""
    if not isinstance(arrays, dict) or arrays.keys() != others.keys():
        return False
    return all(arrays[name] is other for name, other in others.items())


def _arrays(leaves: Leaves, flat: Tensor) -> Arrays:
    parts = (part.numpy() for part in leaves.parts(flat))
    return dict(zip(leaves.names, parts, strict=True))
