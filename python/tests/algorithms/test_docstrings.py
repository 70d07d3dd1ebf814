"""Every public function over tensors documents their types and shapes, the mask, and how a loss is
reduced.

The test reads the source, so that new functions and parameters are checked too:

- a parameter ``x: Tensor`` needs ``x: float32 [N]``, or a place in
  ``float32 [N], int64 [N] -> float32 [N]``, which must list all parameters; a dtype applies to the
  tensors after it until the next dtype;
- a returned tensor needs ``-> float32 [N]`` or ``Returns float32 [N]``;
- a function that takes a record of ``types.py`` states a dtype, a shape, and ``Mask:``;
- a function that returns ``LossTerms`` states ``Reduction:`` with the normalizer of the record.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollout_workers.algorithms as algorithms
from rollout_workers.algorithms import types
from rollout_workers.trainer.model import logprob

FOLDER = Path(algorithms.__file__).parent
FILES = [*sorted(FOLDER.glob("*.py")), Path(logprob.__file__)]
DTYPE = r"(?:float(?:32|64)?|bfloat16|int(?:32|64)|bool|uint8)"
SHAPE = r"(?:\[[A-Z](?:, [A-Z])*\]|scalar)"
TENSOR = rf"{DTYPE} {SHAPE}"
SIGNATURE = rf"({TENSOR}(?:, (?:{DTYPE} )?{SHAPE})*) -> {TENSOR}"
NORMALIZERS = {
    kind.__name__: [field.name for field in dataclasses.fields(kind) if field.name in ("normalizer", "pairs", "samples")]
    for kind in (types.TokenBatch, types.ValueBatch, types.PairBatch, types.UnpairedBatch, types.ScoreBatch, types.EstimatorBatch)
}


def lacks(function: ast.FunctionDef) -> list[str]:
    """The required parts that the docstring of a function lacks."""
    text = " ".join((ast.get_docstring(function) or "").split())
    given = {
        argument.arg: ast.unparse(argument.annotation).removesuffix(" | None")
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if argument.annotation is not None
    }
    returned = ast.unparse(function.returns) if function.returns is not None else ""
    tensors = [name for name, annotation in given.items() if annotation == "Tensor"]
    records = [annotation for annotation in given.values() if annotation in NORMALIZERS]
    found: list[str] = []
    if not any(len(re.findall(SHAPE, inputs)) == len(tensors) for inputs in re.findall(SIGNATURE, text)):
        named = {name for names in re.findall(rf"\b([\w, ]+): {TENSOR}", text) for name in re.split(r", | and ", names)}
        found += [f"`{name}: <dtype> [<shape>]`" for name in tensors if name not in named]
    if "Tensor" in re.findall(r"\w+", returned) and not re.search(rf"(?:->|Returns) {TENSOR}", text):
        found.append("`Returns <dtype> [<shape>]`")
    if records and not re.search(TENSOR, text):
        found.append("a dtype and shape")
    if records and "Mask:" not in text:
        found.append("`Mask:`")
    if returned == "LossTerms":
        _, _, reduction = text.partition("Reduction:")
        if not any(f"``{name}``" in reduction for record in records for name in NORMALIZERS[record]):
            found.append("`Reduction:` and the normaliser")
    return found


def public(path: Path) -> Iterator[ast.FunctionDef]:
    """Functions of a file whose names don't begin with an underscore."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_docstrings_document_tensors(path: Path) -> None:
    wrong = [
        f"{path.name}:{function.lineno} {function.name} lacks {', '.join(lacks(function))}"
        for function in public(path)
        if lacks(function)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("def f(a: Tensor, b: Tensor) -> Tensor:\n '''float [N], int64 [N] -> float [N].'''", 0),
        ("def f(a: Tensor, b: Tensor) -> Tensor:\n '''a, b: float [N]. Returns float [N].'''", 0),
        ("def f(a: Tensor, b: Tensor) -> Tensor:\n '''float [N] -> float [N].'''", 2),
        ("def f(a: Tensor, b: Tensor | None) -> Tensor:\n '''a: float [N]. Returns float [N].'''", 1),
        ("def f(a: Tensor) -> Tensor:\n '''a: float [N].'''", 1),
        ("def f(a: Tensor) -> None:\n '''a: [N].'''", 1),
        ("def f(batch: PairBatch) -> LossTerms:\n '''float32 [P] each. Mask: none. Reduction: sum / ``pairs``.'''", 0),
        ("def f(batch: PairBatch) -> LossTerms:\n '''float32 [P] each. Mask: none. Reduction: sum / ``normalizer``.'''", 1),
        ("def f(batch: PairBatch) -> LossTerms:\n '''A loss.'''", 3),
        ("def f(batch: PairBatch) -> LossTerms: ...", 3),
    ],
)
def test_what_is_missing_is_named(source: str, wanted: int) -> None:
    (function,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    assert len(lacks(function)) == wanted
