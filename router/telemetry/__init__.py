"""Metrics, traces and service level objectives (SLOs) of requests."""
