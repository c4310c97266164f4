"""Framed connections: protobuf messages in Baton's own frames over TCP, besides gRPC
(docs/results/router.md)."""
