"""The reward contract: what may be returned, what is refused, and where an error is said to be."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from rollout.plugin import (
    RewardError,
    RewardFailed,
    RewardFunction,
    RewardImportError,
    RewardShapeError,
    RewardTimeout,
    Sample,
    Score,
    Step,
    call_reward,
    call_reward_async,
    load_reward,
)

SAMPLES = [Sample("1+1=", "2", {"answer": "2"}), Sample("1+2=", "4", {"answer": "3"})]


def reward(folder: Path, body: str, *, name: str = "reward") -> RewardFunction:
    (folder / "reward.py").write_text(body)
    return load_reward(f"reward.py:{name}", folder)


def test_floats_become_scores(tmp_path: Path) -> None:
    function = reward(tmp_path, "def reward(s): return [float(x.completion == x.row['answer']) for x in s]")
    assert call_reward(function, SAMPLES) == [Score(1.0), Score(0.0)]


def test_mappings_carry_metrics(tmp_path: Path) -> None:
    function = reward(tmp_path, "def reward(s): return [{'reward': True, 'length': len(x.completion)} for x in s]")
    assert call_reward(function, SAMPLES) == [Score(1.0, {"length": 1.0})] * 2


def test_any_kind_of_number_is_taken(tmp_path: Path) -> None:
    numbers = "numpy.float32(0.5), fractions.Fraction(1, 4), decimal.Decimal(3), 7, True"
    body = f"import decimal, fractions, numpy\ndef reward(s): return [{numbers}]"
    assert call_reward(reward(tmp_path, body), [SAMPLES[0]] * 5) == [Score(n) for n in (0.5, 0.25, 3.0, 7.0, 1.0)]


def test_numpy_is_taken(tmp_path: Path) -> None:
    function = reward(tmp_path, "import numpy\ndef reward(s): return numpy.arange(len(s))")
    assert call_reward(function, SAMPLES) == [Score(0.0), Score(1.0)]


def test_async_functions_are_awaited(tmp_path: Path) -> None:
    body = "import asyncio\nasync def reward(s):\n    await asyncio.sleep(0)\n    return [0.5] * len(s)\n"
    function = reward(tmp_path, body)
    assert call_reward(function, SAMPLES) == [Score(0.5)] * 2
    assert asyncio.run(call_reward_async(function, SAMPLES, timeout_seconds=5)) == [Score(0.5)] * 2


async def test_a_blocking_function_leaves_the_loop_free(tmp_path: Path) -> None:
    function = reward(tmp_path, "def reward(s):\n    s[0].row['gate'].wait()\n    return [1.0]\n")
    gate = threading.Event()
    call = asyncio.create_task(call_reward_async(function, [Sample("", "", {"gate": gate})], timeout_seconds=30))
    await asyncio.sleep(0)
    gate.set()  # would never be reached were the loop blocked
    assert await call == [Score(1.0)]


async def test_a_slow_call_is_a_timeout_and_no_score(tmp_path: Path) -> None:
    function = reward(tmp_path, "def reward(s):\n    s[0].row['gate'].wait()\n    return [1.0]\n")
    gate = threading.Event()
    with pytest.raises(RewardTimeout, match=r"longer than 0\.05 s for 1 samples") as caught:
        await call_reward_async(function, [Sample("", "", {"gate": gate})], timeout_seconds=0.05)
    gate.set()
    assert caught.value.reason == "REWARD_TIMEOUT"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("None", "returned None"),
        ("1.0", "returned a float"),
        ("'ab'", "returned a str"),
        ("{'reward': 1.0}", "returned a dict"),
        ("(x for x in s)", "returned a generator"),
        ("[1.0]", "returned 1 items for 2 samples"),
        ("[1.0, None]", "returned None as item 1"),
        ("[1.0, '1']", "returned a str as item 1"),
        ("[float('nan'), 1.0]", "returned nan as item 0"),
        ("[1.0, float('-inf')]", "returned -inf as item 1"),
        ("[1e300, 1.0]", r"returned 1e\+300 as item 0, whose square overflows float32"),
        ("[1.0, {'reward': -2e18}]", r"returned -2e\+18 as `reward` of item 1, whose square overflows float32"),
        ("[1.0, {'score': 1.0}]", "returned a mapping without `reward` as item 1"),
        (
            "[1.0, {'reward': 1.0, 'mean': 3.0}]",
            "returned the metric `mean` in item 1, whose name the run already uses for `reward/mean`",
        ),
        ("[1.0, {'reward': 1.0, 'ok': 'yes'}]", "returned a str as `ok` of item 1"),
    ],
)
def test_bad_results_are_refused_at_the_definition(tmp_path: Path, result: str, message: str) -> None:
    function = reward(tmp_path, f"import math\n\ndef reward(s): return {result}\n")
    with pytest.raises(RewardShapeError, match=message.replace("(", r"\(")) as caught:
        call_reward(function, SAMPLES)
    place = caught.value.place
    assert place is not None
    assert (Path(place.file).name, place.line) == ("reward.py", 3)


def test_parts_of_a_completion_are_rewarded(tmp_path: Path) -> None:
    samples = [Sample("1+1=", "1+1=2", token_ids=[4, 5, 6]), Sample("1+1=", "", token_ids=[7])]
    function = reward(tmp_path, "def reward(s): return [{'token_rewards': [0.5] * len(x.token_ids)} for x in s]")
    assert call_reward(function, samples) == [Score(0.0, token_rewards=(0.5, 0.5, 0.5)), Score(0.0, token_rewards=(0.5,))]
    steps = "[{'start': 0, 'end': 3, 'reward': 1}, {'start': 3, 'end': 5, 'reward': -1.0}] if x.completion else []"
    function = reward(tmp_path, f"def reward(s): return [{{'reward': 2, 'ok': 1, 'step_rewards': {steps}}} for x in s]")
    assert call_reward(function, samples) == [
        Score(2.0, {"ok": 1.0}, steps=(Step(0, 3, 1.0), Step(3, 5, -1.0))),
        Score(2.0, {"ok": 1.0}),
    ]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("{'token_rewards': [1.0]}", "1 `token_rewards` for the 2 tokens"),
        ("{'token_rewards': 'ab'}", "a str as `token_rewards`"),
        ("{'token_rewards': [1.0, float('nan')]}", "nan as an item of `token_rewards`"),
        ("{'token_rewards': [1.0, 1e20]}", r"1e\+20 as an item of `token_rewards` of item 0, whose square"),
        ("{'step_rewards': [{'start': 0, 'end': 9, 'reward': 1}]}", "the step 0 to 9"),
        ("{'step_rewards': [{'start': 1, 'end': 1, 'reward': 1}]}", "the step 1 to 1"),
        ("{'step_rewards': [{'start': 0, 'end': 2, 'reward': 1}, {'start': 1, 'end': 3, 'reward': 1}]}", "ends at 2"),
        ("{'step_rewards': [(0, 1, 1.0)]}", "no mapping of `start`"),
        ("{'step_rewards': [{'start': 0, 'end': 1, 'reward': None}]}", "None as the reward of a step"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, item: str, message: str) -> None:
    function = reward(tmp_path, f"def reward(s): return [{item} for _ in s]")
    with pytest.raises(RewardShapeError, match=message):
        call_reward(function, [Sample("p", "a+b", token_ids=[1, 2])])


def test_an_error_names_the_innermost_line_of_the_users_files(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("import json\n\ndef parse(text):\n    return json.loads(text)\n")
    function = reward(tmp_path, "from neighbour import parse\n\ndef reward(s):\n    return [parse('{')]\n")
    with pytest.raises(RewardFailed, match="raised JSONDecodeError: ") as caught:
        call_reward(function, SAMPLES)
    place = caught.value.place
    assert place is not None
    assert (Path(place.file).name, place.line, place.column, place.text.strip()) == (
        "neighbour.py",
        4,
        5,
        "return json.loads(text)",
    )


async def test_sys_exit_ends_nothing(tmp_path: Path) -> None:
    function = reward(tmp_path, "import sys\ndef reward(s):\n    sys.exit(1)\n")
    with pytest.raises(RewardFailed, match=r"called sys\.exit"):
        call_reward(function, SAMPLES)
    with pytest.raises(RewardFailed, match=r"called sys\.exit"):
        await call_reward_async(function, SAMPLES, timeout_seconds=5)


@pytest.mark.parametrize(
    ("body", "message", "line"),
    [
        ("def reward(s:\n    pass\n", "syntax error", 1),
        ("import nowhere_to_be_found\n", "raises ModuleNotFoundError", 1),
        ("x = 1\ny = x / 0\n", "raises ZeroDivisionError", 2),
        ("import sys\nsys.exit(3)\n", "calls sys.exit", 2),
        ("def other(s): return []\n", "no function `reward`.*it has `other`", 0),
        ("reward = 3\n", "of type int.*make it a function", 0),
        (
            "\ndef reward(prompts, completions, **more): ...\n",
            r"is `reward\(prompts, completions, \*\*more\)`.*`def reward\(samples\)`",
            2,
        ),
        ("def reward(): ...\n", r"is `reward\(\)`", 1),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path: Path, body: str, message: str, line: int) -> None:
    with pytest.raises(RewardImportError, match=message) as caught:
        reward(tmp_path, body)
    assert caught.value.place is not None
    assert caught.value.place.line == line


def test_a_missing_module_may_be_a_typo(tmp_path: Path) -> None:
    (tmp_path / "grading.py").write_text("")
    with pytest.raises(RewardImportError) as caught:
        reward(tmp_path, "import gradng\ndef reward(s): return []\n")
    assert caught.value.fix == "did you mean `grading`, which is next to reward.py?"
    with pytest.raises(RewardImportError) as caught:
        reward(tmp_path, "import unobtainium.core\ndef reward(s): return []\n")
    assert "no unobtainium.py next to reward.py and no package `unobtainium`" in caught.value.fix
    assert "install" in caught.value.fix


def test_a_module_that_a_reward_misses_when_it_is_called(tmp_path: Path) -> None:
    with pytest.raises(RewardFailed) as caught:
        call_reward(reward(tmp_path, "def reward(s):\n    import unobtainium.core\n"), [Sample("", "")])
    assert "no unobtainium.py next to reward.py and no package `unobtainium`" in caught.value.fix
    assert "workers' Python" in caught.value.fix


def test_fixes_do_not_contradict_each_other(tmp_path: Path) -> None:
    fixes: list[str] = []
    for body in ("raise ValueError('no')", "return [float('nan')]"):
        with pytest.raises(RewardError) as caught:
            call_reward(reward(tmp_path, f"def reward(s): {body}\n"), [Sample("", "")])
        fixes.append(caught.value.fix)
    assert "retried, then excluded" in fixes[0] and "catch" not in fixes[0]
    assert "raise" not in fixes[1]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RewardImportError, match=r"can't read gone\.py: No such file"):
        load_reward("gone.py:reward", tmp_path)
    with pytest.raises(RewardImportError, match="has no function name"):
        load_reward("gone.py", tmp_path)


def test_a_changed_file_is_a_new_module(tmp_path: Path) -> None:
    first = reward(tmp_path, "def reward(s): return [1.0] * len(s)")
    second = reward(tmp_path, "def reward(s): return [2.0] * len(s)")  # same size, same second
    assert not (tmp_path / "__pycache__").exists()
    assert call_reward(first, SAMPLES) == [Score(1.0)] * 2
    assert call_reward(second, SAMPLES) == [Score(2.0)] * 2


def test_the_folder_hides_no_installed_package_after_the_import(tmp_path: Path) -> None:
    reward(tmp_path, "def reward(s): return []")
    assert sys.path[-1] == str(tmp_path)
    assert sys.path[0] != str(tmp_path)
