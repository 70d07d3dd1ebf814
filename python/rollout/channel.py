"""Options of every gRPC channel and server."""

from __future__ import annotations

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 256 << 20),
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.keepalive_time_ms", 10_000),  # detects a dead host after 15 s, even during a call
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # the core uses the longer of the two
    ("grpc.http2.max_pings_without_data", 0),  # unlimited; the default is two, then one a minute
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *OPTIONS,
    (
        "grpc.http2.min_ping_interval_without_data_ms",
        5_000,
    ),  # clients ping every 10 s; the default would disconnect them
)
