"""An agent that plays a guessing game with the policy of a run, through the plain OpenAI client.

    python examples/agent_openai/agent.py RUN [--shuffle] [--state DIR | --server HOST:PORT]

It takes the prompts of the run, plays each game in its own session, and closes the session
with the reward: 1 if the policy finds the number with three guesses, else 0. It ends with the run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import openai
from prepare import GUESSES, hint

from rollout.client import Episode, connect_async


async def play(policy: openai.AsyncOpenAI, model: str, prompt: Sequence[Any], number: int, **options: Any) -> tuple[float, int]:
    """Play one game. Returns the reward and the number of guesses."""
    messages = list(prompt)
    for turn in range(1, GUESSES + 1):
        answer = await policy.chat.completions.create(model=model, messages=messages, **options)
        guess = answer.choices[0].message.content or ""
        if not guess.isdecimal():
            return 0.0, turn
        if int(guess) == number:
            return 1.0, turn
        messages += [{"role": "assistant", "content": guess}, hint(int(guess), number)]
    return 0.0, GUESSES


async def play_episode(client: openai.AsyncOpenAI, episode: Episode) -> tuple[float, int]:
    """Play the game of an episode in its session."""
    policy = client.with_options(base_url=episode.base_url)  # requests at this URL are in the session
    async with episode:  # an exception closes the session as INFRA_FAILED: no reward
        return await play(policy, episode.model, episode.prompt, episode.row["number"])


async def play_group(client: openai.AsyncOpenAI, group: Sequence[Episode], *, shuffle: bool) -> None:
    """Play the games of a prompt group at the same time. shuffle: give their rewards to each other,
    so that they say nothing about the games."""
    games = await asyncio.gather(*(play_episode(client, episode) for episode in group), return_exceptions=True)
    played = [(episode, *game) for episode, game in zip(group, games, strict=True) if not isinstance(game, BaseException)]
    for failure in games:
        if isinstance(failure, BaseException):
            print(f"a game of group {group[0].group} failed: {failure}", file=sys.stderr)
    rewards = [won for _, won, _ in played]
    if shuffle:
        random.shuffle(rewards)
    await asyncio.gather(
        *(
            episode.close(reward, metrics={"won": won, "guesses": turns})
            for reward, (episode, won, turns) in zip(rewards, played, strict=True)
        )
    )


async def main() -> None:
    """Play until the run has ended."""
    parser = argparse.ArgumentParser(description="Play a guessing game with the policy of a run.")
    parser.add_argument("run", help="id or name of the run")
    parser.add_argument("--shuffle", action="store_true", help="shuffle the rewards of each group: the control")
    parser.add_argument("--state", help="state folder of the local rolloutd")
    parser.add_argument("--server", help="gRPC address of a rolloutd, host:port; the key is $ROLLOUT_API_KEY")
    arguments = parser.parse_args()
    async with (
        connect() as policy,
        connect_async(arguments.server, state=arguments.state) as client,
        asyncio.TaskGroup() as tasks,
    ):
        group: list[Episode] = []
        async for episode in client.episodes(arguments.run):
            group.append(episode)
            if len(group) == episode.task.group_size:
                tasks.create_task(play_group(policy, group, shuffle=arguments.shuffle))
                group = []


def connect() -> openai.AsyncOpenAI:
    """A client of the OpenAI API whose base URL is set for each game."""
    return openai.AsyncOpenAI(base_url="http://localhost", api_key=os.environ.get("ROLLOUT_API_KEY", "none"), max_retries=5)


if __name__ == "__main__":
    asyncio.run(main())
