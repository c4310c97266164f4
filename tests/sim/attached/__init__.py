"""A simulated cluster whose workers attach simulated ``vllm serve`` processes. It runs as a whole
cluster does (:mod:`tests.sim.whole`), with the servers' hazards as further faults."""
