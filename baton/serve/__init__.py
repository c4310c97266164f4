"""The lifecycle of a program (start, serve, drain, stop), its probes and its metrics."""
