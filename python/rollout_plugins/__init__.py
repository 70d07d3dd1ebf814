"""Makes, tests, lists, and installs plugins: ``rollout plugin``. It needs no torch, except for the
tests of losses and advantage estimators."""
