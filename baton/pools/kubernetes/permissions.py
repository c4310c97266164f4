"""Permissions (RBAC) that a call to the Kubernetes API lacks."""

from baton.errors import Unauthorized

RESIZE_PERMISSIONS = {
    ("get", "deployments/scale"),
    ("update", "deployments/scale"),
    ("patch", "pods"),
    ("delete", "pods"),
}
"""Verbs and resources that the chart's value ``rbac.resize`` adds to the conductors' Role."""


class Forbidden(Unauthorized):
    """No Role allows ``verb`` on ``resource`` in the namespace."""

    def __init__(self, message: str, verb: str, resource: str) -> None:
        super().__init__(message)
        self.verb = verb
        self.resource = resource

    @property
    def permission(self) -> str:
        """The missing permission, like ``get deployments/scale``."""
        return f"{self.verb} {self.resource}"

    @property
    def hint(self) -> str:
        """A sentence on which value of the chart grants the permission; empty if none does."""
        if (self.verb, self.resource) not in RESIZE_PERMISSIONS:
            return ""
        return "the chart's value rbac.resize=true gives it to the conductors' Role"
