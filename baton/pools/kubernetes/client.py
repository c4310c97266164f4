"""The way to the API server of Kubernetes: one call at a time, bounded, with our errors."""

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

CALL_SECONDS = 10.0
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

T = TypeVar("T")


class Conflict(Overloaded):
    """What was read has changed since: read again."""


class ResourceExpired(Overloaded):
    """What is asked for is too long ago: list again."""


class KubernetesClient:
    """Calls in one namespace. They raise Unavailable (not reached, or no answer in
    ``call_seconds``), Unauthorized (naming the right that is missing), NotFound, Conflict, Gone,
    Overloaded, and Invalid for what the API server rejects."""

    def __init__(
        self,
        configuration: client.Configuration,
        namespace: str,
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        configuration.retries = 0  # a call has one bound; urllib3 would have three
        self.api = client.ApiClient(configuration)
        self.namespace = namespace
        self._host = configuration.host
        self._seconds = call_seconds

    async def call(
        self, verb: str, resource: str, call: Callable[..., T], *given: Any, **named: Any
    ) -> T:
        """``call`` is a method of one of the client's APIs; ``verb`` and ``resource`` are RBAC's
        names for it."""

        def work() -> T:
            with self.translated(verb, resource):
                return call(*given, _request_timeout=self._seconds, **named)

        return await run_in_thread(work)

    def close(self) -> None:
        self.api.close()  # type: ignore[no-untyped-call]

    @contextmanager
    def translated(self, verb: str, resource: str) -> Iterator[None]:
        """For a call that a thread of somebody else makes."""
        asked = f"{verb} {resource} in namespace {self.namespace}"
        try:
            yield
        except ApiException as error:
            raise _error(error, verb, resource, self.namespace) from error
        except HTTPError as error:
            why = f"did not answer in time or at all ({type(error).__name__})"
            raise Unavailable(f"the API server at {self._host} {why}: {asked}") from error
        except ValueError as error:
            raise Unavailable(f"the API server's answer makes no sense: {asked}") from error


def open_kubernetes_client(
    namespace: str | None, call_seconds: float = CALL_SECONDS
) -> KubernetesClient:
    """By the service account in a pod, by the kubeconfig elsewhere; ``namespace`` None is theirs.
    Raises Invalid when there is neither."""
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        own = NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except (ConfigException, OSError):
        own = _load_kubeconfig(configuration)
    return KubernetesClient(configuration, namespace or own or "default", call_seconds)


def _load_kubeconfig(configuration: client.Configuration) -> str:
    try:
        config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        _, active = config.list_kube_config_contexts()  # type: ignore[no-untyped-call]
    except (ConfigException, OSError) as error:
        raise Invalid(f"neither in a pod nor with a usable kubeconfig: {error}") from error
    return str(active["context"].get("namespace", ""))


def _error(error: ApiException, verb: str, resource: str, namespace: str) -> BatonError:
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
    if error.status == 410:
        return ResourceExpired(f"too long ago: {asked} ({told})")
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
