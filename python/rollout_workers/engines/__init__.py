"""Engines turn prompts into sampled tokens. ``base`` is the contract; each engine is a package in
this folder."""
