"""What a test of a worker runs against: the embedded NATS and registry of a real ``rolloutd``,
streams, plans, work.

Used by the tests of this project, and by those of engines and harnesses that live elsewhere.
"""
