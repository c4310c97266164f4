"""Pure functions from a snapshot to a decision: no I/O, no clock, no randomness."""
