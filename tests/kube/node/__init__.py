"""Nodes whose containers are processes of this machine, each in Linux namespaces of its own."""
