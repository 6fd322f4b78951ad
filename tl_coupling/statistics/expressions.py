"""Expressions over the columns of a table, read from text: each node of the syntax tree
must be one allowed here.

`pandas.DataFrame.eval` reads the same text, but also attributes and calls, which reach
all of Python.
"""

import ast
import operator
import re
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np
import pandas
from pandas.api import types

ALLOWED = (
    "columns (`in backticks` unless they are plain names), numbers, text in quotes, + - * / **, comparisons, and, or, "
    "not, in [...], log, log10, log2, sqrt, exp, abs"
)
_LONGEST, _DEEPEST, _LARGEST_EXPONENT = 2000, 60, 100
_FUNCTIONS = {
    name: getattr(np, name) for name in ("log", "log10", "log2", "sqrt", "exp", "abs")
}
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    **{
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
    },
    **{
        ast.Pow: operator.pow,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
    },
    **{
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.And: np.logical_and,
        ast.Or: np.logical_or,
    },
}
# Text in quotes stays as it is.
_TOKENS = re.compile(
    r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|`([^`]*)`|[&|]", re.DOTALL
)


def evaluate(table: pandas.DataFrame, expression: str) -> Any:
    """The value of an expression: an array along the rows, or a single number, text or
    truth value without columns.

    Numbers are float64 whatever the column holds, so that no power takes long; true and
    false count as 1 and 0 in arithmetic. `&` and `|` bind like `and` and `or`, and
    comparisons may be chained, both as in `DataFrame.eval`.

    Raises:
        ValueError: something that is not allowed, an exponent above 100, a column that
            is not there.

    Example:
        >>> import pandas
        >>> from tl_coupling.statistics.expressions import evaluate
        >>> evaluate(pandas.DataFrame({"n_layers": [6, 12, 24]}), "6 < n_layers <= 24").tolist()
        [False, True, True]
    """
    try:
        tree, quoted = _parsed(expression)
        with np.errstate(all="ignore"):
            return _value(tree, lambda name: _column(table, quoted.get(name, name)))
    except ValueError as error:
        shown = expression if len(expression) <= 100 else expression[:99] + "…"
        why = (
            f"; the columns are {', '.join(map(str, table))}"
            if expression.isidentifier()
            else f": {error}"
        )
        raise ValueError(f"no column or expression {shown!r}{why}") from None


def columns_of(expression: str) -> set[str]:
    """Names of the columns that an expression uses, and of its functions; ValueError
    where it cannot be read.
    """
    tree, quoted = _parsed(expression)
    return {
        quoted.get(node.id, node.id)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name)
    }


def _parsed(expression: str) -> tuple[ast.expr, dict[str, str]]:
    """The syntax tree, and the columns in backticks by the names that stand for them in
    it.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"at most {_LONGEST} characters, got {len(expression)}")
    quoted: dict[str, str] = {}

    def replaced(token: re.Match[str]) -> str:
        if token[1] is None:
            return {"&": " and ", "|": " or "}.get(token[0], token[0])
        quoted[name := f"_column_in_backticks_{len(quoted)}"] = token[1]
        return f" {name} "

    try:
        tree = ast.parse(_TOKENS.sub(replaced, expression).strip(), mode="eval").body
    # NUL characters and lone surrogates raise ValueError, deep nesting one of the last
    # two.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"it cannot be read; allowed are {ALLOWED}") from None
    layer: list[ast.AST] = [tree]
    for _ in range(_DEEPEST):
        layer = [child for node in layer for child in ast.iter_child_nodes(node)]
    if layer:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    return tree, quoted


def _value(node: ast.expr, column: Callable[[str], Any]) -> Any:
    match node:
        case ast.Constant(value=bool() | str() as constant):
            return constant
        case ast.Constant(value=int() | float() as constant):
            try:
                return np.float64(constant)
            except OverflowError:
                raise ValueError("a number in it is too large") from None
        case ast.Name(id=name):
            return column(name)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _numbers(node, _value(operand, column))
            return -value if isinstance(sign, ast.USub) else value
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            return np.logical_not(_truths(node, _value(operand, column)))
        case ast.BoolOp(op=op, values=operands):
            return reduce(
                _OPERATORS[type(op)],
                [_truths(node, _value(operand, column)) for operand in operands],
            )
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            base, other = (
                _numbers(node, _value(side, column)) for side in (left, right)
            )
            if isinstance(op, ast.Pow) and not (
                np.ndim(other) == 0 and abs(other) <= _LARGEST_EXPONENT
            ):
                wanted = f"one number, at most {_LARGEST_EXPONENT} in magnitude"
                raise ValueError(f"the exponent in {_text(node)} must be {wanted}")
            return _OPERATORS[type(op)](base, other)
        case ast.Compare(
            left=left, ops=[ast.In() | ast.NotIn() as op], comparators=[operand]
        ):
            elements = (
                [_value(e, column) for e in operand.elts]
                if isinstance(operand, ast.List | ast.Tuple)
                else [[]]
            )
            if any(map(np.ndim, elements)):
                raise ValueError(
                    f"`in` must be followed by a list of numbers or texts, got {_text(operand)}"
                )
            value = _value(left, column)
            found = [_compared(node, value, ast.Eq(), element) for element in elements]
            return reduce(
                np.logical_or, found, np.zeros(np.shape(value), bool)
            ) ^ isinstance(op, ast.NotIn)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(
            type(op) in _OPERATORS for op in ops
        ):
            # `a < b < c` is `a < b and b < c`.
            values = [_value(side, column) for side in (left, *others)]
            return reduce(
                np.logical_and, map(partial(_compared, node), values, ops, values[1:])
            )
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if (
            name in _FUNCTIONS
        ):
            return _FUNCTIONS[name](_numbers(node, _value(argument, column)))
    raise ValueError(f"{_text(node)} is not allowed; allowed are {ALLOWED}")


def _compared(node: ast.expr, left: Any, op: ast.cmpop, right: Any) -> Any:
    if not isinstance(op, ast.Eq | ast.NotEq):
        left, right = _numbers(node, left), _numbers(node, right)
    one, other = np.asarray(left).dtype.kind, np.asarray(right).dtype.kind
    # A column of objects may hold numbers beside text, as checkpoints do.
    if "U" in (one, other) and not {one, other} <= {"U", "O"}:
        raise ValueError(
            f"{_text(node)} compares text with {_kind(right if one == 'U' else left)}"
        )
    return _OPERATORS[type(op)](left, right)


def _column(table: pandas.DataFrame, name: str) -> np.ndarray:
    """A column as float64, as truth values or, whatever else it holds, as objects; NaN
    where a value is missing.
    """
    if name not in table:
        raise ValueError(
            f"there is no column {name!r}; the columns are {', '.join(map(str, table))}"
        )
    values = table[name]
    if not isinstance(values, pandas.Series):
        raise ValueError(f"there are two columns {name!r}")
    values = values.infer_objects()
    if types.is_bool_dtype(values.dtype) and not values.isna().any():
        return values.to_numpy(dtype=bool)
    if types.is_numeric_dtype(values.dtype) and not types.is_complex_dtype(
        values.dtype
    ):
        return values.to_numpy(dtype=np.float64, na_value=np.nan)
    return values.astype(object).where(values.notna(), np.nan).to_numpy(dtype=object)


def _kind(value: Any) -> str:
    return {"b": "truth values", "f": "numbers"}.get(
        np.asarray(value).dtype.kind, "text"
    )


def _numbers(node: ast.expr, value: Any) -> Any:
    if _kind(value) == "text":
        raise ValueError(f"{_text(node)} needs numbers, got text")
    return np.float64(value)


def _truths(node: ast.expr, value: Any) -> Any:
    if (kind := _kind(value)) != "truth values":
        raise ValueError(
            f"{_text(node)} needs true or false on each side, got {kind}: put comparisons in brackets"
        )
    return value


def _text(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:59] + "…"
