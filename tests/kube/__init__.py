"""A small Kubernetes cluster in one process, for tests: an API server, controllers, and nodes whose
containers are processes on this machine.

Helm, kubectl and the ``kubernetes`` client work with it, and it starts within a second. See
``README.md``.
"""
