"""Environments: the protocol, the episodes that drive them, and the built-in ones. Imports no
torch."""
