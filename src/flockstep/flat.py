"""A model whose parameters are views of one flat tensor, and whose gradients are views of another.

Every exchange is then one vector operation, whatever the model. The flat tensor holds the trainable
parameters first and the persistent floating-point buffers (the statistics of batch normalisation)
behind them, so that whoever averages the whole of it averages both. Frozen parameters, buffers of
integers and non-persistent buffers stay where they are. A model of which more is unfrozen later is
made flat anew."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Self

import torch
from torch import Tensor, nn

from flockstep.errors import FlockstepError
from flockstep.fields import require, require_model

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]


class FlatTensors:
    """What strategies see of a model, whatever computes with it.

    Fields:
        state: parameters and buffers, one flat tensor; `parameters` and `buffers` are its parts.
        gradients: of the parameters.
        shapes: of the parameters, in their order in the flat tensor.
        count: how many numbers the parameters are.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        buffer_elements: int,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Allocate,
    ) -> None:
        self.shapes = tuple(shapes)
        self.count = sum(shape.numel() for shape in self.shapes)
        self.state = allocate(self.count + buffer_elements, dtype, device)
        self.parameters = self.state[: self.count]
        self.buffers = self.state[self.count :]
        self.gradients = allocate(self.count, dtype, device).zero_()

    def copy_with(self, state: Tensor) -> Self:
        """The same model's flat tensors with another state, and no model behind them."""
        other = copy.copy(self)
        other.state = state.clone()
        other.parameters = other.state[: self.count]
        other.buffers = other.state[self.count :]
        other.gradients = torch.zeros_like(other.parameters)
        return other

    def live_in(self, memory: Tensor) -> None:
        """Move to memory that others may see and change, too, and which has held the same values
        since all have met: another worker may have taken a step there already. For models without
        buffers, which are nobody else's.
        """
        require(
            not self.buffers.numel(),
            "model",
            "have no buffers to live in shared memory",
            self.buffers.numel(),
        )
        self.state = self.parameters = memory

    def named(self, model: nn.Module, state: Tensor) -> dict[str, Tensor]:
        """Parameters and buffers of a torch module that has `state`, by name."""
        raise FlockstepError("parameters have names in a torch module only: this is another's")

    def collect_gradients(self) -> None:
        """Make `gradients` hold those of the last backward pass."""

    @property
    def is_outgrown(self) -> bool:
        """Whether parameters that were frozen when it was made are no longer."""
        return False

    def changes(self) -> int:
        """How often the parameters were changed by others than strategies, where that is known."""
        return 0


class FlatModel(FlatTensors):
    """The flat tensors of a torch module, whose parameters and gradients are views of them."""

    def __init__(self, model: nn.Module, allocate: Allocate) -> None:
        require_model(model)
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._known = {id(p) for p in model.parameters()}
        require(bool(self._trainable), "model", "have a trainable parameter", type(model).__name__)
        buffers = dict(_persistent_float_buffers(model))
        self._flat_buffers = list(buffers.values())
        dtype, device = self._trainable[0].dtype, self._trainable[0].device
        _require_uniform(model, buffers, dtype, device)

        shapes = [p.shape for p in self._trainable]
        buffer_elements = sum(b.numel() for b in buffers.values())
        super().__init__(shapes, buffer_elements, dtype, device, allocate)

        self._gradient_views = []
        for parameter, start in _placed(self._trainable, 0):
            parameter.data = _move(parameter.data, self.state, start)
            view = _shaped(self.gradients, parameter.data, start)
            if parameter.grad is not None:
                view.copy_(parameter.grad)
            parameter.grad = view
            self._gradient_views.append(view)
        for buffer, start in _placed(list(buffers.values()), self.count):
            buffer.data = _move(buffer.data, self.state, start)
        self._home = self._addresses()
        self._model = model
        # Where each parameter is held, and how many things each module holds: looked at in every
        # step, which walking through the model would take too long for.
        modules = [*model.modules()]
        self._places = [
            (module._parameters, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
        ]
        holders = [held for module in modules for held in (module._parameters, module._modules)]
        self._holders = [(held, len(held)) for held in holders]

    def live_in(self, memory: Tensor) -> None:
        super().live_in(memory)
        for parameter, start in _placed(self._trainable, 0):
            parameter.data = _shaped(memory, parameter.data, start)
        self._home = self._addresses()

    def named(self, model: nn.Module, state: Tensor) -> dict[str, Tensor]:
        """Parameters and buffers of a model that has `state`, by name, as
        `torch.func.functional_call` wants them.
        """
        names = {
            id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        placed = _placed([*self._trainable, *self._flat_buffers], 0)
        return {names[id(tensor)]: _shaped(state, tensor.data, start) for tensor, start in placed}

    def collect_gradients(self) -> None:
        """Make `gradients` hold the gradients of the last backward pass.

        It does already, since autograd adds into the views, unless somebody replaced them:
        `zero_grad()` does."""
        if not all(map(is_, map(attrgetter("grad"), self._trainable), self._gradient_views)):
            with torch.no_grad():
                for parameter, view in zip(self._trainable, self._gradient_views, strict=True):
                    if parameter.grad is None:
                        view.zero_()
                    elif parameter.grad is not view:
                        view.copy_(parameter.grad)
                    parameter.grad = view
        for parameter, view in zip(self._trainable, self._gradient_views, strict=True):
            if not parameter.requires_grad and not view.any():
                # Frozen by now: an optimizer leaves alone what has no gradient, but moves by its
                # momentum what has one of zeros.
                parameter.grad = None
        if self._addresses() != self._home:
            raise FlockstepError(
                "the model's parameters were moved or replaced after its Worker was made "
                "(model.to(…), parameter.data = …): do that before"
            )
        self._require_same_parts()

    def _require_same_parts(self) -> None:
        """Complain of a parameter that was replaced, added or removed: nobody would train it."""
        is_same = all(held.get(name) is known for held, name, known in self._places)
        if is_same and all(len(held) == count for held, count in self._holders):
            return
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        if names.keys() != self._known:
            new = sorted(names[each] for each in names.keys() - self._known) or ["one is gone"]
            raise FlockstepError(
                "the model has other parameters than when its Worker was made "
                f"({', '.join(map(repr, new[:3]))}): add and replace them before"
            )

    @property
    def is_outgrown(self) -> bool:
        return any(map(attrgetter("requires_grad"), self._frozen))

    def changes(self) -> int:
        """How often the parameters were changed by their own names, as an optimizer does; what
        strategies do to the flat tensor is not counted.
        """
        return sum(map(attrgetter("_version"), self._trainable))

    def _addresses(self) -> tuple[int, int]:
        """Where the first and the last parameter lie. What moves a model moves all of it."""
        return self._trainable[0].data_ptr(), self._trainable[-1].data_ptr()

    def owns(self, parameter: Tensor) -> bool:
        """Whether `parameter` is the model's: exchanged, or frozen and equal on all workers."""
        return id(parameter) in self._known


def outside_tensors(model: nn.Module) -> list[Tensor]:
    """What belongs to the model's state but not to its flat tensor: equal on all workers at the
    start.
    """
    frozen = [p.data for p in model.parameters() if not p.requires_grad]
    flat = {id(buffer) for _, buffer in _persistent_float_buffers(model)}
    return frozen + [b for b in model.buffers() if id(b) not in flat]


def _persistent_float_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            if buffer.is_floating_point() and buffer.numel():
                seen.add(id(buffer))
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _require_uniform(
    model: nn.Module, buffers: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """One flat tensor can hold only one dtype on one device."""
    trainable = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    for name, tensor in (*trainable, *buffers.items()):
        if tensor.dtype != dtype or tensor.device != device:
            raise FlockstepError(
                "the model's parameters and buffers must share one dtype and device: "
                f"{name!r} is {tensor.dtype} on {tensor.device}, "
                f"the first parameter {dtype} on {device}; "
                "use model.to(dtype) or model.to(device)"
            )


def _placed(tensors: Sequence[Tensor], start: int) -> Iterator[tuple[Tensor, int]]:
    for tensor in tensors:
        yield tensor, start
        start += tensor.numel()


def _move(tensor: Tensor, flat: Tensor, start: int) -> Tensor:
    view = _shaped(flat, tensor, start)
    view.copy_(tensor)
    return view


def _shaped(flat: Tensor, like: Tensor, start: int) -> Tensor:
    """The part of `flat` from `start` on, with the shape of `like` and, if it is dense, its
    strides.
    """
    part = flat[start : start + like.numel()]
    if torch.ops.aten.is_non_overlapping_and_dense(like):
        return part.as_strided(like.shape, like.stride(), part.storage_offset())
    return part.view(like.shape)
