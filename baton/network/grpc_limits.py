"""Bounds of every gRPC server against whoever reaches its port: options of gRPC's own, which hold
before a call has shown who makes it."""

import resource

MAX_CONNECTIONS = 2048
"""A cluster's routers, conductors and workers, twice over; some 20 KB each."""

MAX_STREAMS = 1024
"""Calls of one connection at a time; a decode worker has one for each hand-off from its peer. The
next ones wait at the caller's."""

WINDOW_BYTES = 16 * 1024
"""Of a call that nobody reads from."""

HANDSHAKE_MILLISECONDS = 5_000
IDLE_MILLISECONDS = 60_000
"""Without a call; members connect again when they have one."""

SERVER_LIMITS = (
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # A message that is asked for may be larger: its window grows with it.
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),  # would make the window larger for whoever sends fast
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MILLISECONDS),
    ("grpc.max_connection_idle_ms", IDLE_MILLISECONDS),
    # Two servers on one port would silently split the traffic.
    ("grpc.so_reuseport", 0),
)

SPARE_OPEN_FILES = 1024


def raise_open_file_limit() -> None:
    """As many as the system lets this process have, if connections could need them: strangers must
    not use up what files and lines need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MAX_CONNECTIONS + SPARE_OPEN_FILES and soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
