"""The conductor's policies over simulated workers, in virtual time."""
