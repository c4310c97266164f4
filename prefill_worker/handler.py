"""The prefill side of a worker, which adds prompts to the engine after fetching their prefixes from
the store."""

from baton.engine.constraint import Constraint
from baton.engine.engine import Engine
from baton.engine.result import StepResult
from baton.worker.context import WorkerContext
from baton.worker.job import Job
from baton.worker.prefix_fetch_stats import PrefixFetchStats
from baton.worker.prompt_keys import hash_prompt
from prefill_worker.kv_exporter import KvExporter
from prefill_worker.prefix_store import PrefixStore


class PrefillHandler:
    """Implements :class:`baton.worker.sides.PrefillSide`."""

    def __init__(self, context: WorkerContext, store: PrefixStore) -> None:
        self._engine = context.engine
        self._key_hasher = context.key_hasher
        self._store = store
        self.exports = KvExporter(context)

    async def start_prefill(self, job: Job, constraint: Constraint | None) -> None:
        spec = job.spec
        if spec.wants_prompt_logprobs:  # the whole prompt is computed
            job.prefix_fetch = PrefixFetchStats()
            await self._engine.call(lambda engine: engine.add(spec, job.task, constraint))
            return
        chain = await hash_prompt(job, self._key_hasher)
        fetch = await self._store.find_prefix(spec, chain.keys)
        job.prefix_fetch = fetch.stats

        def add(engine: Engine) -> int | None:
            """Add the request to the engine and return None. But if the store has more of the
            prefix than the device, and this part was not fetched yet, add nothing and return the
            number of blocks cached on the device."""
            cached = engine.count_cached_blocks(chain.keys, spec.attention_window)
            if fetch.num_stored_blocks > cached and not fetch.is_fetched:
                return cached
            engine.add(spec, job.task, constraint, chain)
            return None

        cached = await self._engine.call(add)
        if cached is not None:
            await self._store.fetch_prefix(fetch, cached)
            fetch.is_fetched = True
            await self._engine.call(add)
            self._store.start_split_fetch(fetch)

    def record_step(self, result: StepResult) -> None:
        self._store.record_step(result)

    async def publish_remaining(self) -> None:
        await self._store.publish_remaining()

    @property
    def link_bytes_per_second(self) -> float | None:
        return self._store.bytes_per_second

    async def run(self) -> None:
        await self._store.run()
