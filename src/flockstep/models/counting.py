"""What a model costs: parameters, floating-point operations, and the ratio of the two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from flockstep.errors import InvalidField
from flockstep.fields import require, require_model

Shape = Sequence[int]

# torch's counter hooks into the modules of all threads, and a model has one training flag for all.
_one_count = threading.Lock()


def count_parameters(model: nn.Module) -> int:
    """The number of parameters, trained and frozen; one that the model uses in several places
    counts once.
    """
    require_model(model)
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_sample(model: nn.Module, example: Any) -> float:
    """Floating-point operations of the forward pass for one sample; a multiplication with its
    addition counts as two.

    Counted are matrix products, convolutions, recurrent layers and attention (causal attention in
    full), which is what published figures count; additions of biases, activations, normalisations
    and pooling are not.

    The model runs once, in evaluation mode and without gradients. Its training flags, its buffers
    and torch's random state are afterwards as they were before.

    Arguments:
        model: any nn.Module.
        example: a batch, as large as you like, on the model's device: the input tensor; a tuple or
            list that starts with it, as data sets give batches; or a mapping of keyword arguments,
            whose first tensor tells the number of samples.
    """
    require_model(model)
    arguments, keywords = _call_of(example)
    shapes = [
        tuple(part.shape) for part in (*arguments, *keywords.values()) if isinstance(part, Tensor)
    ]
    require(
        bool(shapes and shapes[0]),
        "example",
        "hold a tensor with samples along its first dimension",
        shapes,
    )
    samples = shapes[0][0]
    require(samples > 0, "example", "hold at least one sample", shapes)

    try:
        with _one_count:
            return _flops(model, arguments, keywords) / samples
    except Exception as error:  # whatever a model raises about its input
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidField(
            f"'example' must be a batch that the model takes (got {shapes}): {reason}"
        ) from error


def cc_ratio(model: nn.Module, example: Any) -> float:
    """The computation–communication ratio: FLOPs per sample ÷ parameters.

    How much a worker computes on one sample for each number that it sends when it sends its
    parameters. The larger, the less the network matters. ResNet-50 on ImageNet: 7.7 G ÷ 25 M = 308.

    Paper: Wongpanich, You & Demmel, "Rethinking the value of asynchronous solvers for distributed
        deep learning", 2020.

    Arguments: as of `flops_per_sample`.

    Example:
        fs.cc_ratio(fs.models.LeNet5(), torch.zeros(1, 1, 28, 28))   # 833,040 ÷ 61,706 = 13.5
    """
    parameters = count_parameters(model)
    require(parameters > 0, "model", "have parameters", type(model).__name__)
    return flops_per_sample(model, example) / parameters


def _call_of(example: Any) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The arguments, and the keyword arguments, that an example stands for."""
    inputs = example[0] if isinstance(example, tuple | list) and example else example
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    kinds = "a tensor, a tuple or list that starts with one, or a mapping of keyword arguments"
    raise InvalidField(f"'example' must be {kinds} (got {type(inputs).__name__})")


def _flops(model: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, Any]) -> int:
    """Of one call, which works on copies of the buffers."""
    # Not at the top: it loads torch's compiler, for which `import flockstep` shall not wait.
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with _as_it_was(model), torch.no_grad(), counter, _NoFusedLayers():
        functional_call(model, buffers, arguments, keywords)
    return counter.get_total_flops()


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within; afterwards all training flags and the random state are as they were.

    The flags are set one by one: `model.eval()` would lose them where parts of a model differ, and
    some models do more in it than set a flag."""
    flags = [(module, module.training) for module in model.modules()]
    devices = {
        parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"
    }
    with torch.random.fork_rng(devices):
        try:
            for module, _ in flags:
                module.training = False
            yield
        finally:
            for module, training in flags:
                module.training = training


class _NoFusedLayers(TorchFunctionMode):
    """Changes nothing, but where any such mode is active torch's transformer layers compute step by
    step.

    Otherwise, in evaluation mode, each is one operation that the counter does not know.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def _formulas() -> dict[Any, Callable[..., int]]:
    """Formulas for what torch's counter passes over, and takes for 0."""
    aten = torch.ops.aten
    return {
        aten.mv: _matrix_by_vector,
        aten.dot: _dot,
        aten.mkldnn_rnn_layer: _lstm_on_cpu,
        aten._cudnn_rnn: _recurrent_on_gpu,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    }


def _matrix_by_vector(matrix: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(matrix)


def _dot(vector: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(vector)


def _lstm_on_cpu(
    inputs: Shape, input_weights: Shape, hidden_weights: Shape, *_: Any, **__: Any
) -> int:
    return _recurrent_on_gpu(inputs, [input_weights, hidden_weights])


def _recurrent_on_gpu(inputs: Shape, weights: Sequence[Shape], *_: Any, **__: Any) -> int:
    """Every weight matrix meets every step of every sample once; weights of one dimension are
    biases.
    """
    return 2 * prod(inputs[:-1]) * sum(prod(shape) for shape in weights if len(shape) > 1)


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Scores of all queries with all keys, and the weighted sums of the values."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
