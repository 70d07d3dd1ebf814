"""The planner's dry calls, in a process of their own: see ``__main__.py``."""
