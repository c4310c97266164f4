"""Places the requests of several models: each model has a conductor of its own."""

from collections.abc import Mapping, Sequence

from baton.clock import Clock
from baton.core.ids import WorkerId
from baton.core.placement import Placement, PlacementQuery
from baton.core.pool_plan import PoolPlan
from baton.errors import Unavailable
from baton.registry.membership import Membership, ModelMembership
from conductor.conductor import Conductor, ConductorConfig, describe_members
from conductor.limits import MAX_MODELS
from conductor.store_mirror import StoreMirror

KEEP_SECONDS = 3600.0
"""How long a model's conductor, which may take 200 MB, is kept after the model's last worker has
left. If workers join later, only the load's trend is lost, since their caches are empty."""


class ModelConductors:
    """Implements :class:`baton.rpc.conductor_service.ConductorCore` for all models that the
    cluster's workers serve. The models share the mirror of the KV stores; loads, prefixes cached on
    workers, and plans are separate."""

    def __init__(
        self,
        membership: Membership,
        mirror: StoreMirror,
        clock: Clock,
        config: ConductorConfig,
        reported: StoreMirror | None = None,
    ) -> None:
        """``reported``: see :class:`conductor.cache_index.CacheIndex`."""
        self._membership = membership
        self._mirror = mirror
        self._reported = reported
        self._clock = clock
        self._config = config
        self._leaving: frozenset[WorkerId] = frozenset()
        self._by_model: dict[str, Conductor] = {}
        self._served_at: dict[str, float] = {}
        """The last time when a plan was made for each model while it had workers."""

    def place(self, query: PlacementQuery) -> Placement:
        """Place a request on workers of its model. Raises the errors of :meth:`Conductor.place`,
        and Unavailable if no worker serves the model."""
        conductor = self._by_model.get(query.model) or self._add_model(query.model)
        return conductor.place(query)

    def set_config(self, config: ConductorConfig) -> None:
        """Apply new settings, as :meth:`Conductor.set_config` does."""
        self._config = config
        for conductor in self._by_model.values():
            conductor.set_config(config)

    def set_leaving_workers(self, leaving: frozenset[WorkerId]) -> None:
        """Set the workers that are about to terminate, on which nothing is placed from now on. This
        replaces the previous set."""
        self._leaving = leaving
        for conductor in self._by_model.values():
            conductor.set_leaving_workers(leaving)

    def plan_pools(self) -> None:
        """Make new plans for all models that have got requests, and drop those that have had no
        workers for :data:`KEEP_SECONDS`."""
        self._drop_unserved_models()
        for conductor in self._by_model.values():
            conductor.plan_pools()

    def pool_plan(self, model: str = "") -> PoolPlan | None:
        """Return the latest plan for the pools of ``model``, or None if there is none yet. If
        ``model`` is empty, this is the plan of the only model that has one."""
        plans = self.pool_plans()
        if not model:
            return next(iter(plans.values())) if len(plans) == 1 else None
        return plans.get(model)

    def pool_plans(self) -> Mapping[str, PoolPlan]:
        """Return the latest plans by model."""
        plans = {model: each.pool_plan() for model, each in list(self._by_model.items())}
        return {model: plan for model, plan in plans.items() if plan is not None}

    def describe(self) -> tuple[Sequence[str], str]:
        return describe_members(self._membership.members)

    def _add_model(self, model: str) -> Conductor:
        served = self._membership.current.models
        if model not in served:
            raise Unavailable(f"no worker is ready for model {model!r}")
        if len(self._by_model) >= MAX_MODELS:
            self._by_model = {name: each for name, each in self._by_model.items() if name in served}
        conductor = self._by_model[model] = Conductor(
            ModelMembership(self._membership, model),
            self._mirror,
            self._clock,
            self._config,
            self._reported,
        )
        conductor.set_leaving_workers(self._leaving)
        return conductor

    def _drop_unserved_models(self) -> None:
        now, served = self._clock.monotonic(), self._membership.current.models
        served_at = {
            model: now if model in served else self._served_at.get(model, now)
            for model in self._by_model
        }
        self._served_at = {model: at for model, at in served_at.items() if now - at < KEEP_SECONDS}
        # A scrape of the metrics may read the dict in another thread: replace it as a whole.
        self._by_model = {model: self._by_model[model] for model in self._served_at}
