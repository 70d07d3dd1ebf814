"""Rewards as CEL expressions: what they see, what they may be, and where a mistake is said to
be."""

from __future__ import annotations

import pytest

from rollout.expression import Expression, ExpressionError, ExpressionFailed
from rollout.plugin import RewardShapeError, Sample, Score, call_reward

ROW = {"answer": "42", "count": 3, "weight": 0.5, "words": ["42", "forty-two"]}
SAMPLES = [Sample("17+25=", "42", ROW), Sample("17+25=", "", ROW)]


@pytest.mark.parametrize(
    ("text", "rewards"),
    [
        ("completion == row.answer ? 1.0 : 0.0", [1.0, 0.0]),
        ("completion == row['answer']", [1.0, 0.0]),
        ("completion.trim().size() + 1", [3.0, 1.0]),
        ("row.words.exists(word, word == completion) ? row.weight : 0.0", [0.5, 0.0]),
        ("lastNumber(completion, -1.0) / 2.0", [21.0, -0.5]),
        ("number(completion, 0.0) == double(row.answer)", [1.0, 0.0]),
        ("completion.matches('^[0-9]+$') && prompt.endsWith('=')", [1.0, 0.0]),
        ("has(row.missing) ? row.missing : double(row.count)", [3.0, 3.0]),
        ("greatest(0.1, 1.0 - double(size(completion)) / 2.0)", [0.1, 1.0]),
    ],
)
def test_values(text: str, rewards: list[float]) -> None:
    assert call_reward(Expression(text), SAMPLES) == [Score(reward) for reward in rewards]


@pytest.mark.parametrize(
    ("text", "message", "line", "column"),
    [
        ("completion ==", "ends too early", 1, 12),
        ("(1.0 + 2.0", "ends too early", 1, 8),
        ("1.0 +\n * 2.0", "can't be read at column 2", 2, 2),
        ("complet == 'x'", "did you mean `completion`", 1, 1),
        ("row.words.exists(w, v == completion)", "uses `v`", 1, 21),
        ("completion.tirm() == ''", "did you mean `trim`", 1, 12),
        ("__import__('os')", "uses `__import__`", 1, 1),
    ],
)
def test_mistakes_have_a_place(text: str, message: str, line: int, column: int) -> None:
    with pytest.raises(ExpressionError, match=message.replace("(", r"\(")) as caught:
        Expression(text)
    place = caught.value.place
    assert place is not None and (place.line, place.column) == (line, column)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("row.missing", "the row has no `missing`"),
        ("row.count * 2.0", "mixes an integer"),
        ("double(completion)", "is not a number"),
        ("1 / 0", "has no value"),
    ],
)
def test_a_sample_without_a_value_fails(text: str, message: str) -> None:
    with pytest.raises(ExpressionFailed, match=message):
        call_reward(Expression(text), SAMPLES)


@pytest.mark.parametrize("text", ["completion", "row.words", "1.0 / 0.0"])
def test_what_is_no_finite_number_is_refused(text: str) -> None:
    with pytest.raises(RewardShapeError):
        call_reward(Expression(text), SAMPLES)


def test_fields_are_known_before_any_row_is() -> None:
    fields = Expression("row.a == row['b'] || 'c' in row && row.c == 1 || has(row.d) && row.d || row.a == 1").fields
    assert [(use.name, use.column, use.guarded) for use in fields] == [
        ("a", 5, False), ("b", 14, False), ("c", 40, True), ("d", 58, True),
    ]  # fmt: skip
