"""``rollout-plugins plugin --spec FILE`` answers a request of the CLI, as ``rollout-worker plugin``
does: name it with ``rollout plugin test --worker rollout-plugins`` where no workers are
installed."""

from __future__ import annotations

import argparse
import sys

from rollout_plugins.command import command


def main() -> None:
    """Answer the request in a file."""
    parser = argparse.ArgumentParser(prog="rollout-plugins", description=__doc__)
    parser.add_argument("command", choices=("plugin",))
    parser.add_argument("--spec", required=True, help="file of the request, JSON")
    sys.exit(command(parser.parse_args().spec))


if __name__ == "__main__":
    main()
