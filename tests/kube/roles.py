"""The ClusterRoles that every cluster has: ``view``, ``edit`` and ``admin``. A RoleBinding grants
one of them in one namespace.

Their rules are those of Kubernetes 1.36, for the kinds that the API server of this package knows.
No rule covers cluster-scoped objects (nodes, priority classes) or custom resources; real operators
can add rules for their own kinds.
"""

from typing import Any

from tests.kube.kinds import CLUSTER_ROLE, ROLE_BINDING, SERVICE_ACCOUNT, Object

READ = ["get", "list", "watch"]
WRITE = ["create", "delete", "deletecollection", "patch", "update"]


def _rule(verbs: list[str], group: str, *names: str) -> Object:
    return {"apiGroups": [group], "resources": list(names), "verbs": verbs}


VIEWED = [
    _rule(
        READ, "", "configmaps", "endpoints", "persistentvolumeclaims",
        "persistentvolumeclaims/status", "pods", "pods/status", "pods/log", "serviceaccounts",
        "services", "services/status", "events", "limitranges", "resourcequotas",
        "resourcequotas/status", "namespaces", "namespaces/status",
    ),
    _rule(
        READ, "apps", "daemonsets", "daemonsets/status", "deployments", "deployments/scale",
        "deployments/status", "replicasets", "replicasets/scale", "replicasets/status",
        "statefulsets", "statefulsets/scale", "statefulsets/status",
    ),
    _rule(READ, "autoscaling", "horizontalpodautoscalers", "horizontalpodautoscalers/status"),
    _rule(READ, "batch", "cronjobs", "cronjobs/status", "jobs", "jobs/status"),
    _rule(READ, "policy", "poddisruptionbudgets", "poddisruptionbudgets/status"),
    _rule(READ, "networking.k8s.io", "ingresses", "ingresses/status", "networkpolicies"),
    _rule(READ, "discovery.k8s.io", "endpointslices"),
]  # fmt: skip
EDITED = [
    _rule(READ, "", "secrets", "pods/exec"),
    _rule(
        WRITE, "", "configmaps", "persistentvolumeclaims", "pods", "pods/exec", "secrets",
        "serviceaccounts", "services", "events",
    ),
    _rule(["create"], "", "pods/eviction", "serviceaccounts/token"),
    _rule(
        WRITE, "apps", "daemonsets", "deployments", "deployments/scale", "replicasets",
        "replicasets/scale", "statefulsets", "statefulsets/scale",
    ),
    _rule(WRITE, "autoscaling", "horizontalpodautoscalers"),
    _rule(WRITE, "batch", "cronjobs", "jobs"),
    _rule(WRITE, "policy", "poddisruptionbudgets"),
    _rule(WRITE, "networking.k8s.io", "ingresses", "networkpolicies"),
    _rule([*READ, *WRITE], "coordination.k8s.io", "leases"),
]  # fmt: skip
ADMINISTERED = [
    _rule([*READ, *WRITE], "rbac.authorization.k8s.io", "roles", "rolebindings"),
    _rule(["create"], "authorization.k8s.io", "localsubjectaccessreviews"),
]

CLUSTER_ROLES = {
    "view": VIEWED,
    "edit": [*VIEWED, *EDITED],
    "admin": [*VIEWED, *EDITED, *ADMINISTERED],
}
"""The rules of each role."""


def add_cluster_roles(api: Any) -> None:
    for name, rules in CLUSTER_ROLES.items():
        api.create(CLUSTER_ROLE, {"metadata": {"name": name}, "rules": rules})


def add_namespace_admin(api: Any, namespace: str, account: str) -> None:
    """Create a ServiceAccount, and bind it to the ClusterRole ``admin``, only in its own
    namespace."""
    metadata = {"name": account, "namespace": namespace}
    api.create(SERVICE_ACCOUNT, {"metadata": metadata})
    reference = {"apiGroup": CLUSTER_ROLE.group, "kind": "ClusterRole", "name": "admin"}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    binding = {"metadata": metadata, "roleRef": reference, "subjects": [subject]}
    api.create(ROLE_BINDING, binding)
