"""Fills in the same default values as a real API server."""

from tests.kube.kinds import Object

PROBE = {
    "timeoutSeconds": 1,
    "periodSeconds": 10,
    "successThreshold": 1,
    "failureThreshold": 3,
}


def set_defaults(kind: str, found: Object) -> None:
    """Fill in the default values of an object, in place."""
    spec = found.get("spec")
    if spec is None:
        return
    setter = SETTERS.get(kind)
    if setter:
        setter(spec)
    template = (spec.get("template") or {}).get("spec")
    if template is not None:
        template.setdefault("restartPolicy", "Never" if kind == "Job" else "Always")
        _pod(template)


def _fill(place: Object, defaults: Object) -> None:
    for name, value in defaults.items():
        place.setdefault(name, value)


def _pod(spec: Object) -> None:
    account = spec.get("serviceAccountName") or "default"
    _fill(
        spec,
        {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst",
            "serviceAccountName": account,
            "serviceAccount": account,
            "schedulerName": "default-scheduler",
            "securityContext": {},
        },
    )
    for container in [*spec["containers"], *(spec.get("initContainers") or [])]:
        _container(container)
    for volume in spec.get("volumes") or []:
        for name in ("configMap", "secret", "projected"):
            if volume.get(name) is not None:
                volume[name].setdefault("defaultMode", 0o644)


def _container(container: Object) -> None:
    latest = ":" not in container.get("image", "x:").rsplit("/", 1)[-1]
    _fill(
        container,
        {
            "imagePullPolicy": "Always" if latest else "IfNotPresent",
            "terminationMessagePath": "/dev/termination-log",
            "terminationMessagePolicy": "File",
            "resources": {},
        },
    )
    for port in container.get("ports") or []:
        port.setdefault("protocol", "TCP")
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        if container.get(name):
            _fill(container[name], PROBE)
    for variable in container.get("env") or []:
        reference = (variable.get("valueFrom") or {}).get("fieldRef")
        if reference:
            reference.setdefault("apiVersion", "v1")


def _deployment(spec: Object) -> None:
    _fill(
        spec,
        {
            "replicas": 1,
            "strategy": {},
            "revisionHistoryLimit": 10,
            "progressDeadlineSeconds": 600,
        },
    )
    strategy = spec["strategy"]
    strategy.setdefault("type", "RollingUpdate")
    if strategy["type"] == "RollingUpdate":
        strategy["rollingUpdate"] = strategy.get("rollingUpdate") or {}
        _fill(strategy["rollingUpdate"], {"maxSurge": "25%", "maxUnavailable": "25%"})


def _stateful_set(spec: Object) -> None:
    _fill(
        spec,
        {
            "replicas": 1,
            "podManagementPolicy": "OrderedReady",
            "revisionHistoryLimit": 10,
            "updateStrategy": {"type": "RollingUpdate"},
        },
    )
    for claim in spec.get("volumeClaimTemplates") or []:
        _fill(claim, {"apiVersion": "v1", "kind": "PersistentVolumeClaim"})
        _claim(claim["spec"])


def _service(spec: Object) -> None:
    _fill(
        spec,
        {"type": "ClusterIP", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster"},
    )
    for port in spec.get("ports") or []:
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port["port"])


def _job(spec: Object) -> None:
    _fill(spec, {"backoffLimit": 6, "completions": 1, "parallelism": 1})


def _claim(spec: Object) -> None:
    spec.setdefault("volumeMode", "Filesystem")


def _replica_set(spec: Object) -> None:
    spec.setdefault("replicas", 1)


SETTERS = {
    "Pod": _pod,
    "Deployment": _deployment,
    "ReplicaSet": _replica_set,
    "StatefulSet": _stateful_set,
    "Service": _service,
    "Job": _job,
    "PersistentVolumeClaim": _claim,
}
