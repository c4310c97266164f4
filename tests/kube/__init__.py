"""A small Kubernetes in one process, for tests: an API server, controllers, and nodes whose
containers are processes of this machine.

It is real enough for Helm, kubectl and the ``kubernetes`` client, and starts within a second. See
``README.md``.
"""
