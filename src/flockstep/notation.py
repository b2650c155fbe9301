"""Specs as text, in the form of a call: `top_k(ratio=0.01)`, `warmup(epochs=5) * cosine`.

One printer, `written`, and one parser, `read`, for all that a run is made of. Both go by the fields
of the classes and their types; fields that equal their defaults are left out.

    written(fs.SyncSGD(codec=fs.TopK(0.01)))       # "sync_sgd(codec=top_k(ratio=0.01))"
    read(Strategy, "sync_sgd(codec=top_k(0.01))")  # the same strategy

Names without quotes are texts, too: `easgd(period=4, mode=sync)`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import keyword
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flockstep.backends import Compute, Faults, Pause
from flockstep.codecs import Codec, find_codec
from flockstep.data import (
    Assignment,
    BatchGrowth,
    BatchRule,
    GlobalBatch,
    Sampling,
    find_assignment,
)
from flockstep.errors import InvalidField, SpecError, UnknownName, plain_spelling, unknown_name
from flockstep.fields import fitted, is_mapping, kinds_of, require, shown, type_names
from flockstep.network import PRESETS, Link, LinkChange, Network, Route, Site, is_own_network
from flockstep.optimizers import NEEDED, OptimizerSpec, fields_of, find_optimizer
from flockstep.schedules import Product, Schedule, find_schedule
from flockstep.strategies import Strategy, find_strategy
from flockstep.units import is_quantity, read_seconds

NAME_WITH_HYPHENS = re.compile(r"[A-Za-z]\w*(-\w+)+")  # such as a preset's
# Names that stand for values, where a field takes such values.
WORDS: dict[str, Any] = {"true": True, "false": False, "inf": math.inf, "nan": math.nan}


@dataclass(frozen=True)
class Kind:
    """A kind of spec: how its classes are found by name, what to say to who gives something else,
    values with names of their own, and what a number alone means.
    """

    find: Callable[[str], Any]
    text_rule: str
    rule: str
    # A spec from a text that is shorter than a call; None for texts of another form.
    shorthand: Callable[[str, str], Any] = lambda field, text: None
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    of_number: Callable[[float], Any] | None = None


def _finder(kind: str, *classes: type, names: Iterable[str] = ()) -> Callable[[str], type]:
    """Finds classes that are not in a table of their own, by their names in any spelling."""
    known = {_name_of(each): each for each in classes}

    def find(name: str) -> type:
        for each, spec_class in known.items():
            if plain_spelling(each) == plain_spelling(name):
                return spec_class
        raise unknown_name(kind, name, [*names, *known])

    return find


def _name_of(spec_class: type) -> str:
    return getattr(spec_class, "name", spec_class.__name__.lower())


def _own_network(field: str, text: str) -> Network | None:
    """`latency=20ms,bandwidth=100Mbit/s`."""
    return Network.read(text, field) if is_own_network(text) else None


def _step_time(field: str, text: str) -> Compute | None:
    """`20ms`."""
    return Compute(read_seconds(field, text)) if is_quantity(text) else None


KINDS: dict[type, Kind] = {
    Strategy: Kind(
        find_strategy,
        "be a strategy such as sync_sgd or local_sgd(period=8)",
        "be a strategy such as fs.LocalSGD(period=8)",
    ),
    Codec: Kind(
        find_codec,
        "be a codec such as one_bit or top_k(ratio=0.01)",
        "be one such as fs.OneBit()",
    ),
    Assignment: Kind(
        find_assignment,
        "be an assignment such as disjoint or medium_coarse(copies=2)",
        "be one such as fs.Disjoint()",
    ),
    Sampling: Kind(
        _finder("sampling", Sampling),
        "be one such as sampling(order=shuffle_once)",
        "be one such as fs.Sampling()",
    ),
    Schedule: Kind(
        find_schedule,
        "be a schedule such as cosine or warmup(epochs=5) * step_decay",
        "be one such as fs.Cosine()",
    ),
    BatchRule: Kind(
        _finder("batch size", BatchGrowth, GlobalBatch),
        "be a whole number, or batch_growth(initial=32, at=(0.5,), factor=4)",
        "be a whole number, or one such as fs.BatchGrowth(32)",
    ),
    Network: Kind(
        _finder("network", Network, names=PRESETS),
        "be a network such as wan-100m, or latency=20ms,bandwidth=100Mbit/s",
        "be one such as fs.Network.preset('wan-100m')",
        _own_network,
        PRESETS,
    ),
    Link: Kind(
        _finder("link", Network, Link, names=PRESETS),
        "be a link such as 'wan-100m', or link(latency_seconds=0.01, bytes_per_second=1e8)",
        "be one such as fs.Network.preset('wan-100m')",
        _own_network,
        PRESETS,
    ),
    Site: Kind(
        _finder("site", Site),
        "be a site such as site('Oslo', 8, inside='lan-10g')",
        "be one such as fs.Site('Oslo', 8)",
    ),
    Route: Kind(
        _finder("route", Route),
        "be a route such as route('Oslo', 'Rome', latency_seconds=0.02, bytes_per_second=1e8)",
        "be one such as fs.Route('Oslo', 'Rome', 0.02, 1e8)",
    ),
    LinkChange: Kind(
        _finder("change", LinkChange),
        "be a change such as link_change(10.0, bandwidth=0.5)",
        "be one such as fs.LinkChange(10.0, bandwidth=0.5)",
    ),
    Compute: Kind(
        _finder("compute", Compute, names=["measured"]),
        "be a time such as 20ms or 0.02, measured, or compute(seconds=0.02, jitter=0.1)",
        "be seconds, or one such as fs.Compute(seconds=0.02)",
        _step_time,
        {"measured": Compute.measured()},
        Compute.read,
    ),
    Faults: Kind(
        _finder("faults", Faults),
        "be faults such as faults(deaths={3: '100 steps'}, pause_rate=0.1)",
        "be one such as fs.Faults(deaths={3: '100 steps'})",
    ),
    Pause: Kind(
        _finder("pause", Pause),
        "be pauses such as [pause(2, at='1s', seconds=5)]",
        "be one such as fs.Pause(2, at='1s', seconds=5)",
    ),
    OptimizerSpec: Kind(
        find_optimizer,
        "be an optimizer such as adam or sgd(lr=0.1, momentum=0.9)",
        "be one such as fs.OptimizerSpec('sgd', lr=0.1)",
    ),
}


# ---- What a spec is made of


@dataclass(frozen=True)
class Form:
    """What stands between the parentheses of a call, and what makes a spec of it."""

    name: str
    hints: Mapping[str, Any]
    defaults: Mapping[str, Any]  # NEEDED, where a field has none
    make: Callable[..., Any]


def _form(kind: type, name: str) -> Form:
    """The form of the spec of that name."""
    found = KINDS[kind].find(name)
    return _optimizer_form(found) if kind is OptimizerSpec else _form_of_class(found)


def _optimizer_form(name: str) -> Form:
    known = fields_of(name)
    hints = {field: declared.hint for field, declared in known.items()}
    # A learning rate may be given beside the optimizer.
    defaults = {
        field: None if field == "lr" and declared.default is NEEDED else declared.default
        for field, declared in known.items()
    }
    return Form(name, hints, defaults, lambda **values: OptimizerSpec(name, **values))


def _form_of_class(spec_class: Any) -> Form:
    name = _name_of(spec_class)
    if not dataclasses.is_dataclass(spec_class):
        raise SpecError(f"{name} cannot be written or read: its class is no dataclass")
    make: Callable[..., Any] = spec_class  # type: ignore[assignment]
    fields = [each for each in dataclasses.fields(spec_class) if each.init]
    hints = _hints_of_fields(make)
    return Form(
        name,
        {each.name: hints.get(each.name, Any) for each in fields},
        {each.name: _default_of(each) for each in fields},
        make,
    )


@functools.cache  # a study asks for the id of thousands of specs
def _hints_of_fields(spec_class: Any) -> Mapping[str, Any]:
    """The types of a class's fields. A class of another package may import some of them for type
    checkers alone: those are left out.
    """
    hints: dict[str, Any] = {}
    for owner in reversed(spec_class.__mro__):
        for name, declared in vars(owner).get("__annotations__", {}).items():
            alone = {"__annotations__": {name: declared}, "__module__": owner.__module__}
            try:
                hints |= typing.get_type_hints(type("Alone", (), alone))
            except NameError:
                hints.pop(name, None)
    return hints


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return NEEDED if field.default is dataclasses.MISSING else field.default


def _kind_of(value: Any) -> type | None:
    """What kind of spec a value is; None for plain ones."""
    return next((kind for kind in KINDS if isinstance(value, kind)), None)


def _kind_in(hint: Any) -> type | None:
    """What kind of spec a field takes, if any."""
    taken = [typing.get_origin(each) or each for each in kinds_of(hint)]
    return next((kind for kind in KINDS if kind in taken), None)


def _kind_named(name: str) -> type | None:
    """What kind of spec has that name, if any: for fields that do not say what they take."""
    for kind, known in KINDS.items():
        if name in known.named:
            return kind
        with suppress(UnknownName, InvalidField):
            known.find(name)
            return kind
    return None


# ---- Printing


def written(value: Any, hint: Any = Any) -> str:
    """A spec, or a plain value of a field, as text that `read` gives back."""
    kind = _kind_of(value)
    if kind is not None:
        return _written_spec(value, kind, is_inside=False)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return _written_number(value, kinds_of(hint))
    if isinstance(value, str):
        is_spec_too = Any in kinds_of(hint) and _kind_named(value) is not None
        return repr(str(value)) if is_spec_too else _written_text(value)
    if isinstance(value, tuple | list):
        hints = _hints_of_items(hint, len(value))
        items = [_written_inside(*each) for each in zip(value, hints, strict=True)]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(value, Mapping):
        key_hint, value_hint = _hints_of_pairs(hint)
        pairs = [
            f"{_written_inside(key, key_hint)}: {_written_inside(value[key], value_hint)}"
            for key in sorted(value)
        ]
        return f"{{{', '.join(pairs)}}}"
    raise SpecError(f"a {type(value).__name__} cannot be written as text (got {shown(value)})")


def _written_inside(value: Any, hint: Any) -> str:
    """A value within a call, where a name such as lan-10g would be a difference."""
    kind = _kind_of(value)
    return written(value, hint) if kind is None else _written_spec(value, kind, is_inside=True)


def _written_number(value: float, kinds: Sequence[Any]) -> str:
    if isinstance(value, int) and (int in kinds or float not in kinds):
        return repr(int(value))
    return repr(float(value))


def _written_text(value: str) -> str:
    is_name = value.isidentifier() and value.isascii() and not keyword.iskeyword(value)
    return value if is_name and value.lower() not in (*WORDS, "none") else repr(str(value))


def _hints_of_items(hint: Any, count: int) -> Sequence[Any]:
    """The types of the items of a tuple or list."""
    for kind in kinds_of(hint):
        hints = typing.get_args(kind)
        is_list = typing.get_origin(kind) is list
        if is_list or (typing.get_origin(kind) is tuple and hints[-1] is Ellipsis):
            return hints[:1] * count
        if typing.get_origin(kind) is tuple and len(hints) == count:
            return hints
    return [Any] * count


def _hints_of_pairs(hint: Any) -> Sequence[Any]:
    """The types of the keys and the values of a mapping."""
    mappings = [kind for kind in kinds_of(hint) if is_mapping(typing.get_origin(kind))]
    return typing.get_args(mappings[0]) if mappings else (Any, Any)


def _written_spec(value: Any, kind: type, is_inside: bool) -> str:
    if isinstance(value, Product):
        left, right = written(value.left), written(value.right)
        return f"{left} * ({right})" if isinstance(value.right, Product) else f"{left} * {right}"

    for name, named in KINDS[kind].named.items():
        if value == named and type(value) is type(named):
            return _written_text(name) if is_inside else name

    if isinstance(value, OptimizerSpec):
        form = _optimizer_form(value.name)
        values = {**form.defaults, **dict(value.fields)}
    else:
        form = _form_of_class(_written_class(value, kind))
        values = {field: getattr(value, field) for field in form.hints}

    given = []
    for field, each in values.items():
        text = _written_inside(each, form.hints[field])
        # By their texts: 1 and 1.0 are equal, but not the same to a field that takes both.
        default = form.defaults[field]
        if default is NEEDED or text != _written_inside(default, form.hints[field]):
            given.append(f"{field}={text}")
    text = f"{form.name}({', '.join(given)})" if given else form.name
    if not type(value).__module__.startswith("flockstep."):
        _require_readable(value, kind, text)
    return text


def _require_readable(value: Any, kind: type, text: str) -> None:
    """Refuse what does not come back: fields of a class elsewhere may be of any type."""
    try:
        again = read(kind, text)
        is_same = again == value or repr(again) == repr(value)  # NaN is not equal to itself
    except Exception as error:
        # Whatever that class raises, the text is of no use.
        raise SpecError(f"{shown(value)} cannot be written as text: {error}") from error
    if not is_same:
        raise SpecError(
            f"{shown(value)} cannot be written as text: it would be read as {shown(again)}"
        )


def _written_class(value: Any, kind: type) -> type:
    """The value's class, if it is the one that its name gives back."""
    name = _name_of(type(value))
    known_as = kind.__name__.lower()
    try:
        found = KINDS[kind].find(name)
    except UnknownName:
        found = None
    if found is not type(value):
        reason = f"no {known_as}" if found is None else f"another {known_as}"
        remedy = " (offer it as an entry point 'flockstep.strategies')" if kind is Strategy else ""
        raise SpecError(
            f"{type(value).__name__} cannot be written as text: {reason} is called {name!r}{remedy}"
        )
    return type(value)


# ---- Reading


class _NotASpec(Exception):
    """The text is an expression, but not of this kind."""


def read(kind: type, text: str, field: str = "") -> Any:
    """A spec of that kind: `one_bit`, `top_k(ratio=0.01)`, `top_k(0.01)`, `warmup(5) *
    step_decay(at=(0.3, 0.6))`. `field` is what messages call it.
    """
    field = field or kind.__name__.lower()
    try:
        return _read(field, text, kind)
    except (_NotASpec, RecursionError):
        raise InvalidField(f"{field!r} must {KINDS[kind].text_rule} (got {shown(text)})") from None


def as_spec(field: str, value: Any, hint: Any) -> Any:
    """A value of a field that takes specs, or one as text, as the field has it."""
    kind = _kind_in(hint)
    if kind is None:
        return fitted(field, value, hint)
    if isinstance(value, str):
        return read(kind, value, field)
    of_number = KINDS[kind].of_number
    if of_number is not None and type(value) in (int, float):
        return of_number(value)
    others = tuple(each for each in kinds_of(hint) if isinstance(each, type))
    is_plain = isinstance(value, others) and not isinstance(value, bool)
    require(isinstance(value, kind) or is_plain, field, KINDS[kind].rule, value)
    return value


def read_value(field: str, text: str, hint: Any) -> Any:
    """Read `text` as what the field's type says: numbers, a text, a truth value, a spec such as
    a codec, or none.
    """
    kind, kinds = _kind_in(hint), kinds_of(hint)
    if text.lower() == "none" and types.NoneType in kinds:
        return None
    if kind is not None and int not in kinds:
        return read(kind, text, field)
    if kind is None and str in kinds:
        return _unquoted(text)
    try:
        return _value(field, _parsed(text), hint)
    except (_NotASpec, RecursionError):
        rule = f"be {type_names(hint)}" if kind is None else KINDS[kind].text_rule
        raise InvalidField(f"{field!r} must {rule} (got {shown(text)})") from None


def read_settings(settings: Sequence[str]) -> dict[str, str]:
    """`["period=8"]` gives `{"period": "8"}`."""
    values: dict[str, str] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise InvalidField(f"'--set' must be FIELD=VALUE (got {shown(setting)})")
        if key in values:
            both = f"{key}={values[key]} and {key}={text}"
            raise InvalidField(f"'--set {key}' must not be given twice (got {both})")
        values[key] = text
    return values


def read_with_settings(kind: type, text: str, settings: Mapping[str, str], field: str) -> Any:
    """A spec from text, with more fields from texts of their own: `local_sgd` and `{"period":
    "8"}`, as `--set period=8` gives it.
    """
    try:
        name, nodes = _call(field, text, _parsed(text), kind)
        form = _form(kind, name)
        values = {key: _value(key, node, form.hints[key]) for key, node in nodes.items()}
    except (_NotASpec, RecursionError):
        raise InvalidField(f"{field!r} must {KINDS[kind].text_rule} (got {shown(text)})") from None

    for key, setting in settings.items():
        if key not in form.hints:
            raise unknown_name(f"field of {name}", key, form.hints)
        values[key] = read_value(key, setting, form.hints[key])
    return _made(form, values, "--set {}=…")


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # whatever the text is made of
        raise _NotASpec from None


def _read(field: str, text: str, kind: type) -> Any:
    named, name = KINDS[kind].named, text.strip()
    if name in named:
        return named[name]
    brief = KINDS[kind].shorthand(field, text)
    if brief is not None:
        return brief
    if named and NAME_WITH_HYPHENS.fullmatch(name):  # to Python it would be a difference
        raise unknown_name(kind.__name__.lower(), name, named)
    return _spec(field, text, _parsed(text), kind)


def _spec(field: str, whole: str, node: ast.expr, kind: type) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _read(field, node.value, kind)
    if isinstance(node, ast.Name) and node.id in KINDS[kind].named:
        return KINDS[kind].named[node.id]
    of_number = KINDS[kind].of_number
    if of_number is not None and _is_number(node):
        return of_number(ast.literal_eval(node))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and kind is Schedule:
        return _spec(field, whole, node.left, kind) * _spec(field, whole, node.right, kind)

    name, nodes = _call(field, whole, node, kind)
    form = _form(kind, name)
    values = {key: _value(key, each, form.hints[key]) for key, each in nodes.items()}
    try:
        return _made(form, values, f"{field}={name}({{}}=…)")
    except InvalidField as error:
        if kind not in (Compute, Faults, Pause, Schedule):
            raise
        # A run has fields of the same names: 'seconds' of compute is not its own.
        message = re.sub(r"^('\w+') must", rf"\1 of {name} must", str(error))
        raise InvalidField(message) from None


def _call(field: str, whole: str, node: ast.expr, kind: type) -> tuple[str, dict[str, ast.expr]]:
    """The name of a call and its arguments by the names of their fields."""
    call = node if isinstance(node, ast.Call) else None
    named = call.func if call else node
    if not isinstance(named, ast.Name):
        raise _NotASpec
    name = named.id
    known = list(_form(kind, name).hints)

    values = call.args if call else []
    if len(values) > len(known):
        raise InvalidField(
            f"{field!r} must give {name} at most {len(known)} values (got {shown(whole)})"
        )
    nodes = dict(zip(known, values, strict=False))
    for each in call.keywords if call else []:
        if each.arg is None or each.arg in nodes:
            raise _NotASpec
        if each.arg not in known:
            raise unknown_name(f"field of {name}", each.arg, known)
        nodes[each.arg] = each.value
    return name, nodes


def _made(form: Form, values: Mapping[str, Any], how: str) -> Any:
    """The spec with these fields. `how` tells how to give the field that is put in its braces."""
    for key, default in form.defaults.items():
        if default is NEEDED and key not in values:
            raise InvalidField(f"{key!r} of {form.name} must be given: {how.format(key)}")
    return form.make(**values)


def _value(field: str, node: ast.expr, hint: Any) -> Any:
    """What an expression means to a field."""
    kinds = kinds_of(hint)
    kind = _kind_in(hint)
    takes_none = types.NoneType in kinds or Any in kinds
    if takes_none and isinstance(node, ast.Name) and node.id.lower() == "none":
        return None
    if kind is None and Any in kinds:
        kind = _kind_of_node(node)
    if kind is not None and not _is_number(node):
        return _spec(field, ast.unparse(node), node, kind)

    takes_tuple = any(typing.get_origin(each) is tuple for each in kinds)
    if takes_tuple and _is_number(node):
        node = ast.Tuple([node])  # `at=0.5` for `at=(0.5,)`
    return fitted(field, _plain(field, node, hint), hint)


def _kind_of_node(node: ast.expr) -> type | None:
    """What kind of spec an expression is, where the field does not say; None for plain ones."""
    if isinstance(node, ast.BinOp):
        return Schedule
    named = node.func if isinstance(node, ast.Call) else node
    return _kind_named(named.id) if isinstance(named, ast.Name) else None


def _plain(field: str, node: ast.expr, hint: Any) -> Any:
    """A number, text, truth value, tuple or mapping, as it is written."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return _word(node.id, kinds_of(hint))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _plain(field, node.operand, float)
        if not isinstance(value, int | float):
            raise _NotASpec
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Tuple | ast.List):
        hints = _hints_of_items(hint, len(node.elts))
        return tuple(_value(field, *each) for each in zip(node.elts, hints, strict=True))
    if isinstance(node, ast.Dict):
        key_hint, value_hint = _hints_of_pairs(hint)
        keys = [_value(field, key, key_hint) for key in node.keys if key is not None]
        values = [_value(field, value, value_hint) for value in node.values]
        if len(set(keys)) == len(values):  # nothing twice, and nothing like {**others}
            return dict(zip(keys, values, strict=True))
    raise _NotASpec


def _word(name: str, kinds: Sequence[Any]) -> Any:
    """What a name without quotes stands for: true, inf, … where the field takes such, or itself."""
    value = WORDS.get(name.lower(), name)
    return value if Any in kinds or type(value) in kinds or str not in kinds else name


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _unquoted(text: str) -> str:
    """A text as it stands, but for quotes around it."""
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
    return value if isinstance(value, str) else text
