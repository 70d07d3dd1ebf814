"""The parts that every worker has: registration, streams, events, the gRPC server, and the
lifecycle of the process. Imports no torch.

Two threads run independently of the worker's event loop, so a busy model does not delay them: one
renews the registration, the other (``heartbeat``) extends the ack deadline of work items and sends
events.
"""
