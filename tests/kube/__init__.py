"""A Kubernetes of one process, to test on: API server, controllers, and nodes whose containers are
processes of this machine.

Real enough for Helm, kubectl and the ``kubernetes`` client; small enough to start in a second.
"""
