"""Clients of the KV store: the index of who holds which block, and the store nodes."""
