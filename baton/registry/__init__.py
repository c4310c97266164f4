"""Who is in the cluster: Redis, and an in-memory registry for tests and simulations."""
