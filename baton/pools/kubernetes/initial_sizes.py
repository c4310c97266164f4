"""Gives each new Deployment of a release its initial number of replicas.

The chart's Deployments contain no number of replicas by default, so that neither an upgrade nor a
rollback writes one: the number belongs to whoever scales. Kubernetes starts such a Deployment with
one replica. A conductor sets the number of replicas once, to the one in the chart's values, and
records the Deployment's UID in an annotation of the conductors' Lease. The Lease is removed with
the release.

Permissions (RBAC): ``get`` and ``update`` on deployments/scale of these Deployments, ``get`` and
``patch`` on the Lease.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import structlog
from kubernetes import client

from baton.clock import Clock
from baton.errors import BatonError, NotFound
from baton.pools.kubernetes.client import MERGE_PATCH, KubernetesClient
from baton.pools.kubernetes.permissions import Forbidden
from baton.pools.kubernetes.scale import DEPLOYMENT, ScaleClient

ANNOTATION = "baton.dev/initially-sized"
"""Annotation of the Lease: a JSON object of the UIDs of sized Deployments, by name."""

DEFAULT_REPLICAS = 1
"""The number of replicas with which Kubernetes starts a Deployment that specifies none. Any other
number was set by somebody, and is kept."""

RETRY_SECONDS = 5.0
CHECK_SECONDS = 60.0
"""Interval between two checks for Deployments that were deleted and created again."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _SizedDeployments:
    """The UIDs of the Deployments that are no longer new, by name, as read from the Lease's
    annotation :data:`ANNOTATION`. ``version`` is the resourceVersion of the Lease at that time."""

    uids: Mapping[str, str]
    version: str


class InitialSizes:
    """Gives new Deployments their initial sizes. ``read_replicas`` returns the sizes by the
    Deployment's name. Several conductors may run this at once: a write fails if its object has
    changed meanwhile."""

    def __init__(
        self,
        kubernetes: KubernetesClient,
        lease: str,
        read_replicas: Callable[[], Mapping[str, int]],
        clock: Clock,
    ) -> None:
        self._kubernetes = kubernetes
        self._scales = ScaleClient(kubernetes)
        self._leases = client.CoordinationV1Api(kubernetes.api)
        self._lease = lease
        self._read_replicas = read_replicas
        self._clock = clock
        self._seen_sized: set[str] = set()
        self._last_failure = ""

    async def run(self) -> None:
        """Size new Deployments until cancelled. Failures are logged and retried."""
        while True:
            try:
                await self.apply()
            except BatonError as error:
                self._log_failure(str(error))
                await self._clock.sleep(RETRY_SECONDS)
            else:
                self._last_failure = ""
                await self._clock.sleep(CHECK_SECONDS)

    async def apply(self) -> None:
        """Size every Deployment that is new, and record that it was sized. If one Deployment fails,
        the others are sized nevertheless, and the error is raised at the end. Raises Conflict if
        another process changed a Deployment or the Lease meanwhile, and the other errors of
        :class:`KubernetesClient`. After an error, call this again."""
        replicas = self._read_replicas()
        if not replicas:
            await self._forget_all()
            return
        sized, failures = await self._read_sized(), []
        uids = {name: uid for name, uid in sized.uids.items() if name in replicas}
        for name, wanted in replicas.items():
            try:
                uid = await self._size_if_new(name, wanted, sized)
            except BatonError as error:
                failures.append(error)
                continue
            if uid is not None:
                uids[name] = uid
        if uids != sized.uids:
            await self._record(replace(sized, uids=uids))
        if failures:
            raise failures[0]

    async def _size_if_new(self, name: str, wanted: int, sized: _SizedDeployments) -> str | None:
        """Set the size of Deployment ``name`` to ``wanted`` if it is new (``sized`` does not have
        its UID) and has Kubernetes' default size; any other size is kept. Return its UID, which the
        caller records, so that the Deployment no longer counts as new.

        There is one exception: return None, so that the Deployment is checked once more, if a new
        Deployment already has the wanted size when it is first checked and that is not the default
        size. The size may come from ``replicas`` in an old manifest, from which an upgrade is about
        to remove it; Kubernetes then resets the size to the default."""
        scale = await self._scales.read(DEPLOYMENT, name)
        if sized.uids.get(name) == scale.uid:
            return scale.uid
        if scale.replicas == DEFAULT_REPLICAS != wanted:
            await self._scales.write(DEPLOYMENT, name, replace(scale, replicas=wanted))
            log.info("initial_size_set", deployment=name, replicas=wanted)
        elif scale.replicas == wanted != DEFAULT_REPLICAS and name not in self._seen_sized:
            self._seen_sized.add(name)
            return None
        return scale.uid

    async def _forget_all(self) -> None:
        """Empty the Lease's record of the Deployments that were given their initial size, since no
        initial sizes are configured now. If some
        are configured again later, all Deployments count as new. Do nothing if the Lease does not
        exist or may not be read."""
        try:
            sized = await self._read_sized()
        except (Forbidden, NotFound):
            return
        if sized.uids:
            await self._record(replace(sized, uids={}))

    async def _read_sized(self) -> _SizedDeployments:
        namespace, read = self._kubernetes.namespace, self._leases.read_namespaced_lease
        lease = await self._kubernetes.call("get", "leases", read, self._lease, namespace)
        metadata = lease.metadata
        assert metadata is not None
        try:
            uids = json.loads((metadata.annotations or {}).get(ANNOTATION, "{}"))
        except ValueError:
            uids = {}  # edited by hand; Deployments with another number than one keep it
        return _SizedDeployments(
            uids if isinstance(uids, dict) else {}, metadata.resource_version or ""
        )

    async def _record(self, sized: _SizedDeployments) -> None:
        text = json.dumps(sized.uids, sort_keys=True)
        body = {"metadata": {"resourceVersion": sized.version, "annotations": {ANNOTATION: text}}}
        patch = self._leases.patch_namespaced_lease
        await self._kubernetes.call(
            "patch", "leases", patch, self._lease, self._kubernetes.namespace, body,
            _content_type=MERGE_PATCH,
        )  # fmt: skip

    def _log_failure(self, failure: str) -> None:
        """Log a failure, unless it is the same as the last one."""
        if failure != self._last_failure:
            log.warning("initial_sizes_failed", error=failure)
        self._last_failure = failure
