"""Network security: signed calls, TLS, limits of gRPC servers, and a table of listening sockets."""
