"""Conversations with the policy as trees of token segments: the next turn's prompt, forks, the
durable form, and training rows. Imports no torch."""
