"""The planner's calls of Python in a separate process: see ``__main__.py``."""
