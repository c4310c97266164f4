"""The life of a program: start, serve, drain, stop; probes and metrics."""
