"""A Lease of ``coordination.k8s.io``, by which conductors elect the conductor that resizes
pools.

Permissions (RBAC): ``get`` and ``patch`` on this lease, which may be restricted to its name. If the
lease does not exist yet, also ``create`` on leases, which can't be restricted to a name. The Helm
chart creates the lease, so its role does not need ``create``, and the lease is removed with the
release.
"""

from datetime import UTC, datetime
from typing import Any

from kubernetes import client

from baton.clock import Clock
from baton.errors import NotFound
from baton.pools.kubernetes.client import MERGE_PATCH, KubernetesClient
from baton.pools.leader_election import LEASE_SECONDS, NO_HOLDER, LeaseRecord


class KubernetesLease:
    """Implements :class:`baton.pools.leader_election.LeaseStore`. The times in the lease are for
    information only."""

    def __init__(self, kubernetes: KubernetesClient, name: str, clock: Clock) -> None:
        self._kubernetes = kubernetes
        self._api = client.CoordinationV1Api(kubernetes.api)
        self._name = name
        self._clock = clock

    async def read(self) -> LeaseRecord | None:
        namespace = self._kubernetes.namespace
        read = self._api.read_namespaced_lease
        try:
            found = await self._kubernetes.call("get", "leases", read, self._name, namespace)
        except NotFound:
            return None
        return _record(found)

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        """Write the lease and return the new record. Raises Conflict when the lease was changed or
        created meanwhile."""
        api, namespace, body = self._api, self._kubernetes.namespace, self._body(record)
        if not record.version:
            create = api.create_namespaced_lease
            written = await self._kubernetes.call("create", "leases", create, namespace, body)
        else:
            written = await self._kubernetes.call(
                "patch", "leases", api.patch_namespaced_lease, self._name, namespace, body,
                _content_type=MERGE_PATCH,
            )  # fmt: skip
        return _record(written)

    def _body(self, record: LeaseRecord) -> dict[str, Any]:
        """Return the Lease as plain JSON. The Kubernetes client would omit the fractional seconds
        of a timestamp if they are zero, and the API server refuses a timestamp without them."""
        now = datetime.fromtimestamp(self._clock.wall_nanoseconds() / 1e9, UTC)
        metadata = {"name": self._name}
        if record.version:
            metadata["resourceVersion"] = record.version
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": record.holder,
                "leaseDurationSeconds": LEASE_SECONDS if record.holder != NO_HOLDER else 1,
                "renewTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                "leaseTransitions": record.transitions,
            },
        }


def _record(lease: client.V1Lease) -> LeaseRecord:
    metadata, spec = lease.metadata, lease.spec
    assert metadata is not None
    if spec is None:
        return LeaseRecord(NO_HOLDER, version=metadata.resource_version or "")
    renewals = spec.renew_time.isoformat() if spec.renew_time is not None else ""
    return LeaseRecord(
        spec.holder_identity or NO_HOLDER,
        renewals,
        spec.lease_transitions or 0,
        metadata.resource_version or "",
    )
