"""Moves KV blocks between processes: shared memory, NIXL, gRPC. No torch."""
