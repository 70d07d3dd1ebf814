"""Environments of verifiers, one for each case of ``test_verifiers.py``. As a program it plays the
cases in the interpreter of the plugin, and prints a JSON object for each."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

import numpy as np
import verifiers as vf
from datasets import Dataset

from rollout.environment import Observation, Refusal, Result, Task, ToolCall, Turn
from rollout.environments import source
from rollout.errors import RolloutError
from rollout.hosting.episodes import Checked
from rollout.hosting.episodes import load_environment as load_class

ROWS = Dataset.from_list([{"question": f"what is {n} + {n}?", "answer": str(2 * n)} for n in range(4)])


def right(completion: vf.Messages, answer: str) -> float:
    return float(answer in completion[-1].content)


def raising(completion: vf.Messages) -> float:
    raise KeyError("score")


async def nothing(completion: vf.Messages) -> Any:
    return None


def nan(completion: vf.Messages) -> float:
    return float("nan")


def longest(completions: list[vf.Messages], **_: Any) -> list[float]:
    sizes = [len(completion[-1].content) for completion in completions]
    return [float(size == max(sizes)) for size in sizes]


def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


def remembered(number: int, memory: list[int]) -> str:
    """Add a number to the memory."""
    memory.append(number)
    return f"{sum(memory)}"


class Turns(vf.MultiTurnEnv):
    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        return [vf.UserMessage(content="again")]


class Rewriting(Turns):
    async def get_prompt_messages(self, state: vf.State) -> vf.Messages:
        messages = await super().get_prompt_messages(state)
        return messages if not state["trajectory"] else [vf.UserMessage(content="a summary"), *messages[1:]]


class Silent(Turns):
    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        return []


class Raising(Turns):
    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        return [vf.UserMessage(content=str(1 / 0))]


class Broken(Turns):
    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        raise vf.InfraError("the sandbox is gone")


class Random(Turns):
    async def setup_state(self, state: vf.State) -> vf.State:
        state["prompt"] = [vf.UserMessage(content=str(random.random()))]
        return state


class Parallel(Turns):
    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        again = [vf.UserMessage(content="again")]
        await asyncio.gather(*(self.get_model_response(state, [*messages, *again]) for _ in range(2)))
        return again


class Warm(Turns):
    async def get_model_response(self, state: vf.State, prompt: vf.Messages, **_: Any) -> vf.Response:
        return await super().get_model_response(state, prompt, sampling_args={"temperature": 2})


class Memory(vf.StatefulToolEnv):
    async def setup_state(self, state: vf.State) -> vf.State:
        state["memory"] = []
        return state

    def update_tool_args(self, tool_name: str, tool_args: dict, messages: vf.Messages, state: vf.State, **_: Any) -> dict:
        return tool_args | {"memory": state["memory"]}


def memory() -> vf.Environment:
    environment = Memory(dataset=ROWS, rubric=vf.Rubric(funcs=[right]))
    environment.add_tool(remembered, args_to_skip=["memory"])
    return environment


def turns(cls: type[vf.MultiTurnEnv], *functions: Any) -> vf.Environment:
    return cls(dataset=ROWS, rubric=vf.Rubric(funcs=list(functions or (right,))), max_turns=2)


KINDS = {
    "single": lambda: vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[right]), system_prompt="You add."),
    "turns": lambda: turns(Turns),
    "tools": lambda: vf.ToolEnv(dataset=ROWS, tools=[double], rubric=vf.Rubric(funcs=[right])),
    "strict": lambda: vf.ToolEnv(dataset=ROWS, tools=[double], stop_errors=[TypeError], rubric=vf.Rubric(funcs=[right])),
    "memory": memory,
    "group": lambda: vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[right, longest], weights=[1.0, 0.5])),
    "rewriting": lambda: turns(Rewriting),
    "silent": lambda: turns(Silent),
    "raising": lambda: turns(Raising),
    "broken": lambda: turns(Broken),
    "random": lambda: turns(Random),
    "parallel": lambda: turns(Parallel),
    "warm": lambda: turns(Warm),
    "rubric raises": lambda: turns(Turns, right, raising),
    "rubric returns None": lambda: turns(Turns, nothing),
    "rubric returns nan": lambda: turns(Turns, right, nan),
    "load raises": lambda: vf.SingleTurnEnv(dataset=ROWS, max_turns={}["turns"]),
    "load returns a list": lambda: [],
}


def load_environment(kind: str) -> vf.Environment:
    return KINDS[kind]()


Said = str | tuple[str, dict[str, Any]]
"""What a turn says: a text, or a call of a function."""
CASES: dict[str, list[tuple[int, Said]]] = {
    "single": [(0, "it is 4"), (1, "")],
    "turns": [(0, "3"), (1, "4"), (1, "5"), (0, "4")],
    "tools": [(0, ("double", {"number": 2})), (1, "4"), (0, "4 it is")],
    "strict": [(0, ("double", {"wrong": 2}))],
    "memory": [
        (0, ("remembered", {"number": 2})), (1, ("remembered", {"number": 5})),
        (0, ("remembered", {"number": 2})), (0, "4"), (1, "5"),
    ],
    "group": [(0, "4"), (1, "not 4 but 5")],
    **{kind: [(0, "4"), (0, "4")] for kind in KINDS if kind not in ("single", "turns", "tools", "strict", "memory", "group")},
}  # fmt: skip


async def play(kind: str) -> list[Any]:
    """What the environment answers to the turns of a case, in order."""
    found: list[Any] = []
    try:
        environment = load(kind)
        task = Task("t", b'{"index": 2}', (0, 1), (0, 1))
        (first,) = await environment.reset([task])
        found.append(shown(first))
        numbers = [0, 0]
        waiting: list[asyncio.Task[Any]] = []
        for sample, said in CASES[kind]:
            waiting.append(asyncio.create_task(environment.step([turn(task, sample, numbers[sample], said)])))
            numbers[sample] += 1
            if not environment.waits_for_siblings:
                found.append(shown((await waiting[-1])[0]))
        if environment.waits_for_siblings:
            found += [shown(answers[0]) for answers in await asyncio.gather(*waiting)]
        await environment.close([("t", 0), ("t", 1)])
    except RolloutError as error:
        found.append({"reason": error.reason, "message": error.message, "line": error.place.text.strip() if error.place else ""})
    return found


def load(kind: str) -> Checked:
    args = {"id": kind.removeprefix("id:")} if kind.startswith("id:") else {"args": {"kind": kind}}
    path = "" if "id" in args else "verifiers_cases.py:load_environment"
    loaded = source("verifiers", path, sys.path[0], json.dumps(args))
    return load_class(loaded["plugin"], loaded["base_dir"], json.loads(loaded["args"]))


def turn(task: Task, sample: int, number: int, said: Said) -> Turn:
    calls = () if isinstance(said, str) else (ToolCall(f"call{number}", said[0], said[1], raw=json.dumps(said[1])),)
    text = said if isinstance(said, str) else ""
    return Turn(task, sample, number, "", np.zeros(1, np.int32), text, False, content=text, tool_calls=calls)


def shown(answer: Observation | Result | Refusal) -> Any:
    match answer:
        case Observation():
            tools = [tool["function"]["name"] for tool in answer.tools]
            return [[message["role"], message["content"]] for message in answer.messages] + ([tools] if tools else [])
        case Result():
            if answer.reason:
                return {"reason": answer.reason, "message": answer.message, "line": ""}
            return {"reward": answer.reward, "metrics": dict(answer.metrics)}
        case Refusal():
            return {"reason": answer.reason, "message": answer.message, "line": ""}


if __name__ == "__main__":
    for case in [*KINDS, "id:no-such-game"]:
        print(json.dumps({"case": case, "found": asyncio.run(play(case))}), flush=True)
