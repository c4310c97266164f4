"""Measures the engine on this machine and compares it with the machine's limits (roofline)."""
