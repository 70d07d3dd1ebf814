"""The planner's dry calls in a separate process: see ``__main__.py``."""
