"""Expressions over the columns of a table, read from text: each node of the syntax tree
must be one allowed here.

`pandas.DataFrame.eval` reads the same text, but also attributes and calls, which reach
all of Python. `simpleeval` reads no columns in backticks, no `and` of arrays, and
compares text with numbers without an error.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import pandas
from pandas.api import types

Value: TypeAlias = np.ndarray | np.generic | bool | str
# `_numbers`, `_truths` and `_compared` check what these are called on.
_Function: TypeAlias = Callable[[Any], Any]
_Operator: TypeAlias = Callable[[Any, Any], Any]

ALLOWED = (
    "columns (`in backticks` unless they are plain names), numbers, text in quotes, "
    "+ - * / **, comparisons, and, or, not, in [...], "
    "log, log10, log2, sqrt, exp, abs"
)
# Limits that no query of a person needs to exceed. They bound what text from elsewhere
# can cost.
_LONGEST = 2000
_DEEPEST = 60
_LARGEST_EXPONENT = 100
_MOST_SHOWN = 100
_MOST_SHOWN_OF_A_PART = 60
_FUNCTIONS: dict[str, _Function] = {
    name: getattr(np, name) for name in ("log", "log10", "log2", "sqrt", "exp", "abs")
}
_ARITHMETIC: dict[type[ast.operator], _Operator] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_COMPARISONS: dict[type[ast.cmpop], _Operator] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_LOGIC: dict[type[ast.boolop], _Operator] = {
    ast.And: np.logical_and,
    ast.Or: np.logical_or,
}
# Text in quotes stays as it is.
_TOKENS = re.compile(
    r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|`([^`]*)`|[&|]", re.DOTALL
)


def evaluate(table: pandas.DataFrame, expression: str) -> Value:
    """Return the value of an expression along the rows of a table.

    It is an array, or a single number, text or truth value where the expression has no
    columns. Numbers are float64 whatever the column holds, so that no power takes long;
    true and false count as 1 and 0 in arithmetic. `&` and `|` bind like `and` and `or`,
    and comparisons may be chained, both as in `DataFrame.eval`.

    Raises:
        ValueError: something that is not allowed, an exponent above 100, a column that
            is not there.

    Example:
        >>> import pandas
        >>> from tl_coupling.statistics import evaluate
        >>> table = pandas.DataFrame({"n_layers": [6, 12, 24]})
        >>> evaluate(table, "6 < n_layers <= 24").tolist()
        [False, True, True]
    """
    try:
        tree, quoted = _parsed(expression)
        with np.errstate(all="ignore"):
            return _Evaluation(table, quoted).value(tree)
    except ValueError as error:
        shown = _shortened(expression, _MOST_SHOWN)
        reason = f": {error}"
        if expression.isidentifier():
            reason = f"; the columns are {', '.join(map(str, table))}"
        raise ValueError(f"no column or expression {shown!r}{reason}") from None


def columns_of(expression: str) -> set[str]:
    """Return the names of the columns that an expression uses, and of its functions.

    Raises:
        ValueError: it cannot be read.
    """
    tree, quoted = _parsed(expression)
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return {quoted.get(name, name) for name in names}


def _parsed(expression: str) -> tuple[ast.expr, dict[str, str]]:
    """Return the syntax tree, and the columns in backticks by the names that stand for
    them in it.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"at most {_LONGEST} characters, got {len(expression)}")
    quoted: dict[str, str] = {}

    def replacement(token: re.Match[str]) -> str:
        column = token[1]
        if column is None:
            return {"&": " and ", "|": " or "}.get(token[0], token[0])
        name = f"_column_in_backticks_{len(quoted)}"
        quoted[name] = column
        return f" {name} "

    try:
        text = _TOKENS.sub(replacement, expression).strip()
        tree = ast.parse(text, mode="eval").body
    # NUL characters and lone surrogates raise ValueError, deep nesting one of the last
    # two.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"it cannot be read; allowed are {ALLOWED}") from None
    if _is_deeper(tree, _DEEPEST):
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    return tree, quoted


def _is_deeper(tree: ast.expr, depth: int) -> bool:
    level: list[ast.AST] = [tree]
    for _ in range(depth):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return bool(level)


class _Evaluation:
    """An expression over the columns of a table.

    Attributes:
        table: what holds the columns.
        quoted: columns in backticks, by the names that stand for them in the tree.
    """

    def __init__(self, table: pandas.DataFrame, quoted: Mapping[str, str]) -> None:
        self.table = table
        self.quoted = quoted

    def value(self, node: ast.expr) -> Value:
        """Return the value of a node; ValueError where it is not allowed."""
        match node:
            case ast.Constant():
                return _constant(node)
            case ast.Name(id=name):
                return _column(self.table, self.quoted.get(name, name))
            case ast.UnaryOp():
                return self.unary(node)
            case ast.BoolOp(op=logic, values=operands):
                truths = [_truths(node, self.value(operand)) for operand in operands]
                return reduce(_LOGIC[type(logic)], truths)
            case ast.BinOp():
                return self.arithmetic(node)
            case ast.Compare(ops=[ast.In() | ast.NotIn()]):
                return self.membership(node)
            case ast.Compare():
                return self.comparison(node)
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
                if name in _FUNCTIONS:
                    return _FUNCTIONS[name](_numbers(node, self.value(argument)))
        raise _not_allowed(node)

    def unary(self, node: ast.UnaryOp) -> Value:
        """Return `-x`, `+x`, `not x` or `~x`."""
        value = self.value(node.operand)
        match node.op:
            case ast.USub():
                return -_numbers(node, value)
            case ast.UAdd():
                return _numbers(node, value)
            case _:
                return np.logical_not(_truths(node, value))

    def arithmetic(self, node: ast.BinOp) -> Value:
        """Return a sum, difference, product, quotient or power."""
        if type(node.op) not in _ARITHMETIC:
            raise _not_allowed(node)
        left = _numbers(node, self.value(node.left))
        right = _numbers(node, self.value(node.right))
        if isinstance(node.op, ast.Pow):
            is_allowed = np.ndim(right) == 0 and np.abs(right) <= _LARGEST_EXPONENT
            if not is_allowed:
                raise ValueError(
                    f"the exponent in {_text(node)} must be one number, "
                    f"at most {_LARGEST_EXPONENT} in magnitude"
                )
        return _ARITHMETIC[type(node.op)](left, right)

    def membership(self, node: ast.Compare) -> Value:
        """Return `x in [...]` or `x not in [...]`."""
        listed = node.comparators[0]
        if not isinstance(listed, ast.List | ast.Tuple):
            raise _not_a_list(listed)
        elements = [self.value(element) for element in listed.elts]
        if any(np.ndim(element) for element in elements):
            raise _not_a_list(listed)
        value = self.value(node.left)
        is_in = np.zeros(np.shape(value), bool)
        for element in elements:
            is_in = np.logical_or(is_in, _compared(node, value, ast.Eq(), element))
        # Exclusive or turns the answer round for `not in`.
        return is_in ^ isinstance(node.ops[0], ast.NotIn)

    def comparison(self, node: ast.Compare) -> Value:
        """Return `a < b`, or `a < b < c`, which is `a < b and b < c`."""
        if any(type(sign) not in _COMPARISONS for sign in node.ops):
            raise _not_allowed(node)
        values = [self.value(side) for side in (node.left, *node.comparators)]
        comparisons = [
            _compared(node, left, sign, right)
            for left, sign, right in zip(values, node.ops, values[1:], strict=False)
        ]
        return reduce(np.logical_and, comparisons)


def _constant(node: ast.Constant) -> Value:
    # True and False are integers too.
    if isinstance(node.value, bool | str):
        return node.value
    if not isinstance(node.value, int | float):
        raise _not_allowed(node)
    try:
        # An integer of Python would be raised to any power exactly, however long it
        # takes.
        return np.float64(node.value)
    except OverflowError:
        raise ValueError("a number in it is too large") from None


def _compared(node: ast.expr, left: Value, sign: ast.cmpop, right: Value) -> Value:
    if not isinstance(sign, ast.Eq | ast.NotEq):
        left = _numbers(node, left)
        right = _numbers(node, right)
    left_kind = np.asarray(left).dtype.kind
    right_kind = np.asarray(right).dtype.kind
    # A column of objects may hold numbers beside text, as checkpoints do.
    if "U" in (left_kind, right_kind) and not {left_kind, right_kind} <= {"U", "O"}:
        not_text = right if left_kind == "U" else left
        raise ValueError(f"{_text(node)} compares text with {_kind(not_text)}")
    return _COMPARISONS[type(sign)](left, right)


def _column(table: pandas.DataFrame, name: str) -> np.ndarray:
    """Return a column as float64, as truth values or, whatever else it holds, as
    objects; NaN where a value is missing.
    """
    if name not in table:
        columns = ", ".join(map(str, table))
        raise ValueError(f"there is no column {name!r}; the columns are {columns}")
    values = table[name]
    # pandas returns a table where two columns have one name.
    if not isinstance(values, pandas.Series):
        raise ValueError(f"there are two columns {name!r}")
    # Objects that are all numbers become numbers.
    values = values.infer_objects()
    dtype = values.dtype
    if types.is_bool_dtype(dtype) and not values.isna().any():
        return values.to_numpy(dtype=bool)
    if types.is_numeric_dtype(dtype) and not types.is_complex_dtype(dtype):
        return values.to_numpy(dtype=np.float64, na_value=np.nan)
    return values.astype(object).where(values.notna(), np.nan).to_numpy(dtype=object)


def _kind(value: Value) -> str:
    kinds = {"b": "truth values", "f": "numbers"}
    return kinds.get(np.asarray(value).dtype.kind, "text")


def _numbers(node: ast.expr, value: Value) -> np.ndarray | np.float64:
    if _kind(value) == "text":
        raise ValueError(f"{_text(node)} needs numbers, got text")
    return np.float64(value)


def _truths(node: ast.expr, value: Value) -> Value:
    kind = _kind(value)
    if kind != "truth values":
        raise ValueError(
            f"{_text(node)} needs true or false on each side, got {kind}: "
            "put comparisons in brackets"
        )
    return value


def _not_allowed(node: ast.expr) -> ValueError:
    return ValueError(f"{_text(node)} is not allowed; allowed are {ALLOWED}")


def _not_a_list(node: ast.expr) -> ValueError:
    return ValueError(
        f"`in` must be followed by a list of numbers or texts, got {_text(node)}"
    )


def _text(node: ast.AST) -> str:
    return _shortened(ast.unparse(node), _MOST_SHOWN_OF_A_PART)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
