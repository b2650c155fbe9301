"""The part of a worker that depends on the framework which computes its gradients.

A strategy sees one flat tensor of parameters and buffers, one of gradients, and an optimizer that
steps. PyTorch's models are made so by `flockstep.flat`; a `Node` makes them so for any other
framework, with `fs.jax` and `fs.numpy` among them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flockstep.errors import FlockstepError, InvalidField
from flockstep.fields import require, require_integer, require_number
from flockstep.flat import FlatTensors


class Node(ABC):
    """A model and its optimizer in a framework of your own. `fs.NodeWorker` trains it.

    Four methods move numbers between the framework's memory and flat tensors of torch's on the CPU.
    An optimizer that keeps state overrides the other methods, too: strategies average, send and
    reset what these give, and checkpoints hold it.

    Fields:
        shapes: of the parameters, in their order in the flat tensor.
        dtype: of all of them, and of the buffers.
        buffer_elements: how many numbers stand behind the parameters and are exchanged with them.
        settings: what schedules set and strategies read: "lr", where it is known.
        is_plain_sgd: whether `update` subtracts the rate times the gradients, and nothing else.
        loss: of the step that is being taken, as `worker.step` was told.
    """

    is_plain_sgd = False
    loss = math.nan

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype = torch.float32,
        *,
        buffer_elements: int = 0,
        lr: float | None = None,
    ) -> None:
        require(len(shapes) > 0, "shapes", "be those of at least one parameter", shapes)
        is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        require(is_float, "dtype", "be one of torch's floating-point types", dtype)
        require_integer("buffer_elements", buffer_elements, 0)
        if lr is not None:
            require_number("lr", lr, above=0, finite=True)
        self.shapes = [torch.Size(shape) for shape in shapes]
        self.dtype = dtype
        self.buffer_elements = buffer_elements
        self.settings: dict[str, float] = {} if lr is None else {"lr": float(lr)}

    @abstractmethod
    def fill(self, state: Tensor) -> None:
        """Write the parameters, and behind them the buffers, into `state`: once, at the start."""

    @abstractmethod
    def show(self, state: Tensor) -> None:
        """From now on the next gradient is to be taken at `state`. Called before every step."""

    @abstractmethod
    def gather(self, gradients: Any, flat: Tensor) -> None:
        """Write what `worker.step` was given as gradients into `flat`."""

    @abstractmethod
    def update(self, parameters: Tensor, gradients: Tensor) -> None:
        """The optimizer's step: change `parameters` in place."""

    def leaves(self) -> list[tuple[str, Sequence[int]]]:
        """Names and shapes of the parameters, and behind them the buffers, which all workers must
        have in common. "" is no name.
        """
        behind = [("", (self.buffer_elements,))] if self.buffer_elements else []
        return [*(("", shape) for shape in self.shapes), *behind]

    def gather_buffers(self, buffers: Any, flat: Tensor) -> None:
        """Write what `worker.step` was given as buffers into `flat`."""
        raise InvalidField("'buffers' must be left out: this node takes none")

    def model_of(self, state: Tensor) -> Any:
        """What `worker.finish` returns: a model with this state, in memory of its own."""
        return state.clone()

    def batch(self, data: Any) -> Any:
        """A batch of `worker.batches`, whose tensors are torch's, as the loop gets it."""
        return data

    def state_tensors(self) -> list[Tensor]:
        """Copies of the optimizer's state as far as it is floating-point numbers."""
        return []

    def put_state_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Take these in place of what `state_tensors` gave."""
        require(not tensors, "tensors", "be left out: this node keeps no state", len(tensors))

    def reset_state(self) -> None:  # noqa: B027  most simple ones have nothing to forget
        """Forget momentum and all other state, as if the optimizer were new."""

    def saved_state(self) -> Any:
        """All of the optimizer's state, for a checkpoint: numbers, tensors, and lists and dicts of
        these.
        """
        return self.state_tensors()

    def load_state(self, saved: Any) -> None:
        """Go on from what `saved_state` gave."""
        self.put_state_tensors(saved)


class NodeOptimizer:
    """What strategies and schedules see of a node's optimizer."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.param_groups = [node.settings]
        # Both once the worker has made the flat tensors.
        self.flat: FlatTensors
        self.where: Callable[[], str]

    def step(self) -> None:
        try:
            self.node.update(self.flat.parameters, self.flat.gradients)
        except InvalidField as error:
            raise InvalidField(f"{self.where()}: {error}") from None

    def state_dict(self) -> dict[str, Any]:
        return {"settings": dict(self.node.settings), "state": self.node.saved_state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.node.settings.update(saved["settings"])
        self.node.load_state(saved["state"])


@dataclass(frozen=True)
class Leaves:
    """The arrays that a model is made of: their names and shapes, in the order of the flat tensor,
    and the type of their numbers.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Leaves:
        """Of named tensors, which must be of this type; by default that of the first."""
        for name, tensor in tensors.items():
            dtype = dtype or tensor.dtype
            if tensor.dtype != dtype:
                raise FlockstepError(
                    "parameters and buffers must share one dtype: "
                    f"{name!r} is {tensor.dtype}, the first parameter {dtype}"
                )
        shapes = tuple(tensor.shape for tensor in tensors.values())
        return cls(tuple(tensors), shapes, dtype or torch.float32)

    @property
    def named_shapes(self) -> list[tuple[str, Sequence[int]]]:
        return [*zip(map(str, self.names), self.shapes, strict=True)]

    @property
    def elements(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    def require_names(self, field: str, names: Sequence[str]) -> None:
        """Complain of a tree that has changed."""
        missing = [name for name in self.names if name not in names]
        new = [name for name in names if name not in self.names]
        rule = "have the leaves that they had when the worker was made"
        require(not missing, field, rule, f"none named {missing[0]!r}" if missing else "")
        require(not new, field, rule, f"a new one, {new[0]!r}" if new else "")

    def require_like(self, field: str, tensors: Sequence[Tensor]) -> None:
        """Complain of arrays that have changed in shape or type."""
        for name, shape, tensor in zip(self.names, self.shapes, tensors, strict=True):
            if tensor.shape != shape or tensor.dtype != self.dtype:
                known = f"{self.dtype} of {tuple(shape)}"
                got = f"{tensor.dtype} of {tuple(tensor.shape)}"
                raise InvalidField(f"{field!r} must be {known} at {name!r} (got {got})")

    def parts(self, flat: Tensor) -> Iterator[Tensor]:
        """Views of a flat tensor in the shapes of the leaves."""
        start = 0
        for shape in self.shapes:
            yield flat[start : start + shape.numel()].view(shape)
            start += shape.numel()

    def copy(self, field: str, tensors: Sequence[Tensor], flat: Tensor) -> None:
        """Copy arrays to their places."""
        self.require_like(field, tensors)
        for place, tensor in zip(self.parts(flat), tensors, strict=True):
            place.copy_(tensor)
