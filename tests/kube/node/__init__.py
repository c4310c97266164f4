"""Nodes whose containers are processes on this machine, each in its own Linux namespaces."""
