"""Runs the test of a plugin without a network:
``python -m rollout_plugins.isolated SPEC [served]``.

The kernel moves a process of an ordinary user to another network only while the process has one
thread, and numpy starts threads when it is imported. So the network is cut off before the imports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rollout_plugins.isolation import cut_off_network


def main() -> None:
    """Answer the request in a file. ``served``: another program serves the plugin, perhaps over the
    network."""
    spec, *served = sys.argv[1:]
    kept = "it is served by another program" if served else cut_off_network()
    from rollout_plugins.command import answered
    from rollout_plugins.testing.session import test

    sys.exit(answered(lambda: test(json.loads(Path(spec).read_text()), kept)))


if __name__ == "__main__":
    main()
