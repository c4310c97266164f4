"""KV transports between processes, over shared memory, NIXL or gRPC. They don't need torch."""
