"""The registry of the cluster's members: in Redis, or in memory for tests and simulations."""
