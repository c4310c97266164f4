"""Opens the pools of a cluster in Kubernetes according to the settings."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.clock import Clock
from baton.config import Settings
from baton.core.pending_settings import PendingSettings
from baton.core.states import Role
from baton.errors import Invalid, NotFound
from baton.pools.leader_election import LeaseStore
from baton.pools.worker_admin import RegistryWorkerAdmin, UnavailableWorkerAdmin
from baton.registry.redis import RedisRegistry

if TYPE_CHECKING:
    from baton.pools.kubernetes.api import KubernetesWorkload
    from baton.pools.kubernetes.client import KubernetesClient
    from baton.pools.kubernetes.initial_sizes import InitialSizes
    from baton.pools.kubernetes.location import KubernetesLocation
    from baton.pools.kubernetes.pod_drainer import LeavingPod
    from baton.pools.kubernetes.pools import KubernetesPools
    from baton.pools.kubernetes.report import PoolsReport


@dataclass(frozen=True, slots=True)
class OpenKubernetesCluster:
    """A cluster in Kubernetes that a command has opened. The methods that read pools raise NotFound
    if the cluster does not exist, so that the command fails."""

    location: "KubernetesLocation"
    pools: "KubernetesPools"
    client: "KubernetesClient"
    registry: RedisRegistry | None

    async def existing_pools(self) -> Mapping[str, "KubernetesWorkload"]:
        """Return the pools by name. Raises NotFound if there are none."""
        if not (pools := await self.pools.pools()):
            raise await self._missing_error()
        return pools

    async def report(self) -> "PoolsReport":
        """Report the pools and pods that the user may read. Raises NotFound if there are none,
        Forbidden if the user may read neither pools nor pods."""
        report = await self.pools.report()
        if not report.pools and not report.pods:
            raise await self._missing_error()
        return report

    async def pending_settings(self) -> Mapping[str, PendingSettings] | None:
        """Return the changed settings that each program has not applied, by the name of its pod.
        Programs that have applied all settings are left out. Return None if ``redis_url`` is not
        set, since this information comes from the registry. Raises Unavailable if the registry
        can't be reached."""
        if self.registry is None:
            return None
        return {
            member.id.rpartition(".")[0] or member.id: member.pending_settings
            for member in await self.registry.members()
            if member.pending_settings != PendingSettings()
        }

    async def _missing_error(self) -> NotFound:
        from baton.pools.kubernetes.location import missing_cluster_error

        return await missing_cluster_error(self.client, self.location.cluster)


@asynccontextmanager
async def open_kubernetes_pools(
    settings: Settings, clock: Clock, on_note: Callable[[str], None]
) -> AsyncIterator["KubernetesPools"]:
    """Open the pools of ``settings.cluster`` in ``settings.kubernetes_namespace``. Raises Invalid
    when the Kubernetes client is not installed or not configured."""
    async with open_kubernetes_cluster(settings, clock, on_note) as cluster:
        yield cluster.pools


@asynccontextmanager
async def open_kubernetes_cluster(
    settings: Settings,
    clock: Clock,
    on_note: Callable[[str], None],
    on_progress: "Callable[[Sequence[LeavingPod]], None]" = lambda leaving: None,
) -> AsyncIterator[OpenKubernetesCluster]:
    """Open the cluster ``settings.cluster`` in ``settings.kubernetes_namespace``. ``on_note`` is
    called with messages for the administrator. While pods drain or are being deleted because a pool
    is resized, ``on_progress`` is called repeatedly with these pods. Raises Invalid when the
    Kubernetes client is not installed or not configured."""
    client = kubernetes_client_for(settings)
    from baton.pools.kubernetes.api import KubernetesApi
    from baton.pools.kubernetes.location import location_of
    from baton.pools.kubernetes.pools import KubernetesPools

    api = KubernetesApi(client, settings.cluster, settings.kubernetes_pools or None)
    registry = (
        RedisRegistry(settings.redis_url, settings.cluster, settings.cluster_secret)
        if settings.redis_url
        else None
    )
    reach = RegistryWorkerAdmin(registry, settings.trust) if registry else UnavailableWorkerAdmin()
    chosen = {
        Role.PREFILL: settings.autoscale_prefill_pool,
        Role.DECODE: settings.autoscale_decode_pool,
    }
    named = {role: name for role, name in chosen.items() if name}
    pools = KubernetesPools(
        api, reach, clock, on_note, settings.drain_timeout_seconds, named, on_progress
    )
    try:
        location = location_of(client, settings.cluster)
        yield OpenKubernetesCluster(location, pools, client, registry)
    finally:
        client.close()
        if registry is not None:
            await registry.close()


@asynccontextmanager
async def open_kubernetes_lease(settings: Settings, clock: Clock) -> AsyncIterator[LeaseStore]:
    """Open the lease by which the conductors of ``settings.cluster`` elect a leader. Raises Invalid
    when the Kubernetes client is not installed or not configured."""
    client = kubernetes_client_for(settings)
    from baton.pools.kubernetes.lease import KubernetesLease

    try:
        yield KubernetesLease(client, _lease_name(settings), clock)
    finally:
        client.close()


@asynccontextmanager
async def open_initial_sizes(
    settings: Settings, read_replicas: Callable[[], Mapping[str, int]], clock: Clock
) -> AsyncIterator["InitialSizes"]:
    """Open an :class:`~baton.pools.kubernetes.initial_sizes.InitialSizes`, which gives new
    Deployments the initial numbers of replicas that ``read_replicas`` returns. Raises Invalid when
    the Kubernetes client is not installed or not configured."""
    client = kubernetes_client_for(settings)
    from baton.pools.kubernetes.initial_sizes import InitialSizes

    try:
        yield InitialSizes(client, _lease_name(settings), read_replicas, clock)
    finally:
        client.close()


def _lease_name(settings: Settings) -> str:
    return settings.kubernetes_lease or f"baton-{settings.cluster}-leader"


def kubernetes_client_for(settings: Settings) -> "KubernetesClient":
    """Open a client, which the caller must close. Raises Invalid if the Kubernetes client is not
    installed or not configured."""
    try:
        from baton.pools.kubernetes.client import open_kubernetes_client
    except ImportError as error:
        raise Invalid(
            "pools in Kubernetes need the extra baton[kubernetes]: pip install 'baton[kubernetes]'"
        ) from error
    return open_kubernetes_client(settings.kubernetes_namespace)
