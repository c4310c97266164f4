"""Clients of the KV store: the index of which node has which block, and the store nodes."""
