"""Engines whose model is in another process.

server.py     what the process of an engine does, as a protocol
engine.py     implements ``Engine`` with it
requests.py   requests and samples
parts.py      the tokens of a stream
"""
