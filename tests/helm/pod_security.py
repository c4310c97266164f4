"""Checks pod specs against the Pod Security Standards ``baseline`` and ``restricted``, as in
Kubernetes 1.36."""

from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]

VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip
"""Volume types that `restricted` allows."""

BASELINE_CAPABILITIES = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD",
    "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip


def violations(spec: Object) -> list[str]:
    """Return the violations of `restricted`, which includes `baseline`."""
    return [*_of_pod(spec), *(found for each in _containers(spec) for found in _of(each, spec))]


def _of_pod(spec: Object) -> Iterator[str]:
    for shared in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(shared):
            yield shared
    for volume in spec.get("volumes", []):
        if kind := next(iter(set(volume) - {"name"} - VOLUMES), None):
            yield f"volume {kind}"


def _of(container: Object, spec: Object) -> Iterator[str]:
    own, pod = container.get("securityContext", {}), spec.get("securityContext", {})
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if not own.get("runAsNonRoot", pod.get("runAsNonRoot")):
        yield "runAsNonRoot"
    if own.get("runAsUser", pod.get("runAsUser")) == 0:
        yield "runAsUser 0"
    seccomp = own.get("seccompProfile", pod.get("seccompProfile", {}))
    if seccomp.get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "hostPort"
    yield from _of_capabilities(own.get("capabilities", {}))


def _of_capabilities(capabilities: Object) -> Iterator[str]:
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities not dropped"
    for added in capabilities.get("add", []):
        if added != "NET_BIND_SERVICE":
            level = "restricted" if added in BASELINE_CAPABILITIES else "baseline"
            yield f"capability {added} ({level})"


def _containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", []), *spec["containers"]]
