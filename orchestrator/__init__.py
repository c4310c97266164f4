"""Starts programs and keeps them running: the supervisor, and pools of local and Ray workers."""
