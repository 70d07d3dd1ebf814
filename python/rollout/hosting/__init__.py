"""Runs plugins. ``host`` calls the user's code; ``runner``, ``child``, and ``sidecar`` are the
three ways to run it."""
