"""Framed connections carry protobuf messages in Baton's own frames over TCP. They replace gRPC for
the busiest streams, because they cost less CPU (docs/results/router.md)."""
