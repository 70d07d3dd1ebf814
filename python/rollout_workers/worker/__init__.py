"""The worker's side of the mesh: registration, streams, events, serving and the life of the
process. Imports no torch.

Two threads live here that a busy model can't hold up: one renews the registration, one
(``heartbeat``) tells NATS that work items are still being worked on and sends events. Everything
else runs on the worker's one event loop.
"""
