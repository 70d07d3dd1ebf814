"""Suites whose tasks are those of a library, by their names in ``eval.suites.NAME.kind``.

The library has an interpreter of its own, as environments have (``rollout plugin install NAME``).
:mod:`rollout.suites.child` runs in it, sends the prompts to an endpoint with the API of OpenAI, and
writes what the library measured.
"""

from __future__ import annotations

PACKAGES = {"inspect_ai": "inspect-ai", "lm_eval": "lm-eval"}
"""Kind -> name of its package. ``rollout/environments/locks/KIND.lock`` has the versions."""
