"""Turns rows of a dataset into prompts and training examples: SFT, conversations, preferences.
Imports no torch."""
