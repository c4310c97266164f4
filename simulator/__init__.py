"""A discrete-event simulator: the conductor's policies over simulated workers in virtual time."""
