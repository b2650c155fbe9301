"""The rules for fields; every field of every recipe with a value that is wrong, and what is
said.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flockstep.optimizers as optimizers
import flockstep.schedules as schedules
from flockstep.data.batch_growth import BatchGrowth
from flockstep.errors import InvalidField
from flockstep.fields import require_flag, require_number
from flockstep.optimizers.lamb import LAMB
from flockstep.optimizers.lars import LARS
from flockstep.optimizers.rmsprop_warmup import RMSpropWarmup
from flockstep.optimizers.two_stage import TwoStage
from flockstep.schedules.schedules import (
    SCHEDULES,
    Cosine,
    FinalCollapse,
    LinearScaling,
    Polynomial,
    Product,
    SlowStart,
    StepDecay,
    Warmup,
)
from flockstep.tasks.label_smoothing import SmoothedLoss

MARKS = "'at' must be a tuple of increasing fractions above 0 and below 1"
MOMENTS = f"{MARKS}, or of increasing moments such as '32000 steps' or '145 epochs'"
SPECS = [*SCHEDULES.values(), Product, BatchGrowth, SmoothedLoss]

INVALID = [
    (Warmup, {"epochs": -1}, "'epochs' must be at least 0 and finite (got -1)"),
    (Warmup, {"epochs": math.inf}, "'epochs' must be at least 0 and finite (got inf)"),
    (Warmup, {"epochs": "5"}, "'epochs' must be a number (got '5')"),
    (Warmup, {"epochs": 5, "start": 1.5}, "'start' must be between 0 and 1 (got 1.5)"),
    (
        Warmup,
        {"epochs": 10**400},
        f"'epochs' must be a number that fits into a float (got 1{'0' * 149}…{'0' * 150})",
    ),
    (LinearScaling, {"scale": 0}, "'scale' must be above 0 and finite (got 0)"),
    (LinearScaling, {"scale": math.nan}, "'scale' must be above 0 and finite (got nan)"),
    (
        LinearScaling,
        {"scale": 8, "warmup_epochs": -0.5},
        "'warmup_epochs' must be at least 0 and finite (got -0.5)",
    ),
    (StepDecay, {"at": (0.75, 0.5)}, f"{MOMENTS} (got (0.75, 0.5))"),
    (StepDecay, {"at": (0.5, 0.5)}, f"{MOMENTS} (got (0.5, 0.5))"),
    (StepDecay, {"at": (0, 0.5)}, f"{MOMENTS} (got (0, 0.5))"),
    (StepDecay, {"at": (0.5, 1.0)}, f"{MOMENTS} (got (0.5, 1.0))"),
    (StepDecay, {"at": 0.5}, f"{MOMENTS} (got 0.5)"),
    (StepDecay, {"at": ("0.5",)}, f"{MOMENTS} (got ('0.5',))"),
    (StepDecay, {"gamma": 0}, "'gamma' must be above 0 and at most 1 (got 0)"),
    (StepDecay, {"gamma": 10}, "'gamma' must be above 0 and at most 1 (got 10)"),
    (SlowStart, {"epochs": ()}, "'epochs' must be a tuple of numbers, one at least (got ())"),
    (SlowStart, {"epochs": 4}, "'epochs' must be a tuple of numbers, one at least (got 4)"),
    (SlowStart, {"epochs": (1.0, 0.0)}, "'epochs' must be above 0 and finite (got 0.0)"),
    (SlowStart, {"factors": (1.0,)}, "'factors' must be as many as epochs, 4 (got (1.0,))"),
    (SlowStart, {"factors": (-1.0, 1.0)}, "'factors' must be at least 0 and finite (got -1.0)"),
    (Polynomial, {"power": 0}, "'power' must be above 0 and finite (got 0)"),
    (Polynomial, {"end": -0.1}, "'end' must be between 0 and 1 (got -0.1)"),
    (Cosine, {"end": 2}, "'end' must be between 0 and 1 (got 2)"),
    (FinalCollapse, {"at": 1}, "'at' must be above 0 and below 1 (got 1)"),
    (FinalCollapse, {"power": 0.5}, "'power' must be at least 1 and finite (got 0.5)"),
    (FinalCollapse, {"cycles": 0}, "'cycles' must be at least 1 (got 0)"),
    (
        Product,
        {"left": Cosine(), "right": 2},
        "'right' must be a schedule such as fs.Cosine() (got 2)",
    ),
    (
        Product,
        {"left": None, "right": Cosine()},
        "'left' must be a schedule such as fs.Cosine() (got None)",
    ),
    (BatchGrowth, {"initial": 0}, "'initial' must be at least 1 (got 0)"),
    (BatchGrowth, {"initial": 8, "at": (0.5, 0.2)}, f"{MARKS} (got (0.5, 0.2))"),
    (BatchGrowth, {"initial": 8, "factor": 1}, "'factor' must be above 1 and finite (got 1)"),
    (BatchGrowth, {"initial": 8, "maximum": 7}, "'maximum' must be at least initial, 8 (got 7)"),
    (BatchGrowth, {"initial": 8, "maximum": 9.5}, "'maximum' must be a whole number (got 9.5)"),
    (SmoothedLoss, {"smoothing": 1}, "'smoothing' must be at least 0 and below 1 (got 1)"),
    (SmoothedLoss, {"smoothing": -0.1}, "'smoothing' must be at least 0 and below 1 (got -0.1)"),
]

INVALID_SETTINGS = [
    (LARS, {"lr": -0.1}, "'lr' must be at least 0 and finite (got -0.1)"),
    (LARS, {"lr": None}, "'lr' must be a number (got None)"),
    (LARS, {"lr": torch.tensor(-1.0)}, "'lr' must be at least 0 and finite (got -1.0)"),
    (LARS, {"lr": torch.tensor([1.0, 2.0])}, "'lr' must be one number (got tensor([1., 2.]))"),
    (LARS, {"momentum": 1.0}, "'momentum' must be at least 0 and below 1 (got 1.0)"),
    (LARS, {"weight_decay": -1}, "'weight_decay' must be at least 0 and finite (got -1)"),
    (LARS, {"trust": 0}, "'trust' must be above 0 and finite (got 0)"),
    (LARS, {"eps": -1e-8}, "'eps' must be at least 0 and finite (got -1e-08)"),
    (LARS, {"adapt_vectors": 1}, "'adapt_vectors' must be True or False (got 1)"),
    (LAMB, {"lr": math.inf}, "'lr' must be at least 0 and finite (got inf)"),
    (LAMB, {"betas": 0.9}, "'betas' must be two numbers (got 0.9)"),
    (LAMB, {"betas": (0.9,)}, "'betas' must be two numbers (got (0.9,))"),
    (LAMB, {"betas": (0.9, 1.0)}, "'betas' must be at least 0 and below 1 (got 1.0)"),
    (LAMB, {"eps": 0}, "'eps' must be above 0 and finite (got 0)"),
    (LAMB, {"weight_decay": -1}, "'weight_decay' must be at least 0 and finite (got -1)"),
    (LAMB, {"adapt_vectors": None}, "'adapt_vectors' must be True or False (got None)"),
    (RMSpropWarmup, {"lr": -1}, "'lr' must be at least 0 and finite (got -1)"),
    (RMSpropWarmup, {"momentum": -0.1}, "'momentum' must be at least 0 and below 1 (got -0.1)"),
    (RMSpropWarmup, {"weight_decay": -1}, "'weight_decay' must be at least 0 and finite (got -1)"),
    (RMSpropWarmup, {"rmsprop_lr": -1}, "'rmsprop_lr' must be at least 0 and finite (got -1)"),
    (RMSpropWarmup, {"smoothing": 1}, "'smoothing' must be at least 0 and below 1 (got 1)"),
    (RMSpropWarmup, {"eps": 0}, "'eps' must be above 0 and finite (got 0)"),
    (RMSpropWarmup, {"center": -1}, "'center' must be at least 0 and finite (got -1)"),
    (RMSpropWarmup, {"period": 0}, "'period' must be above 0 and finite (got 0)"),
]


def name_of(value):
    return value.__name__ if isinstance(value, type) else ""


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_a_wrong_field_is_named_with_its_rule_and_value(spec):
    rows = [(fields, message) for kind, fields, message in INVALID if kind is spec]
    for fields, message in rows:
        with pytest.raises(InvalidField) as caught:
            spec(**fields)
        assert str(caught.value) == message
    tried = {name for fields, _ in rows for name in fields}
    assert {field.name for field in dataclasses.fields(spec)} == tried
    assert spec.__dataclass_params__.frozen
    assert spec.name.islower()


@pytest.mark.parametrize("make", [LARS, LAMB, RMSpropWarmup], ids=name_of)
def test_a_wrong_setting_is_refused_for_all_for_a_group_and_later(make):
    one, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = make([one], lr=0.1)
    rows = [(settings, message) for kind, settings, message in INVALID_SETTINGS if kind is make]
    for settings, message in rows:
        for attempt in (
            partial(make, [one], **{"lr": 0.1, **settings}),
            partial(make, [{"params": [one], **settings}], lr=0.1),
            partial(optimizer.add_param_group, {"params": [other], **settings}),
        ):
            with pytest.raises(InvalidField) as caught:
                attempt()
            assert str(caught.value) == message
    assert len(optimizer.param_groups) == 1
    tried = {name for settings, _ in rows for name in settings}
    assert set(inspect.signature(make).parameters) - {"params"} == tried


def test_docstrings_have_their_parts():
    for kind in (*SPECS, LARS, LAMB, RMSpropWarmup, TwoStage):
        text, parameters = inspect.getdoc(kind), inspect.signature(kind).parameters
        assert "Example:" in text
        assert not parameters or "Fields:" in text
        if kind is not Product:  # it names both in one line
            assert all(f"{name}:" in text for name in parameters)


def test_public_names_are_sorted_and_documented():
    for package in (optimizers, schedules):
        names = package.__all__
        assert names == sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
        assert all(inspect.getdoc(getattr(package, name)) for name in names)


# --- the rules themselves -------------------------------------------------------------------------

BOUNDS = st.sampled_from([-1, 0, 0.5, 1])
NUMBERS = st.sampled_from([-2, -1, 0, 0.5, 1, 2.0, math.inf, -math.inf, math.nan]) | st.floats()


@given(
    NUMBERS,
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("above", "at_least", "below", "at_most"), BOUNDS)
        | {"finite": st.just(True)},
    ),
)
def test_a_number_is_taken_if_and_only_if_all_its_bounds_hold(value, bounds):
    holds = [
        not math.isnan(value) or not bounds,
        "above" not in bounds or value > bounds["above"],
        "at_least" not in bounds or value >= bounds["at_least"],
        "below" not in bounds or value < bounds["below"],
        "at_most" not in bounds or value <= bounds["at_most"],
        "finite" not in bounds or math.isfinite(value),
    ]
    if all(holds):
        require_number("size", value, **bounds)
    else:
        with pytest.raises(InvalidField, match=r"^'size' must be .* \(got "):
            require_number("size", value, **bounds)


@pytest.mark.parametrize(
    ("bounds", "value", "rule"),
    [
        ({}, "1", "be a number"),
        ({}, True, "be a number"),
        ({"above": 0}, 0, "be above 0"),
        ({"above": 0, "finite": True}, math.inf, "be above 0 and finite"),
        ({"at_least": 0, "finite": True}, math.nan, "be at least 0 and finite"),
        ({"at_least": 0, "below": 1}, 1, "be at least 0 and below 1"),
        ({"above": 0, "at_most": 1}, 1.5, "be above 0 and at most 1"),
        ({"at_least": 0.001, "at_most": 3600}, 0, "be between 0.001 and 3600"),
    ],
)
def test_the_rule_is_in_the_message(bounds, value, rule):
    with pytest.raises(InvalidField) as raised:
        require_number("size", value, **bounds)
    assert str(raised.value) == f"'size' must {rule} (got {value!r})"


def test_a_flag_is_true_or_false():
    require_flag("nesterov", False)
    with pytest.raises(InvalidField, match=r"^'nesterov' must be True or False \(got 1\)$"):
        require_flag("nesterov", 1)
