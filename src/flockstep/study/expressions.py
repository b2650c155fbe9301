"""Values that a study computes from others: `round(batch * workers / 2)`, `local_sgd(period={p})`.

Expressions are parsed, never evaluated as Python: they know numbers, texts, the names of the study,
arithmetic, comparisons, `a if b else c`, and the functions of `FUNCTIONS`.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from flockstep.errors import InvalidField, SpecError, unknown_name
from flockstep.fields import shown
from flockstep.strategies import effective_batch, local_batch

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "sqrt": math.sqrt,
    "log2": math.log2,
    "abs": abs,
    "min": min,
    "max": max,
    "int": int,
    "effective_batch": effective_batch,
    "local_batch": local_batch,
}
LARGEST_POWER = 1_000
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_IN_BRACES = re.compile(r"\{([A-Za-z_]\w*)\}")

Lookup = Callable[[str], Any]
"""Gives the value of a name of the study."""


def names_in_text(text: str) -> set[str]:
    """The names in braces: those of `local_sgd(period={period})` are `period`."""
    return set(_IN_BRACES.findall(text))


def filled_in(text: str, lookup: Lookup) -> str:
    """The text with the values of the names in braces. Other braces stay: `slow={3: 2.0}`."""
    return _IN_BRACES.sub(lambda found: str(lookup(found[1])), text)


def names_in_expression(field: str, text: str) -> set[str]:
    """The names that an expression asks for, functions left out."""
    tree = _parsed(field, text)
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return {node.id for node in names if node not in calls}


def evaluated(field: str, text: str, lookup: Lookup) -> Any:
    """What an expression comes to. Errors name the field."""
    try:
        return _value(_parsed(field, text), lookup)
    except (InvalidField, SpecError):
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise InvalidField(
            f"{field!r} must be an expression that can be computed (got {shown(text)}: {error})"
        ) from error


def _parsed(field: str, text: str) -> ast.expr:
    rule = "be an expression such as 'round(128 / workers)'"
    if not isinstance(text, str):
        raise InvalidField(f"{field!r} must {rule} (got {shown(text)})")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidField(f"{field!r} must {rule} (got {shown(text)})") from error
    for node in ast.walk(tree):
        if not isinstance(node, _KNOWN):
            part = type(node).__name__
            raise InvalidField(f"{field!r} must {rule}, without a {part} (got {shown(text)})")
    return tree


_KNOWN = (
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.BinOp,
    ast.UnaryOp,
    ast.USub,
    ast.Compare,
    ast.IfExp,
    ast.Call,
    *_OPERATORS,
)


def _value(node: ast.expr, lookup: Lookup) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return lookup(node.id)
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand, lookup)
    if isinstance(node, ast.BinOp):
        return _computed(node.op, _value(node.left, lookup), _value(node.right, lookup))
    if isinstance(node, ast.IfExp):
        return _value(node.body if _value(node.test, lookup) else node.orelse, lookup)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = _value(node.left, lookup), _value(node.comparators[0], lookup)
        return _computed(node.ops[0], left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in FUNCTIONS:
            raise unknown_name("function", node.func.id, FUNCTIONS)
        return FUNCTIONS[node.func.id](*[_value(each, lookup) for each in node.args])
    raise ValueError("this form is not known here")


def _computed(sign: ast.AST, left: Any, right: Any) -> Any:
    if isinstance(sign, ast.Pow) and abs(right) > LARGEST_POWER:
        raise ValueError(f"a power above {LARGEST_POWER}")
    return _OPERATORS[type(sign)](left, right)
