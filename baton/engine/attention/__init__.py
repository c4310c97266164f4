"""Paged attention: its interface (``base``), and backends for CPUs. ``cuda`` has that for GPUs."""
