"""Calls to the Kubernetes API server, with timeouts and translated errors."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from urllib3.exceptions import HTTPError

from baton.concurrency.threads import run_in_thread
from baton.errors import BatonError, Invalid, NotFound, Overloaded, Unauthorized, Unavailable
from baton.pools.kubernetes.permissions import Forbidden

CALL_SECONDS = 10.0
MERGE_PATCH = "application/merge-patch+json"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

IN_CLUSTER = "in-cluster"
"""The name of a client's context in a pod, which has a service account instead of a kubeconfig."""

T = TypeVar("T")


class Conflict(Overloaded):
    """The object has changed since it was read: read it again."""


class ResourceExpired(Overloaded):
    """The requested resource version is too old: list the objects again."""


class KubernetesClient:
    """Makes API calls in one namespace. They raise Unavailable (the API server can't be reached, or
    does not answer within ``call_seconds``), Forbidden (naming the missing permission),
    Unauthorized (the credentials are not accepted), NotFound, Conflict, ResourceExpired,
    Overloaded, and Invalid for requests that the API server rejects. ``context`` is the name of the
    kubeconfig's context, or :data:`IN_CLUSTER`."""

    def __init__(
        self,
        configuration: client.Configuration,
        namespace: str,
        call_seconds: float = CALL_SECONDS,
        context: str = IN_CLUSTER,
    ) -> None:
        configuration.retries = 0  # else urllib3 retries three times, with a timeout each
        self.api = client.ApiClient(configuration)
        self.namespace = namespace
        self.context = context
        self.server: str = configuration.host
        self._seconds = call_seconds

    async def call(
        self, verb: str, resource: str, call: Callable[..., T], *given: Any, **named: Any
    ) -> T:
        """Run ``call``, a method of one of the client's APIs, in a thread. ``verb`` and
        ``resource`` are what RBAC calls this API call."""

        def work() -> T:
            with self.translated(verb, resource):
                return call(*given, _request_timeout=self._seconds, **named)

        return await run_in_thread(work)

    def close(self) -> None:
        self.api.close()  # type: ignore[no-untyped-call]

    @contextmanager
    def translated(self, verb: str, resource: str) -> Iterator[None]:
        """Context manager that translates the errors of an API call into Baton's errors. Callers
        that make calls in threads of their own use it instead of :meth:`call`."""
        action = f"{verb} {resource} in namespace {self.namespace}"
        try:
            yield
        except ApiException as error:
            raise _error(error, verb, resource, self.namespace) from error
        except HTTPError as error:
            why = f"did not answer in time or at all ({type(error).__name__})"
            raise Unavailable(f"the API server at {self.server} {why}: {action}") from error
        except ValueError as error:
            raise Unavailable(f"the API server's answer is malformed: {action}") from error


def open_kubernetes_client(
    namespace: str | None, call_seconds: float = CALL_SECONDS
) -> KubernetesClient:
    """Open a client, which uses the service account in a pod, and the kubeconfig elsewhere. If
    ``namespace`` is None, the namespace of the service account or the kubeconfig is used. Raises
    Invalid if there is neither a service account nor a usable kubeconfig."""
    configuration, context = client.Configuration(), IN_CLUSTER
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        own = NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except (ConfigException, OSError):
        context, own = _load_kubeconfig(configuration)
    return KubernetesClient(configuration, namespace or own or "default", call_seconds, context)


def _load_kubeconfig(configuration: client.Configuration) -> tuple[str, str]:
    """Load the kubeconfig's current context; return its name and its namespace."""
    try:
        config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        _, active = config.list_kube_config_contexts()  # type: ignore[no-untyped-call]
    except (ConfigException, OSError) as error:
        raise Invalid(
            f"this process does not run in a pod, and there is no usable kubeconfig: {error}"
        ) from error
    return str(active["name"]), str(active["context"].get("namespace", ""))


def _error(error: ApiException, verb: str, resource: str, namespace: str) -> BatonError:
    detail = _message(error)
    action = f"{verb} {resource} in namespace {namespace}"
    if error.status == 403:
        message = (
            f"not allowed to {action}: give this service account or user a Role with the verb "
            f"{verb!r} on {resource!r} ({detail})"
        )
        return Forbidden(message, verb, resource)
    if error.status == 401:
        return Unauthorized(f"the API server does not accept our credentials: {action} ({detail})")
    if error.status == 404:
        return NotFound(f"the object does not exist: {action} ({detail})")
    if error.status == 409:
        return Conflict(f"the object was changed meanwhile: {action} ({detail})")
    if error.status == 410:
        return ResourceExpired(f"the resource version is too old: {action} ({detail})")
    if error.status == 429:
        return Overloaded(f"the API server is overloaded: {action}")
    if error.status and 400 <= error.status < 500:
        return Invalid(f"the API server rejects the request: {action} ({detail})")
    status = error.status or error.reason
    return Unavailable(f"the API server failed ({status}): {action} ({detail})")


def _message(error: ApiException) -> str:
    """Return the message of the Status object in the response's body; if there is none, the HTTP
    reason."""
    try:
        status: Mapping[str, Any] = json.loads(error.body or "")
        return str(status["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
