"""Bounded concurrency: budgets, fair queues, threads, time limits."""
