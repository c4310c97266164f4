"""Logs, traces, and the text form of metrics."""
