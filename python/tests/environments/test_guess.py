"""The game of docs/environments.md saves its open episodes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GUESS: Any = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "environments" / "guess.py"))["Guess"]


async def test_a_saved_game_continues_with_its_number() -> None:
    game, copy = GUESS(), GUESS()
    await game.reset(SimpleNamespace(row_json=json.dumps({"number": 4})))
    copy.load_state_dict(json.loads(json.dumps(game.state_dict())))
    assert await copy.step(SimpleNamespace(text="2", number=0)) == "higher:"
    result = await copy.step(SimpleNamespace(text="4", number=1))
    assert result.reward == 1
