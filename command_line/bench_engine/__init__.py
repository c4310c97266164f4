"""``baton bench engine`` measures the engine alone, on this machine, and compares it with the
machine's roofline."""
