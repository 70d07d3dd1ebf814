"""What an evaluation adds to a batch: the file of scores, completions of a baseline, environments
that score themselves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.conftest import Bench, Outcome

Run = Callable[[Path], Outcome]


def scores(bench: Bench, name: str = "out.scores") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (bench.folder / name).read_text().splitlines()]


def test_the_scores_have_a_line_per_row(bench: Bench, run: Run) -> None:
    data = bench.data(30)
    spec = bench.spec(data, scores=str(bench.folder / "out.scores"), cluster="answer")
    outcome = run(spec)
    assert outcome.code == 0, outcome
    head, *rows = scores(bench)
    assert head["end"] == {key: value for key, value in outcome.last.items() if key != "event"}
    assert head["inputs"]["rows"] == 30 and head["inputs"]["cluster"] == "answer"
    records = bench.records()
    for number, row in enumerate(rows):
        samples = [record for record in records if record["row"] == number]
        assert row["row"] == number and row["scores"] == [sample["score"] for sample in samples]
        assert row["parts"] == {"first": [number, number]} and row["cluster"] == json.dumps(str(2 * number))
        assert ("prompt" in row) == (number < 20)
    assert rows[3]["completions"] == [record["completion"] for record in records if record["row"] == 3]

    (bench.folder / "out.jsonl").unlink()  # the second time, nothing is sampled
    again = run(spec)
    assert (again.code, again.last) == (0, outcome.last) and not (bench.folder / "out.jsonl").exists()
    other = run(bench.spec(data, scores=str(bench.folder / "out.scores"), cluster="answer", limit=7))
    assert (other.code, other.last["reason"]) == (65, "INPUTS_CHANGED") and "`rows` was 30, is 7" in other.last["message"]
    assert run(bench.spec(data, scores=str(bench.folder / "out.scores"), restart=True, limit=7)).code == 0
    assert len(scores(bench)) == 8

    unknown = run(bench.spec(data, "new.jsonl", scores=str(bench.folder / "new.scores"), cluster="topic"))
    assert (unknown.code, unknown.last["reason"]) == (65, "BAD_ROW") and "row 0 has no field `topic`" in unknown.last["message"]
    (bench.folder / "out.scores").write_text("no\n")
    assert run(bench.spec(data, scores=str(bench.folder / "out.scores"))).last["reason"] == "JOURNAL_DAMAGED"


def test_failed_samples_have_no_score(bench: Bench, run: Run) -> None:
    data = bench.data(20, fails=5)
    assert run(bench.spec(data, scores=str(bench.folder / "out.scores"), allow_failures=True)).code == 0
    assert scores(bench)[6]["scores"] == [None, None]


@pytest.mark.timeout(300)
def test_a_killed_evaluation_gives_equal_scores(bench: Bench, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bench.data(160, signal=(100, signal.SIGKILL))
    spec = bench.spec(data, "killed.parquet", scores=str(bench.folder / "killed.scores"))
    command = [sys.executable, "-m", "rollout_workers", "infer", "--spec", str(spec)]
    killed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed
    assert not (bench.folder / "killed.scores").exists()
    monkeypatch.setenv("NO_SIGNALS", "1")
    assert run(spec).code == 0
    assert run(bench.spec(data, "whole.parquet", scores=str(bench.folder / "whole.scores"))).code == 0
    assert scores(bench, "killed.scores")[1:] == scores(bench, "whole.scores")[1:]
    assert (bench.folder / "killed.parquet").read_bytes() == (bench.folder / "whole.parquet").read_bytes()


JUDGE = """
def wins(samples):
    return [0.5 if s.completion == s.row["baseline"] else float(len(s.completion) > len(s.row["baseline"])) for s in samples]
"""


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_judge_compares_with_the_baseline(ending: str, bench: Bench, run: Run) -> None:
    data = bench.data(12)
    baseline = f"base.{ending}"
    assert run(bench.spec(data, baseline, tables={"sampling": {"group_size": 1}})).code == 0
    (bench.folder / "judge.py").write_text(JUDGE)
    changes = {"reward": {"plugin": "judge.py:wins"}, "sampling": {"group_size": 1}}
    compared = {"tables": changes, "baseline": str(bench.folder / baseline), "scores": str(bench.folder / "out.scores")}
    assert run(bench.spec(data, **compared)).code == 0
    assert [row["scores"] for row in scores(bench)[1:]] == [[0.5]] * 12, "a model ties with itself"
    assert bench.records()[3]["data"]["baseline"] == bench.records()[3]["completion"]

    longer = run(bench.spec(bench.data(13), "longer.jsonl", **compared))
    assert (longer.code, longer.last["reason"]) == (65, "BASELINE_INVALID") and "row 12" in longer.last["message"]
    lines = [{**json.loads(line), "answer": "0"} for line in bench.data(12).read_text().splitlines()]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    other = run(bench.spec(data, "other.jsonl", **compared))
    assert other.last["reason"] == "BASELINE_INVALID" and "was written for other data" in other.last["message"]
    wrong = run(bench.spec(data, "wrong.jsonl", **{**compared, "baseline": str(data)}))
    assert wrong.last["reason"] == "BASELINE_INVALID" and "`completion`" in wrong.last["message"]


GAME = """
import json
from rollout.environment import Result, SingleEpisode

class Length(SingleEpisode):
    async def reset(self, task):
        self.number = json.loads(task.row_json)["number"]
        return f"{self.number}="

    async def step(self, turn):
        if turn.number == 1:
            return Result(reward=float(len(turn.text)), metrics={"number": self.number})
        return "1="
"""


def test_an_environment_that_scores_itself_is_a_suite(bench: Bench, run: Run) -> None:
    (bench.folder / "game.py").write_text(GAME)
    limits = {"max_turns": 4, "turn_timeout_seconds": 60.0, "episode_timeout_seconds": 60.0, "credit": "episode"}
    game = {"kind": "python", "path": "game.py:Length", **limits}
    spec = bench.spec(bench.data(10), tables={"environment": game, "sampling": {"max_tokens": 4}})
    given = json.loads(spec.read_text())
    del given["config"]["reward"]
    spec.write_text(json.dumps({**given, "scores": str(bench.folder / "out.scores")}))
    assert run(spec).code == 0
    head, *rows = scores(bench)
    assert set(head["inputs"]["environment"]) >= {"kind", "path", "source"} and head["inputs"]["reward"] is None
    assert len(rows) == 10 and all(score is not None for row in rows for score in row["scores"])
    assert any(score > 0 for row in rows for score in row["scores"])
    assert rows[4]["parts"]["number"] == [4.0, 4.0]
