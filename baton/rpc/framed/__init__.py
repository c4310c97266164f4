"""Framed connections carry protobuf messages in Baton's own frames, over TCP and Unix sockets. They
carry what is frequent, because they cost less CPU than gRPC (docs/results/router.md)."""
