"""The worker pools of all models of a cluster, by name: ``decode``, or ``MODEL/decode`` if the
cluster serves several models."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from baton.core.ids import WorkerId
from baton.core.pool_name import pool_name, pool_names
from baton.core.states import Role
from baton.errors import Invalid, NotFound
from baton.pools.base import Pools, PoolWorker, parse_pool_sizes


class ModelPools:
    """Combines the pools of each model (``by_model``). All methods raise Unavailable when a backend
    can't be reached."""

    def __init__(self, by_model: Mapping[str, Pools]) -> None:
        self._by_model = by_model

    async def sizes(self) -> Mapping[str, int]:
        """Return the pool sizes that were requested last, by the pools' names."""
        return {
            pool_name(model, role, self._by_model): count
            for model, pools in self._by_model.items()
            for role, count in (await pools.sizes()).items()
        }

    async def workers(self) -> list[PoolWorker]:
        """Return all workers, including those that are starting or being removed. They have a
        ``model`` only if there are several models."""
        has_several = len(self._by_model) > 1
        return [
            replace(worker, model=model) if has_several else worker
            for model, pools in self._by_model.items()
            for worker in await pools.workers()
        ]

    async def scale(self, wanted: Mapping[str, int]) -> None:
        """Begin to resize the named pools. Raises Invalid for an unknown name or a size out of
        bounds, before any pool is changed."""
        known = pool_names(self._by_model)
        by_model: dict[str, dict[Role, int]] = defaultdict(dict)
        for name, count in wanted.items():
            if name not in known:
                raise Invalid(f"there is no pool {name!r}; the pools are {', '.join(known)}")
            model, role = known[name]
            by_model[model] |= parse_pool_sizes({role: count})
        for model, sizes in by_model.items():
            await self._by_model[model].scale(sizes)

    async def remove(self, worker_id: WorkerId) -> None:
        """Begin to drain this worker, as :meth:`baton.pools.base.Pools.remove` does."""
        known: list[str] = []
        for pools in self._by_model.values():
            ids = [worker.id for worker in await pools.workers()]
            if worker_id in ids:
                await pools.remove(worker_id)
                return
            known += ids
        raise NotFound(f"there is no worker {worker_id!r}; the workers are: {', '.join(known)}")
