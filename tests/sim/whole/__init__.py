"""A whole cluster simulated in one process: production code over a network with injected faults."""
