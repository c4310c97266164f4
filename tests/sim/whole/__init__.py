"""A simulation of a whole cluster in one process: production code runs over a network with injected
faults."""
