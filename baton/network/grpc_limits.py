"""Limits that protect every gRPC server from untrusted clients. They are options of gRPC itself, so
they apply even before a call is authenticated."""

import resource

MAX_CONNECTIONS = 2048
"""Maximum number of connections to a server: twice the number of routers, conductors and workers of
a cluster. Each connection takes some 20 KB."""

MAX_STREAMS = 1024
"""Maximum number of concurrent calls on one connection; further ones wait on the caller's side. A
decode worker has one call for each KV transfer from the peer."""

WINDOW_BYTES = 16 * 1024
"""Flow-control window of a call that the server does not read from."""

HANDSHAKE_MILLISECONDS = 5_000
IDLE_MILLISECONDS = 60_000
"""Connections without a call for this long are closed; members reconnect when they need to."""

SERVER_LIMITS = (
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # A message that the server waits for may be larger: its window grows as needed.
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),  # would enlarge the window for fast senders
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MILLISECONDS),
    ("grpc.max_connection_idle_ms", IDLE_MILLISECONDS),
    # Two servers on one port would silently split the traffic.
    ("grpc.so_reuseport", 0),
)

SPARE_OPEN_FILES = 1024


def raise_open_file_limit() -> None:
    """Raise the limit on open files to the hard limit if it is too low for ``MAX_CONNECTIONS``:
    unauthenticated clients must not use up the descriptors that members and files need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MAX_CONNECTIONS + SPARE_OPEN_FILES and soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
