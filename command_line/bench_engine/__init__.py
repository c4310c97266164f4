"""``baton bench engine``: the engine alone on this machine, beside what the machine could do."""
