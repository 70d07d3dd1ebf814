"""``python -m rollout_testing.sim inference|learner``: a worker without a model."""

from __future__ import annotations

from rollout_testing.sim.install import install

install()

from rollout_workers.__main__ import main  # noqa: E402  what it imports stands in by now

main()
