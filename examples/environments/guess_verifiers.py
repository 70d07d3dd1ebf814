"""The guessing game as an environment of verifiers: three guesses, and each answer is a hint."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        higher = int(state["answer"]) > int(messages[-1].content)
        return [vf.UserMessage(content="higher:" if higher else "lower:")]

    @vf.stop
    async def over(self, state: vf.State) -> bool:
        if not state["trajectory"]:
            return False
        said = state["trajectory"][-1]["completion"][-1].content
        return said == state["answer"] or not said.isdecimal()


def right(completion: vf.Messages, answer: str) -> float:
    return float(completion[-1].content == answer)


def load_environment(guesses: int = 3, highest: int = 5) -> vf.Environment:
    numbers = [{"question": f"guess 1-{highest}:", "answer": str(number + 1)} for number in range(highest)]
    return Guess(dataset=Dataset.from_list(numbers), rubric=vf.Rubric(funcs=[right]), max_turns=guesses)
