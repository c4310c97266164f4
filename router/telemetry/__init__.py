"""Metrics, traces and service level objectives of requests."""
