"""The supervisor, which starts all processes and restarts them, and pools of local and Ray
workers."""
