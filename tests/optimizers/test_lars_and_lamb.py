"""LARS and LAMB against steps computed by hand, with plain numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from flockstep.optimizers.lamb import LAMB
from flockstep.optimizers.lars import LARS

# A layer of weights with ‖x‖ = 5, and a bias. Rows are flattened where numbers are plain.
WEIGHT, BIAS = [3.0, 0.0, 0.0, 4.0], [1.0, -2.0]
FIRST = [0.0, 0.6, 0.8, 0.0], [0.5, 0.5]
SECOND = [0.3, -0.1, 0.2, 0.7], [-1.0, 0.25]


def length(numbers):
    return math.sqrt(sum(number * number for number in numbers))


def layer(dtype=torch.float64):
    net = nn.Linear(2, 2).to(dtype)
    with torch.no_grad():
        net.weight.copy_(torch.tensor(WEIGHT, dtype=dtype).view(2, 2))
        net.bias.copy_(torch.tensor(BIAS, dtype=dtype))
    return net


def step(net, optimizer, gradients):
    net.weight.grad = torch.tensor(gradients[0], dtype=net.weight.dtype).view(2, 2)
    net.bias.grad = torch.tensor(gradients[1], dtype=net.bias.dtype)
    optimizer.step()
    return net.weight.flatten().tolist(), net.bias.tolist()


def test_a_first_step_of_lars_in_numbers():
    """λ = 0.3·5/(1 + 0.1·5) = 1, so that weights and bias both move by 0.5·(g + 0.1x)."""
    net = layer()
    optimizer = LARS(net.parameters(), lr=0.5, weight_decay=0.1, trust=0.3, eps=0.0)
    weight, bias = step(net, optimizer, FIRST)
    assert weight == pytest.approx([2.85, -0.3, -0.4, 3.8], rel=1e-12)
    assert bias == pytest.approx([0.7, -2.15], rel=1e-12)


@pytest.mark.parametrize("adapt_vectors", [False, True])
def test_two_steps_of_lars_by_hand(adapt_vectors):
    rate, momentum, decay, trust, eps = 0.5, 0.8, 0.1, 0.02, 0.01
    net = layer()
    optimizer = LARS(net.parameters(), rate, momentum, decay, trust, eps, adapt_vectors)
    expected = []
    for place, (x, adapts) in enumerate([(WEIGHT, True), (BIAS, adapt_vectors)]):
        v = [0.0] * len(x)
        for gradients in (FIRST, SECOND):
            g = gradients[place]
            local = trust * length(x) / (length(g) + decay * length(x) + eps) if adapts else 1.0
            v = [
                momentum * v_j + rate * local * (g_j + decay * x_j)
                for v_j, g_j, x_j in zip(v, g, x, strict=True)
            ]
            x = [x_j - v_j for x_j, v_j in zip(x, v, strict=True)]
        expected.append(x)
    step(net, optimizer, FIRST)
    weight, bias = step(net, optimizer, SECOND)
    assert weight == pytest.approx(expected[0], rel=1e-12)
    assert bias == pytest.approx(expected[1], rel=1e-12)


def test_a_first_step_of_lamb_in_numbers():
    """At first m̂/(√v̂ + ε) = g/(|g| + ε), here (0.9, −0.8, 0.5, 0); decay adds (0.3, 0, 0,
    0.4).
    """
    net = layer()
    optimizer = LAMB(net.parameters(), lr=0.1, eps=0.1, weight_decay=0.1)
    weight, bias = step(net, optimizer, ([0.9, -0.4, 0.1, 0.0], [0.9, -0.4]))
    ratio = 5 / math.sqrt(1.2**2 + 0.8**2 + 0.5**2 + 0.4**2)
    moved = [3 - 0.1 * ratio * 1.2, 0.1 * ratio * 0.8, -0.1 * ratio * 0.5, 4 - 0.1 * ratio * 0.4]
    assert weight == pytest.approx(moved, rel=1e-12)
    assert bias == pytest.approx([1 - 0.1 * (0.9 + 0.1), -2 + 0.1 * (0.8 + 0.2)], rel=1e-12)


@pytest.mark.parametrize("adapt_vectors", [False, True])
def test_two_steps_of_lamb_by_hand(adapt_vectors):
    rate, beta1, beta2, eps, decay = 0.1, 0.9, 0.99, 1e-6, 0.05
    net = layer()
    optimizer = LAMB(net.parameters(), rate, (beta1, beta2), eps, decay, adapt_vectors)
    expected = []
    for place, (x, adapts) in enumerate([(WEIGHT, True), (BIAS, adapt_vectors)]):
        m, v = [0.0] * len(x), [0.0] * len(x)
        for t, gradients in enumerate((FIRST, SECOND), start=1):
            g = gradients[place]
            m = [beta1 * m_j + (1 - beta1) * g_j for m_j, g_j in zip(m, g, strict=True)]
            v = [beta2 * v_j + (1 - beta2) * g_j * g_j for v_j, g_j in zip(v, g, strict=True)]
            u = [
                m_j / (1 - beta1**t) / (math.sqrt(v_j / (1 - beta2**t)) + eps) + decay * x_j
                for m_j, v_j, x_j in zip(m, v, x, strict=True)
            ]
            ratio = length(x) / length(u) if adapts else 1.0
            x = [x_j - rate * ratio * u_j for x_j, u_j in zip(x, u, strict=True)]
        expected.append(x)
    step(net, optimizer, FIRST)
    weight, bias = step(net, optimizer, SECOND)
    assert weight == pytest.approx(expected[0], rel=1e-12)
    assert bias == pytest.approx(expected[1], rel=1e-12)


def test_vectors_of_lamb_go_the_way_of_adamw():
    net, other = layer(), layer()
    ours = LAMB([net.bias], lr=0.01, eps=1e-8, weight_decay=0.1)
    theirs = torch.optim.AdamW([other.bias], lr=0.01, eps=1e-8, weight_decay=0.1)
    for gradients in (FIRST, SECOND, FIRST):
        step(net, ours, gradients)
        step(other, theirs, gradients)
    assert torch.allclose(net.bias, other.bias, rtol=1e-12, atol=0)


def naive_lars(x, g, state, lr, momentum, weight_decay, trust, eps):
    size, slope = x.norm(), g.norm()
    local = (
        trust * size / (slope + weight_decay * size + eps)
        if x.ndim > 1 and size > 0 and slope > 0
        else 1.0
    )
    v = momentum * state.get("v", 0.0) + lr * local * (g + weight_decay * x)
    state["v"] = v
    return x - v


def naive_lamb(x, g, state, lr, betas, eps, weight_decay):
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = m = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * g
    state["v"] = v = betas[1] * state.get("v", 0.0) + (1 - betas[1]) * g * g
    u = m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps) + weight_decay * x
    ratio = x.norm() / u.norm() if x.ndim > 1 and x.norm() > 0 and u.norm() > 0 else 1.0
    return x - lr * ratio * u


@pytest.mark.parametrize(
    ("make", "naive", "settings"),
    [
        (
            LARS,
            naive_lars,
            {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.01, "trust": 0.02, "eps": 1e-8},
        ),
        (
            LARS,
            naive_lars,
            {"lr": 0.7, "momentum": 0.0, "weight_decay": 0.0, "trust": 0.02, "eps": 0.0},
        ),
        (LAMB, naive_lamb, {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}),
        (LAMB, naive_lamb, {"lr": 0.02, "betas": (0.0, 0.5), "eps": 1e-6, "weight_decay": 0.0}),
    ],
)
def test_steps_on_lists_are_those_of_a_loop_over_the_parameters(make, naive, settings):
    """With groups of different decay, dtypes, a zero layer, and a parameter that has no gradient
    now and then.
    """
    generator = torch.Generator().manual_seed(3)
    shapes = [(4, 3), (3,), (2, 3, 2), (5, 1), (), (2, 2)]
    dtypes = [torch.float64] * 3 + [torch.float32] + [torch.float64] * 2
    parameters = [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    parameters[3].data.zero_()
    strong = {**settings, "weight_decay": 10 * settings["weight_decay"]}
    optimizer = make([{"params": parameters[:3]}, {"params": parameters[3:], **strong}], **settings)
    expected, states = [p.detach().clone() for p in parameters], [{} for _ in parameters]
    for turn in range(6):
        for place, parameter in enumerate(parameters):
            own = settings if place < 3 else strong
            parameter.grad = None
            if turn % 3 or place != 2:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(
                    parameter.dtype
                )
                expected[place] = naive(expected[place], parameter.grad, states[place], **own)
        optimizer.step()
    for parameter, by_loop in zip(parameters, expected, strict=True):
        tolerance = 1e-12 if parameter.dtype is torch.float64 else 1e-5
        assert torch.allclose(parameter, by_loop, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("make", "eps"), [(LARS, 0.0), (LAMB, 1e-9)])
def test_a_layer_of_zeros_and_a_gradient_of_zeros_are_not_adapted(make, eps):
    born = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    still = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    optimizer = make([born, still], lr=0.5, eps=eps)
    born.grad, still.grad = torch.full_like(born, -0.2), torch.zeros_like(still)
    optimizer.step()
    moved = 0.1 if make is LARS else 0.5  # the gradient, or its sign
    assert torch.allclose(born, torch.full_like(born, moved))
    assert torch.equal(still, torch.ones_like(still))


def test_norms_of_half_precision_are_not_rounded_to_it():
    """‖x‖ = 301 would be 300 in bfloat16, and the step 0.996."""
    weight = nn.Parameter(torch.ones(301, 301, dtype=torch.bfloat16))
    weight.grad = torch.zeros_like(weight)
    weight.grad[0, 0] = 1
    LARS([weight], lr=1 / 301, momentum=0.0, trust=1.0, eps=0.0).step()
    assert weight[0, 0] == 0
    assert weight[1, 1] == 1
    assert weight.dtype is torch.bfloat16
