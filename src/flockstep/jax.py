"""A worker for a JAX model: any pytree of parameters, and any optax optimizer.

    optimizer = optax.sgd(0.1)      # outside: simulated workers share what is compiled for it

    def program(comm):
        worker = fs.jax.Worker(comm, params, optimizer, strategy=fs.LocalSGD(period=8))
        for x, y in worker.batches(dataset, batch_size=32, epochs=2):
            loss, grads = jax.value_and_grad(loss_fn)(worker.params, x, y)
            worker.step(loss, grads)
        return worker.finish()

JAX arrays never change, and strategies change the flat tensor in place: so no array that a program
can get hold of lies in its memory. What is copied per step: the gradients into the flat tensor, and
the parameters out of it, once for the program and once for the optimizer, with the gradients that
have been exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from flockstep.comm import Comm
from flockstep.errors import CheckpointError, FlockstepError, InvalidField
from flockstep.fields import require
from flockstep.node import Leaves, Node
from flockstep.node_worker import NodeWorker
from flockstep.numpy import as_arrays
from flockstep.same_model import cut
from flockstep.schedules import Schedule
from flockstep.strategies import Strategy

try:
    import jax
    import optax
    from jax import numpy as jnp
except ImportError as error:
    raise FlockstepError("fs.jax needs JAX and optax: pip install 'flockstep[jax]'") from error

DTYPES = ("float16", "bfloat16", "float32", "float64")
RATE = "learning_rate"  # as optax calls it
TAKE_MORE = (optax.GradientTransformationExtraArgs, optax.MultiSteps)  # than state and parameters
LONGEST_PART = 80  # characters of a part of a tree in a message
OUTSIDE = "call worker.step outside of jax.jit"


class Worker(NodeWorker):
    """A worker of a pytree of JAX arrays, such as a dict, the parameters of a Flax module, or those
    of an Equinox module (`eqx.partition(model, eqx.is_inexact_array)[0]`).

    `optimizer` is any of optax's. `lr` is the rate that it was made with, for schedules and for
    methods that ask for it; one in `optax.inject_hyperparams` needs none. Of a schedule of optax's
    own strategies hear by `optax.inject_hyperparams` only: with `lr` they keep to that rate. What
    wants the loss as `value`, as `optax.contrib.reduce_on_plateau` does, gets this worker's own.

    `buffers` is a pytree that is exchanged with the parameters but gets no gradients, such as
    Flax's batch_stats: hand new ones to `worker.step(loss, grads, buffers=…)`.

    Leaves stand in the flat tensor in the order of the tree, by which JAX sorts the keys of dicts;
    or as `order` lists their names (`worker.names`), which it must with workers of another order.

    Parameters of float64 need `jax_enable_x64`, set inside the program: processes have their own.

    Batches are NumPy arrays, which JAX's functions take.

    `finish` returns the parameters, or with `buffers` a pair of both.
    """

    node: JaxNode
    _may_change = False

    def __init__(
        self,
        comm: Comm,
        params: Any,
        optimizer: optax.GradientTransformation,
        *,
        strategy: Strategy[Any],
        schedule: Schedule | None = None,
        weight_decay_schedule: Schedule | None = None,
        lr: float | None = None,
        buffers: Any = None,
        order: Sequence[str] | None = None,
    ) -> None:
        node = JaxNode(params, optimizer, lr, buffers, order)
        given = {"lr": schedule, "weight_decay": weight_decay_schedule}
        for setting, each in given.items():
            is_twice = each is not None and setting in node.scheduled
            rule = "be left out where optax has a schedule of its own"
            require(not is_twice, "schedule", f"{rule} for {setting!r}", each)
        super().__init__(comm, node, strategy, schedule, weight_decay_schedule)

    @property
    def params(self) -> Any:
        """Where the next gradient is to be taken."""
        return self.node.params

    @params.setter
    def params(self, params: Any) -> None:
        self._require_may_change("params")
        self.node.gather_parameters(params, self.flat.parameters)
        self.node.show(self.flat.state)

    @property
    def buffers(self) -> Any:
        return self.node.buffers

    @buffers.setter
    def buffers(self, buffers: Any) -> None:
        self._require_may_change("buffers")
        self.node.gather_buffers(buffers, self.flat.buffers)
        self.node.show(self.flat.state)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters, in their order in the flat tensor."""
        return self.node.names

    @property
    def optimizer_state(self) -> Any:
        """Of optax."""
        return self.node.state

    @contextmanager
    def changing_parameters(self) -> Iterator[None]:
        """Between two steps, a change of the parameters that is meant.

        with worker.changing_parameters():
            worker.params = jax.tree.map(lambda leaf: leaf.clip(-1, 1), worker.params)
        """
        self._may_change = True
        try:
            with super().changing_parameters():
                yield
        finally:
            self._may_change = False

    def _hear(self, loss: Any, accuracy: float | None, again: Callable[[], Any] | None) -> None:
        rule = f"be a number that is known by now: {OUTSIDE}"
        require(not isinstance(loss, jax.core.Tracer), "loss", rule, loss)
        super()._hear(loss, accuracy, again)

    def _require_may_change(self, name: str) -> None:
        if not self._may_change:
            raise FlockstepError(
                f"rank {self.comm.rank}: worker.{name} is set by worker.step. A change that is "
                "meant belongs into `with worker.changing_parameters():`"
            )


class JaxNode(Node):
    """A pytree of arrays that are copied out of the flat tensor, and an optax optimizer."""

    def __init__(
        self,
        params: Any,
        optimizer: optax.GradientTransformation,
        lr: float | None = None,
        buffers: Any = None,
        order: Sequence[str] | None = None,
    ) -> None:
        is_one = hasattr(optimizer, "init") and hasattr(optimizer, "update")
        require(is_one, "optimizer", "be one of optax's, such as optax.sgd(0.1)", optimizer)
        self._tree = Tree.of("params", params, order)
        self._buffer_tree = Tree.of("buffers", buffers, dtype=self._tree.leaves.dtype)
        self._start = params, buffers
        self._optimizer = optimizer
        self._has_buffers = buffers is not None
        leaves, of_buffers = self._tree.leaves, self._buffer_tree.leaves
        super().__init__(leaves.shapes, leaves.dtype, buffer_elements=of_buffers.elements, lr=lr)

        self.scheduled: set[str] = set()  # settings that optax changes by itself
        self._made_with = lr
        state = optimizer.init(params)
        self._try(params, state)
        self._read_settings(state)
        self._written = dict(self.settings)
        self._before: Any = None  # the state that was reset
        self.state: Any = None  # made at the parameters that all workers start from

    @property
    def names(self) -> tuple[str, ...]:
        return self._tree.leaves.names

    def leaves(self) -> list[tuple[str, Sequence[int]]]:
        return [*self._tree.leaves.named_shapes, *self._buffer_tree.leaves.named_shapes]

    def _try(self, params: Any, state: Any) -> None:
        """Refuse an optimizer that could not step. Nothing is computed, and what is traced is kept
        for the first step.
        """
        try:
            updates, _ = _updated.eval_shape(self._optimizer, params, state, params, 0.0)
        except TypeError as error:
            rule = "be one that needs gradients, state, parameters and 'value', the loss, only"
            got = cut(" ".join(str(error).split()), 2 * LONGEST_PART)
            raise InvalidField(f"'optimizer' must {rule} (got {got})") from error
        self._require_updates(updates)

    def _require_updates(self, updates: Any) -> None:
        """Complain of updates that are not those of the parameters: too small ones would be added
        all the same.
        """
        tree = self._tree
        if tree.is_like(updates):
            shapes = tuple(leaf.shape for leaf in tree.in_order(updates))
            if shapes == tree.leaves.shapes:
                return
        paths = jax.tree_util.tree_leaves_with_path(updates)
        given = {_name(path): leaf.shape for path, leaf in paths}
        for name, shape in tree.leaves.named_shapes:
            rule = f"give updates of shape {tuple(shape)} at {name!r}"
            require(given.get(name) == shape, "optimizer", rule, given.get(name))
        tree.require_structure("updates", updates)

    # Between the pytree and the flat tensor.

    def fill(self, state: Tensor) -> None:
        count, (params, buffers) = self._tree.leaves.elements, self._start
        self._tree.copy("params", params, state[:count])
        self._buffer_tree.copy("buffers", buffers, state[count:])

    def show(self, state: Tensor) -> None:
        self._shown = state
        self._params = self._buffers = None  # made when somebody asks for them
        if self.state is None:
            self.state = _keeping_schedules(self._optimizer.init(self.params), self._before)
            self._written = {}

    @property
    def params(self) -> Any:
        if self._params is None:
            self._params = self._tree.split(self._shown[: self._tree.leaves.elements])
        return self._params

    @property
    def buffers(self) -> Any:
        if self._buffers is None:
            self._buffers = self._buffer_tree.split(self._shown[self._tree.leaves.elements :])
        return self._buffers

    def gather(self, gradients: Any, flat: Tensor) -> None:
        self._tree.copy("gradients", gradients, flat)

    def gather_parameters(self, params: Any, flat: Tensor) -> None:
        self._tree.copy("params", params, flat)

    def gather_buffers(self, buffers: Any, flat: Tensor) -> None:
        self._buffer_tree.copy("buffers", buffers, flat)

    def model_of(self, state: Tensor) -> Any:
        count = self._tree.leaves.elements
        params = self._tree.split(state[:count])
        return (params, self._buffer_tree.split(state[count:])) if self._has_buffers else params

    def batch(self, data: Any) -> Any:
        return as_arrays(data)

    # The optimizer.

    def update(self, parameters: Tensor, gradients: Tensor) -> None:
        self._write_settings()
        grads, params = self._tree.split(gradients), self._tree.split(parameters)
        updates, self.state = _updated(self._optimizer, grads, self.state, params, self.loss)
        jax.block_until_ready(updates)
        self._require_updates(updates)

        factor = self.settings["lr"] / self._made_with if self._made_with else 1.0
        in_order = self._tree.in_order(updates)
        for part, update in zip(self._tree.leaves.parts(parameters), in_order, strict=True):
            part.add_(from_dlpack(update), alpha=factor)
        if self.scheduled:
            self._read_settings(self.state)

    def _read_settings(self, state: Any) -> None:
        """Take over what `optax.inject_hyperparams` lets others see."""
        for part in jax.tree.leaves(state, is_leaf=_is_injected):
            if not _is_injected(part):
                continue
            rule = "be left out with optax.inject_hyperparams, which tells it"
            is_twice = self._made_with is not None and RATE in part.hyperparams
            require(not is_twice, "lr", rule, self._made_with)
            for name, value in part.hyperparams.items():
                if jnp.ndim(value) == 0:
                    self.settings[_setting(name)] = float(value)
            self.scheduled |= {*map(_setting, getattr(part, "hyperparams_states", ()))}

    def _write_settings(self) -> None:
        """Hand what a schedule has set to optax."""
        if self.settings == self._written:
            return

        def with_settings(part: Any) -> Any:
            if not _is_injected(part):
                return part
            values = {
                name: jnp.asarray(self.settings.get(_setting(name), value), jnp.result_type(value))
                for name, value in part.hyperparams.items()
            }
            return part._replace(hyperparams=values)

        self.state = jax.tree.map(with_settings, self.state, is_leaf=_is_injected)
        self._written = dict(self.settings)

    def state_tensors(self) -> list[Tensor]:
        leaves = jax.tree.leaves(self.state)
        return [_tensor(leaves[place]).clone() for place in self._floating()]

    def put_state_tensors(self, tensors: Sequence[Tensor]) -> None:
        leaves, structure = jax.tree.flatten(self.state)
        for place, tensor in zip(self._floating(), tensors, strict=True):
            leaves[place] = _copied(tensor)
        self.state = jax.tree.unflatten(structure, leaves)

    def _floating(self) -> list[int]:
        """Which leaves of the state are floating-point numbers, settings left out. Those that go
        with the parameters are in the order of the flat tensor.
        """
        paths, structure = jax.tree_util.tree_flatten_with_path(self.state)
        floating = {
            place
            for place, (path, leaf) in enumerate(paths)
            if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
            and not any(getattr(key, "name", None) == "hyperparams" for key in path)
        }
        numbered = jax.tree.unflatten(structure, range(len(paths)))
        parts = jax.tree.leaves(numbered, is_leaf=self._tree.is_like)
        in_order = [
            place
            for part in parts
            for place in (self._tree.in_order(part) if self._tree.is_like(part) else [part])
        ]
        return [place for place in in_order if place in floating]

    def reset_state(self) -> None:
        self._before, self.state = self.state, None  # made anew at the next step's parameters

    def saved_state(self) -> Any:
        return [_tensor(_plain(leaf)).clone() for leaf in jax.tree.leaves(self.state)]

    def load_state(self, saved: Any) -> None:
        leaves, structure = jax.tree.flatten(self.state)
        fits = isinstance(saved, list) and len(saved) == len(leaves)
        if not fits or any(
            tensor.shape != jnp.shape(_plain(leaf))
            for tensor, leaf in zip(saved, leaves, strict=True)
        ):
            raise CheckpointError("the checkpoint is of another optimizer than this one of optax's")
        loaded = [_like(_copied(tensor), leaf) for tensor, leaf in zip(saved, leaves, strict=True)]
        self.state = jax.tree.unflatten(structure, loaded)
        self._written = {}


@dataclass(frozen=True)
class Tree:
    """A pytree and its place in a flat tensor.

    Fields:
        leaves: in the order of the flat tensor.
        places: of each of them among the leaves in the order of the pytree.
        structure: of the pytree.
    """

    leaves: Leaves
    places: tuple[int, ...]
    structure: Any

    @classmethod
    def of(
        cls,
        field: str,
        tree: Any,
        order: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tree:
        paths, structure = jax.tree_util.tree_flatten_with_path(tree)
        names = [_name(path) for path, _ in paths]
        if len({*names}) < len(names):
            twice = max(names, key=names.count)
            raise InvalidField(f"{field!r} must have leaves of different names (got two {twice!r})")
        if order is not None:
            _require_order(order, names)
        places = tuple(range(len(names)) if order is None else map(names.index, order))
        tensors = {}
        for place in places:
            tensors[names[place]] = _checked(field, names[place], paths[place][1])
        if field == "params":
            require(bool(tensors), field, "have an array", tree)
        return cls(Leaves.of(tensors, dtype), places, structure)

    def copy(self, field: str, tree: Any, flat: Tensor) -> None:
        """Copy the leaves of a pytree like this one to their places."""
        jax.block_until_ready(tree)
        self.require_structure(field, tree)
        tensors = map(partial(_readable, field), self.leaves.names, self.in_order(tree))
        self.leaves.copy(field, list(tensors), flat)

    def require_structure(self, field: str, tree: Any) -> None:
        """Complain of a tree that has changed."""
        if self.is_like(tree):
            return
        paths = jax.tree_util.tree_leaves_with_path(tree)
        self.leaves.require_names(field, [_name(path) for path, _ in paths])
        ours, theirs = _first_difference(self.structure, jax.tree.structure(tree))
        rule = "have the tree that they had when the worker was made"
        hint = ". Give a module of nnx as nnx.split(model, nnx.Param)" if self._is_nnx else ""
        raise InvalidField(f"{field!r} must {rule}, with {ours} (got {theirs}){hint}")

    @property
    def _is_nnx(self) -> bool:
        kind, _ = self.structure.node_data() or (type(None), None)
        return any(base.__module__ == "flax.nnx.module" for base in kind.__mro__)

    def split(self, flat: Tensor) -> Any:
        """The pytree of what a flat tensor holds, in memory of its own."""
        parts = _split(_alias(flat), self.leaves.shapes)
        return jax.block_until_ready(self.joined(parts))

    def joined(self, parts: Sequence[Any]) -> Any:
        """The pytree whose leaves are given in the order of the flat tensor."""
        leaves: list[Any] = [None] * len(parts)
        for place, part in zip(self.places, parts, strict=True):
            leaves[place] = part
        return jax.tree.unflatten(self.structure, leaves)

    def is_like(self, tree: Any) -> bool:
        return _is_same(self.structure, jax.tree.structure(tree))

    def in_order(self, tree: Any) -> list[Any]:
        """The leaves of such a pytree, in the order of the flat tensor."""
        leaves = jax.tree.leaves(tree)
        return [leaves[place] for place in self.places]


def _cut(flat: jax.Array, shapes: tuple[torch.Size, ...]) -> list[jax.Array]:
    parts, start = [], 0
    for shape in shapes:
        parts.append(flat[start : start + shape.numel()].reshape(shape))
        start += shape.numel()
    return parts


# What is compiled allocates what it returns: none of it lies in the memory of its arguments.
_split = partial(jax.jit, static_argnums=1)(_cut)


# Compiled by itself, as in a plain loop: together with anything else, roundings would differ.
@partial(jax.jit, static_argnums=0)
def _updated(
    optimizer: optax.GradientTransformation, grads: Any, state: Any, params: Any, loss: Any
) -> tuple[Any, Any]:
    more = {"value": loss} if isinstance(optimizer, TAKE_MORE) else {}
    updates, state = optimizer.update(grads, state, params, **more)
    return updates, state


def _require_order(order: Any, names: Sequence[str]) -> None:
    is_list = isinstance(order, Sequence) and not isinstance(order, str)
    is_whole = is_list and sorted(map(repr, order)) == sorted(map(repr, names))
    rule = f"list all of {cut(', '.join(names), LONGEST_PART)} once"
    require(is_whole, "order", rule, list(order) if is_list else order)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two trees are built alike."""
    try:
        return bool(one == other)
    except ValueError:  # they hold arrays that are no leaves, which cannot be compared
        return False


def _first_difference(one: Any, other: Any) -> tuple[str, str]:
    """The first nodes of two trees that differ."""
    parts, others = one.children(), other.children()
    pairs = [pair for pair in zip(parts, others, strict=False) if not _is_same(*pair)]
    kinds = [(node.node_data() or (None,))[0] for node in (one, other)]
    if kinds[0] is kinds[1] and len(parts) == len(others) and pairs:
        return _first_difference(*pairs[0])
    return _node(one), _node(other)


def _node(structure: Any) -> str:
    """`a dict of ['a', 'b']`, or `a leaf`."""
    data = structure.node_data()
    if data is None:
        return "a leaf"
    kind, more = data
    of_more = "" if more is None else f" of {' '.join(repr(more).split())}"
    return cut(f"a {kind.__name__}{of_more}", LONGEST_PART)


def _alias(flat: Tensor) -> jax.Array:
    """An array in the memory of a flat tensor, which nobody may keep."""
    return jnp.from_dlpack(flat.detach())


def _copied(tensor: Tensor) -> jax.Array:
    return jnp.from_dlpack(tensor, copy=True)


def _tensor(leaf: Any) -> Tensor:
    """In the memory of an array: to be read only."""
    return from_dlpack(jnp.asarray(leaf))


def _readable(field: str, name: str, leaf: Any) -> Tensor:
    if isinstance(leaf, jax.core.Tracer):
        raise InvalidField(f"{field!r} must be known by now at {name!r}: {OUTSIDE} (got {leaf})")
    try:
        return _tensor(leaf)
    except (TypeError, ValueError):
        got = f"a {type(leaf).__name__}"
        raise InvalidField(f"{field!r} must be an array at {name!r} (got {got})") from None


def _checked(field: str, name: str, leaf: Any) -> Tensor:
    is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
    if not is_array or jnp.result_type(leaf).name not in DTYPES:
        got = jnp.result_type(leaf) if is_array else f"a {type(leaf).__name__}"
        rule = f"be an array of {', '.join(DTYPES)}"
        raise InvalidField(f"{field!r} must {rule} at {name!r} (got {got})")
    if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        remedy = "unless the program itself calls jax.config.update('jax_enable_x64', True)"
        raise InvalidField(f"{field!r} must be float32 at {name!r}, {remedy} (got {leaf.dtype})")
    leaf = jnp.asarray(leaf)
    on_cpu = all(device.platform == "cpu" for device in leaf.devices())
    require(on_cpu, field, f"be on the CPU at {name!r}", leaf.devices())
    return _tensor(leaf)


def _name(path: Any) -> str:
    """`layers.0.weight`, of a leaf."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _keeping_schedules(new: Any, before: Any) -> Any:
    """An optimizer's new state, in which optax's own schedules go on where they were before."""
    if before is None:
        return new
    if isinstance(new, optax.ScaleByScheduleState):
        return before
    if _is_injected(new):
        inner = _keeping_schedules(new.inner_state, before.inner_state)
        return before._replace(inner_state=inner)
    if isinstance(new, dict):
        return {key: _keeping_schedules(part, before[key]) for key, part in new.items()}
    if not isinstance(new, tuple):
        return new
    parts = [_keeping_schedules(*pair) for pair in zip(new, before, strict=True)]
    return type(new)(*parts) if hasattr(new, "_fields") else tuple(parts)


def _is_injected(part: Any) -> bool:
    return hasattr(part, "hyperparams") and hasattr(part, "_replace")


def _setting(name: str) -> str:
    """What torch calls a setting of optax's."""
    return "lr" if name == RATE else name


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    """Keys of random numbers as numbers."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _like(array: jax.Array, leaf: Any) -> Any:
    """The other way round."""
    if _is_key(leaf):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
    return array.astype(jnp.result_type(leaf))
