"""Expressions of a table's columns, read from text: arithmetic, comparisons and a few functions. Nothing is executed.

`pandas.DataFrame.eval` reads the same text, and attributes and calls as well, through which a text reaches the whole of
Python. Here the syntax tree is held against what is allowed, and numbers are floats, so that no power takes long.
"""

import ast
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas

ALLOWED = (
    "columns (`in backticks` where they are no names), numbers, text in quotes, + - * / **, comparisons, and, or, not, "
    "in [...], log, log10, log2, sqrt, exp, abs"
)
_LONGEST, _DEEPEST, _LARGEST_EXPONENT = 2000, 60, 100
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "log": np.log, "log10": np.log10, "log2": np.log2, "sqrt": np.sqrt, "exp": np.exp, "abs": np.abs,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}  # fmt: skip
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_SAMENESS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {ast.Eq: operator.eq, ast.NotEq: operator.ne}
# Text in quotes stays as it is.
_TOKENS = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|`([^`]*)`|[&|]", re.DOTALL)


class _NotAllowed(ValueError):
    """What is wrong with an expression, to which the expression is added."""


def evaluate(table: "pandas.DataFrame", expression: str) -> Any:
    """The value of an expression: an array along the rows, or one number, text or truth value without columns.

    Numbers are float64 whatever the column's kind, true and false count as 1 and 0 in arithmetic. `&` and `|` bind like
    `and` and `or`, and comparisons may be chained, both as in `DataFrame.eval`. An exponent is one number, at most 100
    in magnitude.

    Raises:
        ValueError: the expression holds what is not allowed, or a column that is not there.

    Example:
        >>> import pandas
        >>> from tl_coupling.generalization.expressions import evaluate
        >>> evaluate(pandas.DataFrame({"n_layers": [6, 12, 24]}), "6 < n_layers <= 24").tolist()
        [False, True, True]
    """
    try:
        tree, quoted = _parsed(expression)
        with np.errstate(all="ignore"):
            return _value(tree, lambda name: _column(table, quoted.get(name, name)))
    except _NotAllowed as error:
        shown = expression if len(expression) <= 100 else expression[:99] + "…"
        if expression.isidentifier():
            raise ValueError(f"no column or expression {shown!r}; the columns are {_names(table)}") from None
        raise ValueError(f"no column or expression {shown!r}: {error}") from None


def _parsed(expression: str) -> tuple[ast.expr, dict[str, str]]:
    """The syntax tree, and the columns in backticks by the names that stand for them in it."""
    if len(expression) > _LONGEST:
        raise _NotAllowed(f"at most {_LONGEST} characters, got {len(expression)}")
    quoted: dict[str, str] = {}

    def replaced(token: re.Match[str]) -> str:
        if token[1] is not None:
            name = f"_column_in_backticks_{len(quoted)}"
            quoted[name] = token[1]
            return f" {name} "
        return {"&": " and ", "|": " or "}.get(token[0], token[0])

    try:
        tree = ast.parse(_TOKENS.sub(replaced, expression).strip(), mode="eval").body
    # NUL characters and lone surrogates are ValueErrors, deep nesting is one of the others.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _NotAllowed(f"it cannot be read; allowed are {ALLOWED}") from None
    layer: list[ast.AST] = [tree]
    for _ in range(_DEEPEST):
        layer = [child for node in layer for child in ast.iter_child_nodes(node)]
    if layer:
        raise _NotAllowed(f"it is nested more than {_DEEPEST} deep")
    return tree, quoted


def _value(node: ast.expr, column: Callable[[str], Any]) -> Any:
    match node:
        case ast.Constant(value=bool() | str() as constant):
            return constant
        case ast.Constant(value=int() | float() as constant):
            try:
                return np.float64(constant)
            except OverflowError:
                raise _NotAllowed("a number in it is too large") from None
        case ast.Name(id=name):
            return column(name)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _numbers(node, _value(operand, column))
            return -value if isinstance(sign, ast.USub) else value
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            return np.logical_not(_truths(node, _value(operand, column)))
        case ast.BoolOp(op=op, values=operands):
            combine = np.logical_and if isinstance(op, ast.And) else np.logical_or
            return _folded(combine, [_truths(node, _value(operand, column)) for operand in operands])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            base, other = (_numbers(node, _value(side, column)) for side in (left, right))
            if isinstance(op, ast.Pow) and not (np.ndim(other) == 0 and abs(other) <= _LARGEST_EXPONENT):
                raise _NotAllowed(
                    f"the exponent in {_text(node)} must be one number, at most {_LARGEST_EXPONENT} in magnitude"
                )
            return _ARITHMETIC[type(op)](base, other)
        case ast.Compare():
            return _comparison(node, column)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_numbers(node, _value(argument, column)))
    raise _NotAllowed(f"{_text(node)} is not allowed; allowed are {ALLOWED}")


def _comparison(node: ast.Compare, column: Callable[[str], Any]) -> Any:
    """`a < b < c` is `a < b and b < c`."""
    results, left = [], _value(node.left, column)
    for op, operand in zip(node.ops, node.comparators, strict=True):
        if isinstance(op, ast.In | ast.NotIn):
            results.append(_membership(node, left, operand, column) ^ isinstance(op, ast.NotIn))
            if operand is not node.comparators[-1]:
                raise _NotAllowed(f"{_text(node)}: nothing may follow a list")
            continue
        right = _value(operand, column)
        if type(op) in _ORDER:
            results.append(_ORDER[type(op)](_numbers(node, left), _numbers(node, right)))
        elif type(op) in _SAMENESS:
            results.append(_compared(node, _SAMENESS[type(op)], left, right))
        else:
            raise _NotAllowed(f"{_text(node)} is not allowed; allowed are {ALLOWED}")
        left = right
    return _folded(np.logical_and, results)


def _membership(node: ast.Compare, left: Any, operand: ast.expr, column: Callable[[str], Any]) -> Any:
    if isinstance(operand, ast.List | ast.Tuple):
        elements = [_value(element, column) for element in operand.elts]
        if not any(np.ndim(element) for element in elements):
            same = [_compared(node, operator.eq, left, element) for element in elements]
            return _folded(np.logical_or, [np.zeros(np.shape(left), dtype=bool), *same])
    raise _NotAllowed(f"`in` wants a list of numbers or texts, got {_text(operand)}")


def _compared(node: ast.expr, compare: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    one, other = np.asarray(left).dtype.kind, np.asarray(right).dtype.kind
    # A column of objects may hold numbers beside text: checkpoints do.
    if "U" in (one, other) and not {one, other} <= {"U", "O"}:
        raise _NotAllowed(f"{_text(node)} compares text with {_kind(right if one == 'U' else left)}")
    return compare(left, right)


def _folded(combine: Callable[[Any, Any], Any], values: list[Any]) -> Any:
    first, *others = values
    for other in others:
        first = combine(first, other)
    return first


def _column(table: "pandas.DataFrame", name: str) -> np.ndarray:
    """A column as float64, as true and false, or, whatever else it holds, as objects; NaN where nothing is known."""
    import pandas
    from pandas.api import types

    if name not in table:
        raise _NotAllowed(f"there is no column {name!r}; the columns are {_names(table)}")
    values = table[name]
    if not isinstance(values, pandas.Series):
        raise _NotAllowed(f"the column {name!r} is there twice")
    values = values.infer_objects()
    if types.is_bool_dtype(values.dtype) and not values.isna().any():
        return values.to_numpy(dtype=bool)
    if types.is_numeric_dtype(values.dtype) and not types.is_complex_dtype(values.dtype):
        return values.to_numpy(dtype=np.float64, na_value=np.nan)
    return values.astype(object).where(values.notna(), np.nan).to_numpy(dtype=object)


def _kind(value: Any) -> str:
    return {"b": "truth values", "f": "numbers"}.get(np.asarray(value).dtype.kind, "text")


def _numbers(node: ast.expr, value: Any) -> Any:
    if _kind(value) == "text":
        raise _NotAllowed(f"{_text(node)} wants numbers, got text")
    return np.float64(value)


def _truths(node: ast.expr, value: Any) -> Any:
    if (kind := _kind(value)) != "truth values":
        raise _NotAllowed(
            f"{_text(node)} wants true or false on every side, got {kind}: put comparisons in parentheses"
        )
    return value


def _text(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:59] + "…"


def _names(table: "pandas.DataFrame") -> str:
    return ", ".join(map(str, table))
