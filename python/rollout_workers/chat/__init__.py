"""Chats with tools: requests as messages of the chat template, and completions as messages of the
client. Imports no torch."""
