"""Batches of requests from files, answered while nobody else waits."""
