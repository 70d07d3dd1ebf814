"""Environments of policies that act for many steps, loaded from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.environments.acting import maker
from rollout.hosting.episodes import EnvironmentImport

METHODS = "    def reset(self, *, seed=None, options=None): ...\n    def step(self, action): ...\n"


def world(folder: Path, text: str) -> str:
    (folder / "world.py").write_text(text)
    return str(folder)


def test_a_class_is_constructed_with_its_arguments(tmp_path: Path) -> None:
    folder = world(tmp_path, f"class World:\n    def __init__(self, size):\n        self.size = size\n{METHODS}")
    make = maker("world.py:World", folder, '{"size": 3}')
    first, second = make(), make()
    assert first is not second and vars(first) == {"size": 3}


@pytest.mark.parametrize(
    ("text", "args", "message", "fix"),
    [
        (f"def World():\n    pass\nclass Other:\n{METHODS}", "", "`World` is of type function, not a class", "name a class"),
        ("class World:\n    pass\n", "", "`World` has no method `reset`", "write `reset` and `step` as in gymnasium"),
        (f"class World:\n{METHODS}", '{"size": 3}', "`World(size=3)`: ", "`multistep.args` must fit `World()`"),
        (
            f"class World:\n    def __init__(self):\n        1 / 0\n{METHODS}",
            "",
            "`World()` raises ZeroDivisionError",
            "correct",
        ),
        (
            f"import sys\nclass World:\n    def __init__(self):\n        sys.exit(3)\n{METHODS}",
            "",
            "`World()` calls sys.exit",
            "correct the constructor",
        ),
        ("import sys\nsys.exit(3)\n", "", "importing world.py calls sys.exit", "run `python world.py`"),
        ("class Other:\n    pass\n", "", "no class `World` is defined in world.py", "define `class World` in the file"),
    ],
)
def test_what_is_wrong_with_a_class_is_named(tmp_path: Path, text: str, args: str, message: str, fix: str) -> None:
    with pytest.raises(EnvironmentImport) as found:
        maker("world.py:World", world(tmp_path, text), args)()
    assert found.value.message.startswith(message) and found.value.fix.startswith(fix) and found.value.place is not None
