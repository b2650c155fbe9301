"""Specs as text: one printer, one parser."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.specs import EVERY_CLASS, schedules, specs_of

import flockstep as fs
from flockstep.errors import InvalidField, SpecError, UnknownName
from flockstep.notation import KINDS, read, written

LAW = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@pytest.mark.parametrize(("kind", "name"), EVERY_CLASS, ids=lambda each: str(each))
@LAW
@given(data=st.data())
def test_every_class_with_any_fields_reads_back_as_it_was_written(kind, name, data):
    spec = data.draw(specs_of(kind, name))
    text = written(spec)
    again = read(kind, text)
    assert again == spec
    assert type(again) is type(spec)
    assert written(again) == text


@LAW
@given(schedule=schedules())
def test_products_of_schedules_read_back_with_their_parentheses(schedule):
    assert read(fs.Schedule, written(schedule)) == schedule


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (fs.SyncSGD(), "sync_sgd"),
        (fs.SyncSGD("torus:2x4"), "sync_sgd(all_reduce='torus:2x4')"),
        (fs.LocalSGD(None), "local_sgd(period=none)"),
        (
            fs.LocalSGD(8, codec=fs.TopK(0.01)),
            "local_sgd(period=8, codec=top_k(ratio=0.01))",
        ),
        (fs.DiLoCo(8, nesterov=False), "diloco(period=8, nesterov=false)"),
        (fs.NoSync(1), "nosync(pull=1.0)"),
        (fs.PSOPS(decay="none"), "pso_ps(decay='none')"),
        (fs.PostLocalSGD(1, 4), "post_local_sgd(switch_at=1, period=4)"),
        (fs.PostLocalSGD(1.0, 4), "post_local_sgd(switch_at=1.0, period=4)"),
        (
            fs.HouseholdShards(8, 2, inside=fs.FineGrained(2)),
            "household_shards(households=8, shards=2, inside=fine_grained(copies=2))",
        ),
        (fs.Sampling("shuffle_once"), "sampling(order=shuffle_once)"),
        (fs.Warmup(5) * fs.Cosine(), "warmup(epochs=5.0) * cosine"),
        (
            fs.Warmup(5) * (fs.Cosine() * fs.StepDecay((0.5,))),
            "warmup(epochs=5.0) * (cosine * step_decay(at=(0.5,)))",
        ),
        (fs.BatchGrowth(32, (0.5,), 4), "batch_growth(initial=32, at=(0.5,), factor=4.0)"),
        (fs.Network.preset("wan-100m"), "wan-100m"),
        (fs.Network(0.0, math.inf), "ideal"),
        (
            fs.Network(0.01, math.inf, fs.Network.preset("lan-10g"), 8),
            "network(latency_seconds=0.01, bytes_per_second=inf, inside='lan-10g', "
            "household_size=8)",
        ),
        (
            fs.Network(0.01, 1e7, fs.Link(0, 1e9), 8),
            "network(latency_seconds=0.01, bytes_per_second=10000000.0, "
            "inside=link(latency_seconds=0.0, bytes_per_second=1000000000.0), household_size=8)",
        ),
        (
            fs.Compute(0.02, 0.1, {5: 1.5, 3: 2}),
            "compute(seconds=0.02, jitter=0.1, slow={3: 2.0, 5: 1.5})",
        ),
        (fs.Compute.measured(), "measured"),
        (
            fs.Faults({3: "100 steps", 1: 2}, [fs.Pause(2, at="1.5s", seconds=5)], pause_rate=0.5),
            "faults(deaths={1: 2.0, 3: '100 steps'}, pauses=(pause(rank=2, at=1.5, seconds=5.0),), "
            "pause_rate=0.5)",
        ),
        (fs.OptimizerSpec("adam", lr=0.01, betas=(0.9, 0.99)), "adam(lr=0.01, betas=(0.9, 0.99))"),
        (
            fs.OptimizerSpec(
                "two_stage",
                first=fs.OptimizerSpec("sgd", lr=0.1),
                second=fs.OptimizerSpec("adam"),
                warmup_epochs=5,
            ),
            "two_stage(first=sgd(lr=0.1), second=adam, warmup_epochs=5.0)",
        ),
    ],
)
def test_specs_are_written_as_calls_without_their_defaults(spec, text):
    assert written(spec) == text
    kind = next(kind for kind, _ in EVERY_CLASS if isinstance(spec, kind))
    assert read(kind, text) == spec


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (fs.Codec, " top_k( 0.01 ) ", fs.TopK(0.01)),
        (fs.Strategy, "local_sgd(8, codec='top_k(0.01)')", fs.LocalSGD(8, codec=fs.TopK(0.01))),
        (fs.Strategy, "easgd(period=4, mode='sync')", fs.EASGD(4, mode="sync")),
        (fs.Strategy, "diloco(8, nesterov=False)", fs.DiLoCo(8, nesterov=False)),
        (fs.Strategy, "local_sgd(None)", fs.LocalSGD(None)),
        (fs.Strategy, "async_sgd(+0.5, delay_compensation=1)", fs.AsyncSGD(0.5, False, 1.0)),
        (fs.Schedule, "step_decay(at=0.5)", fs.StepDecay((0.5,))),
        (fs.Schedule, "step_decay(at=[0.5, 0.7])", fs.StepDecay((0.5, 0.7))),
        (fs.Network, "wifi", fs.Network.preset("wifi")),
        (fs.Network, "'wan-100m'", fs.Network.preset("wan-100m")),
        (
            fs.Network,
            "network(1e-2, 12.5e6, inside=wifi, household_size=2)",
            fs.Network(1e-2, 12.5e6, fs.Network.preset("wifi"), 2),
        ),
        (fs.OptimizerSpec, "AdamW(lr=1e-4)", fs.OptimizerSpec("adamw", lr=1e-4)),
        (fs.Network, "latency=20ms,bandwidth=100Mbit/s", fs.Network(0.02, 12.5e6)),
        (fs.Network, " bandwidth = 12.5 MB/s , latency = 0.1ms ", fs.Network(1e-4, 12.5e6)),
        (fs.Network, "latency=0s,bandwidth=1B/s", fs.Network(0.0, 1.0)),
        (
            fs.Network,
            "network(1, 1, inside='latency=1us,bandwidth=1Gbit/s', household_size=2)",
            fs.Network(1.0, 1.0, fs.Network(1e-6, 125e6), 2),
        ),
        (fs.Compute, "20ms", fs.Compute(0.02)),
        (
            fs.Faults,
            "Faults({3: '100 steps'}, [pause(2, '20ms', 5)])",
            fs.Faults({3: "100 steps"}, (fs.Pause(2, 0.02, 5.0),)),
        ),
        (fs.Compute, " 1.5 s ", fs.Compute(1.5)),
        (fs.Compute, "Compute(seconds=1, slow={3: 2})", fs.Compute(1.0, slow={3: 2.0})),
    ],
)
def test_many_spellings_are_read(kind, text, expected):
    assert read(kind, text) == expected


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (fs.Codec, "two_bits", "unknown codec 'two_bits'; did you mean 'one_bit'? known: "),
        (fs.Codec, "top_k", "'ratio' of top_k must be given: codec=top_k(ratio=…)"),
        (fs.Codec, "one_bit(2)", "'codec' must give one_bit at most 0 values (got 'one_bit(2)')"),
        (
            fs.Codec,
            "top_k(rate=1)",
            "unknown field of top_k 'rate'; did you mean 'ratio'? known: ",
        ),
        (fs.Codec, "top_k(0.5, ratio=0.5)", "'codec' must be a codec such as one_bit"),
        (fs.Codec, "top_k(ratio=lots)", "'ratio' must be a number (got 'lots')"),
        (fs.Codec, "top_k(ratio=True)", "'ratio' must be a number (got True)"),
        (fs.Codec, "top_k(ratio=1j)", "'ratio' must be a number (got 1j)"),
        (fs.Codec, "((", "'codec' must be a codec such as one_bit"),
        (fs.Codec, "", "'codec' must be a codec such as one_bit"),
        (fs.Codec, "\0", "'codec' must be a codec such as one_bit"),
        (fs.Codec, "(" * 9999, "'codec' must be a codec such as one_bit"),
        (fs.Codec, "fs.TopK(0.1)", "'codec' must be a codec such as one_bit"),
        (fs.Codec, "top_k(ratio=open('x'))", "'codec' must be a codec such as one_bit"),
        (fs.Strategy, "local_sgd(2.5)", "'period' must be a whole number or none (got 2.5)"),
        (fs.Strategy, "local_sgd(8, codec=1)", "'codec' must be "),
        (fs.Strategy, "local_sgd(0)", "'period' must be at least 1 (got 0)"),
        (fs.Schedule, "cosine + cosine", "'schedule' must be a schedule such as cosine or"),
        (fs.Schedule, "step_decay(at=half)", "'at' must be numbers such as 0.5,0.75 (got 'half')"),
        (fs.Network, "moon", "unknown network 'moon'; known: home-uplinks, ideal"),
        (fs.Network, "wan-200m", "unknown network 'wan-200m'; did you mean 'wan-100m'? known: "),
        (fs.Network, "link(0.1, 1)", "unknown network 'link'; known: "),
        (
            fs.Network,
            "latency=20ms",
            "'bandwidth' of network must be given: latency=20ms,bandwidth",
        ),
        (
            fs.Network,
            "latency=20,bandwidth=1B/s",
            "'latency' must be a time such as 20ms, 0.5s or ",
        ),
        (fs.Network, "latency=-1s,bandwidth=1B/s", "'latency' must be a time such as "),
        (fs.Network, "latency=1s,bandwidth=1Mb/s", "'bandwidth' must be a speed such as 100Mbit/s"),
        (fs.Network, "latency=1s,bandwidth=0B/s", "'bandwidth' must be above 0 (got '0B/s')"),
        (fs.Network, "latency=1s,latency=1s", "'latency' of network must not be given twice"),
        (fs.Network, "latncy=1s", "unknown field of a network 'latncy'; did you mean 'latency'? "),
        (fs.Network, f"latency={'9' * 5000}s,bandwidth=1B/s", "'latency' must be a time such as "),
        (fs.Compute, "20 minutes", "'compute' must be a time such as 20ms, 0.5s or 100us (got '20"),
        (fs.Faults, "faults(deaths={3: soon})", "'deaths' of faults must be seconds, a time such"),
        (fs.Faults, "faults(pauses=[pause(1, seconds=0)])", "'seconds' of pause must be above 0"),
        (fs.Compute, "compute(slow={3: fast})", "'slow' must be a number (got 'fast')"),
        (fs.Compute, "compute(slow={**x})", "'slow' must be a number (got 'x')"),
        (fs.OptimizerSpec, "moon", "unknown optimizer 'moon'; did you mean 'muon'? known: "),
        (fs.OptimizerSpec, "adam(betas=0.9)", "'betas' must be 2 values (got (0.9,))"),
        (fs.OptimizerSpec, "two_stage(sgd, adam)", "'warmup_epochs' of two_stage must be given"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(kind, text, message):
    with pytest.raises((InvalidField, UnknownName)) as caught:
        read(kind, text)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("kind", "name"), EVERY_CLASS, ids=str)
def test_a_name_may_be_that_of_the_class(kind, name):
    found = KINDS[kind].find(name)
    if kind is fs.OptimizerSpec:
        assert KINDS[kind].find(name.upper()) == name
    else:
        assert KINDS[kind].find(found.__name__) is found


@dataclass(frozen=True)
class Nameless(fs.Strategy[None]):
    """Of a script."""

    name: ClassVar[str] = "nameless"
    value: Any = None


class Impostor(fs.SyncSGD):
    """With the name of another."""


def test_a_class_that_its_name_does_not_give_cannot_be_written():
    with pytest.raises(
        SpecError, match=r"^Nameless cannot be written as text: no strategy is called 'nameless'"
    ):
        written(Nameless())
    with pytest.raises(SpecError, match=r"^Impostor .*: another strategy is called 'sync_sgd'"):
        written(Impostor())


def test_the_fields_of_a_class_elsewhere_are_read_without_types_that_can_be_found(monkeypatch):
    monkeypatch.setitem(Nameless.__annotations__, "value", "NotImported")
    monkeypatch.setattr("flockstep.strategies.STRATEGIES", {"nameless": Nameless})
    for value in (None, True, 3, 2.5, -math.inf, "text", "none", "two words", (1, ("a",)), {1: 2}):
        assert read(fs.Strategy, written(Nameless(value))) == Nameless(value)
    with pytest.raises(SpecError, match=r"^a object cannot be written as text"):
        written(Nameless(object()))


class Mode(enum.StrEnum):
    FAST = "fast"
    SLOW = "slow"


@dataclass(frozen=True)
class Foreign(fs.Strategy[None]):
    """As another package may write it."""

    name: ClassVar[str] = "foreign"
    codec: NotImported | None = None  # noqa: F821
    weights: dict[str, float] | None = None
    sizes: list | None = None
    anything: Any = None
    mode: Mode = Mode.FAST


@pytest.fixture
def foreign(monkeypatch):
    monkeypatch.setattr("flockstep.strategies.STRATEGIES", {"foreign": Foreign})
    return Foreign


@pytest.mark.parametrize(
    "fields",
    [
        {"codec": fs.TopK(0.1)},
        {"codec": fs.OneBit()},
        {"codec": "one_bit"},
        {"weights": {"a": 1.0}},
        {"sizes": [1, 2]},
        {"anything": fs.Warmup(5.0) * fs.Cosine()},
        {"anything": (fs.OneBit(), "cosine")},
        {"anything": math.nan},
    ],
)
def test_what_a_class_elsewhere_holds_reads_back(foreign, fields):
    strategy = foreign(**fields)
    assert repr(read(fs.Strategy, written(strategy))) == repr(strategy)


def test_names_of_specs_are_read_as_such_in_a_field_of_an_unknown_type(foreign):
    assert read(fs.Strategy, "foreign(codec=one_bit)") == foreign(codec=fs.OneBit())
    assert read(fs.Strategy, "foreign(codec=other)") == foreign(codec="other")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"anything": [1, 2]}, "it would be read as Foreign("),
        ({"mode": Mode.SLOW}, "'mode' must be Mode (got 'slow')"),
    ],
)
def test_what_would_not_come_back_is_not_printed(foreign, fields, reason):
    with pytest.raises(SpecError) as caught:
        written(foreign(**fields))
    message = f"{foreign(**fields)!r} cannot be written as text: {reason}"
    assert str(caught.value).startswith(message)


def test_a_strategy_whose_name_is_no_identifier_is_not_printed(foreign, monkeypatch):
    monkeypatch.setattr("flockstep.strategies.STRATEGIES", {"far-off": foreign})
    monkeypatch.setattr(foreign, "name", "far-off")
    with pytest.raises(SpecError, match=r"cannot be written as text: 'strategy' must be a strat"):
        written(foreign())
