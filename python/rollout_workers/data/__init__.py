"""Rows: prompts, tokenization, conversations, preference pairs and supervised examples. Imports no
torch."""
