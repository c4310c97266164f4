"""Workloads: traces of requests from files, and synthetic ones."""
