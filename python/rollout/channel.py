"""Options of every gRPC channel and server."""

from __future__ import annotations

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.keepalive_time_ms", 10_000),  # a host that is gone without a word is missed after 15 s, whatever a call waits for
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # the core keeps the longer of the two
    ("grpc.http2.max_pings_without_data", 0),  # any number: else two, and then one a minute
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # half of what callers do: else 5 minutes, or they are cut off
)
