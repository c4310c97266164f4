"""Batches of requests from files, run while the cluster has idle capacity."""
