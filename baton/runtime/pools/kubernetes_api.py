"""The few calls of the Kubernetes API that pools need, with our errors and a bound on each.

Rights (RBAC) that the caller needs in its namespace: ``list`` on deployments and statefulsets,
``get`` and ``update`` on deployments/scale and statefulsets/scale, ``list``, ``patch`` and
``delete`` on pods.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from urllib3.exceptions import HTTPError

from baton.core.states import Role
from baton.errors import Invalid, NotFound, Overloaded, Unauthorized, Unavailable
from baton.runtime.pools.base import POOLS
from baton.runtime.pools.pod import DELETION_COST, LEAST_COST, LEAVES_ANNOTATION, Pod, pod_from
from baton.threads import in_thread

PART_OF_LABEL, PART_OF = "app.kubernetes.io/part-of", "baton"
CLUSTER_LABEL = "baton.dev/cluster"
ROLE_LABEL = "baton.dev/role"
"""On the Deployment (or StatefulSet) of a pool, and on its pods."""

CALL_SECONDS = 10.0
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

T = TypeVar("T")


class Conflict(Overloaded):
    """What was read has changed since: read again."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What keeps a pool's pods. ``kind`` is Deployment or StatefulSet."""

    kind: str
    name: str
    role: Role
    replicas: int

    @property
    def resource(self) -> str:
        return f"{self.kind.lower()}s"


@dataclass(frozen=True, slots=True)
class Scale:
    """``version`` is the resourceVersion that was read."""

    replicas: int
    version: str


class KubernetesApi:
    """Of one Baton cluster in one namespace. Calls raise Unavailable (not reached, or no answer in
    ``call_seconds``), Unauthorized (naming the right that is missing), NotFound, Conflict,
    Overloaded, and Invalid for what the API server rejects."""

    def __init__(
        self,
        configuration: client.Configuration,
        namespace: str,
        cluster: str,
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        configuration.retries = 0  # a call has one bound; urllib3 would have three
        self._client = client.ApiClient(configuration)
        self._apps = client.AppsV1Api(self._client)
        self._core = client.CoreV1Api(self._client)
        self._host = configuration.host
        self._namespace = namespace
        self._selector = f"{PART_OF_LABEL}={PART_OF},{CLUSTER_LABEL}={cluster}"
        self._seconds = call_seconds

    async def workloads(self) -> list[Workload]:
        """Of both kinds, of both roles."""
        found = []
        for kind in ("Deployment", "StatefulSet"):
            list_all = getattr(self._apps, f"list_namespaced_{_snake(kind)}")
            answer = await self._call(
                "list", f"{kind.lower()}s", list_all, self._namespace, **self._labelled()
            )
            found += [_workload(kind, item) for item in answer.items]
        return found

    async def scale_of(self, workload: Workload) -> Scale:
        read = getattr(self._apps, f"read_namespaced_{_snake(workload.kind)}_scale")
        what = f"{workload.resource}/scale"
        answer = await self._call("get", what, read, workload.name, self._namespace)
        replicas = answer.spec.replicas if answer.spec is not None else None
        return Scale(replicas or 0, answer.metadata.resource_version)

    async def write_scale(self, workload: Workload, scale: Scale) -> None:
        """Only if nothing has changed since ``scale.version`` was read; Conflict otherwise."""
        write = getattr(self._apps, f"replace_namespaced_{_snake(workload.kind)}_scale")
        body = client.V1Scale(
            api_version="autoscaling/v1",
            kind="Scale",
            metadata=client.V1ObjectMeta(
                name=workload.name, namespace=self._namespace, resource_version=scale.version
            ),
            spec=client.V1ScaleSpec(replicas=scale.replicas),
        )
        what = f"{workload.resource}/scale"
        await self._call("update", what, write, workload.name, self._namespace, body)

    async def pods(self) -> list[Pod]:
        """Of both pools, those that are leaving, too."""
        answer = await self._call(
            "list", "pods", self._core.list_namespaced_pod, self._namespace, **self._labelled()
        )
        return [pod_from(item, _role(item.metadata)) for item in answer.items]

    async def mark(self, pod: Pod, num_replicas: int) -> None:
        """It is to go first, from a pool of so many."""
        notes = {DELETION_COST: str(LEAST_COST), LEAVES_ANNOTATION: str(num_replicas)}
        await self._annotate(pod, notes)

    async def unmark(self, pod: Pod) -> None:
        await self._annotate(pod, {DELETION_COST: None, LEAVES_ANNOTATION: None})

    async def _annotate(self, pod: Pod, notes: Mapping[str, str | None]) -> None:
        body = {"metadata": {"uid": pod.uid, "annotations": notes}}
        patch, content = self._core.patch_namespaced_pod, "application/merge-patch+json"
        await self._call(
            "patch", "pods", patch, pod.name, self._namespace, body, _content_type=content
        )

    async def delete(self, pod: Pod) -> None:
        """This very pod, and no later one of its name; it is given its time to drain."""
        body = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=pod.uid))
        delete = self._core.delete_namespaced_pod
        await self._call("delete", "pods", delete, pod.name, self._namespace, body=body)

    def close(self) -> None:
        self._client.close()  # type: ignore[no-untyped-call]

    def _labelled(self) -> dict[str, Any]:
        roles = ",".join(role.value for role in POOLS)
        return {"label_selector": f"{self._selector},{ROLE_LABEL} in ({roles})"}

    async def _call(
        self, verb: str, resource: str, call: Callable[..., T], *given: Any, **named: Any
    ) -> T:
        def work() -> T:
            with self._translated(verb, resource):
                return call(*given, _request_timeout=self._seconds, **named)

        return await in_thread(work)

    @contextmanager
    def _translated(self, verb: str, resource: str) -> Iterator[None]:
        asked = f"{verb} {resource} in namespace {self._namespace}"
        try:
            yield
        except ApiException as error:
            raise _error(error, verb, resource, self._namespace) from error
        except HTTPError as error:
            why = f"did not answer in time or at all ({type(error).__name__})"
            raise Unavailable(f"the API server at {self._host} {why}: {asked}") from error
        except ValueError as error:
            raise Unavailable(f"the API server's answer makes no sense: {asked}") from error


def open_api(
    namespace: str | None, cluster: str, call_seconds: float = CALL_SECONDS
) -> KubernetesApi:
    """By the service account in a pod, by the kubeconfig elsewhere; ``namespace`` None is theirs.
    Raises Invalid when there is neither."""
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        own = NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except (ConfigException, OSError):
        own = _load_kubeconfig(configuration)
    return KubernetesApi(configuration, namespace or own or "default", cluster, call_seconds)


def _load_kubeconfig(configuration: client.Configuration) -> str:
    try:
        config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        _, active = config.list_kube_config_contexts()  # type: ignore[no-untyped-call]
    except (ConfigException, OSError) as error:
        raise Invalid(f"neither in a pod nor with a usable kubeconfig: {error}") from error
    return str(active["context"].get("namespace", ""))


def _snake(kind: str) -> str:
    return {"Deployment": "deployment", "StatefulSet": "stateful_set"}[kind]


def _role(metadata: client.V1ObjectMeta | None) -> Role:
    """What was listed by its labels has them."""
    assert metadata is not None and metadata.labels is not None
    return Role(metadata.labels[ROLE_LABEL])


def _workload(kind: str, item: Any) -> Workload:
    """Without a number, it is one."""
    replicas = item.spec.replicas
    return Workload(
        kind, item.metadata.name, _role(item.metadata), 1 if replicas is None else replicas
    )


def _error(error: ApiException, verb: str, resource: str, namespace: str) -> Exception:
    told = _message(error)
    asked = f"{verb} {resource} in namespace {namespace}"
    if error.status == 403:
        return Unauthorized(
            f"not allowed to {asked}: give this service account or user a Role with the verb "
            f"{verb!r} on {resource!r} ({told})"
        )
    if error.status == 401:
        return Unauthorized(f"the API server does not accept our credentials: {asked} ({told})")
    if error.status == 404:
        return NotFound(f"not found: {asked} ({told})")
    if error.status == 409:
        return Conflict(f"changed meanwhile: {asked} ({told})")
    if error.status == 429:
        return Overloaded(f"the API server is overloaded: {asked}")
    if error.status and 400 <= error.status < 500:
        return Invalid(f"rejected: {asked} ({told})")
    return Unavailable(f"the API server failed ({error.status or error.reason}): {asked} ({told})")


def _message(error: ApiException) -> str:
    """What a Status object says; of anything else, its reason."""
    try:
        status: Mapping[str, Any] = json.loads(error.body or "")
        return str(status["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
