"""Nodes whose containers are processes of this machine, each in namespaces of its own."""
