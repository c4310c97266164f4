"""How fast the engine is on this machine, beside what the machine could do at most."""
