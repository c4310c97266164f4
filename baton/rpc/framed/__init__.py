"""Connections that carry protobuf messages in frames of our own, beside gRPC (docs/RESULTS.md)."""
