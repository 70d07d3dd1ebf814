"""The policy adds, and judges its own sum in a child session: `1` for right, `0` for wrong."""

import json

from rollout.environment import Result, SingleEpisode


class Review(SingleEpisode):
    async def reset(self, task):
        self.row = json.loads(task.row_json)
        return self.row["prompt"]

    async def step(self, turn):
        critic = self.sessions.open()
        review = await critic.chat(self.row["prompt"] + turn.text + "?")
        right = turn.text == self.row["answer"]
        critic.reward = float(review.text == ("1" if right else "0"))
        return Result(reward=float(right), metrics={"critic": critic.reward})
