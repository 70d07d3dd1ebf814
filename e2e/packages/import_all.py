"""Imports every module of an installed distribution: import_all.py NAME. Modules of engines and
of libraries of tasks, which have separate environments, are skipped by name."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

ENGINES = ("sglang", "vllm")
LIBRARIES = {"rollout.suites.inspect_tasks": "inspect_ai", "rollout.suites.lm_eval_tasks": "lm_eval"}
OF_THE_LEARNER = "rollout_plugins.testing.tensors"
failed: dict[str, str] = {}
imported = 0
for file in importlib.metadata.files(sys.argv[1]) or ():
    if file.suffix != ".py" or file.name == "__main__.py":
        continue
    name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    try:
        importlib.import_module(name)
        imported += 1
    except ModuleNotFoundError as error:
        if name == OF_THE_LEARNER and error.name == "torch":
            print(f"skipped {name}: losses are tested where the workers are installed", file=sys.stderr)
        elif name in LIBRARIES and error.name == LIBRARIES[name]:
            print(f"skipped {name}: {error.name} has a separate environment", file=sys.stderr)
        elif error.name not in ENGINES or not name.startswith(f"rollout_workers.engines.{error.name}."):
            failed[name] = f"{type(error).__name__}: {error}"
        else:
            print(f"skipped {name}: {error.name} has a separate environment", file=sys.stderr)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
assert imported > (8 if sys.argv[1] == "rollout-plugins" else 50), imported
assert not failed, failed
print(imported, "torch" in sys.modules)
