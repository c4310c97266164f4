"""The kinds of objects that the API server of this package knows, including custom resources."""

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object in its JSON form."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of objects. ``plural`` is the name of the kind in paths and in Roles."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True
    subresources: tuple[str, ...] = ()
    short: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def prefix(self) -> str:
        """The prefix of the URL paths of this kind's objects."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"

    @property
    def qualified(self) -> str:
        """The name of the kind in error messages, like ``deployments.apps``."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


def _plain(kind: str, plural: str, *subresources: str, short: str = "") -> Kind:
    return Kind("", "v1", kind, plural, True, subresources, tuple(short.split()))


NAMESPACE = Kind("", "v1", "Namespace", "namespaces", False, ("status",), ("ns",))
NODE = Kind("", "v1", "Node", "nodes", False, ("status",), ("no",))
POD = _plain("Pod", "pods", "status", "eviction", "log", "exec", short="po")
SERVICE = _plain("Service", "services", "status", short="svc")
ENDPOINTS = _plain("Endpoints", "endpoints", short="ep")
CONFIG_MAP = _plain("ConfigMap", "configmaps", short="cm")
SECRET = _plain("Secret", "secrets")
SERVICE_ACCOUNT = _plain("ServiceAccount", "serviceaccounts", short="sa")
CLAIM = _plain("PersistentVolumeClaim", "persistentvolumeclaims", "status", short="pvc")
EVENT = _plain("Event", "events", short="ev")
QUOTA = _plain("ResourceQuota", "resourcequotas", "status", short="quota")
LIMIT_RANGE = _plain("LimitRange", "limitranges", short="limits")

DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments", True, ("scale", "status"), ("deploy",))
REPLICA_SET = Kind("apps", "v1", "ReplicaSet", "replicasets", True, ("scale", "status"), ("rs",))
STATEFUL_SET = Kind(
    "apps", "v1", "StatefulSet", "statefulsets", True, ("scale", "status"), ("sts",)
)
DAEMON_SET = Kind("apps", "v1", "DaemonSet", "daemonsets", True, ("status",), ("ds",))
JOB = Kind("batch", "v1", "Job", "jobs", True, ("status",))
CRON_JOB = Kind("batch", "v1", "CronJob", "cronjobs", True, ("status",), ("cj",))
BUDGET = Kind(
    "policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", True, ("status",), ("pdb",)
)
AUTOSCALER = Kind(
    "autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", True,
    ("status",), ("hpa",),
)  # fmt: skip
SLICE = Kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")
RBAC = "rbac.authorization.k8s.io"
ROLE = Kind(RBAC, "v1", "Role", "roles")
ROLE_BINDING = Kind(RBAC, "v1", "RoleBinding", "rolebindings")
CLUSTER_ROLE = Kind(RBAC, "v1", "ClusterRole", "clusterroles", False)
CLUSTER_ROLE_BINDING = Kind(RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", False)
DEFINITION = Kind(
    "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions",
    False, ("status",), ("crd",),
)  # fmt: skip

PRIORITY_CLASS = Kind(
    "scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", False, (), ("pc",)
)  # fmt: skip
RUNTIME_CLASS = Kind("node.k8s.io", "v1", "RuntimeClass", "runtimeclasses", False)

BUILT_IN = (
    NAMESPACE, NODE, POD, SERVICE, ENDPOINTS, CONFIG_MAP, SECRET, SERVICE_ACCOUNT, CLAIM, EVENT,
    QUOTA, LIMIT_RANGE,
    DEPLOYMENT, REPLICA_SET, STATEFUL_SET, DAEMON_SET, JOB, CRON_JOB, BUDGET, AUTOSCALER, SLICE,
    LEASE, ROLE, ROLE_BINDING, CLUSTER_ROLE, CLUSTER_ROLE_BINDING, DEFINITION,
    Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", short=("netpol",)),
    Kind("networking.k8s.io", "v1", "Ingress", "ingresses", True, ("status",), ("ing",)),
    PRIORITY_CLASS, RUNTIME_CLASS,
    Kind("storage.k8s.io", "v1", "StorageClass", "storageclasses", False, (), ("sc",)),
)  # fmt: skip


class Kinds:
    """All known kinds, which can be found by path or by name. Each CustomResourceDefinition adds
    more."""

    def __init__(self) -> None:
        self.all: list[Kind] = list(BUILT_IN)

    def of_path(self, group: str, version: str, plural: str) -> Kind | None:
        wanted = (group, version, plural)
        return next((k for k in self.all if (k.group, k.version, k.plural) == wanted), None)

    def named(self, api_version: str, kind: str) -> Kind | None:
        wanted = (api_version, kind)
        return next((k for k in self.all if (k.api_version, k.kind) == wanted), None)

    def define(self, definition: Object) -> None:
        """Add the kinds of a CustomResourceDefinition, unless they are known already."""
        spec = definition["spec"]
        names, namespaced = spec["names"], spec["scope"] == "Namespaced"
        for version in spec["versions"]:
            subresources = tuple(version.get("subresources") or {})
            kind = Kind(
                spec["group"], version["name"], names["kind"], names["plural"], namespaced,
                subresources, tuple(names.get("shortNames") or ()),
            )  # fmt: skip
            if kind not in self.all:
                self.all.append(kind)
