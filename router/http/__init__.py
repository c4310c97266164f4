"""HTTP with a bound on everything that a client can send, or not read."""
