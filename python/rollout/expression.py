"""Rewards as CEL expressions (https://cel.dev) over a sample.

Example: ``completion == row.answer ? 1.0 : 0.0``.

An expression can use ``prompt``, ``completion``, and the dataset's ``row``. It has no loops except
the macros of CEL (``all``, ``exists``, ``exists_one``, ``filter``, ``map``), no files, and no
clock. In addition to the functions of CEL it can call those of ``FUNCTIONS``, as ``f(x)`` or
``x.f()``. JSON numbers without a decimal point are integers, which CEL does not mix with other
numbers: write ``double(row.weight) * 2.0``.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rollout.errors import Place
from rollout.expression_function import FUNCTIONS, celled
from rollout.plugin import RewardError, RewardFailed, RewardShapeError, Sample

VARIABLES = ("prompt", "completion", "row")
MACROS = ("all", "exists", "exists_one", "filter", "map", "has", "dyn")
TYPES = ("bool", "bytes", "double", "int", "list", "map", "null_type", "string", "type", "uint")


class ExpressionError(RewardError):
    """The expression can't be compiled, or uses an unknown name. ``place`` is the line and column
    in the expression."""

    reason: ClassVar[str] = "REWARD_EXPRESSION"


class ExpressionLibraryMissing(ExpressionError):
    """The library of expressions is not installed."""

    reason: ClassVar[str] = "LIBRARY_MISSING"


class ExpressionFailed(RewardFailed):
    """The expression has no value for a sample."""


@dataclass(frozen=True, slots=True)
class FieldUse:
    """A field of the row that an expression reads."""

    name: str
    line: int  # in the expression, from 1
    column: int  # from 1
    guarded: bool  # whether the expression checks that the row has it


class Expression:
    """A compiled expression: a function from samples to numbers, for ``call_reward``."""

    def __init__(self, text: str) -> None:
        """Compile. Raises :class:`ExpressionError`."""
        self._celpy = celpy = _library()
        self.__name__ = "reward.expression"
        self.text = text
        environment: Any = celpy.Environment()
        try:
            self._tree: Any = environment.compile(text)
        except self._celpy.CELParseError as error:
            raise self._unreadable(error) from error
        self._check_names()
        self._program: Any = environment.program(
            self._tree, functions={name: celled(function) for name, function in FUNCTIONS.items()}
        )

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Raises :class:`ExpressionFailed` and ``RewardShapeError``."""
        return [self._value(sample) for sample in samples]

    @cached_property
    def fields(self) -> list[FieldUse]:
        """Fields of the row that the expression reads, in order."""
        guarded = set(self._asked())
        uses = [FieldUse(t.value, t.line, t.column, t.value in guarded) for t in self._read()]
        return sorted({use.name: use for use in reversed(uses)}.values(), key=lambda use: (use.line, use.column))

    def _value(self, sample: Sample) -> float:
        types = self._celpy.celtypes
        names = {
            "prompt": types.StringType(sample.prompt),
            "completion": types.StringType(sample.completion),
            "row": self._celpy.json_to_cel(sample.row),
        }
        try:
            value = self._program.evaluate(names)
        except self._celpy.CELEvalError as error:
            raise self._failed(error) from error
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ExpressionFailed(f"the expression has no value: {error}", fix=_FIX) from error
        if isinstance(value, (float, int)):  # a boolean is 1 or 0
            return float(value)
        raise RewardShapeError(
            f"the result of the expression is a {_kind(value)}, not a number", fix="end it with numbers: `... ? 1.0 : 0.0`"
        )

    def _unreadable(self, error: Any) -> ExpressionError:
        line, column = error.line or 1, error.column or 1
        lines = self.text.splitlines() or [""]
        rest = "\n".join([lines[min(line, len(lines)) - 1][column - 1 :], *lines[line:]]).strip()
        tail = getattr(getattr(error.__context__, "token", None), "type", "") == "$END"
        what = "the expression ends too early" if tail else f"the expression can't be read at column {column}: `{rest[:24]}`"
        return ExpressionError(
            what, fix="write it in CEL: `completion == row.answer ? 1.0 : 0.0`", place=Place(self.__name__, line, column)
        )

    def _failed(self, error: Any) -> ExpressionFailed:
        cause = str(error.args[0]) if error.args else str(error)
        if "no matching overload" in cause and "IntType" in cause and "DoubleType" in cause:
            return ExpressionFailed(
                "the expression mixes an integer with another number", fix="write `double(...)` around the integer"
            )
        if key := re.search(r"no such (?:member|key)[^\w]*(?:in mapping: )?'?\"?(\w+)", cause):
            return ExpressionFailed(f"the row has no `{key[1]}`", fix=f"check the field first: `has(row.{key[1]}) ? ... : 0.0`")
        if "return error for overflow" in cause:  # CEL's message for a text that is not a number
            return ExpressionFailed(
                "a text in the expression is not a number", fix="write `number(text, 0.0)`, with the value to use instead"
            )
        return ExpressionFailed(f"the expression has no value: {' '.join(cause.split())[:200]}", fix=_FIX)

    def _check_names(self) -> None:
        known = [*VARIABLES, *TYPES]
        for token in _unbound(self._tree, frozenset()):
            if token.value not in known:
                raise self._unknown("name", token, known, f"there are {', '.join(f'`{name}`' for name in VARIABLES)}")
        functions = [*self._celpy.evaluation.base_functions, *FUNCTIONS, *MACROS]
        callable_names = sorted(name for name in functions if name.isidentifier())
        for token in _called(self._tree):
            if token.value not in callable_names:
                raise self._unknown("function", token, callable_names, f"there are {', '.join(callable_names)}")

    def _unknown(self, what: str, token: Any, known: Sequence[str], otherwise: str) -> ExpressionError:
        near: list[str] = difflib.get_close_matches(str(token.value), known, n=1)
        fix = f"did you mean `{near[0]}`?" if near else otherwise
        return ExpressionError(
            f"the expression uses `{token.value}`, but there is no such {what}",
            fix=fix,
            place=Place(self.__name__, token.line, token.column),
        )

    def _read(self) -> Iterator[Any]:
        """Tokens of fields: of ``row.x`` and ``row["x"]``."""
        for tree in self._tree.find_data("member_dot"):
            if _is_row(tree.children[0]):
                yield tree.children[1]
        for tree in self._tree.find_data("member_index"):
            if _is_row(tree.children[0]) and (token := _literal(tree.children[1])) is not None:
                yield token

    def _asked(self) -> Iterator[str]:
        """Fields of ``has(row.x)`` and ``"x" in row``."""
        for tree in self._tree.find_data("ident_arg"):
            if tree.children[0].value == "has":
                yield from (t.children[1].value for t in tree.find_data("member_dot") if _is_row(t.children[0]))
        for tree in self._tree.find_data("relation"):
            if len(tree.children) == 2 and tree.children[0].data == "relation_in" and _is_row(tree.children[1]):
                token = _literal(tree.children[0])
                yield from [token.value] if token is not None else []


_FIX = "an expression must have a value for every completion, including an empty one"


def _library() -> Any:
    try:
        import celpy  # takes half a second
    except ImportError as error:
        text = f"expressions need the package cel-python, which can't be imported: {error}"
        raise ExpressionLibraryMissing(text, fix=f"install it: {sys.executable} -m pip install 'rollout-rl[cel]'") from error
    return celpy


def _any(_: Any) -> bool:
    return True


def _is_row(tree: Any) -> bool:
    tokens = list(tree.scan_values(_any))
    return [t.value for t in tokens] == ["row"] and tokens[0].type == "IDENT"


def _literal(tree: Any) -> Any:
    tokens = list(tree.scan_values(_any))
    if len(tokens) != 1 or tokens[0].type != "STRING_LIT":
        return None
    token = tokens[0]
    return token.update(value=token.value[1:-1])


def _unbound(tree: Any, bound: frozenset[str]) -> Iterator[Any]:
    """Tokens of names that no macro binds."""
    if not hasattr(tree, "children"):
        return
    if tree.data == "ident" and tree.children[0].value not in bound:
        yield tree.children[0]
    inner = bound
    children = list(tree.children)
    if tree.data == "member_dot_arg" and children[1].value in MACROS and len(children) > 2 and len(children[2].children) > 1:
        yield from _unbound(children[0], bound)
        variable, *rest = children[2].children
        inner = bound | {str(t.value) for t in variable.scan_values(_any)}
        children = rest
    for child in children:
        yield from _unbound(child, inner)


def _called(tree: Any) -> Iterator[Any]:
    """Tokens of functions and methods."""
    for call in tree.find_data("ident_arg"):
        yield call.children[0]
    for call in tree.find_data("member_dot_arg"):
        yield call.children[1]


def _kind(value: object) -> str:
    return "text" if isinstance(value, str) else type(value).__name__.removesuffix("Type").lower()
