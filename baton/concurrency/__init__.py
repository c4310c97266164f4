"""Bounded concurrency: fair slots, threads, time limits."""
