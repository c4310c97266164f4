"""Settings of the autoscaler and of Kubernetes."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from baton.config.values import AsSwitch, Count, Counts, PoolTargets, Seconds


class AutoscalingSettings(BaseModel):
    """Settings of the autoscaler, which makes the sizes of the pools follow the load."""

    # Autoscaling of the pools
    autoscale: Annotated[Literal["off", "dry_run", "on"], AsSwitch] = "off"
    """Whether the sizes of the pools follow the load. ``dry_run`` only logs the changes that would
    be made."""
    autoscale_pools: Literal["supervisor", "kubernetes"] = "supervisor"
    """Which pools are resized. ``supervisor``: those of ``baton up``, by its supervisor;
    ``kubernetes``: the Deployments of the cluster, by a conductor."""
    min_prefill: Count = 1
    max_prefill: Count = 64
    min_decode: Count = 1
    max_decode: Count = 64
    max_workers: Count = 128
    """Maximum total number of prefill and decode workers, for example the number of available
    GPUs. Mixed workers, which are not resized, don't count."""
    autoscale_utilisation: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Target utilisation of a pool that grows."""
    autoscale_shrink_utilisation: Annotated[float, Field(gt=0, le=1)] = 0.6
    """A pool shrinks only if its utilisation afterwards is at most this."""
    autoscale_shrink_seconds: Seconds = 300.0
    """A pool shrinks only if fewer workers would have sufficed for this long."""
    autoscale_start_seconds: Seconds = 60.0
    """How long a worker takes to start. The load is forecast this far ahead."""
    autoscale_interval_seconds: Seconds = 5.0
    """Interval between two checks of the autoscaler."""
    autoscale_stable_seconds: Annotated[float, Field(ge=0)] = 10.0
    """A change is made only after the plan has called for it for this long."""
    autoscale_cooldown_seconds: Annotated[float, Field(ge=0)] = 30.0
    """Minimum time between two changes."""
    autoscale_step: Count = 1
    """Maximum number of workers that one change adds to or removes from a pool."""
    autoscale_pending_timeout_seconds: Seconds = 900.0
    """If a new worker does not serve after this long, its pool returns to its previous size."""
    autoscale_prefill_pool: str | None = None
    autoscale_decode_pool: str | None = None
    """In Kubernetes: name (label ``baton.dev/pool``) of the pool that is resized, for each role.
    None: the role's only pool, or the one named after the role. The role's other pools keep their
    size."""
    kubernetes_namespace: str | None = None
    """Namespace of the pools' Deployments. None: the pod's own, or that of the kubeconfig."""
    kubernetes_pools: PoolTargets = Field(default_factory=dict)
    """The pools, as POOL=ROLE/DEPLOYMENT,…. Empty: find them by their labels, which needs the
    permission to list Deployments."""
    kubernetes_initial_replicas: Counts = Field(default_factory=dict)
    """Initial numbers of replicas, as DEPLOYMENT=NUMBER,…. A conductor sets the number once, when
    it first sees the Deployment, unless somebody has scaled it already."""
    kubernetes_lease: str | None = None
    """Name of the Lease by which the conductors elect the one that resizes pools, and which records
    the Deployments that have got their initial number of replicas. None: baton-CLUSTER-leader."""
    kubernetes_watch: bool = False
    """Whether conductors watch the pods of the pools, so that they stop placing requests on a pod
    as soon as its deletion begins, even before its worker reports that it drains."""
